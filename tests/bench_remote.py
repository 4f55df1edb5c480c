#!/usr/bin/env python3
"""Measures reads of blocks that only a worker on another host has, and prints a Markdown table.

Two network namespaces of this machine are the hosts, with one cable between them: master, worker and object store are
in one, the client in the other, and it reaches the worker by TCP alone. Needs root, and the release build of `cv` (or
that which `CV_BIN` names), `plainfs` and `framed`:

    tests/bench_remote.py --dir /data/bench                  # everything, about five minutes
    tests/bench_remote.py --dir /data/bench --secure         # the same over TLS
    tests/bench_remote.py --dir /data/bench random --quick   # whether it works, not how fast
    tests/bench_remote.py --dir /data/bench ends [--secure]  # processor time at each end, which is better if less

Baselines of the same run: `plainfs` over the local disk for small files; for the rest, `framed`, which sends the same
bytes of the same files over the same cable, without a file system in between and without checksums: a ceiling. The
sides take turns, and a figure is the median of the rounds. What the worker and `plainfs` read is in the page cache on
every side, so nobody waits for a disk.

In the section `ends` each host has one processor: master, worker and `framed serve` the first, the client, what reads
from the mount and `framed read` the second. What `cv fuse` and `cv worker` take of them is counted by the kernel, with
what it does in their name. `framed` is in the clear with `--secure`, too.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench import (CV, HERE, PYTHON, TARGET, drop_caches, parse_sections, run, s3_options, start_plainfs, stop_plainfs,
                   write_noise)

SERVER, CLIENT = "10.78.0.1", "10.78.0.2"
STORE = f"http://{SERVER}:9000"
SECURED = """ca = "{authority}/ca.pem"
certificate = "{authority}/admin-bench.pem"
key = "{authority}/admin-bench-key.pem"
"""
KEYS = {"CV_DEV_S3_ACCESS_KEY": "access", "CV_DEV_S3_SECRET_KEY": "secret"}
SECTIONS = ("files", "stream", "random", "ends")
STREAMS = 4

CONF = """
[cluster]
name = "bench-remote"
masters = ["{server}:7700"]
[security]
{security}
[master]
listen = "{server}:7700"
data_dir = "{directory}/master"
[worker]
listen = "{server}:7710"
dirs = ["[SSD]{directory}/worker"]
[ufs]
file_roots = ["/"]
[client]
# The two hosts have one file system here, where the client would find the worker's socket.
local_descriptors = false
# Less than what a round reads: otherwise the next one would find it in the client's own buffers.
memory_budget = "64MiB"
[fuse]
mount_point = "{directory}/mount"
"""


def processes():
    """Those of this machine: who has started each, and the seconds of a processor that it has taken."""
    found = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        # Behind the name, which may have any character in it.
        fields = text[text.rindex(")") + 2:].split()
        found[int(entry)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def family(pid, found):
    """A process and those that it has started, which these have, and so on."""
    members = [pid]
    for member in members:
        members.extend(child for child, (parent, _) in found.items() if parent == member)
    return members


def processor_seconds(pid):
    found = processes()
    return sum(found[member][1] for member in family(pid, found))


def pin(pid, cores):
    """Has all threads of a process, and of those that it has started, run on these processors."""
    for member in family(pid, processes()):
        for thread in os.listdir(f"/proc/{member}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)


class Hosts:
    """The two network namespaces, and the processes in them."""

    def __init__(self):
        self.names = {role: f"cavern-bench-{os.getpid()}-{role}" for role in ("server", "client")}
        self.children = []
        # The processors of each, where it has its own.
        self.cores = {}

    def set_up(self):
        for name in self.names.values():
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        server, client = self.names["server"], self.names["client"]
        run("ip", "link", "add", "eth0", "netns", server, "type", "veth", "peer", "name", "eth0", "netns", client)
        for name, address in ((server, SERVER), (client, CLIENT)):
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def command(self, role, *command):
        # `ip netns exec` would have the mount in a mount namespace of its own.
        return [*self.pinned(role), "nsenter", f"--net=/run/netns/{self.names[role]}", *(str(part) for part in command)]

    def pinned(self, role):
        return ["taskset", "-c", ",".join(map(str, self.cores[role]))] if role in self.cores else []

    def run(self, role, *command, **options):
        return run(*self.command(role, *command), **options)

    def start(self, role, log, *command, **options):
        child = subprocess.Popen(self.command(role, *command), stdout=log, stderr=log, **options)
        self.children.append(child)
        return child

    def tear_down(self):
        for child in reversed(self.children):
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


class Bench:
    def __init__(self, options):
        self.directory = options.dir.resolve() / "remote"
        self.files = 400 if options.quick else options.files
        self.stream_bytes = (64 << 20) if options.quick else options.stream_bytes
        self.rounds = 1 if options.quick else options.rounds
        self.seconds = 1 if options.quick else 2
        self.hosts = Hosts()
        self.secure = options.secure
        self.source = self.directory / f"source-{self.files}-{self.stream_bytes >> 20}"
        self.cluster = self.directory / "cluster"
        self.mount = self.cluster / "mount"
        self.conf = self.cluster / "cluster.toml"
        self.authority = self.cluster / "authority"
        self.rows = []

    # ------------------------------------------------------------------------------------------ set-up

    def set_up(self):
        shutil.rmtree(self.cluster, ignore_errors=True)
        self.mount.mkdir(parents=True)
        self.make_source()
        security = SECURED.format(authority=self.authority) if self.secure else "insecure = true"
        self.conf.write_text(CONF.format(server=SERVER, directory=self.cluster, security=security))
        if self.secure:
            run(CV, "cert", "init", "--dir", self.authority, "--conf", self.conf)
            for role in ("master", "worker", "client", "admin"):
                run(CV, "cert", "issue", role, "bench", "--dir", self.authority, "--conf", self.conf)
        self.log = (self.cluster / "log").open("w")
        self.hosts.set_up()
        store = ("--root", self.cluster / "objects", "--listen", f"{SERVER}:9000")
        self.hosts.start("server", self.log, CV, "dev-s3", *store, env=dict(os.environ, **KEYS))
        for role in ("master", "worker"):
            (self.cluster / role).mkdir()
            child = self.hosts.start("server", self.log, CV, role, "--conf", self.conf, env=self.identity(role))
        self.worker = child
        self.until("the worker is live", lambda: '"live"' in self.cv("node", "list", "--json"))
        self.until("the bucket is there", self.make_bucket)
        self.cv("mount", f"file://{self.source}", "/data", "--write-type", "cache-mode")
        self.cv("mount", "s3://work", "/work", "--write-type", "fs-mode", *s3_options(STORE, "access", "secret"))
        fuse = (CV, "fuse", "--conf", self.conf)
        self.fuse = self.hosts.start("client", self.log, *fuse, env=self.identity("client"))
        self.until("the mount is there", lambda: os.path.ismount(self.mount))

    def identity(self, role):
        """The environment of a process that shows a certificate of this role, where connections are secured."""
        if not self.secure:
            return None
        files = {"CERTIFICATE": f"{role}-bench.pem", "KEY": f"{role}-bench-key.pem"}
        return os.environ | {f"CV_SECURITY__{key}": str(self.authority / name) for key, name in files.items()}

    def make_source(self):
        """Images, and files to stream: one long, and as many of a quarter of that as there are streams."""
        if (self.source / "done").exists():
            return
        shutil.rmtree(self.source, ignore_errors=True)
        self.source.mkdir()
        run(CV, "gen-images", self.source / "images", "--count", self.files, "--mean-size", "50KB")
        for folder, count, size in (("one", 1, self.stream_bytes), ("four", STREAMS, self.stream_bytes // STREAMS)):
            (self.source / folder).mkdir()
            for number in range(count):
                write_noise(self.source / folder / f"{number}.bin", size)
        (self.source / "done").touch()

    def make_bucket(self):
        make = ("import boto3; boto3.client('s3', endpoint_url='%s', region_name='us-east-1', "
                "aws_access_key_id='access', aws_secret_access_key='secret').create_bucket(Bucket='work')" % STORE)
        return self.hosts.run("server", PYTHON, "-c", make) is not None

    def until(self, what, is_so, patience=30):
        deadline = time.monotonic() + patience
        while True:
            try:
                if is_so():
                    return
                said = "not yet"
            except (subprocess.CalledProcessError, OSError) as error:
                said = error
            if time.monotonic() > deadline:
                sys.exit(f"{what}: not within {patience} s: {said}; see {self.cluster / 'log'}")
            time.sleep(0.1)

    def cv(self, *arguments):
        return self.hosts.run("server", CV, *arguments, "--conf", self.conf)

    def down(self):
        self.hosts.tear_down()
        subprocess.run(["umount", "-l", self.mount], stderr=subprocess.DEVNULL)

    # ------------------------------------------------------------------------------------ measurements

    def below_in_memory(self):
        """Drops what the kernel has of the mounts, names too; what is behind them it has again then."""
        drop_caches()
        for top in (self.source, self.cluster / "worker"):
            for folder, _, names in os.walk(top):
                for name in names:
                    if not name.startswith("worker.sock"):
                        self.bring_in(os.path.join(folder, name))

    def bring_in(self, path):
        """Reads a file, but for its holes: blocks of fs-mode files are as long as any."""
        with open(path, "rb", buffering=0) as file:
            end, at = os.fstat(file.fileno()).st_size, 0
            while at < end:
                try:
                    at = os.lseek(file.fileno(), at, os.SEEK_DATA)
                    hole = os.lseek(file.fileno(), at, os.SEEK_HOLE)
                except OSError:
                    return  # nothing but a hole is left
                while at < hole:
                    at += os.preadv(file.fileno(), [memoryview(self.buffer)[:min(hole - at, len(self.buffer))]], at)

    def in_turn(self, sides):
        """Medians of rounds in which the sides take turns, each time another one first."""
        figures = {name: [] for name in sides}
        for number in range(self.rounds):
            names = list(sides)
            for name in names[number % len(names):] + names[:number % len(names)]:
                figures[name].append(sides[name]())
        return {name: self.median(found) for name, found in figures.items()}

    @staticmethod
    def median(found):
        if isinstance(found[0], list):
            return [statistics.median(each) for each in zip(*found)]
        return statistics.median(found)

    def load(self, directory):
        self.below_in_memory()
        return self.read_files(directory)

    def read_files(self, directory):
        load = (sys.executable, HERE / "load_img.py", directory, "--num_workers", 8, "--raw", "--json")
        return json.loads(run(*self.hosts.pinned("client"), *load))["images_per_second"]

    def framed(self, folder, key, *options):
        """What `framed` reads of a folder of the source."""
        return self.framed_run(folder, *options)[0][key]

    def framed_run(self, folder, *options):
        """The same; and the seconds of a processor that it took, the receiver and the sender."""
        serve = self.hosts.command("server", TARGET / "framed", "serve", "--listen", f"{SERVER}:7999",
                                   self.source / folder)
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            server.stdout.readline()
            try:
                opened = processor_seconds(server.pid)
                read = self.hosts.command("client", TARGET / "framed", "read", "--connect", f"{SERVER}:7999", *options)
                with subprocess.Popen(read, stdout=subprocess.PIPE, text=True) as reader:
                    text = reader.stdout.read()
                    _, status, used = os.wait4(reader.pid, 0)
                    reader.returncode = os.waitstatus_to_exitcode(status)
                if reader.returncode != 0:
                    raise subprocess.CalledProcessError(reader.returncode, read)
                sent = processor_seconds(server.pid) - opened
            finally:
                server.kill()
        return json.loads(text), [used.ru_utime + used.ru_stime, sent]

    def fs_mode(self, folder):
        """A folder of the source as files of the fs-mode mount."""
        copied = self.mount / "work" / folder
        if not copied.exists():
            shutil.copytree(self.source / folder, copied)
            self.cv("persist", "wait", "/work")
        return copied

    def files_section(self):
        ours, theirs = self.mount / "data/images", self.fs_mode("images")
        plain_mount = self.directory / "plain"
        plainfs = start_plainfs(self.source, plain_mount)
        try:
            # The first pass fetches from the bucket.
            self.load(ours)
            figures = self.in_turn({
                "plain": lambda: self.load(plain_mount / "images"),
                "ours": lambda: self.load(ours),
                "fs-mode": lambda: self.load(theirs),
                "framed": lambda: self.framed("images", "replies_per_second", "--order", "files", "--threads", 8),
            })
        finally:
            stop_plainfs(plainfs, plain_mount)
        title = f"{self.files} files of 50 KB, 8 processes, files/s"
        for name in ("ours", "fs-mode"):
            self.row(f"{title}, {'cache-mode' if name == 'ours' else name}", figures[name], "plainfs", figures["plain"])
        self.row("", figures["ours"], "framed TCP, 8 connections", figures["framed"])

    def stream_section(self):
        for folder, streams in (("one", 1), ("four", STREAMS)):
            ours = self.mount / "data" / folder
            stream = lambda: self.bench("stream", ours, "--streams", streams, "--cache", "drop") * (1 << 30) / 1e6
            ceiling = ("--order", "stream", "--threads", streams, "--depth", 8)
            stream()
            self.below_in_memory()
            figures = self.in_turn({
                "ours": stream,
                "framed": lambda: self.framed(folder, "bytes_per_second", *ceiling) / 1e6,
            })
            what = "one stream" if streams == 1 else f"{streams} streams"
            self.row(f"{what}, MB/s", figures["ours"], "framed TCP, 8 × 1 MiB in flight each", figures["framed"])

    def random_section(self):
        ours = self.mount / "data/one"
        self.bench("stream", ours)
        self.below_in_memory()
        for threads in (1, 16):
            options = ("--block", "4KiB", "--threads", threads, "--seconds", self.seconds, "--cache", "drop")
            ceiling = ("--order", "random", "--threads", threads, "--length", 4096, "--seconds", self.seconds)
            figures = self.in_turn({
                "ours": lambda: self.bench("random", ours, *options),
                "framed": lambda: self.framed("one", "replies_per_second", *ceiling),
            })
            self.row(f"random 4 KiB, {threads} thread{'s' if threads > 1 else ''}, reads/s", figures["ours"],
                     f"framed TCP, {threads} connection{'s' if threads > 1 else ''}", figures["framed"])

    def ends_section(self):
        """What each end takes of a processor of its own."""
        with self.a_processor_each():
            for folder, streams in (("one", 1), ("four", STREAMS)):
                options = ("--order", "stream", "--threads", streams, "--depth", 8)
                what = "one stream" if streams == 1 else f"{streams} streams"
                ways = [(", cache-mode", self.mount / "data" / folder), (", fs-mode", self.fs_mode(folder))]
                stream = lambda at: self.bench("stream", at, "--streams", streams, "--cache", "drop")
                reads = {name: lambda at=at: stream(at) for name, at in ways}
                self.ends_rows(what, "MiB", self.stream_bytes >> 20, folder, options, reads)
            ways = [(", cache-mode", self.mount / "data/images"), (", fs-mode", self.fs_mode("images"))]
            reads = {name: lambda at=at: self.read_files(at) for name, at in ways}
            options = ("--order", "files", "--threads", 8)
            self.ends_rows("files of 50 KB", "file", self.files, "images", options, reads)

    @contextlib.contextmanager
    def a_processor_each(self):
        all_cores = os.sched_getaffinity(0)
        if len(all_cores) < 2:
            sys.exit("ends: each end needs a processor of its own, and there is one")
        first, second = sorted(all_cores)[:2]
        self.hosts.cores = {"server": [first], "client": [second]}
        try:
            for child in self.hosts.children:
                pin(child.pid, self.hosts.cores["client" if child is self.fuse else "server"])
            yield
        finally:
            self.hosts.cores = {}
            for child in self.hosts.children:
                pin(child.pid, all_cores)

    def ends_rows(self, what, unit, count, folder, options, reads):
        """Rows of so many units, which are read in several ways of ours."""
        for read in reads.values():
            # The first pass fetches from the bucket.
            read()

        def ours(read):
            self.below_in_memory()
            ends = (self.fuse.pid, self.worker.pid)
            before = [processor_seconds(pid) for pid in ends]
            read()
            return [(processor_seconds(pid) - was) * 1e6 / count for pid, was in zip(ends, before)]

        sides = {name: lambda read=read: ours(read) for name, read in reads.items()}
        sides["framed"] = lambda: [seconds * 1e6 / count for seconds in self.framed_run(folder, *options)[1]]
        figures = self.in_turn(sides)
        for name in reads:
            for number, (end, other) in enumerate((("client", "receiver"), ("worker", "sender"))):
                title = f"{what}{name}, {end}, µs of a processor for each {unit}"
                self.row(title, figures[name][number], f"framed TCP, {other}", figures["framed"][number], digits=1)

    def bench(self, workload, directory, *options):
        bench = (CV, "bench", workload, directory, "--rounds", 1, "--json", *options)
        text = run(*self.hosts.pinned("client"), *bench)
        return json.loads(text)["summary"][0]["target"]["median"]

    def row(self, what, ours, baseline, figure, digits=0):
        if not self.rows:
            print("| what | Cavern | baseline | figure | ratio |\n|---|---:|---|---:|---:|")
        self.rows.append(what)
        print(f"| {what} | {ours:,.{digits}f} | {baseline} | {figure:,.{digits}f} | {ours / figure:.2f} |", flush=True)

    buffer = bytearray(1 << 20)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="on a disk of 10 GB")
    parser.add_argument("--files", type=int, default=8000)
    parser.add_argument("--stream-bytes", type=int, default=2 << 30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="little of everything, once: whether it works")
    parser.add_argument("--secure", action="store_true", help="the processes show certificates: what TLS costs")
    parser.add_argument("--hold", action="store_true", help="leave the cluster up until Enter: for a profile")
    options = parse_sections(parser, SECTIONS)
    bench = Bench(options)
    try:
        bench.set_up()
        for section in options.sections:
            getattr(bench, f"{section}_section")()
        if options.hold:
            input(f"the client has the PID {bench.fuse.pid}; Enter ends all: ")
    finally:
        bench.down()


if __name__ == "__main__":
    main()
