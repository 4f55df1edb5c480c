#!/usr/bin/env python3
"""Measures what a master with very many inodes does: an index of a huge bucket, a restart, a second and third master.

Needs the release build of `cv`, some 6 GB in `--dir`, and for ten million objects about ten minutes:

    tests/bench_scale.py --dir /data/bench                      # 10 million objects
    tests/bench_scale.py --dir /data/bench --objects 1000000

Starts a cluster of its own with one master, and an S3 endpoint that lists as many objects as one likes, and has none.
Shown is how fast they are indexed; how long a client waits that asks for something new when the master is killed and
started again; what the master's database and memory have come to; and, while two more masters get that state, the
longest wait of a client that asks for files that it does not know, and of one that makes files. The baseline of the
waits is the same load for as long before anything happens.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench import CV, run
from bench_masters import Group, Timed

FILES = 1000


def directory_of(number):
    return f"d{number:06d}/"


def file_of(number):
    return f"f{number:04d}"


class HugeBucket(BaseHTTPRequestHandler):
    """Answers LIST of `bucket` with directories of a thousand files each, and HEAD of the files in them."""

    protocol_version = "HTTP/1.1"
    directories = 0

    def do_GET(self):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query, keep_blank_values=True))
        if query.get("list-type") != "2":
            return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        self.answer(200, self.page(query).encode())

    def do_HEAD(self):
        key = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).removeprefix("/bucket").lstrip("/")
        directory, _, file = key.partition("/")
        found = not key or key == f"{directory}/{file}" and file[:1] == "f" and directory[:1] == "d"
        self.answer(200 if found else 404, b"")

    def page(self, query):
        prefix, most = query.get("prefix", ""), int(query.get("max-keys", 1000))
        after = max(query.get("continuation-token", ""), query.get("start-after", ""))
        objects, prefixes, last = [], [], after
        if query.get("delimiter") and not prefix:
            first = int(after[1:7]) + 1 if after else 0
            prefixes = [directory_of(number) for number in range(first, min(first + most, self.directories))]
            last = prefixes[-1] if prefixes else ""
            more = first + most < self.directories
        else:
            # One directory, or the rest of one and no more: a page may have fewer keys than were asked for.
            number = int(prefix[1:7]) if prefix else int(after[1:7]) if after else 0
            first = int(after[9:13]) + 1 if len(after) == 13 and after.startswith(directory_of(number)) else 0
            if first == FILES and not prefix:
                number, first = number + 1, 0
            if number < self.directories:
                until = min(first + most, FILES)
                objects = [f"{directory_of(number)}{file_of(file)}" for file in range(first, until)]
                last = objects[-1] if objects else ""
            more = bool(objects) and (until < FILES or not prefix and number + 1 < self.directories)
        contents = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{number:032x}&quot;</ETag><Size>{number + 1}</Size></Contents>"
            for number, key in enumerate(objects))
        common = "".join(f"<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>" for prefix in prefixes)
        token = f"<NextContinuationToken>{last}</NextContinuationToken>" if more else ""
        return (f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>bucket</Name><Prefix>{prefix}</Prefix>'
                f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}{common}</ListBucketResult>")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve(directories, port):
    HugeBucket.directories = directories
    server = ThreadingHTTPServer(("127.0.0.1", 0), HugeBucket)
    port.put(server.server_address[1])
    server.serve_forever()


class Looking:
    """A process that makes calls without a pause, and the longest of them."""

    def __init__(self, call):
        self.longest, self.calls = multiprocessing.Value("d", 0), multiprocessing.Value("q", 0)
        self.process = multiprocessing.Process(target=self.go_on, args=(call,), daemon=True)
        self.process.start()

    def go_on(self, call):
        timed = Timed(self.longest)
        for number in range(1 << 40):
            timed(call, number)
            self.calls.value += 1

    def begin(self):
        self.longest.value, self.calls.value = 0, 0

    def row(self, what, during):
        if not self.process.is_alive():
            sys.exit(f"the client that was to {what} got an error")
        print(f"| {what} | {during} | {self.calls.value:,} | {1000 * self.longest.value:.0f} |", flush=True)


def memory(group):
    pid = group.status()["masters"][0]["pid"]
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--objects", type=int, default=10_000_000)
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    directory = options.dir / "scale"
    port = multiprocessing.Queue()
    bucket = multiprocessing.Process(target=serve, args=(options.objects // FILES, port), daemon=True)
    bucket.start()
    try:
        measure(Group(directory, 1, '[ufs]\nendpoints = ["127.0.0.1"]\n'), port.get(), options.objects // FILES)
    finally:
        bucket.terminate()
        subprocess.run([CV, "local", "down", "--purge", "--dir", directory],
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        shutil.rmtree(options.dir / "seed", ignore_errors=True)


def measure(group, port, directories):
    begun = time.monotonic()
    group.cv("mount", "s3://bucket/", "/huge", "--write-type", "cache-mode", "--metadata-ttl", "1d",
             "--local", group.directory, "-c", f"s3.endpoint_url=http://127.0.0.1:{port}",
             "-c", "s3.region_name=us-east-1", "-c", "s3.credentials.access=a", "-c", "s3.credentials.secret=b")
    while True:
        mounts = json.loads(group.cv("mount", "--json", "--local", group.directory))
        status = next(mount["status"] for mount in mounts if mount["path"] == "/huge")
        if not status["indexing"]:
            break
        if status["last_error"]:
            sys.exit(f"the index does not end: {status}")
        time.sleep(0.5)
    entries, seconds = status["indexed_entries"], time.monotonic() - begun
    if entries < directories * FILES:
        sys.exit(f"{entries} entries are indexed, and there are {directories * FILES} objects: {status}")
    database = sum(file.stat().st_size for file in group.directory.glob("master*/**/*") if file.is_file())
    print(f"{entries:,} entries indexed in {seconds:.0f} s ({entries / seconds:,.0f}/s); the master's directory has "
          f"{database / 2**20:,.0f} MiB, its memory {memory(group):,.0f} MiB.")

    huge, files = group.mount.parent / "huge", group.mount
    numbers = random.Random(1)

    def look(_number=0):
        place = directory_of(numbers.randrange(directories)) + file_of(numbers.randrange(FILES))
        os.stat(huge / place)

    for _ in range(3):
        group.cv("local", "kill", "master0", "--dir", group.directory)
        begun = time.monotonic()
        start = subprocess.Popen([CV, "local", "start", "master0", "--dir", group.directory], stdout=subprocess.DEVNULL)
        look()
        waited = time.monotonic() - begun
        start.wait()
        print(f"Killed and started: a client's look at an unknown file returns after {waited:.2f} s, memory "
              f"{memory(group):,.0f} MiB.", flush=True)

    print("\n| a client | meanwhile | calls | longest, ms |\n|---|---|---:|---:|")

    def make(number):
        os.close(os.open(files / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    clients = {"looks at unknown files": Looking(look), "makes files": Looking(make)}

    def during(what, work):
        for client in clients.values():
            client.begin()
        work()
        for name, client in clients.items():
            client.row(name, what)

    during("nothing, for 20 s", lambda: time.sleep(20))
    during("a snapshot is made", lambda: group.cv("raft", "snapshot", "--local", group.directory))
    begun = time.monotonic()
    during("two masters join", lambda: group.cv("local", "up", "--dir", group.directory, "--masters", 3,
                                                "--timeout", 600))
    print(f"\nTwo masters have joined after {time.monotonic() - begun:.0f} s.")
    for client in clients.values():
        client.process.kill()


if __name__ == "__main__":
    main()
