#!/usr/bin/env python3
"""Measures writing to fs-mode mounts beside the local disk and a minimal FUSE file system, and prints Markdown tables.

Needs root, git, fio, rclone, PostgreSQL, and the release build of `cv` (or that which `CV_BIN` names) and `plainfs`;
rows whose program is missing are left out, and say so:

    tests/bench_writes.py --dir /data/bench                           # everything
    tests/bench_writes.py --dir /data/bench --rows tar,cp,ingest      # only these
    tests/bench_writes.py --dir /data/bench --quick --repetitions 1   # whether all of it works

Starts a cluster of its own with two workers on the disk of `--dir`; the local disk is the same file system, and what
`plainfs` shows is on it, too. In each repetition all take turns, each time another one first, since the machine's own
speed drifts. A cell is the least, the median and the most of all repetitions; a share compares medians, and below 1 the
mount is the slower one, whatever the unit.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bench import CV, run, start_plainfs, stop_plainfs
from write_rows import GIT, MIB, Missing, Row, groups, in_turn, ingest_into, need, together, write_stream

TICK = 1 / os.sysconf("SC_CLK_TCK")
DISK, PLAIN, OURS = "local disk", "plainfs", "Cavern"


@dataclass(frozen=True)
class Place:
    """Where a row is measured; `copies` of what it streams a program writes itself."""

    name: str
    directory: Path
    copies: int = 1


class Cluster:
    """One with two workers; `/one` keeps one replica of each block, `/two` keeps two."""

    def __init__(self, directory, conf="", mounts=1):
        self.directory = directory / "cluster"
        self.mount, self.second = directory / "mount", directory / "second"
        self.mounts = [self.mount, self.second][:mounts]
        self.conf = conf

    def cv(self, *arguments):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CV_")}
        if arguments[:2] != ("local", "up"):
            environment["CV_CONF"] = str(self.directory / "cluster.toml")
        return run(CV, *arguments, env=environment)

    def __enter__(self):
        for mount in self.mounts:
            mount.mkdir(parents=True, exist_ok=True)
        conf = self.mount.parent / "bench.toml"
        conf.write_text(self.conf)
        try:
            self.up(conf)
            self.s3 = self.status()["s3"]
            seed = self.mount.parent / "seed"
            seed.mkdir(exist_ok=True)
            (seed / "object").write_text("it makes the bucket\n")
            self.cv("local", "seed", "--dir", self.directory, seed, "s3://bench/seed")
            for name, options in (("one", ()), ("two", ("--replicas", 2))):
                self.cv("mount", f"s3://bench/{name}", f"/{name}", "--write-type", "fs_mode", *options,
                        "-c", f"s3.endpoint_url={self.s3['endpoint']}", "-c", "s3.region_name=us-east-1",
                        "-c", f"s3.credentials.access={self.s3['access_key']}",
                        "-c", f"s3.credentials.secret={self.s3['secret_key']}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        subprocess.run([CV, "local", "down", "--dir", self.directory], stdout=subprocess.DEVNULL)
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.mount.parent / "seed", ignore_errors=True)

    def resume(self):
        """All processes end, and begin anew where they were."""
        conf = self.mount.parent / "bench.toml"
        self.cv("local", "down", "--dir", self.directory)
        self.up(conf)

    def up(self, conf):
        mounts = [argument for mount in self.mounts for argument in ("--mount-point", mount)]
        self.cv("local", "up", "--dir", self.directory, *mounts, "--workers", 2, "--conf", conf)

    def status(self):
        return json.loads(self.cv("local", "status", "--dir", self.directory, "--json"))

    def settle(self):
        """Nothing of before is in the way: the bucket has it, and so have the disks."""
        for name in ("one", "two"):
            self.cv("export", f"/{name}", "--watch")
        os.sync()

    def processes(self):
        """What each part of the cluster consists of; a client's mount is kept by a process above the one that works."""
        status = self.status()
        pids = {role: [child["pid"] for child in status[key]]
                for role, key in (("master", "masters"), ("workers", "workers"), ("client", "fuse"))}
        for pid in list(pids["client"]):
            pids["client"] += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return pids


def processor_seconds(pid):
    """Of all threads, those that have ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def remove(directory):
    """With many at once: each name that goes waits for the master's disk."""
    with multiprocessing.get_context("fork").Pool(16) as pool:
        pool.map(shutil.rmtree, [entry for entry in directory.iterdir() if entry.is_dir()])
    shutil.rmtree(directory)


class Bench:
    def __init__(self, directory, repetitions, quick):
        self.directory = directory
        self.repetitions = repetitions
        self.quick = quick
        self.files = self.scaled(10_000)
        self.pieces = self.scaled(512)
        # For what is counted, not timed.
        self.seconds = 0.1 if quick else 1
        self.sources = directory / "sources"
        self.archive = self.sources / "files.tar"
        self.repository = self.sources / "repository"
        self.local = directory / "local"
        self.plain_source = directory / "plain-source"
        self.plain_mount = directory / "plain"
        self.cluster = Cluster(directory)
        self.plainfs = None
        # Processor time of each part for one file, in milliseconds.
        self.spent = {}

    def scaled(self, size):
        return size // 10 if self.quick else size

    def set_up(self):
        """What is copied, cloned and extracted, from nothing; and the two places beside the mount."""
        self.tear_down()
        for made in (self.sources, self.local, self.plain_source):
            made.mkdir(parents=True)
        content = os.urandom(MIB)
        tree = self.sources / "files"
        write_tree(tree, self.scaled(3000), lambda number: content[number:number + 3000])
        with tarfile.open(self.archive, "w") as archive:
            archive.add(tree, "files")
        if shutil.which("git"):
            # Words, as sources are.
            write_tree(self.repository, self.scaled(1500),
                       lambda number: "".join(f"line {number * line}\n" for line in range(50 + number % 300)).encode())
            for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "all"), ("gc", "-q")):
                run("git", "-C", self.repository, *command, env=GIT)
        self.plainfs = start_plainfs(self.plain_source, self.plain_mount, "--writable")

    def tear_down(self):
        if self.plainfs:
            stop_plainfs(self.plainfs, self.plain_mount)
        for made in (self.sources, self.local, self.plain_source):
            shutil.rmtree(made, ignore_errors=True)

    @contextmanager
    def processor_time(self, place, files):
        """Notes what the processes behind a place use meanwhile, for one of so many files."""
        behind = {}
        if place.name == PLAIN:
            behind = {PLAIN: [self.plainfs.pid]}
        elif place.name == OURS:
            behind = self.cluster.processes()

        def used():
            return {part: sum(map(processor_seconds, pids)) for part, pids in behind.items()}

        before = used()
        yield
        for part, seconds in used().items():
            self.spent.setdefault(part, []).append((seconds - before[part]) * 1e3 / files)

    # ---------------------------------------------------------------------------------------- taking turns

    def places(self, replicas):
        return [Place(DISK, self.local, replicas), Place(PLAIN, self.plain_mount, replicas),
                Place(OURS, self.cluster.mount / ("two" if replicas == 2 else "one"))]

    def measure(self, group, wanted):
        """Figures of each wanted row and place, all places in turn; and why a place has none."""
        places = self.places(group.replicas)
        last = max(number for number, row in enumerate(group.rows) if row in wanted)
        figures = {row: {place.name: [] for place in places} for row in wanted}
        failures = {}
        for repetition in range(self.repetitions):
            first = repetition % len(places)
            for place in places[first:] + places[:first]:
                if place.name not in failures:
                    try:
                        self.cluster.settle()
                        for row, figure in self.once(group, last, place, repetition):
                            if row in wanted:
                                figures[row][place.name].append(figure)
                    except Missing:
                        raise
                    except Exception as error:
                        failures[place.name] = reason(error)
        return figures, failures

    def once(self, group, last, place, repetition):
        """A figure for each row up to the last; in a directory of its own, which is removed."""
        place = replace(place, directory=place.directory / f"round{repetition}")
        place.directory.mkdir()
        try:
            with closing(group.measure(self, place)) as measured:
                return [(row, next(measured)) for row in group.rows[:last + 1]]
        finally:
            remove(place.directory)

    def resume(self, place):
        """A job goes on after its host was restarted: a client begins anew, of a local disk nothing is cached."""
        if place.name == OURS:
            self.cluster.resume()

    # --------------------------------------------------------------- what has another baseline than a place

    def network(self):
        """Files whose workers are not asked for descriptors, as if they were on other hosts."""
        baseline = '`write_behind = "0B"`'
        small, large = (Row("network", "writes of 4 KiB over the network", "/s"),
                        Row("network", "writes of 1 MiB over the network", "MiB/s"))
        figures = {row: {baseline: [], OURS: []} for row in (small, large)}
        for _ in range(self.repetitions):
            for name, behind in ((OURS, "64MiB"), (baseline, "0B")):
                conf = f'[client]\nlocal_descriptors = false\nwrite_behind = "{behind}"\n'
                with Cluster(self.directory / "network", conf) as cluster:
                    for row, count, size in ((small, self.scaled(20_000), 4096), (large, self.pieces, MIB)):
                        seconds = together(1, write_stream, cluster.mount / "one", count, size)
                        figures[row][name].append(count / seconds)
        return figures, {}

    def turns(self):
        """Two mounts append in turn in a directory that was there before; then how long one waits that looks into what
        is delegated to the other: the 99th of a hundred looks, in milliseconds."""
        baseline = "`directory_delegations = false`"
        turn, look = (Row("turns", "two mounts append in turn in an old directory", "/s"),
                      Row("turns", "the longest but one of 100 looks into the other's directory", "ms"))
        figures = {row: {baseline: [], OURS: []} for row in (turn, look)}
        for _ in range(self.repetitions):
            for name, delegated in ((OURS, "true"), (baseline, "false")):
                conf = f"[client]\ndirectory_delegations = {delegated}\n"
                with Cluster(self.directory / "turns", conf, mounts=2) as cluster:
                    appended, longest = in_turn(cluster.mount / "one", cluster.second / "one", self.seconds)
                    figures[turn][name].append(appended)
                    figures[look][name].append(longest * 1000)
        return figures, {}

    def arrive(self):
        """From the first write until the bucket has it, which nobody hurries; rclone copies it from the local disk."""
        need("rclone", "rclone")
        baseline, data = "local disk, then `rclone copy`", os.urandom(50_000)
        files, pieces = self.scaled(4_000), self.scaled(1024)
        small = Row("arrive", f"{files:,} files of 50 KB written and in the bucket", "s")
        large = Row("arrive", f"{pieces:,} MiB in one file written and in the bucket", "s")
        works = {small: lambda directory: ingest_into(directory, files, data),
                 large: lambda directory: together(1, write_stream, directory, pieces, MIB)}
        figures = {row: {baseline: [], OURS: []} for row in works}
        with Cluster(self.directory / "arrive") as cluster:
            for number in range(self.repetitions):
                for row, write in works.items():
                    name = f"{'small' if row is small else 'large'}{number}"
                    local, mounted = self.local / name, cluster.mount / "one" / name
                    for directory in (local, mounted):
                        directory.mkdir()
                    cluster.settle()
                    begun = time.monotonic()
                    write(mounted)
                    while any(json.loads(cluster.cv("persist", "status", "/one", "--json"))[left]
                              for left in ("files", "deletions")):
                        time.sleep(0.1)
                    # Were anything still on its way to the master, it would be waited for.
                    cluster.cv("persist", "wait", "/one")
                    figures[row][OURS].append(time.monotonic() - begun)
                    begun = time.monotonic()
                    write(local)
                    copy_with_rclone(cluster.s3, local, name)
                    figures[row][baseline].append(time.monotonic() - begun)
                    shutil.rmtree(local)
        return figures, {}

    def drain(self):
        """The bucket takes what was written to the mount; rclone writes the same files to another prefix."""
        need("rclone", "rclone")
        baseline, data = "`rclone copy`, 64 transfers", os.urandom(50_000)
        row = Row("drain", f"{self.files:,} files of 50 KB to the bucket", "/s")
        figures = {row: {baseline: [], OURS: []}}
        source = self.local / "drain"
        ingest_into(source, self.files, data)
        # Nothing drains before all is written.
        with Cluster(self.directory / "drain", '[master]\npersist_delay = "1h"\n') as cluster:
            for number in range(self.repetitions):
                cluster.settle()
                ingest_into(cluster.mount / "one" / f"drain{number}", self.files, data)
                begun = time.monotonic()
                cluster.cv("export", "/one", "--watch")
                figures[row][OURS].append(self.files / (time.monotonic() - begun))
                begun = time.monotonic()
                copy_with_rclone(cluster.s3, source, f"drain{number}")
                figures[row][baseline].append(self.files / (time.monotonic() - begun))
        shutil.rmtree(source)
        return figures, {}


def copy_with_rclone(s3, source, name):
    environment = dict(os.environ, RCLONE_CONFIG_S_TYPE="s3", RCLONE_CONFIG_S_PROVIDER="Other",
                       RCLONE_CONFIG_S_ENDPOINT=s3["endpoint"], RCLONE_CONFIG_S_REGION="us-east-1",
                       RCLONE_CONFIG_S_ACCESS_KEY_ID=s3["access_key"],
                       RCLONE_CONFIG_S_SECRET_ACCESS_KEY=s3["secret_key"], RCLONE_CONFIG=os.devnull)
    environment.pop("AWS_CA_BUNDLE", None)
    run("rclone", "copy", source, f"S:bench/rclone-{name}", "--transfers", 64, "--checkers", 64,
        "--s3-no-check-bucket", "--no-check-dest", env=environment)


def write_tree(top, files, content):
    """A hundred files in each folder."""
    for number in range(files):
        folder = top / f"folder{number // 100:02}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"file{number:04}.txt").write_bytes(content(number))


def reason(error):
    """In one line; of a program, what it said last."""
    said = getattr(error, "stderr", None) or str(error)
    return f"{type(error).__name__}: {said.strip().splitlines()[-1] if said.strip() else 'no word'}"


# ------------------------------------------------------------------------------------------------------- tables

def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def spread(values):
    return " · ".join(map(number, (min(values), statistics.median(values), max(values)))) if values else "–"


def share(row, ours, baseline):
    if not ours or not baseline:
        return "–"
    of = statistics.median(ours) / statistics.median(baseline)
    return number(1 / of if row.is_time else of)


class Tables:
    """Printed as they grow; a heading where the places are others than before."""

    heading = None

    def show(self, figures, failures):
        for row, places in figures.items():
            if not any(places.values()):
                continue
            *baselines, ours = places.items()
            heading = "".join(f"| {name} " for name in places)
            heading += "".join(f"| share of {name} " for name, _ in baselines)
            if heading != self.heading:
                print(f"\n| what {heading}|\n|---{'|---:' * (2 * len(baselines) + 1)}|")
                self.heading = heading
            cells = ["failed" if name in failures else spread(values) for name, values in places.items()]
            cells += [share(row, ours[1], values) for _, values in baselines]
            print(f"| {row.what}, {row.unit} | {' | '.join(cells)} |")
        sys.stdout.flush()
        for name, why in failures.items():
            print(f"bench_writes: {', '.join(row.name for row in figures)}: {name}: {why}", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to measure; 12 GB are needed")
    parser.add_argument("--rows", help="names with commas between them; all when there are none")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes: the figures say little")
    options = parser.parse_args()
    bench = Bench(options.dir.resolve(), options.repetitions, options.quick)
    of_turns = groups(bench)
    others = {"network": bench.network, "turns": bench.turns, "drain": bench.drain, "arrive": bench.arrive}
    names = [row.name for group in of_turns for row in group.rows] + list(others)
    wanted = set(options.rows.split(",") if options.rows else names)
    if wanted - set(names):
        parser.error(f"unknown row {', '.join(sorted(wanted - set(names)))}: choose from {', '.join(names)}")
    failed, tables = False, Tables()

    def attempt(what, measure, *arguments):
        """One that fails says why, and the others go on."""
        nonlocal failed
        try:
            figures, failures = measure(*arguments)
            tables.show(figures, failures)
            failed |= bool(failures)
        except Missing as missing:
            print(f"bench_writes: {what}: left out: {missing}", file=sys.stderr)
        except Exception as error:
            failed = True
            print(f"bench_writes: {what}: {reason(error)}", file=sys.stderr)

    try:
        bench.set_up()
        with bench.cluster:
            for group in of_turns:
                rows = [row for row in group.rows if row.name in wanted]
                if rows:
                    attempt(", ".join(row.name for row in rows), bench.measure, group, rows)
        for name, measure in others.items():
            if name in wanted:
                attempt(name, measure)
    finally:
        bench.tear_down()
    if bench.spent:
        print("\n| processor time for a file of `ingest`, ms | least · median · most |\n|---|---:|")
        for part, values in bench.spent.items():
            print(f"| {part} | {spread(values)} |")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
