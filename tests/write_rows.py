"""The rows of bench_writes.py: what each of them does in a directory that is its own.

A group of rows is a generator: it is given the benchmark (its sources and sizes) and the place, and yields a figure for
each of its rows in turn. What a row needs beforehand is done before the clock runs.
"""

import fcntl
import json
import multiprocessing
import os
import random
import shutil
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from bench import run

sys.path.insert(0, str(Path(__file__).resolve().parent / "programs"))
from cluster import Missing  # noqa: E402: where the programs' tests have it
from postgres import USER, Postgres  # noqa: E402

MIB = 1 << 20
WRITERS = 16
# Nothing of this host's configuration; `git` writes as somebody.
GIT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull,
       **{f"GIT_{who}_{what}": "bench@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}}


@dataclass(frozen=True)
class Row:
    name: str
    what: str
    unit: str

    @property
    def is_time(self):
        return self.unit in ("s", "ms", "µs")


@dataclass(frozen=True)
class Group:
    measure: Callable
    rows: tuple
    # Of the mount that is ours; elsewhere a program writes as many files itself.
    replicas: int = 1


def need(program, package):
    if not shutil.which(program):
        raise Missing(f"{program} is not installed: apt-get install {package}")


def timed(*command, **options):
    """Seconds that a command takes."""
    begun = time.monotonic()
    run(*command, **options)
    return time.monotonic() - begun


def rate(seconds, deed):
    """How often a second `deed()` was done, in so many seconds."""
    count, begun = 0, time.monotonic()
    while True:
        deed()
        count += 1
        passed = time.monotonic() - begun
        if passed >= seconds:
            return count / passed


def together(count, work, *arguments):
    """Seconds that `count` processes take for `work(number, ...)`, from the moment on in which all are there."""
    fork = multiprocessing.get_context("fork")
    ready, go, errors = fork.Barrier(count + 1), fork.Barrier(count + 1), fork.SimpleQueue()

    def one(number):
        ready.wait()
        go.wait()
        try:
            work(number, *arguments)
        except Exception as error:
            errors.put(f"{type(error).__name__}: {error}")

    processes = [fork.Process(target=one, args=(number,)) for number in range(count)]
    for process in processes:
        process.start()
    ready.wait()
    begun = time.monotonic()
    go.wait()
    for process in processes:
        process.join()
    seconds = time.monotonic() - begun
    if not errors.empty():
        raise RuntimeError(errors.get())
    ended = [process.exitcode for process in processes if process.exitcode]
    if ended:
        raise RuntimeError(f"a process ended with {ended[0]}")
    return seconds


# ---------------------------------------------------------------------------------- trees, and files of one write

def tree(bench, place):
    files, copy = place.directory / "files", place.directory / "copy"
    yield timed("tar", "xf", bench.archive, "-C", place.directory)
    yield timed("cp", "-r", files, copy)
    yield timed("rm", "-rf", copy)


def git(bench, place):
    need("git", "git")
    clone = place.directory / "clone"
    # A copy of each object, as between file systems: links would be none of the mount's work.
    yield timed("git", "clone", "-q", "--no-hardlinks", bench.repository, clone, env=GIT)
    yield timed("git", "-C", clone, "status", "--porcelain", env=GIT)


def write_files(number, directory, files, data, sync):
    for index in range(number, files, WRITERS):
        file = os.open(directory / str(index % 100) / f"{index}.jpg", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(file, data)
        if sync:
            os.fsync(file)
        os.close(file)


def ingest_into(directory, files, data, sync=False):
    """Seconds that all writers take."""
    for number in range(100):
        (directory / str(number)).mkdir(parents=True)
    return together(WRITERS, write_files, directory, files, data, sync)


def ingest(bench, place):
    with bench.processor_time(place, bench.files):
        seconds = ingest_into(place.directory, bench.files, os.urandom(50_000))
    yield bench.files / seconds


def ingest_synced(bench, place):
    yield bench.files / ingest_into(place.directory, bench.files, os.urandom(50_000), sync=True)


# ----------------------------------------------------------------------------- directories that were there before

def append_to(path, data=b"a" * 100):
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(file, data)
    os.close(file)


def make_old(bench, place, name, files):
    """A directory with files that everybody has forgotten: it is in the bucket, and delegated to nobody."""
    directory = place.directory / name
    directory.mkdir()
    for number in range(files):
        append_to(directory / str(number))
    bench.cluster.settle()
    return directory


def existing(bench, place):
    files = bench.scaled(600)
    directory = make_old(bench, place, "old", files)
    yield rate(bench.seconds, lambda: append_to(directory / "0"))
    numbers = iter(range(1 << 30))
    yield rate(bench.seconds, lambda: append_to(directory / f"new{next(numbers)}"))
    made = next(numbers)
    begun = time.monotonic()
    for number in range(made):
        os.rename(directory / f"new{number}", directory / f"renamed{number}")
    yield made / (time.monotonic() - begun)
    bench.cluster.settle()
    begun = time.monotonic()
    for number in range(made):
        os.unlink(directory / f"renamed{number}")
    yield made / (time.monotonic() - begun)
    bench.cluster.settle()
    yield timed("rm", "-rf", directory)


def resumed(bench, place):
    directory = make_old(bench, place, "job", bench.scaled(100))
    bench.resume(place)
    yield rate(bench.seconds * 20, lambda: append_to(directory / "0"))
    yield rate(bench.seconds, lambda: append_to(directory / "0"))


def in_turn(one, other, seconds):
    """How often in a second two mounts append in turn in a directory that was there before; and the longest but one of
    a hundred looks of one into a directory that is delegated to the other, in seconds."""
    old = one / "old"
    old.mkdir()
    for directory in (old, other / "old"):
        append_to(directory / "log")
    turns = iter([old, other / "old"] * (1 << 20))
    appended = rate(seconds, lambda: append_to(next(turns) / "log"))
    looks = []
    for number in range(100):
        directory = one / f"new{number}"
        directory.mkdir()
        append_to(directory / "log")
        begun = time.monotonic()
        size = (other / f"new{number}" / "log").stat().st_size
        looks.append(time.monotonic() - begun)
        assert size == 100, size
    return appended, sorted(looks)[-2]


# --------------------------------------------------------------------------------------------- writes to one file

def appends(bench, place):
    yield rate(bench.seconds, lambda: append_to(place.directory / "log"))
    file = os.open(place.directory / "kept-open", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        record = b"r" * 512
        yield rate(bench.seconds, lambda: os.write(file, record))
    finally:
        os.close(file)


def synced_writes(bench, place):
    path, order, size = place.directory / "database", random.Random(1), bench.scaled(64) * MIB
    path.write_bytes(bytes(size))
    file = os.open(path, os.O_RDWR)

    def write():
        os.pwrite(file, os.urandom(4096), order.randrange(size // 4096) * 4096)
        os.fsync(file)

    try:
        os.fsync(file)
        yield rate(bench.seconds, write)
    finally:
        os.close(file)


def write_stream(number, directory, count, size, copies=1):
    """Each piece to as many files; at the end they are on the disk."""
    data = os.urandom(size)
    files = [os.open(directory / f"stream{number}-{copy}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
             for copy in range(copies)]
    for _ in range(count):
        for file in files:
            os.write(file, data)
    for file in files:
        os.fsync(file)
        os.close(file)


def streams(bench, place):
    for count in (1, 4):
        yield count * bench.pieces / together(count, write_stream, place.directory, bench.pieces, MIB, place.copies)


def locks(bench, place):
    with open(place.directory / "locked", "w") as file:
        def lock():
            fcntl.lockf(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_UN)

        yield 1e6 / rate(bench.seconds, lock)


# --------------------------------------------------------------------------------------------------------- names

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


def names(processes, each):
    def measure(bench, place):
        for process in range(processes):
            (place.directory / f"p{process}").mkdir()
        count = bench.scaled(each)
        for deed in (create, stat, rename, unlink):
            yield processes * count / together(processes, deed, place.directory, count)

    rows = tuple(Row(f"{deed.__name__}{processes}",
                     f"{deed.__name__}, {processes} process{'es' if processes > 1 else ''}", "/s")
                 for deed in (create, stat, rename, unlink))
    return Group(measure, rows)


# -------------------------------------------------------------------------------------------- programs of others

def pgbench(bench, place):
    local = bench.sources / "postgres"
    shutil.rmtree(local, ignore_errors=True)
    local.mkdir()
    data = place.directory / "database"
    data.mkdir()
    database = Postgres(data, local)
    database.run("initdb", "-D", data, "-A", "trust", "--no-locale", "-E", "UTF8")
    database.start()
    try:
        database.run("pgbench", "-h", local, "-i", "-q", "-s", 1 if bench.quick else 5, USER)
        load = database.load("bench", bench.scaled(20))
        said, _ = load.communicate(timeout=600)
        if load.returncode != 0:
            raise RuntimeError(said)
        yield float(next(line for line in said.splitlines() if line.startswith("tps")).split()[2])
        database.stop()
    finally:
        if database.server.poll() is None:
            database.kill()


def made_once(path, make):
    """What takes no part in a measurement is made before the first."""
    if not path.exists():
        make(path)
    return path


def source_text(number, size):
    """Code of about so many bytes, none like another, that compiles."""
    lines = [f"value_{number}_{line} = {(number * 7919 + line) % 100_003}" for line in range(size // 26)]
    return "\n".join(lines) + "\n"


def make_wheel(modules):
    def make(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
            record = []

            def add(name, text):
                wheel.writestr(name, text)
                record.append(f"{name},,")

            for number in range(modules):
                add(f"large/part{number % 40}/module{number}.py", source_text(number, 6000))
            info = "large-1.0.dist-info"
            add(f"{info}/METADATA", "Metadata-Version: 2.1\nName: large\nVersion: 1.0\n")
            add(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")

    return make


def pip(bench, place):
    need("pip", "python3-pip")
    wheel = made_once(bench.sources / "large-1.0-py3-none-any.whl", make_wheel(bench.scaled(2000)))
    yield timed("pip", "install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check",
                "--root-user-action=ignore", "--target", place.directory / "installed", wheel)


def make_packages(packages, files):
    def make(directory):
        for package in range(packages):
            tree = directory / f"p{package}" / "package"
            (tree / "lib").mkdir(parents=True)
            (tree / "package.json").write_text(json.dumps({"name": f"p{package}", "version": "1.0.0"}))
            for number in range(files):
                (tree / "lib" / f"m{number}.js").write_text(source_text(package * files + number, 3000))
            with tarfile.open(directory / f"p{package}.tgz", "w:gz") as archive:
                archive.add(tree, "package")
            shutil.rmtree(tree.parent)

    return make


def npm(bench, place):
    need("npm", "npm")
    count = bench.scaled(50)
    packages = made_once(bench.sources / "packages", make_packages(count, 40))
    project = {"name": "small", "version": "1.0.0",
               "dependencies": {f"p{number}": f"file:{packages}/p{number}.tgz" for number in range(count)}}
    (place.directory / "package.json").write_text(json.dumps(project))
    # Its cache is nowhere that is measured.
    environment = {**os.environ, "npm_config_cache": str(bench.sources / "npm")}
    yield timed("npm", "install", "--offline", "--no-audit", "--no-fund", "--loglevel", "error", cwd=place.directory,
                env=environment)


def fio(bench, place):
    need("fio", "fio")
    for size in ("4k", "1m"):
        for how in ("randread", "randwrite"):
            report = json.loads(run(
                "fio", "--name=it", f"--filename={place.directory / 'file'}", f"--rw={how}", f"--bs={size}",
                f"--size={bench.scaled(256)}m", "--numjobs=1", "--iodepth=128", "--direct=1", "--ioengine=libaio",
                "--sync=1", "--time_based", f"--runtime={1 if bench.quick else 5}", "--output-format=json"))
            figures = report["jobs"][0]["read" if how == "randread" else "write"]
            yield figures["iops"] if size == "4k" else figures["bw_bytes"] / MIB


def groups(bench):
    """All that take turns on the local disk, on plainfs and on the mount."""
    files, small, pieces = f"{bench.files:,} files of 50 KB, {WRITERS} writers", bench.scaled(3000), bench.pieces
    return (
        Group(tree, (Row("tar", f"`tar x` of {small:,} files of 3 KB", "s"), Row("cp", "`cp -r` of them", "s"),
                     Row("rm", "`rm -rf` of them", "s"))),
        Group(git, (Row("clone", f"`git clone` of {bench.scaled(1500):,} files", "s"),
                    Row("status", "`git status` there", "s"))),
        Group(pip, (Row("pip", f"`pip install` of a wheel of {bench.scaled(2000):,} modules", "s"),)),
        Group(npm, (Row("npm", f"`npm install` of {bench.scaled(50)} packages of 40 files", "s"),)),
        Group(ingest, (Row("ingest", files, "/s"),)),
        Group(ingest_synced, (Row("ingest-synced", "the same, with `fsync` each", "/s"),)),
        Group(appends, (Row("reopen", "open, append 100 bytes, close", "/s"),
                        Row("append", "append 512 bytes to an open file", "/s"))),
        Group(existing, (Row("old-append", "open, append 100 bytes, close, in a directory of before", "/s"),
                         Row("old-create", "make files of 100 bytes there", "/s"),
                         Row("old-rename", "rename them", "/s"),
                         Row("old-unlink", "unlink them when the bucket has them", "/s"),
                         Row("old-rm", f"`rm -rf` of {bench.scaled(600)} files that the bucket has", "s"))),
        Group(resumed, (Row("resumed", f"append after a restart of all, for {20 * bench.seconds:g} s", "/s"),
                        Row("resumed-later", "the same, from then on", "/s"))),
        Group(synced_writes, (Row("sync", "random write of 4 KiB, `fsync`", "/s"),)),
        Group(streams, (Row("stream", f"{pieces} × 1 MiB, `fsync`", "MiB/s"),
                        Row("streams", "the same, 4 at once", "MiB/s"))),
        Group(streams, (Row("replicas", f"{pieces} × 1 MiB, `fsync`, two replicas or two local files", "MiB/s"),
                        Row("replicas4", "the same, 4 at once", "MiB/s")), replicas=2),
        names(1, 2000),
        names(40, 200),
        Group(locks, (Row("lock", "lock and unlock (`fcntl`)", "µs"),)),
        Group(pgbench, (Row("pgbench", f"pgbench, 4 clients, scale {1 if bench.quick else 5}", "tps"),)),
        Group(fio, tuple(Row(f"fio-{how}-{size}", f"fio, random {how}s of {size}", "/s" if size == "4K" else "MiB/s")
                         for size in ("4K", "1M") for how in ("read", "write"))),
    )
