# shellcheck shell=sh disable=SC2317,SC2329
# What the packages do on a host beside putting files there: the functions of the scripts of the .deb and of the .rpm.

has_systemd() { [ -d /run/systemd/system ]; }

make_user() {
    getent group cavern >/dev/null || groupadd --system cavern
    getent passwd cavern >/dev/null || useradd --system --gid cavern --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin cavern
}

# Starts and enables nothing: that takes a configuration. In an upgrade, what runs goes on with the new executable. No
# mount is made anew for it: one that cannot go on with the new executable goes on with that from before.
after_install() { # yes|no: whether another version was there
    [ -e /etc/cavern/certificates ] || install -d -m 750 -g cavern /etc/cavern/certificates
    has_systemd || return 0
    systemctl daemon-reload
    /usr/lib/systemd/systemd-sysctl 60-cavern.conf || :
    [ "$1" = yes ] || return 0
    for unit in cavern-master.service cavern-worker.service 'cavern-fuse*.service'; do
        systemctl try-reload-or-restart "$unit" ||
            echo "cavern: $unit does not go on with this version: journalctl --unit '$unit' says why" >&2
    done
}

before_removal() {
    has_systemd || return 0
    for unit in 'cavern-fuse*.service' cavern-worker.service cavern-master.service; do
        systemctl stop "$unit"
    done
}

after_removal() {
    rm -f /etc/systemd/system/*.wants/cavern-master.service /etc/systemd/system/*.wants/cavern-worker.service \
        /etc/systemd/system/*.wants/cavern-fuse.service /etc/systemd/system/*.wants/cavern-fuse@*.service
    ! has_systemd || systemctl daemon-reload
}

# What the processes have stored is nobody's to delete with a package: it may be in no bucket.
after_purge() {
    rmdir /etc/cavern/certificates /etc/cavern /var/lib/cavern/master /var/lib/cavern/worker /var/lib/cavern \
        /var/log/cavern 2>/dev/null || :
    left=
    for directory in /etc/cavern /var/lib/cavern /var/log/cavern; do
        [ ! -e "$directory" ] || left="$left $directory"
    done
    if [ -n "$left" ]; then
        echo "cavern: not empty, and kept with the user cavern:$left" >&2
    elif getent passwd cavern >/dev/null; then
        # It fails, and says so, while a process is his.
        userdel cavern || :
    fi
}

# A master refuses to start with what a later version has written, so its program must not get the place of that.
refuse_downgrade() { # THERE THIS
    [ "${CAVERN_DOWNGRADE:-}" != yes ] && is_later "$1" "$2" || return 0
    echo "cavern: version $1 was installed here, and a master of $2 may not start with what it has written. Where" \
        "\`cv raft status\` shows no master, or a feature version that $2 has, set CAVERN_DOWNGRADE=yes." >&2
    return 1
}
