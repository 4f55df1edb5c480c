#!/usr/bin/env python3
"""Measures the index of buckets of up to ten million objects that are nowhere on disk, listed as late as wanted.

Needs the release build of `cv` and `s3list`, and for ten million objects some 2 GB in `--dir`:

    tests/bench_index.py --dir /data/bench                                   # everything; hours
    tests/bench_index.py --dir /data/bench --objects 1000000 --latency 1     # one size, one profile, both layouts
    tests/bench_index.py --dir /data/bench --objects 100000 --layout flat --pages-per-second 200
    tests/bench_index.py --dir /data/bench --objects 1000000 --latency 1 --changed  # and again, with 1 % of it changed
    tests/bench_index.py --dir /data/bench --objects 10000000 --latency 1 --layout directories --restart

The embedded store has a key space by rule for each size, flat or in directories of a thousand files, and adds
`--latency` ms (1, 20, 150) to each page; with `--pages-per-second` more are refused with 503. Every row has a cluster
of its own with one master. Shown are time, the largest memory of the master and its processor time, the processor time
of the store meanwhile, and the bytes of the master's directory. Beside them, with the same profile: what a plain client
lists in a second with one stream, and time and processor time of the store when it lists the whole with `--streams`
streams at once, which know where to begin; and what strmvol says of itself for as many objects, on eight cores.

With `--changed` a second row is of the next index, and its ratio to the first. With `--restart` the master is killed
in the end, and the seconds are those from its start to its answer to `cv mount`.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from bench import CV, ROUNDS, TARGET, run, s3_options

BUCKET = "rule"
FILES = 1000
# Of one stream, whose rate does not change on the way.
SAMPLE_PAGES = 200
ACCESS, SECRET = "cavern", "cavern-secret"
# One per cent of all keys, with those that are new.
CHANGES = {"seed": 1, "modified": 0.006, "deleted": 0.002, "added": 0.002}
# Seconds and MB of memory of strmvol's index in EROFS, by objects, on so many cores.
STRMVOL = {100_000: (4.09, 125), 1_000_000: (11.07, 871), 10_000_000: (130.59, 8700)}
STRMVOL_CORES = 8


def processor_s(pid):
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid):
    """The largest resident memory since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def forget_peak(pid):
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Store:
    """The embedded store in a process of its own."""

    def __init__(self, root):
        self.root = root
        self.process = subprocess.Popen(
            [CV, "dev-s3", "--root", root, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
             "--access-key", ACCESS, "--secret-key", SECRET], stdout=subprocess.PIPE, text=True)
        ready = self.process.stdout.readline().split()
        if "ready" not in ready:
            sys.exit("the object store does not start: see its messages above")
        addresses = dict(word.split("=", 1) for word in ready if "=" in word)
        self.endpoint, self.admin = addresses["s3"], addresses["http"]

    def ask(self, what, body):
        token = (self.root / "admin-token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{self.admin}/_dev/{what}?bucket={BUCKET}", method="POST",
                                         headers=headers, data=json.dumps(body).encode())
        with urllib.request.urlopen(request):
            pass

    def list(self, *options):
        """What a plain client gets, and the processor time of the store for it."""
        before = processor_s(self.process.pid)
        text = run(TARGET / "s3list", "--endpoint", self.endpoint, "--access-key", ACCESS, "--secret-key", SECRET,
                   "--bucket", BUCKET, *options)
        return json.loads(text) | {"store_s": processor_s(self.process.pid) - before}

    def stop(self):
        self.process.terminate()
        self.process.wait()


class Layout:
    """Where the keys of a rule are."""

    def __init__(self, objects, name):
        self.objects, self.in_directories = objects, name == "directories"

    def rule(self, **more):
        files = FILES if self.in_directories else 0
        return {"keys": self.objects, "files_per_directory": files, "name_bytes": 30} | more

    def splits(self, streams):
        """Strings between which as many keys lie."""
        width = len(str(max(1, -(-self.objects // FILES) - 1)))
        for stream in range(1, streams):
            number = self.objects * stream // streams
            place = f"img/{number // FILES:0{width}}/" if self.in_directories else "img/"
            yield f"{place}{number:08}"


class Cluster:
    """One master, without a file system that anybody uses."""

    def __init__(self, directory):
        self.directory = directory
        conf = directory.parent / f"{directory.name}.toml"
        conf.write_text('[ufs]\nendpoints = ["127.0.0.1"]\n')
        self.cv("local", "up", "--dir", directory, "--masters", 1, "--conf", conf)
        self.look()

    def look(self):
        self.status = json.loads(self.cv("local", "status", "--dir", self.directory, "--json"))
        self.master = self.status["masters"][0]["pid"]

    def cv(self, *arguments):
        return run(CV, *arguments)

    def index(self, store, objects, patience_s):
        self.cv("mount", f"s3://{BUCKET}/", "/index", "--write-type", "cache-mode", "--metadata-ttl", "1d",
                "--local", self.directory, *s3_options(store.endpoint, ACCESS, SECRET))
        begun = time.monotonic()
        while True:
            mounts = json.loads(self.cv("mount", "--json", "--local", self.directory))
            status = next(mount["status"] for mount in mounts if mount["path"] == "/index")
            if not status["indexing"] and status["indexed_entries"] >= objects:
                return
            waited = time.monotonic() - begun
            if waited > patience_s:
                sys.exit(f"the index does not end within {patience_s} s: {status}")
            # Asking is work for the same processors.
            time.sleep(min(max(waited / 50, 0.05), 1))

    def index_again(self):
        said = self.cv("index", "/index", "--watch", "--json", "--local", self.directory)
        last = json.loads(said.splitlines()[-1])
        if last["indexing"] or last["last_error"]:
            sys.exit(f"the index has failed: {last}")

    def restart(self):
        """Kills the master; seconds until another one answers, its largest memory and its processor time."""
        self.cv("local", "kill", "master0", "--dir", self.directory)
        begun = time.monotonic()
        self.cv("local", "start", "master0", "--dir", self.directory)
        mounts = json.loads(self.cv("mount", "--json", "--local", self.directory))
        seconds = time.monotonic() - begun
        if all(mount["path"] != "/index" for mount in mounts):
            sys.exit(f"the master has lost its mount: {mounts}")
        self.look()
        return seconds, peak_mib(self.master), processor_s(self.master)

    def measured(self, store, work, *arguments):
        """Seconds, MiB and processor times of the work."""
        forget_peak(self.master)
        before = processor_s(self.master), processor_s(store.process.pid)
        begun = time.monotonic()
        work(*arguments)
        seconds = time.monotonic() - begun
        after = processor_s(self.master), processor_s(store.process.pid)
        return seconds, peak_mib(self.master), after[0] - before[0], after[1] - before[1]

    def disk_bytes(self):
        return sum(file.stat().st_blocks * 512 for file in self.directory.glob("master*/**/*") if file.is_file())

    def down(self):
        subprocess.run([CV, "local", "down", "--purge", "--dir", self.directory],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.directory, ignore_errors=True)


def row(what, layout, figures, disk, alone, together):
    seconds, memory, master, store = figures
    rate = layout.objects / seconds
    print(f"| {what} | {seconds:,.1f} | {rate:,.0f} | {rate / os.cpu_count():,.0f} | {memory:,.0f} | {master:,.1f} | "
          f"{store:,.1f} | {disk / layout.objects:,.0f} | {alone['keys_per_second']:,.0f} | "
          f"{rate / alone['keys_per_second']:,.1f} × | {together['seconds']:,.1f}, {together['store_s']:,.1f} | "
          f"{strmvol(layout.objects)} |", flush=True)


def strmvol(objects):
    if objects not in STRMVOL:
        return ""
    seconds, memory = STRMVOL[objects]
    return f"{seconds:,.1f}, {memory:,}, {objects / seconds / STRMVOL_CORES:,.0f}"


def restart_row(what, cluster):
    seconds, memory, master = (statistics.median(each) for each in zip(*(cluster.restart() for _ in range(ROUNDS))))
    print(f"| {what} | {seconds:,.2f} | | | {memory:,.0f} | {master:,.1f} |" + " |" * 6, flush=True)


def measure(options, store, layout, layout_name, latency):
    store.ask("key-space", layout.rule())
    profile = {"latency_ms": latency, "pages_per_second": options.pages_per_second, "rate_of": options.rate_of}
    store.ask("list-profile", profile)
    alone = store.list("--pages", SAMPLE_PAGES)
    together = store.list(*(part for split in layout.splits(options.streams) for part in ("--split", split)))
    if together["keys"] != layout.objects:
        sys.exit(f"the bucket has {layout.objects} objects, and listing them gives {together}")
    cluster = Cluster(options.dir / "index")
    try:
        what = f"{layout.objects:,} {layout_name}, {latency} ms"
        figures = cluster.measured(store, cluster.index, store, layout.objects, options.patience)
        row(what, layout, figures, cluster.disk_bytes(), alone, together)
        if options.changed:
            first = figures[0]
            store.ask("key-space", layout.rule(changes=CHANGES))
            figures = cluster.measured(store, cluster.index_again)
            again = f"{what}, 1 % changed, {figures[0] / first:.2f} of the first"
            row(again, layout, figures, cluster.disk_bytes(), alone, together)
        if options.restart:
            restart_row(f"{what}, the master killed and started", cluster)
    finally:
        cluster.down()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--objects", type=int, action="append", help="of 100000, 1000000, 10000000; these by default")
    parser.add_argument("--layout", action="append", choices=["flat", "directories"])
    parser.add_argument("--latency", type=int, action="append", help="ms of a page; 1, 20, 150 by default")
    parser.add_argument("--pages-per-second", type=int, help="no limit by default")
    parser.add_argument("--rate-of", choices=["bucket", "prefix"], default="bucket", help="what the limit is of")
    parser.add_argument("--streams", type=int, default=32, help="of the plain client, for the whole")
    parser.add_argument("--changed", action="store_true", help="index it again after a change of 1 %%")
    parser.add_argument("--restart", action="store_true", help="kill the master and start it, three times")
    parser.add_argument("--patience", type=int, default=7200, help="seconds that an index may take")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    root = options.dir / "index-store"
    shutil.rmtree(root, ignore_errors=True)
    store = Store(root)
    print("| index of | s | objects/s | a core | master, MiB | master, s | store, s | B/object on disk | one stream, "
          f"keys/s | ratio | {options.streams} streams: s, store s | strmvol: s, MB, objects/s a core |\n|---|" +
          "---:|" * 11, flush=True)
    try:
        for objects in options.objects or [100_000, 1_000_000, 10_000_000]:
            for name in options.layout or ["flat", "directories"]:
                for latency in options.latency or [1, 20, 150]:
                    measure(options, store, Layout(objects, name), name, latency)
    finally:
        store.stop()
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
