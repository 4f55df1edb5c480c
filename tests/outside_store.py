#!/usr/bin/env python3
"""An object store that is not ours, on a free port of the loopback interface, with one empty bucket in memory.

    outside_store.py azurite|fake-gcs-server BUCKET

prints its endpoint, and serves until stdin is closed. `bin/setup --stores` installs the stores.
"""

import base64
import email.utils
import hashlib
import hmac
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

STORES = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "cavern/stores")
# Azurite's account, which everybody knows.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
PATIENCE_S = 30


def azurite(port, _directory):
    program = os.path.join(STORES, "node_modules/.bin/azurite-blob")
    at = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    return [program, *at, "--inMemoryPersistence", "--skipApiVersionCheck", "--silent", "--disableTelemetry"]


def azurite_bucket(port, bucket):
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    path = f"/{ACCOUNT}/{bucket}"
    signed = "\n".join(["PUT", *[""] * 11, *(f"{name}:{headers[name]}" for name in sorted(headers))])
    signed += f"\n/{ACCOUNT}{path}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    headers["authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    return ask(port, "PUT", f"{path}?restype=container", headers, b"")


def fake_gcs_server(port, directory):
    at = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    return [os.path.join(STORES, "bin/fake-gcs-server"), *at, "-backend", "memory", "-data", directory]


def fake_gcs_server_bucket(port, bucket):
    headers = {"content-type": "application/json"}
    return ask(port, "POST", "/storage/v1/b", headers, json.dumps({"name": bucket}).encode())


def ask(port, method, path, headers, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


def main():
    store, bucket = sys.argv[1:]
    command, make = {
        "azurite": (azurite, azurite_bucket),
        "fake-gcs-server": (fake_gcs_server, fake_gcs_server_bucket),
    }[store]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        program = command(port, directory)
        if not os.path.exists(program[0]):
            sys.exit(f"{program[0]} is missing: run bin/setup --stores")
        process = subprocess.Popen(program, cwd=directory, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    status, answer = make(port, bucket)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"{store} does not answer at port {port}")
                    time.sleep(0.05)
            if status not in (200, 201):
                sys.exit(f"{store} makes no bucket: {status} {answer!r}")
            print(f"http://127.0.0.1:{port}", flush=True)
            sys.stdin.read()
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
