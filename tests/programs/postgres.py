"""PostgreSQL on a mount: killed under load, the client beneath it too; what it acknowledged is there, and adds up."""

import os
import pwd
import signal
import subprocess
from pathlib import Path

from cluster import Missing, assert_passable, run, until

USER = "postgres"
CLIENTS = 4
# A transaction adds the same to an account, its teller and its branch, and notes it in the history: the sums are equal.
SUMS = """
SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers),
       (SELECT sum(bbalance) FROM pgbench_branches), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)
"""


class Postgres:
    """A server of one database directory, run by the package's user; its socket and logs are on the local disk."""

    def __init__(self, data, local):
        self.data = data
        self.local = local
        self.server = None
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
        if not found:
            raise Missing("initdb is not installed: apt-get install postgresql")
        self.programs = found[-1].parent
        user = pwd.getpwnam(USER)
        self.user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": local}
        for folder in (data, local):
            os.chown(folder, user.pw_uid, user.pw_gid)
            folder.chmod(0o700)
            assert_passable(folder)

    def program(self, name, *arguments):
        return [str(part) for part in (self.programs / name, *arguments)]

    def run(self, name, *arguments):
        return run(*self.program(name, *arguments), **self.user)

    def query(self, text):
        return self.run("psql", "-h", self.local, "-XAtq", "-F", " ", "-v", "ON_ERROR_STOP=1", "-c", text, USER).split()

    def transactions(self):
        return int(self.query("SELECT count(*) FROM pgbench_history")[0])

    def start(self):
        log = open(self.local / "log", "a")
        # A session of its own: it is killed with all of its processes.
        self.server = subprocess.Popen(
            self.program("postgres", "-D", self.data, "-k", self.local, "-c", "listen_addresses="),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **self.user)
        until("the database answers", self.is_ready, 120)

    def is_ready(self):
        assert self.server.poll() is None, f"the database ended: {(self.local / 'log').read_text()[-3000:]}"
        return subprocess.run(self.program("pg_isready", "-q", "-h", self.local), **self.user).returncode == 0

    def kill(self):
        os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        # The postmaster is waited for; the others are gone when none of the group is left.
        until("all processes of the database are gone", lambda: not has_processes(self.server.pid))

    def stop(self):
        self.server.send_signal(signal.SIGINT)
        self.server.wait(60)

    def load(self, name, seconds):
        """Transactions of four clients; each that was acknowledged is a line of a log named so."""
        return subprocess.Popen(
            self.program("pgbench", "-h", self.local, "-n", "-c", CLIENTS, "-T", seconds, "-l", "--log-prefix",
                         self.local / name, USER),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **self.user)

    def acknowledged(self, name):
        return sum(log.read_text().count("\n") for log in self.local.glob(f"{name}.*"))


def has_processes(group):
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


def check(database, acknowledged):
    """The structures are whole, the sums agree, and nothing that was acknowledged is missing."""
    checks = ("--install-missing", "--heapallindexed", "--parent-check")
    database.run("pg_amcheck", "-h", database.local, "-d", USER, *checks)
    sums = database.query(SUMS)
    assert len(set(sums)) == 1, f"sums of accounts, tellers, branches and history differ: {sums}"
    rows = database.transactions()
    # Of each client and kill, one may be committed whose answer was not heard.
    assert acknowledged <= rows, f"{acknowledged - rows} of {acknowledged} acknowledged transactions are missing"
    return rows


def postgres(cluster):
    """Four clients for a minute, killed under load; then again, and the FUSE client beneath the database is killed."""
    seconds, scale = (4, 1) if cluster.quick else (60, 5)
    database = Postgres(cluster.folder("postgres"), cluster.local_folder("postgres"))
    database.run("initdb", "-D", database.data, "-A", "trust", "--no-locale", "-E", "UTF8")
    said = []
    try:
        database.start()
        database.run("pgbench", "-h", database.local, "-i", "-q", "-s", scale, USER)
        calm = database.load("calm", seconds)
        text, _ = calm.communicate(timeout=seconds + 120)
        assert calm.returncode == 0, text
        said.append(next(line for line in text.splitlines() if line.startswith("tps")).split()[2] + " tps")

        for what in ("database", "client"):
            # Until it is killed, and much longer than that takes.
            load = database.load(what, 3600)
            before = database.transactions()
            until("transactions are committed", lambda: database.transactions() >= before + 200)
            if what == "client":
                cluster.child("kill", "fuse0")
            database.kill()
            text, _ = load.communicate(timeout=60)
            assert load.returncode != 0, text
            if what == "client":
                cluster.child("start", "fuse0")
                until("the mount is back", cluster.mounts[0].is_dir)
            database.start()
            rows = check(database, sum(map(database.acknowledged, ("calm", "database", "client"))))
            said.append(f"{rows} transactions after the {what} was killed")
        database.stop()
    finally:
        if database.server and database.server.poll() is None:
            database.kill()
    return ", ".join(said)


RUNS = {"postgres": postgres}
