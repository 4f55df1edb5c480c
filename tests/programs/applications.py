"""Programs that people work with."""

import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from cluster import CV, HERE, need, run, until

# ------------------------------------------------------------------------------------------------ SQLite


def sqlite(cluster):
    """Commits rows while the client is killed: what was committed is there, and the database is whole."""
    rounds = 1 if cluster.quick else 5
    kept = []
    for mode in ("WAL", "DELETE"):
        database = cluster.folder(f"sqlite-{mode}") / "database"
        acknowledged = cluster.local_folder(f"sqlite-{mode}") / "acknowledged"
        acknowledged.write_text("")
        for _ in range(rounds):
            before = len(acknowledged.read_text().split())
            writer = subprocess.Popen([sys.executable, HERE / "sqlite_writer.py", database, acknowledged, mode])
            try:
                until("rows are committed", lambda: len(acknowledged.read_text().split()) >= before + 30)
                cluster.child("kill", "fuse0")
            finally:
                writer.kill()
                writer.wait()
            cluster.child("start", "fuse0")
            until("the mount is back", cluster.mounts[0].is_dir)
            promised = {int(row) for row in acknowledged.read_text().split()}
            connection = sqlite3.connect(database, timeout=60)
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            rows = dict(connection.execute("SELECT number, content FROM rows"))
            connection.close()
            missing = sorted(promised - set(rows))
            assert not missing, f"{mode}: {len(missing)} of {len(promised)} committed rows are missing: {missing[:5]}"
            wrong = [number for number, content in rows.items() if content != content_of(number)]
            assert not wrong, f"{mode}: rows with other content: {wrong[:5]}"
        kept.append(f"{mode} {len(rows)} rows")
    return f"{rounds} kills each: {', '.join(kept)}"


def content_of(number):
    return bytes(number * step % 251 for step in range(1, 2000))


# ------------------------------------------------------------------------------------------- trees of files


def make_tree(top, files, seed):
    """A tree with all that an archive can hold."""
    rng = random.Random(seed)
    for number in range(files):
        folder = top / f"d{number % 37}" / f"e{number % 5}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"file {number}"
        file.write_bytes(rng.randbytes(rng.choice((0, 10, 3000, 70_000, 300_000))))
        file.chmod(rng.choice((0o644, 0o600, 0o755, 0o4711, 0o2755)))
        os.utime(file, ns=(rng.randrange(10**18), rng.randrange(10**18)))
        if number % 7 == 0:
            os.setxattr(file, "user.number", str(number).encode())
        if number % 11 == 0:
            os.chown(file, 1000 + number % 3, 100)
        if number % 13 == 0:
            os.link(file, top / f"link {number}")
        if number % 17 == 0:
            (top / f"symlink {number}").symlink_to(file.relative_to(top))
    os.mkfifo(top / "fifo")
    with open(top / "sparse", "wb") as sparse:
        sparse.seek(20 << 20)
        sparse.write(b"end")
    for folder in sorted(top.glob("d*")):
        os.utime(folder, ns=(10**17, 10**17))


def tar(cluster):
    """Packed here, unpacked there, compared there, packed there, unpacked here, compared here."""
    source, back = cluster.local_folder("tar"), cluster.local_folder("tar-back")
    there, archives = cluster.folder("tar"), cluster.local_folder("tar-archives")
    make_tree(source, 300 if cluster.quick else 3000, 1)
    for number, (origin, target) in enumerate(((source, there), (there, back))):
        archive = archives / f"{number}.tar"
        run("tar", "--xattrs", "--sparse", "-cf", archive, "-C", origin, ".")
        run("tar", "--xattrs", "-xpf", archive, "-C", target)
        run("tar", "--xattrs", "-df", archives / "0.tar", "-C", target)
    return f"{sum(1 for _ in source.rglob('*'))} names"


def rsync(cluster):
    program = need("rsync", "apt-get install rsync")
    source, back, there = cluster.local_folder("rsync"), cluster.local_folder("rsync-back"), cluster.folder("rsync")
    make_tree(source, 300 if cluster.quick else 3000, 2)
    with_acls = add_acls(source, there)
    for origin, target in ((source, there), (there, back)):
        run(program, "-aHAXS", f"{origin}/", f"{target}/")
        differences = run(program, "-aHAXSn", "--delete", "--checksum", "--itemize-changes", f"{origin}/", f"{target}/")
        assert differences == "", f"differences: {differences[:500]}"
    differences = run(program, "-aHAXSn", "--delete", "--checksum", "--itemize-changes", f"{source}/", f"{back}/")
    assert differences == "", f"differences after the way there and back: {differences[:500]}"
    return f"{sum(1 for _ in source.rglob('*'))} names, {'with' if with_acls else 'without'} ACLs"


def add_acls(source, there):
    """Gives some files ACLs, if the mount takes them."""
    probe = there / "probe"
    probe.write_text("")
    takes = shutil.which("setfacl") and subprocess.run(["setfacl", "-m", "u:1001:r", probe],
                                                       stderr=subprocess.DEVNULL).returncode == 0
    probe.unlink()
    if takes:
        for number, file in enumerate(sorted(source.glob("d*/e*/file *"))[:40]):
            run("setfacl", "-m", f"u:{1001 + number}:rx,g:1002:r", file)
        run("setfacl", "-d", "-m", "u:1001:rwx", source / "d0")
    return bool(takes)


# ---------------------------------------------------------------------------------------------- others


def rclone(cluster):
    program = need("rclone", "apt-get install rclone")
    source, there = cluster.local_folder("rclone"), cluster.folder("rclone")
    count = 200 if cluster.quick else 20_000
    run(CV, "gen-images", source / "images", "--count", count, "--mean-size", "50KB")
    began = time.monotonic()
    run(program, "copy", source / "images", there / "images", "--transfers", 16)
    copied = time.monotonic() - began
    run(program, "check", source / "images", there / "images", "--download", "--checkers", 8)
    cluster.persist_wait()
    return f"{count} images copied in {copied:.0f} s with 16 transfers, checked, and in the bucket"


def git(cluster):
    program = need("git", "apt-get install git")
    source, there = cluster.local_folder("git"), cluster.folder("git")
    count = 300 if cluster.quick else 5000
    rng = random.Random(3)
    repository = source / "repository"
    repository.mkdir()
    run(program, "init", "-q", repository)
    for number in range(count):
        folder = repository / f"{number % 50:02}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number:05}.txt").write_text("".join(f"{rng.random()}\n" for _ in range(rng.randrange(1, 60))))
    run(program, "-C", repository, "add", ".")
    run(program, "-C", repository, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "all")
    clone = there / "clone"
    run(program, "clone", "-q", "--no-hardlinks", repository, clone)
    run(program, "-C", clone, "fsck", "--strict", "--full")
    assert run(program, "-C", clone, "status", "--porcelain") == ""
    (clone / "00/00000.txt").write_text("changed\n")
    run(program, "-C", clone, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qam", "change")
    run(program, "-C", clone, "gc", "-q")
    run(program, "-C", clone, "fsck", "--strict", "--full")
    run(program, "-C", clone, "checkout", "-q", "HEAD~1")
    run("diff", "-r", "-x", ".git", repository, clone)
    return f"{count} files cloned, checked, changed, collected"


MAKEFILE = """
OBJECTS = $(patsubst %.c,%.o,$(wildcard *.c))
program: $(OBJECTS)
	$(CC) -o $@ $^
%.o: %.c all.h
	$(CC) -O1 -c -o $@ $<
"""


def make(cluster):
    """A C project: built, nothing to do, one file changed, and only that built anew."""
    program = need("make", "apt-get install build-essential")
    need("cc", "apt-get install build-essential")
    there, count = cluster.folder("make"), 20 if cluster.quick else 200
    numbers = range(count)
    (there / "all.h").write_text("".join(f"int f{number}(int);\n" for number in numbers))
    for number in numbers:
        (there / f"f{number}.c").write_text(f'#include "all.h"\nint f{number}(int x) {{ return x + {number}; }}\n')
    calls = "".join(f"    sum += f{number}(1);\n" for number in numbers)
    (there / "main.c").write_text(f'#include <stdio.h>\n#include "all.h"\nint main(void) {{\n    long sum = 0;\n{calls}'
                                  '    printf("%ld\\n", sum);\n    return 0;\n}\n')
    (there / "Makefile").write_text(MAKEFILE)
    run(program, "-C", there, "-j4")
    assert int(run(there / "program")) == sum(1 + number for number in numbers)
    run(program, "-C", there, "-q")
    (there / "f0.c").write_text('#include "all.h"\nint f0(int x) { return x + 1000; }\n')
    said = run(program, "-C", there, "-j4")
    assert "f0.c" in said and "f1.c" not in said, said
    assert int(run(there / "program")) == sum(1 + number for number in numbers) + 1000
    return f"{count} files compiled with four jobs, and one again"


def checkpoint(cluster):
    """Written to a temporary file, synced and renamed on one mount; read whole, never an older one, on the other."""
    rounds, size = (20, 2 << 20) if cluster.quick else (200, 20 << 20)
    folder = cluster.folder("checkpoint")
    latest, seen = cluster.mounts[1] / "checkpoint" / "latest", []
    until("the folder appears on the other mount", latest.parent.is_dir)
    for number in range(rounds):
        body = random.Random(number).randbytes(size)
        temporary = folder / f".{number}.tmp"
        with open(temporary, "wb") as file:
            file.write(f"{number:08} {hashlib.sha256(body).hexdigest()}\n".encode())
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, folder / "latest")
        # Whichever is seen at once is whole; this one is seen soon.
        until("the checkpoint is seen", lambda: read_checkpoint(latest, seen) == number)
    assert seen == sorted(seen), "an older checkpoint was seen after a newer one"
    assert [path.name for path in folder.iterdir()] == ["latest"]
    cluster.persist_wait()
    return f"{rounds} of {size >> 20} MiB, {len(seen)} reads on the second mount"


def read_checkpoint(path, seen):
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    head, body = content.split(b"\n", 1)
    number, digest = head.split()
    is_whole = hashlib.sha256(body).hexdigest() == digest.decode()
    assert is_whole, f"checkpoint {int(number)} is not whole: {len(body)} bytes"
    seen.append(int(number))
    return int(number)


RUNS = {
    "sqlite": sqlite,
    "tar": tar,
    "rsync": rsync,
    "make": make,
    "checkpoint": checkpoint,
    "git": git,
    "rclone": rclone,
}
