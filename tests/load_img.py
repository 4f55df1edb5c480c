#!/usr/bin/env python3
"""Reads every image below a directory, as the input pipeline of a training job does.

Walks DIR, shuffles the files (seed 42), lets a pool of processes open and decode every image, and prints images/s.
With --raw nothing is decoded: open, read, close, the path of the storage alone (and no PIL is needed). With --whole
neither: each file is read by Python's open() and read(), which also ask for its attributes and its place.
With --against DIR2 the same is done there in turn, and the ratio of the two is printed.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import time

READ_BYTES = 1 << 20
SEED = 42


def read(path):
    """Opens, reads to the end, closes; answers the number of bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        total = 0
        while piece := os.read(descriptor, READ_BYTES):
            total += len(piece)
        return total
    finally:
        os.close(descriptor)


def read_whole(path):
    """The same as programs in Python do it."""
    with open(path, "rb") as file:
        return len(file.read())


def decode(path):
    """Opens and decodes to RGB pixels; answers the number of bytes of the file."""
    from PIL import Image

    with open(path, "rb") as file:
        image = Image.open(file)
        image.convert("RGB").load()
        return file.tell()


WAYS = {"raw": read, "whole": read_whole, "decode": decode}


def work(task):
    """Handles some files; answers files and bytes read, and the first few errors."""
    way, paths = task
    handle = WAYS[way]
    files = size = 0
    errors = []
    for path in paths:
        try:
            size += handle(path)
            files += 1
        except Exception as error:  # whatever a decoder raises, it is one bad file
            errors.append(f"{path}: {error}")
    return files, size, len(errors), errors[:3]


def ready(_):
    """Runs once or more in every process before the clock starts."""
    time.sleep(0.05)


def files_below(directory):
    paths = []
    for folder, _, names in os.walk(directory, onerror=lambda error: sys.exit(f"load_img: {error}")):
        paths.extend(os.path.join(folder, name) for name in names)
    paths.sort()
    return paths


def run(directory, options):
    """One pass over the directory; answers a dictionary of what was measured."""
    walked = time.monotonic()
    paths = files_below(directory)
    walked = time.monotonic() - walked
    if not paths:
        sys.exit(f"load_img: no files below {directory}")
    random.Random(SEED).shuffle(paths)
    if options.num_samples:
        paths = paths[: options.num_samples]
    workers = min(options.num_workers, len(paths))
    step = max(1, min(64, len(paths) // (workers * 4)))
    tasks = [(options.way, paths[start : start + step]) for start in range(0, len(paths), step)]
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        pool.map(ready, range(workers), chunksize=1)
        started = time.monotonic()
        results = list(pool.imap_unordered(work, tasks))
        seconds = time.monotonic() - started
    files, size, failed = (sum(result[index] for result in results) for index in range(3))
    for message in [message for result in results for message in result[3]][:10]:
        print(f"load_img: {message}", file=sys.stderr)
    return {
        "directory": directory,
        "mode": options.way,
        "workers": workers,
        "images": files,
        "bytes": size,
        "errors": failed,
        "walk_seconds": round(walked, 4),
        "seconds": round(seconds, 4),
        "images_per_second": round(files / seconds, 1),
        "bytes_per_second": round(size / seconds),
    }


def with_pil():
    """Goes on under Debian's Python, which has Debian's PIL. The first one in the path may be another, without it."""
    python = "/usr/bin/python3"
    if sys.executable != python and os.access(python, os.X_OK):
        os.execv(python, [python, *sys.argv])
    sys.exit("load_img: decoding needs PIL (apt install python3-pil); --raw and --whole do without")


def show(result):
    print(
        f"{result['images_per_second']:.0f} images/s "
        f"({result['images']} images, {result['bytes'] / 1e6:.1f} MB in {result['seconds']:.2f} s, "
        f"{result['bytes_per_second'] / 1e6:.1f} MB/s, {result['errors']} errors)"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIR")
    parser.add_argument("--num_workers", metavar="N", type=int, default=8, help="processes (default 8)")
    parser.add_argument("--num_samples", metavar="N", type=int, default=0, help="read only so many files")
    ways = parser.add_mutually_exclusive_group()
    for way, what in (("raw", "open, read, close; decode nothing"), ("whole", "open() and read(); decode nothing")):
        ways.add_argument(f"--{way}", dest="way", action="store_const", const=way, default="decode", help=what)
    parser.add_argument("--against", metavar="DIR2", help="do the same there, and print the ratio DIR / DIR2")
    parser.add_argument("--json", action="store_true", help="results as JSON")
    options = parser.parse_args()
    if options.num_workers < 1 or options.num_samples < 0:
        parser.error("--num_workers must be at least 1, --num_samples at least 0")

    if options.way == "decode":
        try:
            import PIL.Image  # here, so that the processes of the pool have it before the clock starts
        except ImportError:
            with_pil()

    results = [run(directory, options) for directory in [options.directory, options.against] if directory]
    if options.json:
        print(json.dumps(results if options.against else results[0]))
    else:
        for result in results:
            if options.against:
                print(f"{result['directory']}: ", end="")
            show(result)
    if options.against and not options.json:
        ratio = results[0]["images_per_second"] / max(results[1]["images_per_second"], 1e-9)
        print(f"ratio: {ratio:.3f}")
    sys.exit(1 if any(result["errors"] for result in results) else 0)


if __name__ == "__main__":
    main()
