#!/usr/bin/env python3
"""Measures what metadata operations cost: calls to a master, and system calls of programs through a mount.

Needs root and the release build of `cv` and `metaload`:

    tests/bench_metadata.py --dir /data/bench                        # 1 and 3 masters; 1, 40 and 400 clients
    tests/bench_metadata.py --dir /data/bench --masters 1 --tasks 40 --watchers 1000
    tests/bench_metadata.py --dir /data/bench --masters 1 --tasks 40 --secure     # over TLS

Starts a cluster of its own for each number of masters. Figures of calls stand beside that of an empty gRPC service with
as many clients, measured just before; those of programs beside the same in a directory of the local disk, which notes
changes in memory only. The master has changes synced before they are answered. With `--watchers` its calls are measured
a second time with so many sessions besides, which have listed the directory above.
"""

import argparse
import json
import shutil
import subprocess
from pathlib import Path

from bench import TARGET, run
from bench_masters import Group

METALOAD = TARGET / "metaload"


def measure(*arguments):
    return json.loads(run(METALOAD, *arguments))


class Echo:
    """An empty gRPC service in a process of its own."""

    def __enter__(self):
        self.process = subprocess.Popen([METALOAD, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip()
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()


def table(title, rows):
    print(f"\n**{title}**\n\n| what | per second | p50, ms | p99, ms | of echo |\n|---|---:|---:|---:|---:|")
    echo = rows["echo"]["per_second"]
    for name, row in rows.items():
        rate, share = row["per_second"], row["per_second"] / echo
        print(f"| {name} | {rate:,.0f} | {row['p50_ms']:.2f} | {row['p99_ms']:.2f} | {share:.2f} |", flush=True)


def beside_disk(title, mount, disk):
    print(f"\n**{title}**\n\n| what | per second | p50, ms | p99, ms | local disk | ratio |\n"
          "|---|---:|---:|---:|---:|---:|")
    for name, row in mount.items():
        rate, local = row["per_second"], disk[name]["per_second"]
        times = f"{row['p50_ms']:.2f} | {row['p99_ms']:.2f}"
        print(f"| {name} | {rate:,.0f} | {times} | {local:,.0f} | {rate / local:.2f} |", flush=True)


def in_directory(directory, *load):
    directory.mkdir()
    try:
        return measure("directory", directory, *load)
    finally:
        shutil.rmtree(directory)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--masters", type=int, action="append", choices=[1, 3, 5])
    parser.add_argument("--tasks", type=int, action="append")
    parser.add_argument("--seconds", type=int, default=4)
    parser.add_argument("--watchers", type=int, default=0)
    parser.add_argument("--secure", action="store_true", help="the processes show certificates: what TLS costs")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    for masters in options.masters or [1, 3]:
        directory = options.dir / f"metadata{masters}"
        # What is changed goes to the bucket later, or never: that is not measured here.
        group = Group(directory, masters, '[master]\npersist_delay = "1h"\n', options.secure)
        try:
            for tasks in options.tasks or [1, 40, 400]:
                load = ["--tasks", tasks, "--seconds", options.seconds]
                with Echo() as echo:
                    rows = measure("echo", echo.address, *load)
                for watchers in sorted({0, options.watchers}):
                    status = group.status()
                    leader = status["masters"][group.leader()]["grpc"]
                    conf = ("--conf", status["conf"]) if options.secure else ()
                    found = measure("master", leader, "/files", "--watchers", watchers, *conf, *load)
                    beside = f", {watchers} watch" if watchers else ""
                    table(f"{masters} master(s), {tasks} client(s){beside}", rows | found)
                disk = in_directory(options.dir / "disk", *load)
                beside_disk(f"{masters} master(s), {tasks} program(s)", in_directory(group.mount / "load", *load), disk)
        finally:
            group.cv("local", "down", "--dir", directory)
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
