#!/usr/bin/env python3
"""Runs programs that others have written on an fs-mode mount, and checks what they leave there and in the bucket.

    tests/programs/run.py --dir /data/programs                 # everything, about half an hour
    tests/programs/run.py --dir /data/programs sqlite tar      # only these

Starts a cluster of its own with two mounts (`cv local`) and stops it at the end. Needs root and the release build of
`cv`; a program that is missing is named with the package that has it, and counts as a failure. docs/programs.md says
what each run shows. Exit code 0 when all are well.
"""

import argparse
import os
import sys
import time
import traceback
from pathlib import Path

# Nothing is left beside the scripts, by those that they start neither.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"

import applications
import outages
import postgres
import suites
from cluster import Cluster, Missing

RUNS = {**suites.RUNS, **applications.RUNS, **postgres.RUNS, **outages.RUNS}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--dir", type=Path, help="for the cluster and what is compared with; everything needs 5 GB")
    place.add_argument("--cluster", type=Path, help="directory of a `cv local` cluster that is up and has two mounts")
    parser.add_argument("--quick", action="store_true", help="less of everything: seconds for each of the short ones")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(RUNS)}; all when none is named")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in RUNS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}: choose from {', '.join(RUNS)}")

    cluster = Cluster(options.cluster or options.dir, is_ours=options.cluster is None, quick=options.quick)
    outcomes = []
    with cluster:
        for name in options.names or RUNS:
            print(f"== {name}", flush=True)
            began = time.monotonic()
            try:
                said, good = RUNS[name](cluster), True
            except Missing as missing:
                said, good = str(missing), False
            except Exception as error:
                traceback.print_exc()
                said, good = str(error).strip().splitlines()[0] if str(error).strip() else repr(error), False
            outcomes.append((name, good, time.monotonic() - began, said))
            if good:
                cluster.tidy()
    width = max(len(name) for name, *_ in outcomes)
    print()
    for name, good, seconds, said in outcomes:
        print(f"{name:{width}}  {'ok    ' if good else 'FAILED'}  {seconds:6.1f} s  {said}")
    sys.exit(0 if all(good for _, good, *_ in outcomes) else 1)


if __name__ == "__main__":
    main()
