#!/usr/bin/env python3
"""Measures what one client of a secured cluster feels of another that takes all it can get.

Needs root and the release build of `cv` and `metaload`:

    tests/bench_tenants.py --dir /data/bench                        # about three minutes
    tests/bench_tenants.py --dir /data/bench --operations 2000 --bytes 64MiB

Starts a cluster of its own, twice: without rates, and with `master.client_operations_per_second` and
`worker.client_bytes_per_second`. Two clients have certificates of their own. One of them, alone and then beside the
other, makes calls to the master (`metaload`, two at a time) and reads 64 KiB at random places of a file through a mount
of its own, over TCP and past the page cache. The other floods: 400 calls at a time, and eight readers of all of the
file. All of them share this machine's processors; the programs of the one that floods are nice, so that they take
little of what would be, on hosts of their own, the other's and the cluster's: among themselves, and, in a session of
their own, also where the kernel gives each session its share (`kernel.sched_autogroup_enabled`). What they do take is
measured as well: beside as nice programs that do nothing but use the processors (`busy`).
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from bench import CV, TARGET, run, s3_options, write_noise

METALOAD = TARGET / "metaload"
FILE_BYTES = 1 << 30
READ_BYTES = 64 << 10
FLOOD_TASKS, FLOOD_READERS = 400, 8
# The nicest there is, as programs and as a session.
NICE = ("sh", "-c", 'echo 19 >/proc/self/autogroup || :; exec nice -n 19 "$0" "$@"')


class Client:
    """Somebody with a certificate, a mount, and programs."""

    def __init__(self, cluster, name, prefix=()):
        certificates = cluster.directory / "certificates"
        self.cluster, self.name, self.children = cluster, name, []
        self.prefix = prefix
        run(CV, "cert", "issue", "client", name, "--dir", certificates, "--out", certificates / name)
        self.mount = cluster.directory / name
        self.mount.mkdir()
        certificate = certificates / name / f"client-{name}"
        self.environment = os.environ | {
            "CV_SECURITY__CERTIFICATE": f"{certificate}.pem",
            "CV_SECURITY__KEY": f"{certificate}-key.pem",
            "CV_FUSE__MOUNT_POINT": str(self.mount),
            "CV_FUSE__HTTP_LISTEN": "127.0.0.1:0",
            "CV_FUSE__DIRECT": "true",
            "CV_FUSE__PASSTHROUGH": "false",
            "CV_CLIENT__LOCAL_DESCRIPTORS": "false",
            "CV_CLIENT__MEMORY_BUDGET": "64MiB",
        }
        log = open(cluster.directory / f"{name}.log", "w")
        self.start([CV, "fuse", "--conf", cluster.conf], stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not (self.mount / "data").is_dir():
            if time.monotonic() > deadline:
                raise SystemExit(f"{name} has no mount: {log.name}")
            time.sleep(0.05)

    def start(self, command, **streams):
        child = subprocess.Popen([*self.prefix, *command], env=self.environment, start_new_session=True, text=True,
                                 **streams)
        self.children.append(child)
        return child

    def load(self, tasks, seconds):
        command = [METALOAD, "master", self.cluster.master, f"/files/{self.name}", "--conf", self.cluster.conf,
                   "--tasks", str(tasks), "--seconds", str(seconds)]
        return self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def read_for_ever(self):
        return self.start([sys.executable, __file__, "--read", str(self.mount / "data/file")])

    def reads(self, seconds):
        """Times of reads at random places, in milliseconds."""
        file = os.open(self.mount / "data/file", os.O_RDONLY)
        times, end, places = [], time.monotonic() + seconds, random.Random(1)
        while time.monotonic() < end:
            at = places.randrange(FILE_BYTES // READ_BYTES) * READ_BYTES
            begun = time.monotonic()
            os.pread(file, READ_BYTES, at)
            times.append((time.monotonic() - begun) * 1000)
        os.close(file)
        return sorted(times)

    def end(self):
        for child in reversed(self.children):
            child.terminate()
            child.wait()


class Cluster:
    def __init__(self, directory, source, conf):
        self.directory = directory
        file = directory.parent / f"{directory.name}.toml"
        file.write_text(f'[master]\npersist_delay = "1h"\n{conf}')
        run(CV, "local", "up", "--dir", directory, "--secure", "--conf", file)
        try:
            self.prepare(source)
        except BaseException:
            self.down()
            raise

    def prepare(self, source):
        directory = self.directory
        status = json.loads(run(CV, "local", "status", "--dir", directory, "--json"))
        self.master, self.conf = status["masters"][0]["grpc"], status["conf"]
        run(CV, "local", "seed", "--dir", directory, source, "s3://data")
        s3 = status["s3"]
        options = s3_options(s3["endpoint"], s3["access_key"], s3["secret_key"])
        one = directory.parent / "tenants-one"
        one.mkdir(exist_ok=True)
        (one / "one").write_text("one")
        run(CV, "local", "seed", "--dir", directory, one, "s3://files/seed")
        run(CV, "mount", "s3://data", "/data", "--write-type", "cache-mode", "--local", directory, *options)
        run(CV, "mount", "s3://files/data", "/files", "--write-type", "fs-mode", "--local", directory, *options)
        run("cp", Path(status["mount_point"]) / "data/file", "/dev/null")
        for name in ("quiet", "flood"):
            (Path(status["mount_point"]) / "files" / name).mkdir()

    def down(self):
        run(CV, "local", "down", "--dir", self.directory)
        shutil.rmtree(self.directory, ignore_errors=True)


def percentile(times, part):
    return times[min(int(len(times) * part), len(times) - 1)]


def measure(client, seconds):
    calls = json.loads(finished(client.load(2, seconds)))
    reads = client.reads(seconds)
    found = {name: (row["p50_ms"], row["p99_ms"]) for name, row in calls.items()}
    return found | {"read 64 KiB": (percentile(reads, 0.5), percentile(reads, 0.99))}


def finished(child):
    output, errors = child.communicate()
    if child.returncode:
        raise SystemExit(f"metaload: {errors}")
    return output


def beside_busy(quiet, seconds):
    spin = [*NICE, sys.executable, "-c", "while True: pass"]
    programs = [subprocess.Popen(spin, start_new_session=True) for _ in range(2 * os.cpu_count())]
    try:
        return measure(quiet, seconds)
    finally:
        for program in programs:
            program.terminate()
            program.wait()


def flooded(quiet, flood, seconds):
    done = threading.Event()

    def calls():
        while not done.is_set():
            # It may be refused something.
            flood.load(FLOOD_TASKS, 5).communicate()

    work = [threading.Thread(target=calls)]
    # Processes, so that no lock of an interpreter slows them down.
    for _ in range(FLOOD_READERS):
        flood.read_for_ever()
    for thread in work:
        thread.start()
    try:
        time.sleep(2)
        return measure(quiet, seconds)
    finally:
        done.set()
        for child in flood.children[1:]:
            child.terminate()
        for thread in work:
            thread.join()


def read_for_ever(path):
    file = os.open(path, os.O_RDONLY)
    while True:
        for at in range(0, FILE_BYTES, 1 << 20):
            os.pread(file, 1 << 20, at)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--bytes", default="64MiB")
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        read_for_ever(options.read)
    if not options.dir:
        parser.error("--dir is required")
    directory = options.dir.resolve()
    source = directory / "tenants-source"
    source.mkdir(parents=True, exist_ok=True)
    write_noise(source / "file", FILE_BYTES)
    rates = (f"client_operations_per_second = {options.operations}\n"
             f'[worker]\nclient_bytes_per_second = "{options.bytes}"\n')
    columns = {}
    try:
        for title, conf in (("no rates", ""), ("rates", rates)):
            cluster, clients = Cluster(directory / f"tenants-{title.replace(' ', '-')}", source, conf), []
            try:
                clients.append(quiet := Client(cluster, "quiet"))
                clients.append(flood := Client(cluster, "flood", NICE))
                columns[f"alone, {title}"] = measure(quiet, options.seconds)
                columns[f"busy, {title}"] = beside_busy(quiet, options.seconds)
                columns[f"flood, {title}"] = flooded(quiet, flood, options.seconds)
            finally:
                for client in clients:
                    client.end()
                cluster.down()
    finally:
        shutil.rmtree(source, ignore_errors=True)
    print("| p50 / p99, ms | " + " | ".join(columns) + " |\n|---|" + "---:|" * len(columns))
    for name in next(iter(columns.values())):
        cells = (f"{column[name][0]:.2f} / {column[name][1]:.2f}" for column in columns.values())
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
