#!/usr/bin/env python3
"""Measures a cluster on this host against its baselines, all in one run, and prints Markdown tables.

Needs root (it drops the kernel's caches), and the release build of `cv` (or that which `CV_BIN` names),
`plainfs` and `s3get`:

    tests/bench.py --dir /data/bench              # everything, about ten minutes
    tests/bench.py --dir /data/bench images list  # only these sections

Baselines: the local file system that also holds the workers' data; `plainfs`, a minimal FUSE file system that answers
reads from that local file system; `s3get`, a plain client of the same bucket with the same requests in flight;
`load_s3.py`, the same loop as `load_img.py` over boto3. Every figure stands beside its ratio to a baseline of the
same run, since the machine's own speed drifts.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import ssl
import statistics
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavern"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or CACHE / "target") / "release"
# The build to measure.
CV = Path(os.environ.get("CV_BIN") or TARGET / "cv").resolve()
# The Python with what tests/requirements.txt names; `bin/setup --tests` makes it.
PYTHON = CACHE / "venv/bin/python"


# Of which a figure is the median; the sides take turns.
ROUNDS = 3


def run(*command, **options):
    return subprocess.run([str(part) for part in command], check=True, text=True,
                          stdout=subprocess.PIPE, **options).stdout


def drop_caches():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def timed(function, *arguments):
    start = time.monotonic()
    function(*arguments)
    return time.monotonic() - start


def write_noise(path, size):
    """A file of whole MiB that nothing makes smaller."""
    with path.open("wb") as out:
        for _ in range(size >> 20):
            out.write(os.urandom(1 << 20))


def s3_options(endpoint, access, secret):
    """What `cv mount` is told of an embedded store."""
    options = {"endpoint_url": endpoint, "region_name": "us-east-1", "credentials.access": access,
               "credentials.secret": secret, "force.path.style": "true"}
    return [part for key, value in options.items() for part in ("-c", f"s3.{key}={value}")]


def parse_sections(parser, sections):
    """Adds the sections, reads the command line, and sees that what all sections need is there."""
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(sections)}; all when none is named")
    options = parser.parse_args()
    unknown = set(options.sections) - set(sections)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}: choose from {', '.join(sections)}")
    if not PYTHON.exists():
        sys.exit(f"{parser.prog}: {PYTHON} is missing, which has boto3: run bin/setup --tests")
    options.sections = options.sections or sections
    return options


def start_plainfs(source, mount, *options, **streams):
    mount.mkdir(exist_ok=True)
    plainfs = subprocess.Popen([TARGET / "plainfs", source, mount, "--threads", "2", *options], **streams)
    deadline = time.monotonic() + 10
    while not os.path.ismount(mount):
        if time.monotonic() > deadline or plainfs.poll() is not None:
            plainfs.kill()
            sys.exit("plainfs did not mount within 10 s")
        time.sleep(0.02)
    return plainfs


def stop_plainfs(plainfs, mount):
    # It unmounts by itself, unless the mount is in use.
    plainfs.terminate()
    plainfs.wait()
    subprocess.run(["umount", "-l", mount], stderr=subprocess.DEVNULL)


class Bench:
    def __init__(self, directory, images, stream_bytes, secure):
        self.directory = directory
        self.secure = secure
        self.images = images
        self.stream_bytes = stream_bytes
        self.source = directory / "source"
        self.plain_mount = directory / "plain"
        self.cluster = directory / "cluster"
        self.mount = directory / "mount"
        self.plainfs = None
        self.seeded = set()
        # By moment and process.
        self.memory = {}

    # ------------------------------------------------------------------------------------------ set-up

    def cv(self, *arguments):
        return run(CV, *arguments)

    def set_up(self):
        self.source.mkdir(parents=True, exist_ok=True)
        images = self.source / "images"
        if not images.exists():
            self.cv("gen-images", images, "--count", self.images, "--mean-size", "50KB")
        stream = self.source / "stream/stream.bin"
        if not stream.exists():
            stream.parent.mkdir()
            write_noise(stream, self.stream_bytes)
        tree = self.source / "tree"
        if not tree.exists():
            for number in range(100_000):
                folder = tree / f"{number // 1000:03}"
                if number % 1000 == 0:
                    folder.mkdir(parents=True)
                (folder / f"{number:06}.txt").write_text(f"{number}\n")
        os.sync()

    def up(self):
        self.mount.mkdir(exist_ok=True)
        more = ("--s3-admin", "--secure") if self.secure else ("--s3-admin",)
        seconds = timed(self.cv, "local", "up", "--dir", self.cluster, "--mount-point", self.mount, *more)
        self.status = json.loads(self.cv("local", "status", "--dir", self.cluster, "--json"))
        if self.secure:
            os.environ["CV_CONF"] = self.status["conf"]
        return seconds

    def attach(self, name, mode="cache_mode", path=None):
        """Copies source/NAME into a bucket of its own, if it is not there, and mounts it at /NAME or another path."""
        s3 = self.status["s3"]
        if name not in self.seeded:
            self.cv("local", "seed", "--dir", self.cluster, self.source / name, f"s3://{name}")
            self.seeded.add(name)
        master = self.status["masters"][0]["grpc"]
        os.environ["CV_CLUSTER__MASTERS"] = json.dumps([master])
        self.cv("mount", f"s3://{name}", path or f"/{name}", "--write-type", mode,
                *s3_options(s3["endpoint"], s3["access_key"], s3["secret_key"]))

    def down(self):
        if self.plainfs:
            stop_plainfs(self.plainfs, self.plain_mount)
        subprocess.run([CV, "local", "down", "--dir", self.cluster], stdout=subprocess.DEVNULL)
        shutil.rmtree(self.cluster, ignore_errors=True)

    # ------------------------------------------------------------------------------------ measurements

    def load(self, directory, *options):
        text = run(sys.executable, HERE / "load_img.py", directory, "--num_workers", 8,
                   "--num_samples", self.images, *options)
        return float(next(line for line in text.splitlines() if "images/s" in line).split()[0])

    def plain_client(self, name, inflight, part=0):
        s3 = self.status["s3"]
        text = run(TARGET / "s3get", "--endpoint", s3["endpoint"], "--access-key", s3["access_key"],
                   "--secret-key", s3["secret_key"], "--bucket", name, "--source", self.source / name,
                   "--inflight", inflight, "--part", part)
        return json.loads(text)

    def boto3_client(self, name):
        s3 = self.status["s3"]
        environment = dict(os.environ, AWS_ACCESS_KEY_ID=s3["access_key"], AWS_SECRET_ACCESS_KEY=s3["secret_key"])
        text = run(PYTHON, HERE / "load_s3.py", s3["endpoint"], name, "--num_workers", 8, env=environment)
        return float(text.split()[0])

    @contextlib.contextmanager
    def data_set(self, name, consistency):
        """A mount of /NAME alone, beside that of everything, by a client of its own."""
        self.cv("mount", "update", f"/{name}", "--consistency", consistency)
        mount = self.directory / "data-set"
        settings = {"PATH": f"/{name}", "MOUNT_POINT": mount, "HTTP_LISTEN": "127.0.0.1:0"}
        environment = {f"CV_FUSE__{key}": str(value) for key, value in settings.items()}
        client = subprocess.Popen([CV, "fuse", "--conf", self.cluster / "cluster.toml"],
                                  env=os.environ | environment, stdout=subprocess.PIPE, text=True)
        try:
            assert " ready " in client.stdout.readline(), "the data set is not mounted"
            yield mount
        finally:
            client.terminate()
            client.wait()

    def new_client(self, **options):
        """A FUSE client that has read nothing; `options` are of the process that starts it."""
        self.cv("local", "stop", "fuse", "--dir", self.cluster)
        run(CV, "local", "start", "fuse", "--dir", self.cluster, **options)

    def fetched(self):
        """How many GETs the store has got."""
        s3 = self.status["s3"]
        token = Path(s3["admin_token"]).read_text().strip()
        asked = urllib.request.Request(f"{s3['admin']}/_dev/stats", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked) as page:
            return json.load(page)["kinds"]["GET"]

    def cold_again(self, name):
        """No worker has a block of the mount, the client neither a file of one, of which it lets go when it hears of
        that, nor bytes, and the kernel nothing of the store's files, which all sides read."""
        self.cv("fs", "free", f"/{name}")
        # Chunks that were read ahead for nobody stay for half a minute.
        deadline = time.monotonic() + 60
        held = [f"cavern_client_{what}" for what in ("descriptors", "backing_files", "budget_used_bytes")]
        while any(self.client_metric(metric) > 0 for metric in held):
            if time.monotonic() > deadline:
                held = ", ".join(f"{metric} {self.client_metric(metric):.0f}" for metric in held)
                sys.exit(f"the client has files or bytes of blocks a minute after they were freed: {held}")
            time.sleep(0.02)
        drop_caches()

    def client_metric(self, name):
        """What the FUSE client tells of itself."""
        client = json.loads(self.cv("local", "status", "--dir", self.cluster, "--json"))["fuse"][0]
        with self.metrics_page(client["http"]) as page:
            lines = page.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def metrics_page(self, address):
        if not self.secure:
            return urllib.request.urlopen(f"http://{address}/metrics")
        certificates = self.cluster / "certificates"
        token = (certificates / "http-token").read_text().strip()
        trust = ssl.create_default_context(cafile=certificates / "ca.pem")
        # Certificates name no hosts.
        trust.check_hostname = False
        request = urllib.request.Request(f"https://{address}/metrics", headers={"Authorization": f"Bearer {token}"})
        return urllib.request.urlopen(request, context=trust)

    def cold_images(self, ours):
        """Medians of rounds in which the three clients take turns, and each of them begins with the same."""
        rates = {"bare": [], "boto3": [], "ours": []}
        for _ in range(ROUNDS):
            drop_caches()
            rates["bare"].append(self.plain_client("images", 8)["objects_per_second"])
            drop_caches()
            rates["boto3"].append(self.boto3_client("images"))
            self.cold_again("images")
            before = self.fetched()
            rates["ours"].append(self.load(ours, "--raw"))
            requests = self.fetched() - before
            assert requests >= self.images, f"only {requests} of {self.images} images came from the bucket, {rates}"
        return {name: statistics.median(figures) for name, figures in rates.items()}

    def images_section(self):
        self.attach("images")
        disk, plain, ours = (base / "images" for base in (self.source, self.plain_mount, self.mount))
        cold = self.cold_images(ours)
        rows = [
            ("cold, from the bucket", cold["ours"], "plain S3 client in Rust, one process, 8 in flight", cold["bare"]),
            ("", cold["ours"], "boto3, 8 processes", cold["boto3"]),
        ]
        sides = {"disk": disk, "plain": plain, "ours": ours}
        figures = self.warm_images(sides)
        rows += [
            ("warm in the worker, kernel caches dropped", figures["ours"], "plainfs", figures["plain"]),
            ("", figures["ours"], "local disk", figures["disk"]),
            ("warm, page cache", figures["ours-pages"], "plainfs", figures["plain-pages"]),
            ("", figures["ours-pages"], "local disk", figures["disk-pages"]),
        ]
        rows += self.few_descriptors_rows(sides)
        rows += self.data_set_rows(figures["disk-pages"])
        drop_caches()
        plain_decoded, ours_decoded = self.load(plain), self.load(ours)
        rows.append(("decoded, warm", ours_decoded, "plainfs", plain_decoded))
        rows += self.fs_mode_rows(plain)
        self.table(f"{self.images} JPEGs of 50 KB, 8 processes, images/s", rows, "{:,.0f}")

    def warm_images(self, sides):
        """For each side the median after the kernel's caches were dropped, and that right after, of rounds in turn."""
        rates = {name + pages: [] for name in sides for pages in ("", "-pages")}
        for _ in range(ROUNDS):
            for name, directory in sides.items():
                drop_caches()
                rates[name].append(self.load(directory, "--raw"))
                rates[name + "-pages"].append(self.load(directory, "--raw"))
        return {name: statistics.median(figures) for name, figures in rates.items()}

    def few_descriptors_rows(self, sides):
        """A client that may open a fifth of the files at a time."""
        few = self.images // 5
        limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
        self.new_client(preexec_fn=limit)
        figures = self.warm_images({name: sides[name] for name in ("plain", "ours")})
        self.new_client()
        what = f"a process that may open {few:,} files,"
        return [
            (f"{what} kernel caches dropped", figures["ours"], "plainfs", figures["plain"]),
            (f"{what} page cache", figures["ours-pages"], "plainfs", figures["plain-pages"]),
        ]

    def data_set_rows(self, disk_pages):
        """The images in a mount of their own, beside `plainfs`: as they may change in the bucket, and as they may not,
        where both have the kernel open files by itself."""
        rows = []
        for consistency, what, options in (("ttl", "a data set alone", ()),
                                           ("never", "the same, `--consistency never`", ("--no-open",))):
            plain = self.directory / "plain-data-set"
            plainfs = start_plainfs(self.source, plain, *options)
            try:
                with self.data_set("images", consistency) as ours:
                    figures = self.warm_images({"plain": plain / "images", "ours": ours})
            finally:
                stop_plainfs(plainfs, plain)
            baseline = " ".join(("plainfs", *options))
            rows += [
                (f"{what}, warm in the worker", figures["ours"], f"`{baseline}`", figures["plain"]),
                (f"{what}, page cache", figures["ours-pages"], f"`{baseline}`", figures["plain-pages"]),
                ("", figures["ours-pages"], "local disk", disk_pages),
            ]
        self.cv("mount", "update", "/images", "--consistency", "ttl")
        return rows

    def fs_mode_rows(self, plain):
        """The same images through an fs-mode mount of the same bucket, which is mounted in one mode at a time."""
        self.cv("umount", "/images")
        self.attach("images", "fs_mode", "/images-fs")
        ours = self.mount / "images-fs"
        self.wait_until_listed(ours)
        self.load(ours, "--raw")
        figures = self.warm_images({"plain": plain, "ours": ours})
        # Written there they are in blocks of the mount's own.
        written = ours / "written"
        shutil.copytree(self.source / "images", written)
        self.cv("persist", "wait", "/images-fs")
        self.load(written, "--raw")
        own = self.warm_images({"plain": plain, "ours": written})
        shutil.rmtree(written)
        self.cv("persist", "wait", "/images-fs")
        self.cv("umount", "/images-fs")
        self.attach("images")
        return [
            ("fs-mode, warm in the worker, kernel caches dropped", figures["ours"], "plainfs", figures["plain"]),
            ("fs-mode, page cache", figures["ours-pages"], "plainfs", figures["plain-pages"]),
            ("fs-mode, written there, kernel caches dropped", own["ours"], "plainfs", own["plain"]),
            ("fs-mode, written there, page cache", own["ours-pages"], "plainfs", own["plain-pages"]),
        ]

    def wait_until_listed(self, directory):
        """What the bucket has is indexed in the background."""
        deadline = time.monotonic() + 120
        while sum(len(names) for _, _, names in os.walk(directory)) < self.images:
            if time.monotonic() > deadline:
                sys.exit(f"{directory} did not show {self.images} images within 120 s")
            time.sleep(0.2)

    def read_stream(self, path):
        seconds = timed(lambda: run("dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"))
        return self.stream_bytes / seconds / 1e6

    def stream_section(self):
        # That of the section before keeps files of the images.
        self.new_client()
        self.attach("stream")
        disk, plain, ours = (base / "stream/stream.bin" for base in (self.source, self.plain_mount, self.mount))
        bares, colds = [], []
        for _ in range(ROUNDS):
            drop_caches()
            bares.append(self.plain_client("stream", 4, 8 << 20)["bytes_per_second"] / 1e6)
            self.cold_again("stream")
            colds.append(self.read_stream(ours))
        bare, cold = statistics.median(bares), statistics.median(colds)
        rows = [("cold, from the bucket", cold, "plain S3 client, 4 × 8 MiB in flight", bare)]
        figures = {}
        for name, path in (("disk", disk), ("plain", plain), ("ours", ours)):
            rates, warm = [], []
            for _ in range(3):
                drop_caches()
                rates.append(self.read_stream(path))
                # The file below in the page cache, ours not: what the way through FUSE costs.
                if name != "disk":
                    self.forget_pages(path)
                warm.append(self.read_stream(path))
            figures[name], figures[name + "-warm"] = statistics.median(rates), statistics.median(warm)
        rows += [
            ("warm in the worker, kernel caches dropped", figures["ours"], "plainfs", figures["plain"]),
            ("", figures["ours"], "local disk", figures["disk"]),
            ("warm, block file in the page cache", figures["ours-warm"], "plainfs", figures["plain-warm"]),
            ("", figures["ours-warm"], "local disk", figures["disk-warm"]),
        ]
        self.table("One stream of 2 GiB, MB/s", rows, "{:,.0f}")

    @staticmethod
    def forget_pages(path):
        """Drops this file's own pages; those of the file behind it stay."""
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def random_section(self):
        """Of each side the pages are dropped before a round that are its own: those of the mounts. What is behind them,
        and the local disk's file, stay in the page cache, so nobody waits for the disk."""
        if not (self.mount / "stream").exists():
            self.attach("stream")
        paths = {name: base / "stream/stream.bin" for name, base in
                 (("disk", self.source), ("plain", self.plain_mount), ("ours", self.mount))}
        for path in paths.values():
            self.read_stream(path)
        rows = []
        for size in ("4KiB", "256KiB"):
            for threads in (1, 16):
                rates = {name: [] for name in paths}
                for seed in range(ROUNDS):
                    for name, path in paths.items():
                        if name != "disk":
                            self.forget_pages(path)
                        rates[name].append(self.random_reads(path, size, threads, seed))
                figures = {name: statistics.median(found) for name, found in rates.items()}
                what = f"{size}, {threads} thread{'s' if threads > 1 else ''}"
                rows.append((what, figures["ours"], "plainfs", figures["plain"]))
                rows.append(("", figures["ours"], "local disk, in the page cache", figures["disk"]))
        self.table("Random reads of a warm 2 GiB file, reads/s", rows, "{:,.0f}")

    def random_reads(self, path, size, threads, seed):
        text = self.cv("bench", "random", path.parent, "--block", size, "--threads", threads, "--seed", seed,
                       "--seconds", 2, "--rounds", 1, "--json")
        return json.loads(text)["summary"][0]["target"]["median"]

    def list_section(self):
        """Listings with a stat for each file: after a restart of the client, when the kernel's caches were dropped, and
        when it has everything; by root and by somebody else."""
        rows = []
        somebody = ("setpriv", "--reuid", 65534, "--regid", 65534, "--clear-groups")
        bases = {"disk": self.source, "plain": self.plain_mount, "ours": self.mount}
        for name, count in (("images", self.images), ("tree", 100_000)):
            if not (self.mount / name).exists():
                self.attach(name)
            for what, before, after in (("`find -size +0`", ("find",), ("-type", "f", "-size", "+0")),
                                        ("`ls -lR`", ("ls", "-lR"), ())):
                listed = lambda base, *user: timed(lambda: run(*user, *before, base / name, *after))
                self.new_client()
                drop_caches()
                first = listed(self.mount)
                times = {side + state: [] for side in bases for state in ("", "-warm", "-user")}
                for _ in range(ROUNDS):
                    for side, base in bases.items():
                        drop_caches()
                        times[side].append(listed(base))
                        times[side + "-warm"].append(listed(base))
                        # Only its own user may look into plainfs.
                        if side != "plain":
                            times[side + "-user"].append(listed(base, *somebody))
                figures = {side: statistics.median(found) for side, found in times.items() if found}
                what = f"{what}, {count:,} files"
                rows += [
                    (f"{what}, first", first, "local disk, cold", figures["disk"]),
                    (f"{what}, kernel caches dropped", figures["ours"], "plainfs", figures["plain"]),
                    (f"{what}, warm", figures["ours-warm"], "plainfs", figures["plain-warm"]),
                    ("", figures["ours-warm"], "local disk", figures["disk-warm"]),
                    (f"{what}, warm, not root", figures["ours-user"], "local disk", figures["disk-user"]),
                ]
            rows += self.data_set_listings(name, count, bases["disk"], somebody)
        rows += self.marked_listings(name, count, somebody)
        self.table("Listings with a stat per file, seconds", rows, "{:.3f}")

    def data_set_listings(self, name, count, disk, somebody):
        with self.data_set(name, "ttl") as ours:
            times = {}
            for _ in range(ROUNDS):
                for side, directory in (("disk", disk / name), ("ours", ours)):
                    for who, user in (("", ()), (", not root", somebody)):
                        listed = timed(lambda: run(*user, "ls", "-lR", directory))
                        times.setdefault((side, who), []).append(listed)
        # The first round of all is that of a kernel that knows nothing.
        figures = {key: statistics.median(found[1:]) for key, found in times.items()}
        return [(f"`ls -lR`, {count:,} files, a data set alone, warm{who}", figures["ours", who], "local disk",
                 figures["disk", who]) for who in ("", ", not root")]

    def marked_listings(self, name, count, somebody):
        """The same while one file elsewhere in the namespace has what `ls -l` asks each file for: an access list, then
        a label, too."""
        (self.source / "marked").mkdir(exist_ok=True)
        (self.source / "marked" / "file").write_bytes(b"x")
        self.attach("marked", "fs_mode")
        entries = ((1, 6, -1), (2, 4, 1000), (4, 4, -1), (16, 4, -1), (32, 4, -1))
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
        rows = []
        for what, attribute, value in (("an access list", "system.posix_acl_access", acl),
                                       ("a label", "security.selinux", b"system_u:object_r:etc_t:s0")):
            os.setxattr(self.mount / "marked" / "file", attribute, value)
            times = {}
            for _ in range(ROUNDS):
                for side, base in (("disk", self.source), ("ours", self.mount)):
                    drop_caches()
                    for state, user in (("kernel caches dropped", ()), ("warm", ()), ("warm, not root", somebody)):
                        listed = timed(lambda: run(*user, "ls", "-lR", base / name))
                        times.setdefault((side, state), []).append(listed)
            figures = {key: statistics.median(found) for key, found in times.items()}
            rows += [(f"`ls -lR`, {count:,} files, one file has {what}, {state}", figures[side, state], "local disk",
                      figures["disk", state]) for side, state in figures if side == "ours"]
        # The bucket may lack the marks, which nobody reads again.
        self.cv("umount", "/marked", "--discard")
        return rows

    def note_memory(self, moment):
        status = json.loads(self.cv("local", "status", "--dir", self.cluster, "--json"))
        processes = self.memory[moment] = {}
        for role, children in (("master", status["masters"]), ("worker", status["workers"]), ("fuse", status["fuse"])):
            for child in children:
                pid = child["pid"]
                # A FUSE client with the process that keeps its mount.
                pids = [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
                lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
                total = lambda begin: sum(int(line.split()[1]) for line in lines if line.startswith(begin))
                processes[role] = (total("VmRSS:") / 1024, total("Threads:"))

    def memory_section(self):
        moments = list(self.memory)
        print(f"\n**Resident memory, MiB**\n\n| process | threads at rest | {' | '.join(moments)} |")
        print("|---" * (len(moments) + 2) + "|")
        for role, (_, threads) in self.memory[moments[0]].items():
            cells = " | ".join(f"{self.memory[moment][role][0]:.0f}" for moment in moments)
            print(f"| {role} | {threads} | {cells} |")

    @staticmethod
    def table(title, rows, form):
        print(f"\n**{title}**\n\n| what | Cavern | baseline | figure | ratio |\n|---|---:|---|---:|---:|")
        for what, ours, baseline, figure in rows:
            print(f"| {what} | {form.format(ours)} | {baseline} | {form.format(figure)} | {ours / figure:.2f} |")
        sys.stdout.flush()


def main():
    sections = ("images", "stream", "random", "list", "memory")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="on the disk to measure; 6 GB are needed")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--stream-bytes", type=int, default=2 << 30)
    parser.add_argument("--secure", action="store_true", help="the processes show certificates: what TLS costs")
    options = parse_sections(parser, sections)
    bench = Bench(options.dir.resolve(), options.images, options.stream_bytes, options.secure)
    bench.set_up()
    try:
        seconds = bench.up()
        print(f"From `cv local up` to a usable mount: {seconds:.2f} s")
        bench.note_memory("at rest")
        bench.plainfs = start_plainfs(bench.source, bench.plain_mount)
        for section in options.sections:
            getattr(bench, f"{section}_section")()
            if section != "memory":
                bench.note_memory(f"after {section}")
    finally:
        bench.down()


if __name__ == "__main__":
    main()
