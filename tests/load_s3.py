#!/usr/bin/env python3
"""Reads every object of a bucket with boto3, as an input pipeline without a mount does: the counterpart of
`load_img.py --raw`.

Lists the bucket, shuffles the keys (seed 42), lets a pool of processes get every object, and prints objects/s. The
credentials are those of the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY).
"""

import argparse
import multiprocessing
import random
import time

import boto3
from botocore.config import Config

SEED = 42
client = None


def connect(endpoint):
    global client
    config = Config(s3={"addressing_style": "path"}, response_checksum_validation="when_required")
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)


def ready(_):
    """Runs once or more in every process before the clock starts."""
    time.sleep(0.2)


def get(task):
    bucket, keys = task
    return sum(len(client.get_object(Bucket=bucket, Key=key)["Body"].read()) for key in keys)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint", help="as http://127.0.0.1:9000")
    parser.add_argument("bucket")
    parser.add_argument("--num_workers", type=int, default=8)
    options = parser.parse_args()
    connect(options.endpoint)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=options.bucket)
    keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
    random.Random(SEED).shuffle(keys)
    tasks = [(options.bucket, keys[start : start + 32]) for start in range(0, len(keys), 32)]
    with multiprocessing.Pool(options.num_workers, connect, (options.endpoint,)) as pool:
        pool.map(ready, range(options.num_workers * 2), chunksize=1)
        started = time.monotonic()
        size = sum(pool.imap_unordered(get, tasks))
        seconds = time.monotonic() - started
    print(f"{len(keys) / seconds:.0f} objects/s ({len(keys)} objects, {size / 1e6:.1f} MB in {seconds:.2f} s)")


if __name__ == "__main__":
    main()
