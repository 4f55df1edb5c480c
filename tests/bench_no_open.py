#!/usr/bin/env python3
"""Measures what reading without OPEN gains, and counts who opens an old version of a file that was replaced.

Needs root, and the release build of `plainfs`:

    tests/bench_no_open.py --dir /data/bench             # both, about two minutes
    tests/bench_no_open.py --dir /data/bench pages       # or only one of: pages replaced

`pages`: 8 processes open, read and close 8,000 files of 50 KB whose pages the kernel has, each in an order of its own:
on the local disk, of `plainfs`, and of `plainfs --no-open`, to which the kernel sends no OPEN and no RELEASE. A figure
is the median of rounds in turn.

`replaced`: as many processes open, read and close 16 files of `plainfs --no-open --replaced`, while one after the other
is replaced by a next version: another inode, to which the name leads. A replacement is acknowledged when the kernel has
dropped the name's entry. An open that began after that, and has led to an earlier inode, was *stale*; bytes of another
version than the inode's are *mixed*; *ESTALE* is what a reader gets whose version was given up between its open and
its read. Old versions are given up at once (`gone`), or kept for those who have them open (`readable`). With `cached`
the kernel is not told: stale opens must show there, or they would not anywhere.
"""

import argparse
import errno
import itertools
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench import ROUNDS, start_plainfs, stop_plainfs
from load_img import read

SECTIONS = ("pages", "replaced")
# Readers begin as they are, with what this process has in memory.
FORK = multiprocessing.get_context("fork")
READERS = 8
LENGTH = 50_000
FILES = [f"{number // 1000}/{number:04}" for number in range(8000)]
REPLACED = [str(number) for number in range(16)]
# Seconds between two replacements, and from the start of the readers to their first open.
PAUSE, START = 0.001, 0.5
# Inode numbers of `plainfs --replaced` are the version's times this, and a remainder.
FILES_MAX = 1 << 16
# Of each file that is replaced the last version that was acknowledged.
ACKNOWLEDGED = FORK.RawArray("Q", len(REPLACED))


def make(directory, names):
    """Files of noise, if they are not there."""
    for name in names:
        path = directory / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(LENGTH))
    os.sync()
    return directory


def read_pages(directory, begin, end, seed):
    """Opens, reads and closes files in an order of its own; answers how many a second."""
    paths = [os.path.join(directory, name) for name in FILES]
    random.Random(seed).shuffle(paths)
    time.sleep(max(0.0, begin - time.monotonic()))
    begin = time.monotonic()
    for count, path in enumerate(itertools.cycle(paths)):
        if time.monotonic() >= end:
            return count / (time.monotonic() - begin)
        read(path)


def read_versions(directory, begin, end, seed):
    """Opens, reads and closes files while they are replaced; answers what it has met how often."""
    order, met = random.Random(seed), Counter()
    time.sleep(max(0.0, begin - time.monotonic()))
    while time.monotonic() < end:
        number = order.randrange(len(REPLACED))
        newest = ACKNOWLEDGED[number]
        met["opens"] += 1
        try:
            with open(os.path.join(directory, REPLACED[number]), "rb", buffering=0) as file:
                version = os.fstat(file.fileno()).st_ino // FILES_MAX
                met["stale"] += version < newest
                met["mixed"] += file.read(2 * LENGTH) != version.to_bytes(8, "little") * (LENGTH // 8)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            met["ESTALE"] += 1
    return met


def replace(plainfs, end):
    """Replaces files, one after the other; answers how many."""
    order = random.Random(READERS)
    for count in itertools.count():
        if time.monotonic() >= end:
            return count
        number = order.randrange(len(REPLACED))
        plainfs.stdin.write(f"{REPLACED[number]}\n")
        ACKNOWLEDGED[number] = int(plainfs.stdout.readline())
        time.sleep(PAUSE)


def together(reader, directory, seconds, meanwhile=lambda end: None):
    """What each reader answers, and what this process has done meanwhile."""
    begin = time.monotonic() + START
    with ProcessPoolExecutor(READERS, mp_context=FORK) as pool:
        tasks = [pool.submit(reader, directory, begin, begin + seconds, seed) for seed in range(READERS)]
        done = meanwhile(begin + seconds)
        return [task.result() for task in tasks], done


def pages(directory, seconds):
    source = make(directory / "no-open", FILES)
    sides = {"local disk": source}
    with ExitStack() as mounts:
        for number, options in enumerate(((), ("--no-open",))):
            mount = directory / f"no-open-{number}"
            mounts.callback(stop_plainfs, start_plainfs(source, mount, *options), mount)
            sides[f"`{' '.join(('plainfs', *options))}`"] = mount
        for place, name in itertools.product(sides.values(), FILES):
            read(place / name)
        rates = {side: [] for side in sides}
        for _, (side, place) in itertools.product(range(ROUNDS), sides.items()):
            rates[side].append(sum(together(read_pages, place, seconds)[0]))
    figures = {side: statistics.median(found) for side, found in rates.items()}
    print(f"\n| {len(FILES)} files of 50 KB from the kernel's pages, {READERS} processes "
          "| opened, read and closed a second | of the local disk |\n|---|---:|---:|")
    for side, figure in figures.items():
        print(f"| {side} | {figure:,.0f} | {figure / figures['local disk']:.2f} |")


def replaced(directory, seconds):
    source, mount = make(directory / "no-open-replaced", REPLACED), directory / "no-open-mount"
    met = {}
    for old in ("gone", "readable", "cached"):
        ACKNOWLEDGED[:] = [0] * len(REPLACED)
        plainfs = start_plainfs(source, mount, "--no-open", f"--replaced={old}", text=True, bufsize=1,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            found, count = together(read_versions, mount, seconds, lambda end: replace(plainfs, end))
        finally:
            stop_plainfs(plainfs, mount)
        met[old] = sum(found, Counter(replaced=count))
    columns = ("replaced", "opens", "stale", "mixed", "ESTALE")
    print(f"\n| the old version is | {' | '.join(columns)} |\n|---{'|---:' * len(columns)}|")
    for old, found in met.items():
        print(f"| {old} | {' | '.join(f'{found[column]:,}' for column in columns)} |")
    if not met["cached"]["stale"]:
        sys.exit("no open is stale where the kernel is not told: nothing is proved")
    if met["gone"]["stale"] or met["readable"]["stale"] or any(found["mixed"] for found in met.values()):
        sys.exit("openers are not led to the newest version")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; both when none is named")
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to measure; 500 MB are needed")
    parser.add_argument("--seconds", type=float, default=5, help="of a round of pages; replaced has four times that")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"unknown section {', '.join(sorted(unknown))}: choose from {', '.join(SECTIONS)}")
    directory = options.dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for section in options.sections or SECTIONS:
        if section == "pages":
            pages(directory, options.seconds)
        else:
            replaced(directory, 4 * options.seconds)


if __name__ == "__main__":
    main()
