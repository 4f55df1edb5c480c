#!/usr/bin/env python3
"""Measures `cv fuse s3://…`: how soon and at what cost a bucket is a directory, beside the mount of a cluster, and
beside others that mount buckets. Prints Markdown tables.

Needs root, `bin/setup --peers` (with `--deb` also `bin/setup --package`), and the release build of `cv`, or that which
`CV_BIN` names:

    tests/bench_one_host.py --dir /data/bench                    # everything, about ten minutes
    tests/bench_one_host.py --dir /data/bench host               # this host: start, rest, images beside a cluster
    tests/bench_one_host.py --dir /data/bench peers              # beside rclone, s3fs and JuiceFS
    tests/bench_one_host.py --dir /data/bench --deb FILE host    # also the package in Debian 12 and 13 and nothing else

The store of `host` is moto's, which is not ours and counts requests; that of `peers` is `cv dev-s3`, since one that
takes 2 ms for each object makes all who ask it alike (`--store` has both take one). Each mount is made by one command
that returns when it can be used; the kernel's caches are dropped before that, with the executables in them. Then
`load_img.py --raw` reads all images by 8 processes: cold, with the kernel's caches dropped, and once more. Every side
has a new cache each round, and trusts names and attributes for 60 s, as Cavern does by default.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from bench import CACHE, CV, HERE, PYTHON, ROUNDS, Bench, drop_caches, parse_sections, run, s3_options
from bench_writes import processor_seconds
from package import SUITES, Root

BUCKET = "images"
ACCESS, SECRET = "bench", "bench-secret"
# What `bin/setup --peers` installs, beside the packages of Debian.
PEERS = CACHE / "peers/bin"
PATH = f"{PEERS}:{os.environ['PATH']}"
CACHE_GIB = 20
TRUST_S = 60
# After a start, before a mount counts as at rest.
SETTLE_S = 5
PATIENCE_S = 60
# What each process of `cv fuse s3://…` is, by its command line.
ROLES = {"--backend": "master and worker", "--beside": "supervisor", "--daemon": "client"}


def environment(endpoint):
    """What all sides are told of the store, and nothing that whoever calls this has of his own."""
    own = ("AWS_", "CV_", "RCLONE_", "JFS_", "S3FS_")
    kept = {key: value for key, value in os.environ.items()
            if not key.startswith(own) and not key.lower().endswith("_proxy")}
    return kept | {
        "PATH": PATH,
        "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWSACCESSKEYID": ACCESS, "AWSSECRETACCESSKEY": SECRET,
        "RCLONE_CONFIG": os.devnull, "RCLONE_CONFIG_S_TYPE": "s3", "RCLONE_CONFIG_S_PROVIDER": "Other",
        "RCLONE_CONFIG_S_ENDPOINT": endpoint, "RCLONE_CONFIG_S_REGION": "us-east-1",
        "RCLONE_CONFIG_S_ACCESS_KEY_ID": ACCESS, "RCLONE_CONFIG_S_SECRET_ACCESS_KEY": SECRET,
    }


def quietly(*command, **options):
    """What it says counts only where it fails."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{command[0]} {command[1]} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


class Store:
    """An object store with the images in a bucket; ends with the `with` block."""

    def __init__(self, process):
        self.process = process
        self.ready = process.stdout.readline()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.terminate()
        self.process.wait()

    def gets(self):
        request = urllib.request.Request(self.counts, headers=self.headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as page:
            answer = json.load(page)
        return answer.get("kinds", answer).get("GET", 0)


class Moto(Store):
    headers = {}

    def __init__(self, _directory, source):
        super().__init__(subprocess.Popen([PYTHON, HERE / "moto_s3.py", BUCKET, source], env=environment(""), text=True,
                                          stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        self.endpoint = json.loads(self.ready)["endpoint"]
        self.counts = f"{self.endpoint}/_requests"


class DevS3(Store):
    def __init__(self, directory, source):
        root = self.root = directory / "store"
        shutil.rmtree(root, ignore_errors=True)
        super().__init__(subprocess.Popen(
            [CV, "dev-s3", "--root", root, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
             "--access-key", ACCESS, "--secret-key", SECRET],
            env=environment(""), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        said = dict(word.split("=", 1) for word in self.ready.split() if "=" in word)
        self.endpoint, self.counts = said["s3"], f"http://{said['http']}/_dev/stats"
        self.headers = {"Authorization": f"Bearer {(root / 'admin-token').read_text().strip()}"}
        try:
            quietly("rclone", "copy", source, f"S:{BUCKET}", "--transfers", 16, env=environment(self.endpoint))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_):
        super().__exit__()
        shutil.rmtree(self.root, ignore_errors=True)


STORES = {"moto": Moto, "dev-s3": DevS3}


class Images:
    """What is read, and what it has to be."""

    def __init__(self, directory, count):
        self.source = directory / "one-host-images"
        if not self.source.exists():
            run(CV, "gen-images", self.source, "--count", count, "--mean-size", "50KB")
        paths = sorted(path for path in self.source.rglob("*") if path.is_file())
        self.count, self.bytes = len(paths), sum(path.stat().st_size for path in paths)
        assert self.count == count, f"{self.source} has {self.count} images and not {count}: remove it"
        self.first = paths[0].relative_to(self.source)
        self.first_byte = paths[0].read_bytes()[:1]

    def read(self, directory):
        """All of them; gives seconds of the listing, and seconds of the reading."""
        said = json.loads(run(sys.executable, HERE / "load_img.py", directory, "--raw", "--json", "--num_workers", 8))
        read = said["images"], said["bytes"]
        assert read == (self.count, self.bytes), f"{directory} gave {read} and not {(self.count, self.bytes)}"
        return said["walk_seconds"], said["seconds"]


@dataclass(frozen=True)
class System:
    """Where commands run: this host, or a root directory of it."""

    name: str
    root: Path = Path("/")

    def command(self, *words):
        return words if self.root == Path("/") else ("chroot", self.root, *words)

    def outside(self, path):
        return self.root / path.relative_to("/")


class Mount:
    """A mount that one command makes, by processes whose command lines name its cache."""

    def __init__(self, system, command, at, cache, variables, below=""):
        self.system, self.words, self.variables = system, command, variables
        self.at, self.cache = system.outside(at), system.outside(cache)
        self.images = self.at / below
        self.mark = str(cache).encode()
        self.log = self.cache.with_name(f"{self.cache.name}.log")

    def start(self, images):
        """Gives seconds until the command has returned, and until a byte has been read."""
        self.at.mkdir(parents=True, exist_ok=True)
        self.cache.mkdir(parents=True, exist_ok=True)
        drop_caches()
        began = time.monotonic()
        with self.log.open("ab") as log:
            done = subprocess.run(self.system.command(*map(str, self.words)), env=self.variables,
                                  stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        returned = time.monotonic() - began
        if done.returncode:
            sys.exit(f"{self.words[0]} ended with {done.returncode}: {self.log.read_text()[-2000:]}")
        with (self.images / images.first).open("rb") as file:
            byte = file.read(1)
        taken = time.monotonic() - began
        assert byte == images.first_byte, f"{self.images / images.first} begins with {byte}"
        return returned, taken

    def processes(self):
        """Their command lines, by id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes()
                    if self.mark in line:
                        found[int(entry.name)] = line.decode(errors="replace").split("\0")
        return found

    def end(self):
        """Unmounts, and waits until no process of it is left."""
        deadline = time.monotonic() + PATIENCE_S
        while os.path.ismount(self.at):
            # The kernel closes the last files a moment after their readers.
            busy = subprocess.run(["umount", self.at], capture_output=True, text=True)
            if busy.returncode and time.monotonic() > deadline:
                self.kill(f"{self.at} cannot be unmounted: {busy.stderr.strip()}")
            time.sleep(0.05)
        while self.processes():
            if time.monotonic() > deadline:
                self.kill(f"processes of {self.at} run on after it was unmounted: {self.processes()}")
            time.sleep(0.05)

    def kill(self, why):
        subprocess.run(["umount", "--lazy", self.at], stderr=subprocess.DEVNULL)
        # Some start others again.
        for _ in range(100):
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        subprocess.run(["umount", "--lazy", self.at], stderr=subprocess.DEVNULL)
        sys.exit(why)

    def forget(self):
        """Nothing is cached of it, but what the kernel has."""
        shutil.rmtree(self.cache, ignore_errors=True)
        self.log.unlink(missing_ok=True)

    def memory(self):
        """Of each process, by its role: resident bytes, and these with only a share of pages that others have too."""
        found = []
        for process, words in self.processes().items():
            rows = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
            kib = {row.split(":")[0]: int(row.split()[1]) for row in rows}
            role = next((role for mark, role in ROLES.items() if mark in words), "another process")
            found.append((role, kib["Rss"] * 1024, kib["Pss"] * 1024))
        return sorted(found)

    def processor_time(self):
        """Of all processes, in seconds; they have to be the same at both ends of a span."""
        return {process: processor_seconds(process) for process in self.processes()}


def total(memory):
    return sum(resident for _, resident, _ in memory), sum(proportional for *_, proportional in memory)


def one_host(system, executable, directory, store):
    cache = directory / f"cavern-{os.getpid()}"
    at = directory / "one-host"
    command = [executable, "fuse", f"s3://{BUCKET}", at, "--cache", f"{cache}:{CACHE_GIB}GiB"]
    return Mount(system, command, at, cache, environment(store.endpoint))


# ------------------------------------------------------------------------------------------ one host

def idle(mount, seconds):
    """The share of a processor that all processes use while nobody asks for anything."""
    time.sleep(SETTLE_S)
    before = mount.processor_time()
    time.sleep(seconds)
    after = mount.processor_time()
    assert before.keys() == after.keys(), f"processes have come or gone: {before} {after}"
    return 100 * sum(after[process] - before[process] for process in after) / seconds


def measure_host(mount, images, store, options):
    """Rows of what a start and a mount at rest cost, each with what it is to be at most. The mount is there at the end,
    and has all images."""
    starts = []
    for number in range(options.rounds):
        if number:
            mount.end()
        mount.forget()
        starts.append(mount.start(images))
    returned, first = (statistics.median(column) for column in zip(*starts))
    used = idle(mount, options.idle_seconds)
    at_rest = mount.memory()
    resident, proportional = total(at_rest)
    cold = images.count / images.read(mount.images)[1]
    after = total(mount.memory())
    mount.end()
    # Whatever a second start asks for is asked of the store now.
    before = store.gets()
    returned_again, first_again = mount.start(images)
    warm = images.count / images.read(mount.images)[1]
    gets = store.gets() - before
    rows = [
        ("first start: the command has returned, s", None, returned, "{:.2f}"),
        ("first start: the first byte has been read, s", 5, first, "{:.2f}"),
        ("second start: the command has returned, s", None, returned_again, "{:.2f}"),
        ("second start: the first byte has been read, s", 5, first_again, "{:.2f}"),
        ("GETs of the second start and of all images after it", 0, gets, "{}"),
        ("all images after the first start, images/s", None, cold, "{:,.0f}"),
        ("all images after the second start, images/s", None, warm, "{:,.0f}"),
        (f"processor in {options.idle_seconds:.0f} s of rest, % of one", 1, used, "{:.2f}"),
        ("resident at rest (RSS), MB", 200, resident / 1e6, "{:.0f}"),
        ("the same, pages in common once (PSS), MB", None, proportional / 1e6, "{:.0f}"),
        ("resident after all images (RSS), MB", None, after[0] / 1e6, "{:.0f}"),
        ("the same, pages in common once (PSS), MB", None, after[1] / 1e6, "{:.0f}"),
    ]
    for role, resident, proportional in at_rest:
        rows.append((f"at rest, {role}: RSS, MB", None, resident / 1e6, "{:.0f}"))
        rows.append((f"at rest, {role}: PSS, MB", None, proportional / 1e6, "{:.0f}"))
    return rows


@contextlib.contextmanager
def bare_system(suite, deb):
    """Debian with what the package depends on, and nothing else."""
    with tempfile.TemporaryDirectory(prefix="cavern-one-host-", dir="/var/tmp") as temporary:
        Path(temporary).chmod(0o755)
        root = Root(Path(temporary), suite, include=())
        root.sh(f"apt-get update -qq && apt-get install -qq {root.bring(deb)}")
        fuse = root.path / "dev/fuse"
        if not fuse.exists():
            os.mknod(fuse, stat.S_IFCHR | 0o666, os.makedev(10, 229))
        run("mount", "-t", "proc", "proc", root.path / "proc")
        try:
            yield System(f"Debian {suite}", root.path)
        finally:
            run("umount", root.path / "proc")


def host_section(bench, images, options):
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(STORES[options.store or "moto"](bench.directory, images.source))
        columns = {}
        for suite in options.suites if options.deb else ():
            with bare_system(suite, options.deb) as system:
                mount = one_host(system, "/usr/bin/cv", Path("/var/cache"), store)
                try:
                    columns[system.name] = measure_host(mount, images, store, options)
                finally:
                    mount.end()
        mount = one_host(System("this host"), CV, bench.directory, store)
        stack.callback(mount.forget)
        stack.callback(mount.end)
        columns = {mount.system.name: measure_host(mount, images, store, options)} | columns
        print(f"\n| one host | at most | {' | '.join(columns)} |\n|---|---:{'|---:' * len(columns)}|")
        for cells in zip(*columns.values()):
            what, most, *_ = cells[0]
            figures = " | ".join(form.format(figure) for *_, figure, form in cells)
            print(f"| {what} | {'' if most is None else most} | {figures} |")
        sys.stdout.flush()
        beside_cluster(bench, mount, images, store)


def beside_cluster(bench, mount, images, store):
    """The same images by a cluster of the same build, which has them from the same store."""
    os.environ["CV_UFS__ENDPOINTS"] = json.dumps([store.endpoint])
    try:
        bench.up()
        os.environ["CV_CONF"] = str(bench.cluster / "cluster.toml")
        bench.cv("mount", f"s3://{BUCKET}", f"/{BUCKET}", "--write-type", "cache_mode",
                 *s3_options(store.endpoint, ACCESS, SECRET))
        images.read(bench.mount / BUCKET)
        with bench.data_set(BUCKET, "ttl") as alone:
            sides = {"one": mount.images, "cluster": bench.mount / BUCKET, "alone": alone}
            figures = bench.warm_images(sides)
    finally:
        bench.down()
        for name in ("CV_UFS__ENDPOINTS", "CV_CONF"):
            os.environ.pop(name, None)
    rows = [(what if side == "cluster" else "", figures[f"one{pages}"], baseline, figures[side + pages])
            for what, pages in (("warm, kernel caches dropped", ""), ("warm, page cache", "-pages"))
            for side, baseline in (("cluster", "mount of a cluster"), ("alone", "of the data set alone"))]
    Bench.table(f"{images.count} JPEGs of 50 KB, 8 processes, images/s", rows, "{:,.0f}")


# ------------------------------------------------------------------------------------------ peers

class Peers:
    """Ours and others, which mount the same images of one store."""

    def __init__(self, directory, images, store):
        self.directory, self.images, self.store = directory, images, store
        self.variables = environment(store.endpoint)
        self.volume = f"sqlite3://{directory / 'juicefs.db'}"

    def cache(self, name):
        return self.directory / f"{name}-{os.getpid()}"

    def mount(self, name, command, below=""):
        """`{at}` and `{cache}` in a command are the places of this mount."""
        at, cache = self.directory / f"{name}-mount", self.cache(name)
        words = [str(word).format(at=at, cache=cache) for word in command]
        return Mount(System("this host"), words, at, cache, self.variables, below)

    def juicefs(self, name, *options):
        command = ["juicefs", "mount", "--background", "--cache-dir", "{cache}", "--cache-size", f"{CACHE_GIB}G",
                   "--free-space-ratio", "0.01", "--backup-meta", "0", "--no-usage-report", "--no-syslog",
                   "--log", "{cache}.log", *options, self.volume, "{at}"]
        return self.mount(name, command, BUCKET)

    def fill_juicefs(self):
        """It keeps files in a form of its own, so that the images are copied into a mount of it."""
        database = self.directory / "juicefs.db"
        for path in self.directory.glob(f"{database.name}*"):
            path.unlink()
        quietly("rclone", "mkdir", "S:juicefs", env=self.variables)
        quietly("juicefs", "format", "--storage", "s3", "--bucket", f"{self.store.endpoint}/juicefs", "--access-key",
                ACCESS, "--secret-key", SECRET, "--trash-days", 0, self.volume, "juicefs", env=self.variables)
        mount = self.juicefs("juicefs-fill")
        mount.at.mkdir(exist_ok=True)
        try:
            quietly(*mount.words, env=self.variables)
            shutil.copytree(self.images.source, mount.images)
        finally:
            mount.end()
            mount.forget()

    def all(self):
        trust = f"{TRUST_S}s"
        trusted = [f"--{what}={trust}" for what in ("attr-cache", "entry-cache", "dir-entry-cache", "open-cache")]
        s3fs = f"url={self.store.endpoint},use_path_request_style,use_cache={{cache}},ro"
        return {
            "Cavern": one_host(System("this host"), CV, self.directory, self.store),
            "`rclone mount --vfs-cache-mode full`": self.mount("rclone", [
                "rclone", "mount", f"S:{BUCKET}", "{at}", "--daemon", "--vfs-cache-mode", "full", "--cache-dir",
                "{cache}", "--read-only", "--use-server-modtime", "--attr-timeout", trust, "--dir-cache-time", trust,
                "--log-file", "{cache}.log"]),
            "`s3fs -o use_cache`": self.mount("s3fs", [
                "s3fs", BUCKET, "{at}", "-o", f"{s3fs},attr_timeout={TRUST_S},entry_timeout={TRUST_S}"]),
            "`juicefs mount`": self.juicefs("juicefs", "--read-only", *trusted),
            "`juicefs mount`, its default times": self.juicefs("juicefs-own", "--read-only"),
        }

    def measure(self, mount):
        """One round: a start with nothing cached, and three readings."""
        images = self.images
        mount.forget()
        before = self.store.gets()
        try:
            first = mount.start(images)[1]
            at_rest = total(mount.memory())[1]
            listing, cold = images.read(mount.images)
            gets = self.store.gets() - before
            assert gets >= images.count, f"{mount.words[0]}: only {gets} of {images.count} came from the store"
            drop_caches()
            warm = images.read(mount.images)[1]
            pages = images.read(mount.images)[1]
            gets = self.store.gets() - before - gets
        finally:
            mount.end()
            mount.forget()
        rates = {"cold": cold, "cold, with the listing before": listing + cold, "warm, kernel caches dropped": warm,
                 "warm, page cache": pages}
        return ({what: images.count / seconds for what, seconds in rates.items()},
                {"first byte": first, "first listing": listing},
                {"all processes after the first byte (PSS)": at_rest / 1e6},
                {"the two warm readings": gets})


def peers_section(bench, images, options):
    for program in ("rclone", "s3fs", "juicefs"):
        if not shutil.which(program, path=PATH):
            sys.exit(f"{program} is missing: run bin/setup --peers")
    with STORES[options.store or "dev-s3"](bench.directory, images.source) as store:
        peers = Peers(bench.directory, images, store)
        peers.fill_juicefs()
        mounts = list(peers.all().items())
        found = {name: [] for name, _ in mounts}
        for number in range(options.rounds):
            first = number % len(mounts)
            for name, mount in mounts[first:] + mounts[:first]:
                found[name].append(peers.measure(mount))
        tables = [(f"{images.count} JPEGs of 50 KB, 8 processes, images/s", "{:,.0f}"), ("Starts, seconds", "{:.2f}"),
                  ("Memory, MB", "{:.0f}")]
        medians = {name: [{what: statistics.median(each[index][what] for each in rounds) for what in rounds[0][index]}
                          for index in range(len(tables) + 1)] for name, rounds in found.items()}
        ours = medians.pop("Cavern")
        for index, (title, form) in enumerate(tables):
            rows = [("" if number else what, figure, peer, theirs[index][what]) for what, figure in ours[index].items()
                    for number, (peer, theirs) in enumerate(medians.items())]
            Bench.table(title, rows, form)
        for name, figures in ({"Cavern": ours} | medians).items():
            for what, gets in figures[-1].items():
                if gets:
                    print(f"\n{name}: {gets:.0f} GETs in {what}")


def main():
    sections = {"host": host_section, "peers": peers_section}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to measure, of a short path; 5 GB")
    parser.add_argument("--images", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of starts, and of peers")
    parser.add_argument("--idle-seconds", type=float, default=60)
    parser.add_argument("--store", choices=STORES, help="for all sections")
    parser.add_argument("--deb", type=Path, help="what bin/package has made, for `host` in a system of its own")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="of Debian, for --deb")
    options = parse_sections(parser, tuple(sections))
    directory = options.dir.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    images = Images(directory, options.images)
    bench = Bench(directory, options.images, 0, secure=False)
    for section in options.sections:
        sections[section](bench, images, options)


if __name__ == "__main__":
    main()
