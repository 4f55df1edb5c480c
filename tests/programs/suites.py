"""Programs that were written to find faults of file systems."""

import contextlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

from cluster import assert_passable, need, run

# Not applicable: each case of pjdfstest that does not run, and why.
NOT_APPLICABLE = {
    "link::link_count_max": "pathconf(3) knows no LINK_MAX of FUSE: the C library has a list of file systems for it",
}
# What remounts is run by itself: a case before keeps a file open, on any file system.
REMOUNTING = "erofs"

PJDFSTEST = """
[features]
posix_fallocate = {{}}
rename_ctime = {{}}
utime_now = {{}}
utimensat = {{}}
[settings]
naptime = 0.01
allow_remount = {remount}
[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
"""

# Without -i mount(8) would hand the remount to a helper, and the helper begin another client.
MOUNT = """#!/bin/sh
exec /usr/bin/mount -i "$@"
"""


def pjdfstest(cluster):
    program = need("pjdfstest", "cargo install --locked pjdfstest@0.2.2")
    folder, local = cluster.folder("pjdfstest"), cluster.local_folder("pjdfstest")
    assert_passable(local)
    (local / "mount").write_text(MOUNT)
    (local / "mount").chmod(0o755)
    passed, skipped = 0, []
    with short_path(folder) as short:
        for remounting in (False, True):
            conf = local / "pjdfstest.toml"
            conf.write_text(PJDFSTEST.format(remount=str(remounting).lower()))
            patterns = [REMOUNTING] if remounting else []
            # The cases of EXDEV have the file system of `local` as their second one.
            # What is remounted is looked for in the path.
            where = folder if remounting else short
            command = [program, "-c", conf, "-p", where, "-s", local, *patterns]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            text = subprocess.run(command, text=True, env=path_first(local), **pipes).stdout
            text = re.sub(r"\x1b\[[0-9;]*m", "", text)
            failed = re.findall(r"^(\S+) +FAILED\n(.*)", text, re.M)
            causes = "; ".join(f"{name}: {why.strip()}" for name, why in failed)
            assert not failed, f"{len(failed)} cases failed: {causes}"
            assert "Summary: 0 failed" in text, text[-2000:]
            passed += len(re.findall(r"^\S+ +ok$", text, re.M))
            names = re.findall(r"^(\S+) +skipped$", text, re.M)
            skipped += [name for name in names if remounting or REMOUNTING not in name]
    assert sorted(skipped) == sorted(NOT_APPLICABLE), f"skipped: {skipped}"
    return f"{passed} cases passed, {len(skipped)} not applicable"


@contextlib.contextmanager
def short_path(folder):
    """A path to `folder` that leaves room: the address of a socket has 107 characters, and pjdfstest adds up to 88."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as parent:
        os.chmod(parent, 0o755)
        path = Path(parent) / "f"
        path.symlink_to(folder)
        yield path


def path_first(folder):
    return dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")


FSX = """
flen = 3000000
[opsize]
max = 100000
[weights]
close_open = 1.0
invalidate = 1.0
mapread = 10.0
mapwrite = 10.0
read = 10.0
write = 10.0
truncate = 3.0
fsync = 0.5
fdatasync = 0.5
posix_fallocate = 2.0
punch_hole = 2.0
sendfile = 2.0
posix_fadvise = 1.0
copy_file_range = 2.0
"""


def fsx_command(cluster, mount, seed, operations):
    program = need("fsx", "cargo install --locked fsx@0.3.2")
    local = cluster.local_folder(f"fsx-{mount}-{seed}")
    conf = local / "fsx.toml"
    conf.write_text(FSX)
    file = cluster.folder(f"fsx-{mount}-{seed}", mount) / "file"
    return [program, "-f", conf, "-S", seed, "-N", operations, "-P", local, file]


def fsx(cluster):
    seeds, operations = (range(1, 2), 1000) if cluster.quick else (range(1, 6), 100_000)
    for seed in seeds:
        run(*fsx_command(cluster, 0, seed, operations))
    return f"{len(seeds)} × {operations:,} operations with mappings"


def fsx_two(cluster):
    """Different files, each on a mount of its own, at once."""
    operations = 1000 if cluster.quick else 100_000
    commands = [fsx_command(cluster, mount, 10 + mount, operations) for mount in range(2)]
    running = [subprocess.Popen([str(part) for part in command], text=True, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for command in commands]
    said = [process.communicate()[0] for process in running]
    for process, text in zip(running, said):
        assert process.returncode == 0, f"fsx ended with {process.returncode}: {text[-2000:]}"
    return f"2 × {operations:,} operations on two mounts at once"


# A group runs at once.
STRESSORS = [
    ["access", "chdir", "chmod", "chown", "copy-file", "dentry", "dir", "dirdeep"],
    ["dirmany", "dup", "fallocate", "fcntl", "file-ioctl", "filename", "flock", "fpunch"],
    ["fstat", "getdent", "hdd", "iomix", "link", "locka", "lockf", "lockofd"],
    ["mknod", "msync", "open", "readahead", "rename", "revio", "seek", "sendfile"],
    ["aio", "fiemap", "splice", "symlink", "sync-file", "touch", "utime", "xattr"],
]


def stress(cluster):
    program = need("stress-ng", "apt-get install stress-ng")
    seconds = 5 if cluster.quick else 60
    for number, group in enumerate(STRESSORS):
        folder = cluster.folder(f"stress{number}")
        options = [option for name in group for option in (f"--{name}", "1")]
        sizes = {"hdd": 64, "iomix": 64, "fallocate": 64, "sync-file": 32, "readahead": 32, "copy-file": 128}
        options += [option for name, mib in sizes.items() for option in (f"--{name}-bytes", f"{mib}M")]
        run(program, "--temp-path", folder, "--timeout", f"{seconds}s", "--verify", *options)
        assert list(folder.iterdir()) == [], f"left over: {list(folder.iterdir())}"
    return f"{sum(map(len, STRESSORS))} stressors, {seconds} s each"


RUNS = {"pjdfstest": pjdfstest, "fsx": fsx, "fsx-two": fsx_two, "stress": stress}
