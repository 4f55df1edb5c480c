#!/usr/bin/env python3
"""Measures writing to fs-mode mounts against the local disk, all in one run, and prints Markdown tables.

Needs root, fio, rclone and the release build of `cv`:

    tests/bench_writes.py --dir /data/bench               # everything, some ten minutes
    tests/bench_writes.py --dir /data/bench ingest names  # only these sections

Starts a cluster of its own with two workers on the disk of `--dir`; the local disk is the same file system. Each
figure is the median of three rounds, in which ours and the baseline take turns, since the machine's own speed drifts.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import Bench as Readings
from bench import CV, run

ROUNDS = 3
MIB = 1 << 20


def together(count, work, *arguments):
    """Seconds that `count` processes take for `work(number, ...)`, from the moment on in which all are there."""
    ready, go = multiprocessing.Barrier(count + 1), multiprocessing.Barrier(count + 1)

    def one(number):
        ready.wait()
        go.wait()
        work(number, *arguments)

    processes = [multiprocessing.Process(target=one, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    ready.wait()
    begun = time.monotonic()
    go.wait()
    for process in processes:
        process.join()
        if process.exitcode != 0:
            sys.exit("a writer failed")
    return time.monotonic() - begun


def remove(directory):
    """With as many at once as wrote it: each name that goes waits for the master's disk."""
    with multiprocessing.Pool(16) as pool:
        pool.map(shutil.rmtree, [entry for entry in directory.iterdir() if entry.is_dir()])
    shutil.rmtree(directory)


def write_files(number, directory, files, writers, data, sync):
    for index in range(number, files, writers):
        file = os.open(directory / str(index % 100) / f"{index}.jpg", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, data)
        if sync:
            os.fsync(file)
        os.close(file)


def write_stream(number, directory, count, size):
    data = os.urandom(size)
    file = os.open(directory / f"stream{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for _ in range(count):
        os.write(file, data)
    os.close(file)


def write_and_sync(number, path, count):
    order = random.Random(number)
    file = os.open(path, os.O_RDWR)
    for _ in range(count):
        os.pwrite(file, os.urandom(4096), order.randrange(0, 16384) * 4096)
        os.fsync(file)
    os.close(file)


def create(number, directory, count):
    for index in range(count):
        os.close(os.open(directory / f"p{number}" / f"f{index}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


def stat(number, directory, count):
    for index in range(count):
        os.stat(directory / f"p{number}" / f"f{index}")


def rename(number, directory, count):
    for index in range(count):
        os.rename(directory / f"p{number}" / f"f{index}", directory / f"p{number}" / f"r{index}")


def unlink(number, directory, count):
    for index in range(count):
        os.unlink(directory / f"p{number}" / f"r{index}")


class Bench:
    def __init__(self, directory, files, conf=""):
        self.directory = directory
        self.conf = conf
        self.files = files
        self.local = directory / "local"
        self.cluster = directory / "cluster"
        self.mount = directory / "mount"

    def cv(self, *arguments):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CV_")}
        if arguments[:2] != ("local", "up"):
            environment["CV_CONF"] = str(self.cluster / "cluster.toml")
        return run(CV, *arguments, env=environment)

    def up(self):
        self.mount.mkdir(parents=True, exist_ok=True)
        self.local.mkdir(exist_ok=True)
        conf = self.directory / "bench.toml"
        conf.write_text(self.conf)
        self.cv("local", "up", "--dir", self.cluster, "--mount-point", self.mount, "--workers", 2, "--conf", conf)
        self.s3 = json.loads(self.cv("local", "status", "--dir", self.cluster, "--json"))["s3"]
        seed = self.directory / "seed"
        seed.mkdir(exist_ok=True)
        (seed / "object").write_text("it makes the bucket\n")
        self.cv("local", "seed", "--dir", self.cluster, seed, "s3://bench/seed")
        for name, options in (("one", ()), ("two", ("--replicas", 2))):
            self.cv("mount", f"s3://bench/{name}", f"/{name}", "--write-type", "fs_mode", *options,
                    "-c", f"s3.endpoint_url={self.s3['endpoint']}", "-c", "s3.region_name=us-east-1",
                    "-c", f"s3.credentials.access={self.s3['access_key']}",
                    "-c", f"s3.credentials.secret={self.s3['secret_key']}")

    def down(self):
        subprocess.run([CV, "local", "down", "--dir", self.cluster], stdout=subprocess.DEVNULL)
        for made in (self.cluster, self.local, self.directory / "seed"):
            shutil.rmtree(made, ignore_errors=True)

    def settle(self):
        """Nothing of before is in the way: the bucket has it, and so have the disks."""
        for name in ("one", "two"):
            self.cv("export", f"/{name}", "--watch")
        os.sync()

    def turns(self, measure, ours="one"):
        """Medians of `measure(directory)`: ours, and the local disk's. Each round has directories of its own."""
        figures = {"ours": [], "local": []}
        for number in range(ROUNDS):
            for name, base in (("ours", self.mount / ours), ("local", self.local)):
                self.settle()
                directory = base / f"round{number}"
                directory.mkdir()
                figures[name].append(measure(directory))
                remove(directory)
        return statistics.median(figures["ours"]), statistics.median(figures["local"])

    # ------------------------------------------------------------------------------------ measurements

    def ingest_section(self):
        data = os.urandom(50_000)
        rows = []
        for sync in (False, True):
            def ingest(directory):
                for number in range(100):
                    (directory / str(number)).mkdir()
                return self.files / together(16, write_files, directory, self.files, 16, data, sync)

            ours, local = self.turns(ingest)
            rows.append(("with `fsync` each" if sync else "closed", ours, "local disk", local))
        self.table(f"{self.files:,} files of 50 KB, 16 writers, files/s", rows)

    def stream_section(self):
        rows = []
        for mount, replicas in (("one", 1), ("two", 2)):
            for streams in (1, 4):
                def stream(directory):
                    return streams * 512 / together(streams, write_stream, directory, 512, MIB)

                ours, local = self.turns(stream, mount)
                what = f"{streams} stream{'s' if streams > 1 else ''}, {replicas} replica{'s' if replicas > 1 else ''}"
                rows.append((what, ours, "local disk", local))
        self.table("Writes of 1 MiB, 512 MiB a stream, MiB/s", rows)

    def network_section(self):
        """Files whose workers are not asked for descriptors, as if they were on other hosts."""
        figures = {"64MiB": ([], []), "0B": ([], [])}
        for number in range(ROUNDS):
            for behind, (small, large) in figures.items():
                conf = f'[client]\nlocal_descriptors = false\nwrite_behind = "{behind}"\n'
                bench = Bench(self.directory / "network", self.files, conf)
                try:
                    bench.up()
                    base = bench.mount / "one"
                    small.append(20_000 / together(1, write_stream, base, 20_000, 4096))
                    large.append(512 / together(1, write_stream, base, 512, MIB))
                finally:
                    bench.down()
        rows = []
        for position, what in enumerate(("writes of 4 KiB a second", "writes of 1 MiB, MiB/s")):
            ours, baseline = (statistics.median(figures[behind][position]) for behind in ("64MiB", "0B"))
            rows.append((what, ours, '`write_behind = "0B"`', baseline))
        self.table("Over the network, one stream", rows)

    def sync_section(self):
        def sync(directory):
            path = directory / "database"
            path.write_bytes(bytes(64 * MIB))
            return 1000 / together(1, write_and_sync, path, 1000)

        ours, local = self.turns(sync)
        self.table("Random writes of 4 KiB, each with `fsync`, a second", [("one process", ours, "local disk", local)])

    def names_section(self):
        deeds = {"create": create, "stat": stat, "rename": rename, "unlink": unlink}
        rows = []
        for processes, count in ((1, 2000), (40, 200)):
            figures = {name: ([], []) for name in deeds}
            for number in range(ROUNDS):
                for which, base in enumerate((self.mount / "one", self.local)):
                    self.settle()
                    directory = base / f"names{number}"
                    for process in range(processes):
                        (directory / f"p{process}").mkdir(parents=True)
                    for name, deed in deeds.items():
                        seconds = together(processes, deed, directory, count)
                        figures[name][which].append(processes * count / seconds)
                    remove(directory)
            for name, (ours, local) in figures.items():
                what = f"{name}, {processes} process{'es' if processes > 1 else ''}"
                rows.append((what, statistics.median(ours), "local disk", statistics.median(local)))
        self.table("Names, operations/s", rows)

    def fio_section(self):
        rows = []
        for size, form in (("4k", "IOPS"), ("1m", "MiB/s")):
            for how in ("randread", "randwrite"):
                def fio(directory):
                    report = json.loads(run(
                        "fio", "--name=it", f"--filename={directory / 'file'}", f"--rw={how}", f"--bs={size}",
                        "--size=256m", "--numjobs=1", "--iodepth=128", "--direct=1", "--ioengine=libaio", "--sync=1",
                        "--time_based", "--runtime=5", "--output-format=json"))
                    figures = report["jobs"][0]["read" if how == "randread" else "write"]
                    return figures["iops"] if form == "IOPS" else figures["bw_bytes"] / MIB

                ours, local = self.turns(fio)
                rows.append((f"{how}, {size}, {form}", ours, "local disk", local))
        self.table("`fio -iodepth=128 -direct=1 -ioengine=libaio -sync=1`, one job", rows)

    def drain_section(self):
        """The bucket takes what was written to the mount; rclone writes the same files to another prefix."""
        count, data = min(self.files, 10_000), os.urandom(50_000)

        def files_in(directory):
            for number in range(100):
                (directory / str(number)).mkdir(parents=True)
            together(16, write_files, directory, count, 16, data, False)

        source = self.local / "drain"
        files_in(source)
        # Nothing drains before all is written.
        bench = Bench(self.directory / "drain", self.files, '[master]\npersist_delay = "1h"\n')
        ours, plain = [], []
        try:
            bench.up()
            environment = dict(os.environ, RCLONE_CONFIG_S_TYPE="s3", RCLONE_CONFIG_S_PROVIDER="Other",
                               RCLONE_CONFIG_S_ENDPOINT=bench.s3["endpoint"],
                               RCLONE_CONFIG_S_ACCESS_KEY_ID=bench.s3["access_key"],
                               RCLONE_CONFIG_S_SECRET_ACCESS_KEY=bench.s3["secret_key"],
                               RCLONE_CONFIG_S_REGION="us-east-1", RCLONE_CONFIG=os.devnull)
            environment.pop("AWS_CA_BUNDLE", None)
            for number in range(ROUNDS):
                bench.settle()
                files_in(bench.mount / "one" / f"drain{number}")
                begun = time.monotonic()
                bench.cv("export", "/one", "--watch")
                ours.append(count / (time.monotonic() - begun))
                begun = time.monotonic()
                run("rclone", "copy", source, f"S:bench/rclone{number}", "--transfers", 64, "--checkers", 64,
                    "--s3-no-check-bucket", "--no-check-dest", env=environment)
                plain.append(count / (time.monotonic() - begun))
        finally:
            bench.down()
        rows = [("objects/s", statistics.median(ours), "rclone, 64 transfers", statistics.median(plain))]
        self.table(f"{count:,} files of 50 KB to the bucket", rows)

    @staticmethod
    def table(title, rows):
        Readings.table(title, rows, "{:,.0f}")


def main():
    sections = ("ingest", "stream", "network", "sync", "names", "fio", "drain")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to measure; 12 GB are needed")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(sections)}; all when none is named")
    options = parser.parse_args()
    unknown = set(options.sections) - set(sections)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}: choose from {', '.join(sections)}")
    bench = Bench(options.dir.resolve(), options.files)
    try:
        bench.up()
        for section in options.sections or sections:
            getattr(bench, f"{section}_section")()
    finally:
        bench.down()


if __name__ == "__main__":
    main()
