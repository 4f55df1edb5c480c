#!/usr/bin/env python3
"""Measures how long programs wait while the master that leads is killed, stopped or replaced, and checks what they did.

Needs root and the release build of `cv`:

    tests/bench_masters.py --dir /data/bench --rounds 30             # all kinds
    tests/bench_masters.py --dir /data/bench --rounds 10 kill        # only: of kill, freeze, transfer, stop
    tests/bench_masters.py --dir /data/bench --rounds 20 quiet       # kills, by kind of call

Starts a cluster of its own with three masters. Two programs make files in an fs-mode mount (create, write, rename,
read back), a third one walks a directory and looks at its files. A round does something to the leader, lets the group
be whole again, and notes the longest single system call of any program. Any error ends the run; at its end every file
that was made is there, in this mount and in one that knows nothing.

`quiet` kills the leader beside three programs that pause between their calls: one writes and syncs files, one reads
files that are cached, one looks up names that nobody has had. For each it notes the longest call of each kill, and how
many calls failed.
"""

import argparse
import json
import math
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
# Of `quiet`: files that are read, and what a program does between two steps.
CACHED = 50
PAUSE = 0.005


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


def write_one(directory, number):
    path = directory / "written" / str(number)
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(file, content(number))
        os.fsync(file)
    finally:
        os.close(file)


def read_one(directory, number):
    number %= CACHED
    if (directory / "cached" / str(number)).read_bytes() != content(number):
        sys.exit(f"cached file {number} has another content")


def look_up_one(directory, number):
    try:
        os.stat(directory / "names" / f"none-{number}")
    except FileNotFoundError:
        return
    sys.exit(f"none-{number} is there")


QUIET = {"writes a file and syncs it": write_one, "reads a cached file": read_one, "looks up a new name": look_up_one}


def repeat(step, directory, done, longest, steps, failed, times):
    """Notes the longest step, how many failed, and in the end the time of each."""
    took = []
    while not done.is_set():
        begun = time.monotonic()
        try:
            step(directory, steps.value)
        except OSError as error:
            failed.value += 1
            print(f"{step.__name__}: {error}", file=sys.stderr)
        took.append(time.monotonic() - begun)
        longest.value = max(longest.value, took[-1])
        steps.value += 1
        time.sleep(PAUSE)
    times.put(took)


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
    quiet = "quiet"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10, help="of each kind")
    parser.add_argument("kinds", nargs="*", help=f"of {', '.join(kinds)}; all these when none is named; or {quiet}")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {*kinds, quiet}:
        parser.error(f"no such kind: {', '.join(unknown)}")
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = options.dir / "masters"
    try:
        group = Group(directory)
        if chosen := [kind for kind in options.kinds or kinds if kind != quiet]:
            measure(group, chosen, options.rounds)
        if quiet in options.kinds:
            measure_quiet(group, options.rounds)
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


def p99(ordered):
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


def measure_quiet(group, rounds):
    directory = group.mount / "quiet"
    for name in ("written", "cached", "names"):
        # Not of this client, which would answer by itself what it has made.
        group.cv("fs", "mkdir", "--parents", f"/files/quiet/{name}", "--local", group.directory)
    for number in range(CACHED):
        (directory / "cached" / str(number)).write_bytes(content(number))
    done = multiprocessing.Event()
    programs = {}
    for said, step in QUIET.items():
        longest, steps, failed = (multiprocessing.Value(kind, 0) for kind in "dqq")
        shared = (longest, steps, failed, multiprocessing.Queue())
        process = multiprocessing.Process(target=repeat, args=(step, directory, done, *shared))
        programs[said] = (process, *shared)
    for process, *_ in programs.values():
        process.start()
    waits = {said: [] for said in programs}
    try:
        for _ in range(rounds):
            leader = group.leader()
            for _, longest, *_ in programs.values():
                longest.value = 0
            group.kill(leader)
            group.wait_whole()
            time.sleep(SETTLE)
            for said, (_, longest, *_) in programs.items():
                waits[said].append(1000 * longest.value)
        if not all(process.is_alive() for process, *_ in programs.values()):
            sys.exit("a program got an answer that is not so")
    finally:
        done.set()
        # A process ends when somebody has taken what it has put.
        took = {said: times.get() for said, (process, *_, times) in programs.items() if process.is_alive()}
        for process, *_ in programs.values():
            process.join()
    print(f"**The leader is killed {rounds} times: steps of three programs, milliseconds**\n")
    print("| the program | longest of each kill: median | p99 | most | all steps: median | p99 | steps | failed |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for said, (_, _, steps, failed, _) in programs.items():
        longest, every = sorted(waits[said]), sorted(1000 * step for step in took[said])
        figures = (statistics.median(longest), p99(longest), longest[-1], statistics.median(every), p99(every))
        print(f"| {said} | {' | '.join(f'{figure:.1f}' for figure in figures)} | {steps.value} | {failed.value} |")
    if any(process.exitcode != 0 or failed.value for process, _, _, failed, _ in programs.values()):
        sys.exit("a call failed, or answered what is not so")
    made = sorted(int(name) for name in os.listdir(directory / "written"))
    steps = programs["writes a file and syncs it"][2].value
    if made != list(range(steps)):
        sys.exit(f"{len(made)} files are there, and {steps} were made")


if __name__ == "__main__":
    main()
