"""The cluster that the programs run on."""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cavern"
TARGET = Path(os.environ.get("CARGO_TARGET_DIR") or CACHE / "target") / "release"
CV = Path(os.environ.get("CV_BIN") or TARGET / "cv")

CONF = """
[master]
persist_delay = "200ms"
"""


class Missing(Exception):
    """A program is not installed."""


def need(program, package):
    """The path of a program; Cargo's own are found where Cargo installs them."""
    found = shutil.which(program) or shutil.which(program, path=str(Path.home() / ".cargo/bin"))
    if not found:
        raise Missing(f"{program} is not installed: {package}")
    return found


def run(*command, **options):
    """Runs a command to its end, which must be a good one; gives what it said."""
    options.setdefault("timeout", 3600)
    done = subprocess.run([str(part) for part in command], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode != 0:
        print(done.stdout[-20_000:])
        raise AssertionError(f"{Path(command[0]).name} ended with {done.returncode}")
    return done.stdout


def assert_passable(folder):
    """A program that becomes another user must get to its folder."""
    shut = [str(above) for above in folder.resolve().parents if not above.stat().st_mode & 0o001]
    assert not shut, f"other users may not pass {', '.join(shut)}: choose another --dir"


def until(what, condition, seconds=60):
    """Waits for a condition, and gives what made it true."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class Cluster:
    """One worker, two mounts; the bucket `programs` is mounted at `/programs` in both."""

    def __init__(self, directory, is_ours, quick):
        self.top = directory.resolve()
        self.is_ours = is_ours
        self.quick = quick
        self.directory = self.top / "cluster" if is_ours else self.top

    def __enter__(self):
        if self.is_ours:
            self.top.mkdir(parents=True, exist_ok=True)
            conf = self.top / "conf.toml"
            conf.write_text(CONF)
            self.cv("local", "up", "--conf", conf, "--mount-point", self.top / "mount0",
                    "--mount-point", self.top / "mount1", "--dir", self.directory)
        try:
            self.mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.is_ours:
            self.cv("local", "down", "--dir", self.directory)
            shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.local, ignore_errors=True)

    def mount(self):
        self.local = self.top / "local"
        self.local.mkdir(exist_ok=True)
        # A bucket is made by what is put into it.
        seed = self.local / "seed"
        seed.mkdir(exist_ok=True)
        (seed / "object").write_text("of no interest\n")
        self.cv("local", "seed", "--dir", self.directory, seed, "s3://programs/elsewhere")
        s3 = self.status()["s3"]
        self.cv("mount", "s3://programs/fs", "/programs", "--write-type", "fs_mode", "--block-size", "1MiB",
                "-c", f"s3.endpoint_url={s3['endpoint']}", "-c", "s3.region_name=us-east-1",
                "-c", f"s3.credentials.access={s3['access_key']}", "-c", f"s3.credentials.secret={s3['secret_key']}")
        self.mounts = [Path(fuse["mount_point"]) / "programs" for fuse in self.status()["fuse"]]
        for mount in self.mounts:
            until(f"{mount} appears", mount.is_dir)

    def cv(self, *arguments):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CV_")}
        environment["CV_CONF"] = str(self.directory / "cluster.toml")
        if arguments[:2] == ("local", "up"):
            del environment["CV_CONF"]
        return run(CV, *arguments, env=environment)

    def status(self):
        return json.loads(self.cv("local", "status", "--json", "--dir", self.directory))

    def child(self, action, name):
        """`start`, `stop` or `kill` for a child of the cluster."""
        self.cv("local", action, name, "--dir", self.directory)

    def folder(self, name, mount=0):
        """A new, empty directory on a mount."""
        folder = self.mounts[mount] / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def local_folder(self, name):
        """A new, empty directory beside the cluster."""
        folder = self.local / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def tidy(self):
        """Removes what a run has left, so that the next one has room."""
        for folder in (*self.mounts[0].iterdir(), *self.local.iterdir()):
            shutil.rmtree(folder)

    def persist_status(self):
        return json.loads(self.cv("persist", "status", "/programs", "--json"))

    def persist_wait(self, seconds=600):
        self.cv("persist", "wait", "/programs", "--timeout", f"{seconds}s")
