#!/usr/bin/env python3
"""Measures how long programs wait while the master that leads is killed, stopped or replaced, and checks what they did.

Needs root and the release build of `cv`:

    tests/bench_masters.py --dir /data/bench --rounds 30             # all kinds
    tests/bench_masters.py --dir /data/bench --rounds 10 kill        # only: of kill, freeze, transfer, stop

Starts a cluster of its own with three masters. Two programs make files in an fs-mode mount (create, write, rename,
read back), a third one walks a directory and looks at its files. A round does something to the leader, lets the group
be whole again, and notes the longest single system call of any program. Any error ends the run; at its end every file
that was made is there, in this mount and in one that knows nothing.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import CV, run

# A round goes on for this long after the group is whole again.
SETTLE = 1.0


def content(number):
    return (f"{number} " * (1 + number % 300)).encode()


class Timed:
    """Calls of one program, and how long the longest of them took."""

    def __init__(self, longest):
        self.longest = longest

    def __call__(self, call, *arguments):
        begun = time.monotonic()
        result = call(*arguments)
        self.longest.value = max(self.longest.value, time.monotonic() - begun)
        return result


def write(directory, done, made, longest):
    timed = Timed(longest)
    while not done.is_set():
        number = made.value
        path = directory / f"{number}.new"
        file = timed(os.open, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        timed(os.write, file, content(number))
        timed(os.close, file)
        timed(os.rename, path, directory / str(number))
        made.value = number + 1
        earlier = number // 2
        if timed((directory / str(earlier)).read_bytes) != content(earlier):
            sys.exit(f"{directory / str(earlier)} has another content")


def look(directory, done, longest):
    timed = Timed(longest)
    while not done.is_set():
        for entry in timed(os.listdir, directory):
            try:
                timed(os.stat, directory / entry)
            except FileNotFoundError:
                # Renamed since.
                pass
        time.sleep(0.005)


class Group:
    def __init__(self, directory, masters=3, conf="", secure=False):
        self.directory = directory
        file = directory.parent / f"{directory.name}.toml"
        file.write_text(conf)
        self.cv("local", "up", "--dir", directory, "--masters", masters, "--conf", file,
                *(("--secure",) if secure else ()))
        s3 = self.status()["s3"]
        self.cv("local", "seed", "--dir", directory, self.seed(), "s3://files/seed")
        self.cv("mount", "s3://files/data", "/files", "--write-type", "fs-mode", "--local", directory,
                "-c", f"s3.endpoint_url={s3['endpoint']}", "-c", "s3.region_name=us-east-1",
                "-c", f"s3.credentials.access={s3['access_key']}", "-c", f"s3.credentials.secret={s3['secret_key']}")
        self.mount = Path(self.status()["mount_point"]) / "files"

    def seed(self):
        seed = self.directory.parent / "seed"
        seed.mkdir(exist_ok=True)
        (seed / "one").write_text("one")
        return seed

    def cv(self, *arguments):
        return run(CV, *arguments)

    def status(self):
        return json.loads(self.cv("local", "status", "--dir", self.directory, "--json"))

    def raft(self):
        return json.loads(self.cv("raft", "status", "--local", self.directory, "--json"))

    def leader(self):
        """Its number among the masters of the status."""
        status, raft = self.status(), self.raft()
        address = next(one["address"] for one in raft["masters"] if one["id"] == raft["leader"])
        return next(number for number, one in enumerate(status["masters"]) if one["grpc"] == address)

    def wait_whole(self, but=None):
        """Until all masters answer, and one of them leads; with `but`, another one than that."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            raft = self.raft()
            if raft["answering"] == 3 and raft["leader"] and (but is None or self.leader() != but):
                return
            time.sleep(0.1)
        sys.exit("the group does not become whole")

    def kill(self, leader):
        self.cv("local", "kill", f"master{leader}", "--dir", self.directory)
        time.sleep(3)
        self.cv("local", "start", f"master{leader}", "--dir", self.directory)

    def freeze(self, leader):
        pid = self.status()["masters"][leader]["pid"]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(6)
        os.kill(pid, signal.SIGCONT)

    def transfer(self, _leader):
        self.cv("raft", "transfer", "--local", self.directory)

    def stop(self, leader):
        self.cv("local", "stop", f"master{leader}", "--dir", self.directory)
        time.sleep(1)
        self.cv("local", "start", f"master{leader}", "--dir", self.directory)


def main():
    kinds = ["kill", "freeze", "transfer", "stop"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10, help="of each kind")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(kinds)}; all when none is named")
    options = parser.parse_args()
    if unknown := set(options.kinds) - set(kinds):
        parser.error(f"no such kind: {', '.join(unknown)}")
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = options.dir / "masters"
    try:
        measure(Group(directory), options.kinds or kinds, options.rounds)
    finally:
        subprocess.run([CV, "local", "down", "--purge", "--dir", directory],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.rmtree(options.dir / "seed", ignore_errors=True)


def measure(group, kinds, rounds):
    done = multiprocessing.Event()
    programs = []
    for number in range(2):
        directory = group.mount / str(number)
        directory.mkdir()
        made, longest = multiprocessing.Value("q", 0), multiprocessing.Value("d", 0)
        process = multiprocessing.Process(target=write, args=(directory, done, made, longest))
        programs.append((process, longest, directory, made))
    longest = multiprocessing.Value("d", 0)
    process = multiprocessing.Process(target=look, args=(group.mount / "0", done, longest))
    programs.append((process, longest, None, None))
    for process, *_ in programs:
        process.start()
    try:
        print("**Longest wait of a program, milliseconds**\n\n| the leader is | rounds | least | median | most |")
        print("|---|---:|---:|---:|---:|")
        for kind in kinds:
            waits = []
            for _ in range(rounds):
                leader = group.leader()
                for _, longest, *_ in programs:
                    longest.value = 0
                getattr(group, kind)(leader)
                group.wait_whole()
                time.sleep(SETTLE)
                if not all(process.is_alive() for process, *_ in programs):
                    sys.exit("a program got an error")
                waits.append(1000 * max(longest.value for _, longest, *_ in programs))
            said = {"kill": "killed (SIGKILL)", "freeze": "stopped for 6 s (SIGSTOP)", "transfer": "asked to hand over",
                    "stop": "ended (SIGTERM)"}[kind]
            print(f"| {said} | {rounds} | {min(waits):.0f} | {statistics.median(waits):.0f} | {max(waits):.0f} |",
                  flush=True)
    finally:
        done.set()
        for process, *_ in programs:
            process.join()
    if any(process.exitcode != 0 for process, *_ in programs):
        sys.exit("a program got an error")
    for known in (True, False):
        if not known:
            group.cv("local", "stop", "fuse", "--dir", group.directory)
            group.cv("local", "start", "fuse", "--dir", group.directory)
        for _, _, directory, made in programs[:2]:
            names = sorted(int(name) for name in os.listdir(directory))
            if names != list(range(made.value)):
                sys.exit(f"{len(names)} files in {directory}, and {made.value} were made")
            for name in names:
                if (directory / str(name)).read_bytes() != content(name):
                    sys.exit(f"{directory / str(name)} has another content")
    print(f"\n{sum(made.value for _, _, _, made in programs[:2])} files were made, and all are there.")


if __name__ == "__main__":
    main()
