#!/usr/bin/env python3
"""Installs what bin/package has made, upgrades and removes it, in systems that have nothing else.

    tests/package.py --dir /var/tmp/packages                 what `bin/package --out /var/tmp/packages` has made
    tests/package.py --dir … --suites bookworm

Makes a root directory of Debian for each suite (mmdebstrap), with systemd, man-db and bash-completion, whose programs
judge what the package brings. Boots it (systemd-nspawn), with a stand-in for `cv`, to see what becomes of the units
when they are restarted, when the package is upgraded, and when it is removed; and with `cv` itself, to see what becomes
of a line of /etc/fstab. The .rpm is installed there as well: no EL9 is to be had from Debian's mirrors, so what it
needs is compared with what EL9 has. Needs root, /dev/fuse and /dev/autofs. Exit code 0 when
all is well.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SUITES = ("bookworm", "trixie")
JUDGES = ("systemd", "man-db", "bash-completion", "passwd")
GLIBC_MOST = (2, 34)
BYTES_MOST = 50_000_000
# Mode and owner of what the package brings; everything else is root's and 644 or 755.
ENVIRONMENTS = ("/etc/cavern/fuse.env", "/etc/cavern/master.env", "/etc/cavern/worker.env")
SPECIAL = {
    "/etc/cavern/certificates": ("750", "root:cavern"),
    # A link.
    "/usr/sbin/mount.cavern": ("777", "root:root"),
    **{name: ("600", "root:root") for name in ENVIRONMENTS},
}
CONFFILES = {*ENVIRONMENTS, "/etc/needrestart/conf.d/cavern.conf"}
UNITS = ("cavern-master.service", "cavern-worker.service", "cavern-fuse.service", "cavern-fuse@.service")
# What dpkg, apt, and the caches of others change at any installation.
UNWATCHED = re.compile(r"/(proc|sys|dev|run|tmp|var/(cache|log|tmp|lib/(dpkg|apt|rpm|systemd)))(/|$)|/etc/[^/]*-$")


def run(*command, fails=False, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    said = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}"
    return said

# Serves for ever, and counts how often it is to go on with another executable.
STAND_IN = """#!/bin/sh
case "$1 $2" in
    "fuse reload") echo >>/run/reloads ;;
    *)
        trap 'kill $!; exit 0' TERM
        sleep 1000 &
        wait ;;
esac
"""
# A line for each step: main process of the unit, its state, the `cv fuse` that it waits for, and how often that was to
# go on; then the main process of the worker.
PROBE = """#!/bin/sh
begun() {
    until kill -0 "$(cat /run/cavern-fuse/pid)" 2>/dev/null; do sleep 0.1; done
}
said() {
    for try in $(seq 100); do
        [ "$(cat /run/reloads 2>/dev/null | wc -l)" -lt "$2" ] || break
        sleep 0.1
    done
    supervisor=$(cat /run/cavern-fuse/pid 2>/dev/null)
    [ -d "/proc/${supervisor:-none}" ] || supervisor=gone
    echo "$1 $(systemctl show --value -p MainPID cavern-fuse) $(systemctl show --value -p ActiveState cavern-fuse)" \
        "$supervisor $(cat /run/reloads 2>/dev/null | wc -l) $(systemctl show --value -p MainPID cavern-worker)"
}
systemctl start cavern-fuse
said refused 0
echo '[cluster]' >/etc/cavern/cluster.toml
systemctl enable --now cavern-fuse cavern-worker
begun
said started 0
systemctl restart cavern-fuse
said restarted 1
kill -KILL "$(systemctl show --value -p MainPID cavern-fuse)"
said killed 2
dpkg --force-confold --install /later.deb
said upgraded 3
systemctl stop cavern-fuse
said stopped 3
systemctl start cavern-fuse
begun
said again 3
dpkg --remove cavern
said removed 3
systemctl poweroff --no-block
"""
# Lines of /etc/fstab: what is mounted at boot, and when somebody comes by.
FSTAB = """file:///srv/images /mnt/booted cavern _netdev,nofail,cache=/var/cache/booted:1GiB 0 0
file:///srv/images /mnt/asked cavern _netdev,nofail,x-systemd.automount,cache=/var/cache/asked:1GiB 0 0
"""
# A line for each step of each of them: state of the mount's unit, what a file there has, and how many processes serve
# it; then what a file has that was opened before the upgrade. Whoever looks at the automounted one mounts it again.
FSTAB_PROBE = """#!/bin/sh
count() { grep -las "^/usr/bin/cv.*/var/cache/$name" /proc/[0-9]*/cmdline | wc -l; }
wait_for() { # COMMAND...
    for try in $(seq 300); do
        ! "$@" || return 0
        sleep 0.1
    done
}
is_over() { [ "$(count)" -eq 0 ] && ! systemctl --quiet is-active "mnt-$name.mount"; }
said() { # STEP CONTENT
    echo "$name-$1 $(systemctl show --value -p ActiveState "mnt-$name.mount") $2 $(count)"
}
read_it() { cat "/mnt/$name/one" || echo none; }
for name in booted asked; do
    wait_for test -e /mnt/$name/one
    said begun "$(read_it)"
    systemctl restart mnt-$name.mount
    said restarted "$(read_it)"
    exec 8</mnt/$name/two
    dpkg --force-confold --install /later.deb
    said upgraded "$(read_it)"
    cv fuse reload --mount-point /mnt/$name
    said reloaded "$(read_it)"
    echo "$name-opened $(cat <&8)"
    exec 8<&-
    umount /mnt/$name
    wait_for is_over
    said unmounted -
    mount /mnt/$name
    said by-hand "$(read_it)"
    umount /mnt/$name
    wait_for is_over
    [ $name = asked ] || systemctl start mnt-$name.mount
    said again "$(read_it)"
    [ $name = booted ] || systemctl stop mnt-$name.automount
    systemctl stop mnt-$name.mount
    wait_for is_over
    said stopped -
done
systemctl poweroff --no-block
"""
PROBE_UNIT = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/probe
StandardOutput=file:/probe.out
StandardError=inherit
"""


class Root:
    """A root directory of a system."""

    def __init__(self, directory, suite, include=JUDGES):
        self.path = directory / suite
        run("mmdebstrap", "--quiet", "--variant=minbase", *(f"--include={name}" for name in include), suite, self.path)
        # Nothing of this system runs, nor is anything of this host to be told.
        shutil.copy("/etc/resolv.conf", self.path / "etc/resolv.conf")

    def sh(self, line, fails=False, **variables):
        environment = {"PATH": "/usr/sbin:/usr/bin", "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        inside = ["unshare", "--mount", "--pid", "--fork", "--root", self.path, "--mount-proc", "sh", "-ec", line]
        return run(*inside, fails=fails, env={**environment, **variables})

    def bring(self, file):
        shutil.copy(file, self.path / "tmp")
        return f"/tmp/{file.name}"

    def files(self):
        found = set()
        for top, folders, files in os.walk(self.path):
            inside = "/" + os.path.relpath(top, self.path).removeprefix(".")
            here = {os.path.join(inside, name) for name in folders + files}
            found |= {name for name in here if not UNWATCHED.match(name)}
        return found

    def read(self, name):
        return (self.path / name.lstrip("/")).read_text()

    def append(self, name, text):
        with open(self.path / name.lstrip("/"), "a") as file:
            file.write(text)


def check_files(root, brought):
    for name in sorted(brought):
        shown = root.sh(f"stat --format '%a %U:%G %F' '{name}'").strip()
        mode, owner, kind = shown.split(" ", 2)
        is_program = "director" in kind or name.startswith(("/usr/bin/", "/usr/libexec/"))
        expected = SPECIAL.get(name, ("755" if is_program else "644", "root:root"))
        assert (mode, owner) == expected, f"{name}: {shown}"
    wanted = {"/usr/bin/cv", "/usr/libexec/cavern/hold-mount", "/usr/lib/sysctl.d/60-cavern.conf",
              "/usr/share/cavern/cluster.toml", "/usr/share/cavern/version", "/usr/share/doc/cavern/copyright",
              "/usr/share/doc/cavern/licences.gz",
              "/usr/share/doc/cavern/licences-of-rust.html.gz",
              "/usr/share/fish/vendor_completions.d/cv.fish", *SPECIAL,
              *(f"/usr/lib/systemd/system/{unit}" for unit in UNITS)}
    assert wanted <= brought, f"missing: {wanted - brought}"


def check_system(root):
    """What the package brings is what systemd, man and bash take, and nothing has been started or enabled."""
    assert os.readlink(root.path / "usr/sbin/mount.cavern") == "../bin/cv"
    version = root.sh("cv version").split()
    assert version[0] == "cv", version
    user = root.sh("getent passwd cavern").strip().split(":")
    assert user[5:] == ["/nonexistent", "/usr/sbin/nologin"], user
    units = " ".join(f"/usr/lib/systemd/system/{unit.replace('@', '@a-b')}" for unit in UNITS)
    root.sh("cp /usr/lib/systemd/system/cavern-fuse@.service /usr/lib/systemd/system/cavern-fuse@a-b.service")
    said = root.sh(f"systemd-analyze verify --man=no {units}; rm /usr/lib/systemd/system/cavern-fuse@a-b.service")
    assert "cavern" not in said, said
    states = [line.split()[:2] for line in root.sh("systemctl list-unit-files --no-legend 'cavern-*'").splitlines()]
    assert sorted(states) == sorted([unit, "disabled"] for unit in UNITS), states
    pages = sorted(root.path.glob("usr/share/man/man1/cv*.1.gz"))
    assert {"cv.1.gz", "cv-fuse-reload.1.gz"} <= {page.name for page in pages}, pages
    for page in pages:
        said = root.sh(f"man --warnings --local-file /usr/share/man/man1/{page.name} 2>&1 >/dev/null")
        assert said == "", f"{page.name}: {said}"
    root.sh("bash -c '. /usr/share/bash-completion/completions/cv && complete -p cv'")
    assert root.read("/usr/share/zsh/vendor-completions/_cv").startswith("#compdef cv\n")
    licences = root.sh("zcat /usr/share/doc/cavern/licences.gz")
    for bundled in ("The LevelDB Authors", "Yann Collet", "Microsoft Corporation, Daan Leijen"):
        assert bundled in licences, f"what is compiled in of {bundled} is without its licence"
    assert "GENERAL PUBLIC LICENSE" not in licences
    # No cluster of this host alone instead of the one that is meant.
    assert not (root.path / "etc/cavern/cluster.toml").exists()


def check_deb(root, deb, later, later_version):
    before = root.files()
    root.sh(f"apt-get update -qq && apt-get install -qq --no-install-recommends {root.bring(deb)}")
    brought = root.files() - before
    check_files(root, brought)
    check_system(root)
    shown = set(root.sh("dpkg-query --show --showformat='${Conffiles}' cavern").split()[::2])
    assert shown == CONFFILES, shown

    # An upgrade keeps what was changed, also where the file of the package has changed.
    root.append("/etc/cavern/master.env", "CV_LOG__LEVEL=debug\n")
    (root.path / "etc/cavern/cluster.toml").write_text("[cluster]\n")
    root.sh("systemctl enable cavern-worker cavern-fuse@a-b")
    root.sh(f"apt-get install -qq -o Dpkg::Options::=--force-confold {root.bring(later)}")
    assert root.sh("dpkg-query --show --showformat='${Version}' cavern") == later_version
    assert root.read("/etc/cavern/master.env").endswith("CV_LOG__LEVEL=debug\n")
    assert root.read("/etc/cavern/worker.env").endswith("# later\n"), "one that nobody has changed is replaced"
    assert root.read("/etc/cavern/cluster.toml") == "[cluster]\n"
    assert root.sh("systemctl is-enabled cavern-worker").strip() == "enabled"

    # The way back is refused, unless somebody knows what he does.
    install = f"dpkg --force-confold --install {root.bring(deb)}"
    refused = root.sh(install, fails=True)
    assert "CAVERN_DOWNGRADE=yes" in refused, refused
    assert root.sh("dpkg-query --show --showformat='${Version} ${Status}' cavern") == \
        f"{later_version} install ok installed"
    root.sh("dpkg --remove cavern")
    refused = root.sh(install, fails=True)
    assert "CAVERN_DOWNGRADE=yes" in refused, refused
    root.sh(install, CAVERN_DOWNGRADE="yes")

    # What was configured stays when the package goes, and what was stored in any case.
    root.sh("systemctl enable cavern-worker cavern-fuse@a-b")
    data = root.path / "var/lib/cavern/worker"
    data.mkdir(parents=True)
    (data / "block").write_text("kept")
    root.sh("apt-get remove -qq cavern")
    left = root.files() - before
    assert {name for name in left if not name.startswith(("/etc/", "/var/lib/cavern"))} == set(), left
    assert set(ENVIRONMENTS) <= left and not any(".wants/" in name for name in left), left
    said = root.sh("apt-get purge -qq cavern")
    assert "/etc/cavern /var/lib/cavern" in said, said
    assert (data / "block").read_text() == "kept" and not set(ENVIRONMENTS) & root.files()
    root.sh("getent passwd cavern")
    # And with nothing of anybody's, nothing is left.
    shutil.rmtree(root.path / "var/lib/cavern")
    (root.path / "etc/cavern/cluster.toml").unlink()
    root.sh(f"dpkg --install {root.bring(deb)} && dpkg --purge cavern")
    assert root.files() - before == set(), root.files() - before
    root.sh("getent passwd cavern", fails=True)


def boot(root, probe, later, *options):
    """Boots the system, until the probe shuts it down; gives what that has printed."""
    for name, text in [("probe", probe), ("etc/systemd/system/probe.service", PROBE_UNIT)]:
        (root.path / name).write_text(text)
        (root.path / name).chmod(0o755)
    # Not to /tmp, which is another one after a boot.
    shutil.copy(later, root.path / "later.deb")
    (root.path / "probe.out").unlink(missing_ok=True)
    root.sh("systemctl add-wants multi-user.target probe.service")
    nspawn = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot", *options, "--directory", root.path]
    run(*nspawn, timeout=180, stdin=subprocess.DEVNULL, env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"})
    return root.read("/probe.out")


def check_units(root, deb, later):
    """What becomes of `cv fuse`, and so of the mount, in the hands of systemd."""
    root.sh(f"dpkg --install {root.bring(deb)}")
    root.sh("dpkg-divert --local --rename --divert /usr/bin/cv.real --add /usr/bin/cv")
    (root.path / "usr/bin/cv").write_text(STAND_IN)
    (root.path / "usr/bin/cv").chmod(0o755)
    root.sh("mkdir -p /mnt/cavern")
    said = boot(root, PROBE, later)
    steps = {words[0]: words[1:] for words in map(str.split, said.splitlines()) if len(words) == 6}
    main, state, supervisor, reloads, worker = range(5)
    assert steps["refused"][:3] == ["0", "inactive", "gone"], said
    started, cv_fuse = steps["started"], steps["started"][supervisor]
    assert cv_fuse != "gone" and started[state] == "active", said
    for number, step in enumerate(["restarted", "killed", "upgraded"], 1):
        assert steps[step][state:worker] == ["active", cv_fuse, str(number)], f"{step}: {said}"
    assert steps["restarted"][main] not in ("0", started[main]), said
    assert steps["upgraded"][main] == steps["killed"][main], f"a mount is reloaded: {said}"
    assert steps["upgraded"][worker] not in ("0", started[worker]), f"a worker is restarted: {said}"
    assert steps["stopped"][:3] == ["0", "inactive", "gone"], said
    assert steps["again"][state] == "active" and steps["again"][supervisor] not in ("gone", cv_fuse), said
    assert steps["removed"] == ["0", "inactive", "gone", "3", "0"], said
    assert not list(root.path.glob("etc/systemd/system/*.wants/cavern-*")), said
    root.sh("rm /usr/bin/cv; dpkg-divert --local --rename --remove /usr/bin/cv; dpkg --purge cavern")


def check_fstab(root, deb, later):
    """A line of /etc/fstab: at boot, in the hands of systemd, and when the package is upgraded."""
    root.sh(f"dpkg --install {root.bring(deb)}")
    images = root.path / "srv/images"
    images.mkdir(parents=True)
    for name in ("one", "two"):
        (images / name).write_text(name)
    (root.path / "etc/fstab").write_text(FSTAB)
    generator = "/usr/lib/systemd/system-generators/systemd-fstab-generator"
    said = root.sh(f"mkdir /tmp/fstab && {generator} /tmp/fstab /tmp/fstab /tmp/fstab && cd /tmp/fstab && "
                   "systemd-analyze verify --man=no mnt-booted.mount mnt-asked.mount mnt-asked.automount")
    assert "mnt-" not in said, said
    said = boot(root, FSTAB_PROBE, later, "--bind=/dev/fuse", "--bind=/dev/autofs")
    steps = {words[0]: words[1:] for words in map(str.split, said.splitlines()) if words}
    for name in ("booted", "asked"):
        for step in ("begun", "restarted", "upgraded", "reloaded", "again"):
            state, content, processes = steps[f"{name}-{step}"]
            assert (state, content) == ("active", "one") and int(processes) > 0, f"{name}-{step}: {said}"
        # systemd hears of what others mount a moment later.
        assert steps[f"{name}-by-hand"][-2] == "one" and steps[f"{name}-by-hand"][-1] != "0", said
        assert steps[f"{name}-opened"] == ["two"], said
        for step in ("unmounted", "stopped"):
            assert steps[f"{name}-{step}"] == ["inactive", "-", "0"], f"{name}-{step}: {said}"
    root.sh("rm -r /srv/images /etc/fstab && dpkg --purge cavern")


def check_rpm(root, rpm):
    needs = run("rpm", "--query", "--package", "--requires", rpm).split("\n")
    versions = [tuple(map(int, found)) for need in needs for found in re.findall(r"GLIBC_(\d+)\.(\d+)", need)]
    assert versions and max(versions) <= GLIBC_MOST, needs
    assert not any("stdc++" in need for need in needs), needs
    configuration = run("rpm", "--query", "--package", "--configfiles", rpm).split()
    assert set(configuration) == set(ENVIRONMENTS), configuration
    before = root.files()
    # Its scripts run in the root directory; what it needs is there under other names.
    command = ["rpm", "--root", root.path, "--nodeps"]
    run(*command, "--install", rpm)
    root.sh("cv version && getent passwd cavern && test -e /usr/share/zsh/site-functions/_cv")
    for name, (mode, owner) in SPECIAL.items():
        assert root.sh(f"stat --format '%a %U:%G' {name}").strip() == f"{mode} {owner}", name
    # The way back is refused, unless somebody knows what he does.
    version = root.path / "usr/share/cavern/version"
    there = version.read_text()
    version.write_text(f"{there.strip()}.1\n")
    refused = run(*command, "--upgrade", "--force", rpm, fails=True)
    assert "CAVERN_DOWNGRADE=yes" in refused, refused
    assert version.read_text() != there, "nothing of it is installed"
    run(*command, "--upgrade", "--force", rpm, env={**os.environ, "CAVERN_DOWNGRADE": "yes"})
    assert version.read_text() == there
    run(*command, "--upgrade", "--force", rpm)
    run(*command, "--erase", "cavern")
    left = {name for name in root.files() - before if not name.startswith(("/var/lib/rpm", "/usr/lib/sysimage"))}
    assert not any("cavern" in name or name.endswith(("/cv", "/_cv")) for name in left), left


def check_image(archive, directory):
    layout, bundle = directory / "layout", directory / "bundle"
    layout.mkdir()
    run("tar", "--extract", "--file", archive, "--directory", layout)
    manifest = json.loads((layout / "index.json").read_text())["manifests"][0]
    # The name that podman gives it.
    tag = manifest["annotations"]["org.opencontainers.image.ref.name"]
    assert tag.startswith("cavern:"), tag
    run("umoci", "unpack", "--image", f"{layout}:{tag}", bundle)
    process = json.loads((bundle / "config.json").read_text())["process"]
    assert process["args"] == ["/usr/bin/cv", "--help"], process["args"]
    said = run("chroot", bundle / "rootfs", "/usr/bin/cv", "version")
    assert said.startswith("cv "), said
    for name in ("etc/ssl/certs/ca-certificates.crt", "usr/share/doc/cavern/licences.gz"):
        assert (bundle / "rootfs" / name).exists(), name
    run("chroot", bundle / "rootfs", "fusermount3", "--version")


def repack(deb, directory):
    """The same package as of a later version, one of whose configuration files is another."""
    tree = directory / "later"
    run("dpkg-deb", "--raw-extract", deb, tree)
    control = (tree / "DEBIAN/control").read_text()
    version = re.search(r"^Version: (.*)$", control, re.M)[1]
    later = version + "+later"
    (tree / "DEBIAN/control").write_text(control.replace(f"Version: {version}", f"Version: {later}"))
    for name in ("master", "worker"):
        with open(tree / f"etc/cavern/{name}.env", "a") as file:
            file.write("# later\n")
    run("dpkg-deb", "--root-owner-group", "--build", tree, directory / "later.deb")
    return directory / "later.deb", later


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the packages are")
    parser.add_argument("--suites", nargs="+", default=SUITES, help=f"of Debian; {' and '.join(SUITES)} by default")
    options = parser.parse_args()
    (deb,), (rpm,), (image,) = (sorted(options.dir.glob(pattern)) for pattern in ("*.deb", "*.rpm", "*.oci.tar"))
    run(REPOSITORY / "bin/setup", "--package")

    with tempfile.TemporaryDirectory(prefix="cavern-package-", dir="/var/tmp") as temporary:
        directory = Path(temporary)
        directory.chmod(0o755)
        run("dpkg-deb", "--extract", deb, directory / "tree")
        assert (directory / "tree/usr/bin/cv").stat().st_size <= BYTES_MOST
        later, version = repack(deb, directory)
        for suite in options.suites:
            root = Root(directory, suite)
            check_deb(root, deb, later, version)
            check_units(root, deb, later)
            check_fstab(root, deb, later)
            print(f"{suite}: {deb.name} is well", flush=True)
            check_rpm(root, rpm)
            print(f"{suite}: {rpm.name} is well", flush=True)
        check_image(image, directory)
        print(f"{image.name} is well", flush=True)


if __name__ == "__main__":
    sys.exit(main())
