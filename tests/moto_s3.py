#!/usr/bin/env python3
"""An object store that is not ours: the S3 of moto, over HTTP on a free port of the loopback interface.

    moto_s3.py BUCKET DIRECTORY

puts every file below DIRECTORY into a new BUCKET (in memory; past HTTP, which would take minutes), prints a line of
JSON with its endpoint, and serves until its stdin is closed. `GET /_requests` answers the requests so far by kind, as
the admin port of `cv dev-s3` names them, and `DELETE /_requests` forgets them. Requests must be signed, but any keys
are taken.
"""

import argparse
import json
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from urllib.parse import parse_qs

from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Handler(WSGIRequestHandler):
    # Connections stay open, as with any store.
    protocol_version = "HTTP/1.1"

    def log_request(self, *_):
        pass


class Counting:
    """Counts requests on their way to the application."""

    def __init__(self, application):
        self.application = application
        self.lock = threading.Lock()
        self.counts = Counter()

    def __call__(self, environ, start_response):
        if environ["PATH_INFO"] == "/_requests":
            with self.lock:
                answer = json.dumps(self.counts).encode()
                if environ["REQUEST_METHOD"] == "DELETE":
                    self.counts.clear()
            start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))])
            return [answer]
        with self.lock:
            self.counts[kind(environ)] += 1
        return self.application(environ, start_response)


def kind(environ):
    method = environ["REQUEST_METHOD"]
    bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
    query = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
    if key:
        return method
    if bucket and method == "GET" and not query.keys() & {"location", "uploads", "acl", "policy", "versioning"}:
        return "LIST"
    return "BUCKET"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bucket")
    parser.add_argument("directory", type=Path)
    options = parser.parse_args()
    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    backend.create_bucket(options.bucket, "us-east-1")
    for path in sorted(options.directory.rglob("*")):
        if path.is_file():
            backend.put_object(options.bucket, path.relative_to(options.directory).as_posix(), path.read_bytes())
    application = Counting(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"endpoint": f"http://127.0.0.1:{server.server_port}"}), flush=True)
    sys.stdin.read()
    # Whatever is being answered: nobody waits for it any more.
    os._exit(0)


if __name__ == "__main__":
    main()
