#!/usr/bin/env python3
"""Measures views: making one, mounting it, listing it and reading it, beside the ordinary mount and a local disk.

Needs root, Linux 6.14 or later with EROFS, and the release build of `cv` and `plainfs`:

    tests/bench_views.py --dir /data/bench                            # all sections, about an hour
    tests/bench_views.py --dir /data/bench names --objects 100000     # names alone, of fewer objects
    tests/bench_views.py --dir /data/bench contents elsewhere

*names*: a bucket of `--objects` objects by rule, in directories of a thousand, is indexed; a view of it is made, with
the largest memory of the master meanwhile and what it has before; it is mounted, and `find` and `ls -lR` run over it,
over the same by FUSE, over the ordinary mount, and over as many empty files on the disk of `--dir`. Each is warm: the
first pass is not counted. `processor_s` is of the program and what the kernel does for it, `served_s` of `cv fuse`.
Before that, the memory of all processes: at rest, when `find` has looked at every file of the ordinary mount, and, with
another client, of the view.

*contents*: 20,000 files of 50 KB, read by eight readers: from the kernel's pages, from the worker of this host with
the kernel's caches dropped, and from the bucket when no worker has them. `raw` is read(2) by processes, `whole` is
Python's open() and read(), `threads` is `cv bench files`; images are decoded as well.

*elsewhere*: the same files at a worker on another host, a network namespace of this one (`bench_remote.py`). It needs
the Python of `bin/setup --tests`. What that worker and `plainfs` read is in memory.

Each row is one line of JSON; `ratio` is to what `of` names, measured in turn with it.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import bench_remote
from bench import CV, HERE, ROUNDS, Bench, drop_caches, run, start_plainfs, stop_plainfs, timed
from bench_index import Cluster, Layout, Store, forget_peak, peak_mib, processor_s

SECTIONS = ["names", "contents", "elsewhere"]
# Directories of a thousand files each, of which `ls -lR` lists so many.
LISTED = 100
# Of files that are made for other benchmarks, and not read here.
STREAM_BYTES = 16 << 20


def row(section, what, **figures):
    rounded = {name: round(figure, 4) if isinstance(figure, float) else figure for name, figure in figures.items()}
    print(json.dumps({"section": section, "what": what} | rounded), flush=True)


def resident_mib(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def served_by(status):
    """The process that does the work of the first mount."""
    supervisor = status["fuse"][0]["pid"]
    children = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(children[0]) if children else supervisor


class NamesCluster(Cluster):
    """One master and a mount."""

    def __init__(self, directory):
        self.mount = directory.parent / "views-mount"
        self.directory = directory
        conf = directory.parent / f"{directory.name}.toml"
        conf.write_text('[ufs]\nendpoints = ["127.0.0.1"]\n')
        self.cv("local", "up", "--dir", directory, "--conf", conf, "--mount-point", self.mount)
        self.look()

    def new_client(self):
        """One that has looked at nothing."""
        for command in ("stop", "start"):
            self.cv("local", command, "fuse", "--dir", self.directory)
        self.look()

    def memory_mib(self, walked=None):
        """That of all processes, once every file of a directory was looked at."""
        if walked:
            run("find", walked, "-size", "+1000G")
        processes = [self.master, served_by(self.status)] + [worker["pid"] for worker in self.status["workers"]]
        return sum(resident_mib(pid) for pid in processes)


def spent(command, served):
    """Seconds, and processor times of a command and of the process that serves the mount."""
    before, served_before = resource.getrusage(resource.RUSAGE_CHILDREN), processor_s(served)
    seconds = timed(lambda: subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, own, processor_s(served) - served_before


def medians(sides, command, served):
    """Of each side, of rounds in which they take turns, after one that is not counted."""
    figures = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, place in sides.items():
            measured = spent(command(place), served)
            if number:
                figures[name].append(measured)
    return {name: [statistics.median(column) for column in zip(*rows)] for name, rows in figures.items()}


def disk_tree(top, objects):
    """As many empty files, with names of the same length."""
    if not top.exists():
        for number in range(objects):
            folder = top / f"{number // 1000:04}"
            if number % 1000 == 0:
                folder.mkdir(parents=True)
            (folder / f"{number:030}").touch()
    return top


def names(options):
    root = options.dir / "views-store"
    shutil.rmtree(root, ignore_errors=True)
    store, cluster = Store(root), None
    place = options.dir / "views-kernel"
    place.mkdir(exist_ok=True)
    try:
        store.ask("key-space", Layout(options.objects, "directories").rule())
        cluster = NamesCluster(options.dir / "views")
        cluster.index(store, options.objects, 7200)
        local = ("--local", cluster.directory)
        memory = {"at_rest_mib": cluster.memory_mib(), "mount_mib": cluster.memory_mib(cluster.mount / "index")}
        cluster.new_client()

        before = resident_mib(cluster.master)
        forget_peak(cluster.master)
        seconds = timed(cluster.cv, "view", "create", "/index", "bench", *local)
        view = json.loads(cluster.cv("view", "describe", "bench", "--json", *local))
        row("names", "create", objects=options.objects, seconds=seconds, master_mib_before=before,
            master_mib_peak=peak_mib(cluster.master), image_bytes_each=view["image_bytes"] / options.objects,
            object_bytes_each=view["object_bytes"] / options.objects)
        row("names", "fetch to this host", seconds=timed(os.listdir, cluster.mount / ".views/bench"))
        seconds = timed(cluster.cv, "view", "mount", "bench", place, "--mount-point", cluster.mount, *local)
        row("names", "mount", seconds=seconds)
        with_view = cluster.memory_mib(place)
        row("names", "memory of all processes", **memory, view_mib=with_view, of="mount",
            ratio=with_view / memory["mount_mib"])

        served = served_by(cluster.status)
        disk = disk_tree(options.dir / f"views-disk-{options.objects}", options.objects)
        sides = {"disk": disk, "view": place, "view by FUSE": cluster.mount / ".views/bench",
                 "mount": cluster.mount / "index"}
        for what, command in {
            "find": lambda top: ["find", top],
            "ls -lR": lambda top: ["ls", "-lR", *sorted(folder(top).iterdir())[:LISTED]],
        }.items():
            figures = medians(sides, command, served)
            for name, (seconds, own, others) in figures.items():
                row("names", f"{what}, {name}", seconds=seconds, processor_s=own, served_s=others, of="disk",
                    ratio=seconds / figures["disk"][0])
    finally:
        subprocess.run(["umount", "--lazy", place], stderr=subprocess.DEVNULL)
        if cluster:
            cluster.down()
        store.stop()
        shutil.rmtree(root, ignore_errors=True)


def folder(top):
    """The directory that has the directories of files: that of keys by rule is one below."""
    return top / "img" if (top / "img").is_dir() else top


def load(directory, *options):
    text = run(sys.executable, HERE / "load_img.py", directory, "--num_workers", 8, "--json", *options)
    return json.loads(text)["images_per_second"]


def bench_files(directory):
    """Files a second by eight threads, of one round."""
    text = run(CV, "bench", "files", directory, "--threads", 8, "--rounds", 1, "--json")
    return json.loads(text)["summary"][0]["target"]["median"]


READERS = {
    "raw": lambda directory: load(directory, "--raw"),
    "whole": lambda directory: load(directory, "--whole"),
    "threads": bench_files,
}


def baseline(what):
    """What figures of one kind are compared with."""
    if "elsewhere" in what or "bucket" in what:
        return "mount"
    return "disk" if "pages" in what else "plainfs"


def rate_rows(section, rates):
    """The medians of what was noted by kind and side."""
    figures = {key: statistics.median(found) for key, found in rates.items()}
    for (what, name), rate in figures.items():
        of = baseline(what)
        row(section, f"{what}, {name}", images_per_second=rate, of=of, ratio=rate / figures[what, of])


def contents(options):
    bench = Bench(options.dir / "views-contents", options.images, 1 << 20, False)
    place = options.dir / "views-kernel"
    place.mkdir(exist_ok=True)
    try:
        bench.source.mkdir(parents=True, exist_ok=True)
        images = bench.source / "images"
        if not images.exists():
            bench.cv("gen-images", images, "--count", options.images, "--mean-size", "50KB")
        bench.up()
        bench.plainfs = start_plainfs(bench.source, bench.plain_mount)
        bench.attach("images")
        # It waits for the index, which the mount has begun.
        local = ("--local", bench.cluster)
        bench.cv("index", "/images", "--watch", *local)
        bench.cv("view", "create", "/images", "bench", *local)
        bench.cv("view", "mount", "bench", place, "--mount-point", bench.mount, *local)
        sides = {"disk": images, "plainfs": bench.plain_mount / "images", "mount": bench.mount / "images",
                 "view": place, "view by FUSE": bench.mount / ".views/bench"}
        for name in ("mount", "view", "view by FUSE"):
            load(sides[name], "--raw")
        rates = {}

        def noted(what, name, rate):
            rates.setdefault((what, name), []).append(rate)

        for _ in range(ROUNDS):
            for name, directory in sides.items():
                for how, reader in READERS.items():
                    drop_caches()
                    noted(f"{how}, from the worker", name, reader(directory))
                    noted(f"{how}, from the kernel's pages", name, reader(directory))
                drop_caches()
                noted("decoded, from the worker", name, load(directory))
            for name in ("mount", "view"):
                bench.cold_again("images")
                before = bench.fetched()
                noted("raw, from the bucket", name, load(sides[name], "--raw"))
                if bench.fetched() - before < options.images:
                    sys.exit(f"the bucket was asked for fewer than {options.images} images by the {name}")
        rate_rows("contents", rates)
    finally:
        subprocess.run(["umount", "--lazy", place], stderr=subprocess.DEVNULL)
        bench.down()
        # Other sections have other masters.
        os.environ.pop("CV_CLUSTER__MASTERS", None)


def elsewhere(options):
    bench = bench_remote.Bench(argparse.Namespace(dir=options.dir, files=options.images, stream_bytes=STREAM_BYTES,
                                                  rounds=ROUNDS, quick=False, secure=False))
    place, plain = options.dir / "views-kernel", bench.directory / "plain"
    place.mkdir(exist_ok=True)
    plainfs = None
    try:
        bench.set_up()
        bench.cv("index", "/data", "--watch")
        # Beside the files themselves it would be one of them.
        bench.cv("view", "create", "/data/images", "bench", "--store", "/work")
        bench.until("the view is there", (bench.mount / ".views/bench").is_dir)
        run(CV, "view", "mount", "bench", place, "--mount-point", bench.mount)
        plainfs = start_plainfs(bench.source, plain)
        sides = {"plainfs": plain / "images", "mount": bench.mount / "data/images", "view": place,
                 "view by FUSE": bench.mount / ".views/bench"}
        # The first pass fetches from the bucket.
        load(sides["mount"], "--raw")
        rates = {}
        for _ in range(ROUNDS):
            for name, directory in sides.items():
                for how, reader in READERS.items():
                    bench.below_in_memory()
                    rates.setdefault((f"{how}, from a worker elsewhere", name), []).append(reader(directory))
        rate_rows("elsewhere", rates)
    finally:
        subprocess.run(["umount", "--lazy", place], stderr=subprocess.DEVNULL)
        if plainfs:
            stop_plainfs(plainfs, plain)
        bench.down()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help="all when none is named")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--objects", type=int, default=1_000_000, help="of the section names")
    parser.add_argument("--images", type=int, default=20_000, help="of the other sections")
    options = parser.parse_args()
    options.dir = options.dir.resolve()
    # The kernel mounts images from a disk only.
    staging = options.dir / "views-staging"
    staging.mkdir(parents=True, exist_ok=True)
    os.environ["CV_CLIENT__STAGING_DIRECTORY"] = str(staging)
    for section in options.sections or SECTIONS:
        {"names": names, "contents": contents, "elsewhere": elsewhere}[section](options)


if __name__ == "__main__":
    main()
