"""The bucket goes away while programs write: they notice nothing, and it has everything in the end."""

import hashlib
import os
import random
import signal
import threading
import time

from cluster import need, run, until


class Load(threading.Thread):
    """Writes, syncs, renames, reads and removes until it is told to stop."""

    def __init__(self, folder, seed):
        super().__init__()
        self.folder, self.rng = folder, random.Random(seed)
        self.stop, self.error, self.files, self.slowest = threading.Event(), None, {}, 0.0
        self.operations = 0

    def run(self):
        try:
            while not self.stop.is_set():
                began = time.monotonic()
                self.step()
                self.slowest = max(self.slowest, time.monotonic() - began)
                self.operations += 1
                # Programs compute, too; and the backlog of two minutes is to fit on the disk.
                time.sleep(0.02)
        except Exception as error:
            self.error = error

    def step(self):
        name = f"f{self.rng.randrange(400)}"
        path = self.folder / name
        if name in self.files and self.rng.random() < 0.3:
            path.unlink()
            del self.files[name]
            return
        if name in self.files:
            assert hashlib.sha256(path.read_bytes()).digest() == self.files[name], f"{name} has other bytes"
        body = self.rng.randbytes(self.rng.randrange(100_000))
        temporary = self.folder / "temporary"
        with open(temporary, "wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        self.files[name] = hashlib.sha256(body).digest()


def outage(cluster, name, begin, end):
    seconds = 10 if cluster.quick else 120
    loads = [Load(cluster.folder(f"{name}{number}"), number) for number in range(4)]
    cluster.persist_wait()
    for load in loads:
        load.start()
    try:
        until("work is under way", lambda: all(load.operations > 10 for load in loads))
        begin()
        try:
            backlog, deadline = [], time.monotonic() + seconds
            while time.monotonic() < deadline:
                backlog.append(cluster.persist_status()["files"])
                done = sum(load.operations for load in loads)
                time.sleep(seconds / 20)
                assert all(load.error is None for load in loads), [load.error for load in loads]
                moved = sum(load.operations for load in loads) > done
                assert moved, "nothing was written for a while"
        finally:
            end()
    finally:
        for load in loads:
            load.stop.set()
        for load in loads:
            load.join()
    assert all(load.error is None for load in loads), [load.error for load in loads]
    assert max(backlog[len(backlog) // 2:]) > max(backlog[0], 50), f"the backlog has not grown: {backlog}"
    cluster.persist_wait()
    status = cluster.persist_status()
    assert (status["files"], status["deletions"]) == (0, 0), status
    compare(cluster, name, loads)
    operations, slowest = sum(load.operations for load in loads), max(load.slowest for load in loads)
    return f"{seconds} s, {operations:,} operations, the slowest {slowest:.1f} s, backlog up to {max(backlog):,} files"


def compare(cluster, name, loads):
    """The bucket has these files, and no other, byte by byte."""
    program = need("rclone", "apt-get install rclone")
    s3 = cluster.status()["s3"]
    remote = (f":s3,provider=Other,endpoint='{s3['endpoint']}',access_key_id={s3['access_key']},"
              f"secret_access_key={s3['secret_key']},region=us-east-1,force_path_style=true:programs/fs")
    # Whatever this host has to say about other object stores is not meant for this one.
    environment = {key: value for key, value in os.environ.items()
                   if not key.lower().startswith(("aws_", "rclone_")) and not key.lower().endswith("_proxy")}
    for number, load in enumerate(loads):
        assert sorted(path.name for path in load.folder.iterdir()) == sorted(load.files)
        there = f"{remote}/{name}{number}"
        run(program, "check", load.folder, there, "--download", "--config", "/dev/null", env=environment)


def unreachable(cluster):
    """The object store's process is gone: nobody listens."""
    return outage(cluster, "unreachable", lambda: cluster.child("stop", "s3"), lambda: cluster.child("start", "s3"))


def stopped(cluster):
    """The object store takes connections, and says nothing."""
    pid = cluster.status()["s3"]["pid"]
    return outage(cluster, "stopped", lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT))


RUNS = {"unreachable": unreachable, "stopped": stopped}
