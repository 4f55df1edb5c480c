#!/usr/bin/env python3
"""What boto3 can do with `cv dev-s3`. The store is named by S3_ENDPOINT, S3_ACCESS_KEY and S3_SECRET_KEY."""

import hashlib
import io
import os
import unittest
import urllib.error
import urllib.request

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError

MIB = 1 << 20
BUCKET = "boto3"


def connect(secret_key=os.environ["S3_SECRET_KEY"], **options):
    return boto3.client(
        "s3", endpoint_url=os.environ["S3_ENDPOINT"], region_name="us-east-1",
        aws_access_key_id=os.environ["S3_ACCESS_KEY"], aws_secret_access_key=secret_key,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}, **options))


class Boto3(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.s3 = connect()
        cls.s3.create_bucket(Bucket=BUCKET)

    def put(self, key, body, **options):
        return self.s3.put_object(Bucket=BUCKET, Key=key, Body=body, **options)

    def get(self, key, **options):
        return self.s3.get_object(Bucket=BUCKET, Key=key, **options)["Body"].read()

    def keys(self, prefix):
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def refused(self, status, code, call, **options):
        with self.assertRaises(ClientError) as caught:
            call(Bucket=BUCKET, **options)
        answer = caught.exception.response
        self.assertEqual((answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]), (status, code))

    def test_objects_are_put_read_described_and_deleted(self):
        body = os.urandom(100_000)
        etag = self.put("plain/object", body, ContentType="image/jpeg", Metadata={"origin": "camera"})["ETag"]
        self.assertEqual(etag, f'"{hashlib.md5(body).hexdigest()}"')
        head = self.s3.head_object(Bucket=BUCKET, Key="plain/object")
        self.assertEqual((head["ContentLength"], head["ETag"], head["ContentType"], head["Metadata"]),
                         (100_000, etag, "image/jpeg", {"origin": "camera"}))
        self.assertEqual(self.get("plain/object"), body)
        self.s3.delete_object(Bucket=BUCKET, Key="plain/object")
        self.refused(404, "NoSuchKey", self.s3.get_object, Key="plain/object")
        self.refused(404, "404", self.s3.head_object, Key="plain/object")
        # As on S3, what is not there can be deleted.
        self.s3.delete_object(Bucket=BUCKET, Key="plain/object")

    def test_keys_of_any_characters(self):
        keys = ["odd/ space", "odd/a+b&c=d", "odd/%41", "odd/é", "odd/日本", "odd/a//b", "odd/*'\"()!~"]
        for key in keys:
            self.put(key, key.encode())
        self.assertEqual(self.keys("odd/"), sorted(keys, key=str.encode))
        for key in keys:
            self.assertEqual(self.get(key), key.encode())

    def test_large_objects_go_up_in_parts(self):
        body = os.urandom(17 * MIB + 5)
        config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB, max_concurrency=4)
        self.s3.upload_fileobj(io.BytesIO(body), BUCKET, "parts/large", Config=config)
        head = self.s3.head_object(Bucket=BUCKET, Key="parts/large")
        digests = [hashlib.md5(body[start : start + 5 * MIB]).digest() for start in range(0, len(body), 5 * MIB)]
        self.assertEqual(head["ETag"], f'"{hashlib.md5(b"".join(digests)).hexdigest()}-4"')
        down = io.BytesIO()
        self.s3.download_fileobj(BUCKET, "parts/large", down, Config=config)
        self.assertEqual(down.getvalue(), body)

    def test_an_upload_can_be_looked_at_and_given_up(self):
        upload = self.s3.create_multipart_upload(Bucket=BUCKET, Key="parts/given-up")["UploadId"]
        here = {"Key": "parts/given-up", "UploadId": upload}
        part = self.s3.upload_part(Bucket=BUCKET, PartNumber=1, Body=b"x" * 5 * MIB, **here)
        parts = self.s3.list_parts(Bucket=BUCKET, **here)["Parts"]
        self.assertEqual([(one["PartNumber"], one["Size"], one["ETag"]) for one in parts], [(1, 5 * MIB, part["ETag"])])
        uploads = self.s3.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
        self.assertIn((upload, "parts/given-up"), [(one["UploadId"], one["Key"]) for one in uploads])
        self.refused(400, "InvalidPart", self.s3.complete_multipart_upload, **here,
                     MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": '"00"'}]})
        self.s3.abort_multipart_upload(Bucket=BUCKET, **here)
        self.refused(404, "NoSuchUpload", self.s3.list_parts, **here)
        self.assertEqual(self.keys("parts/given-up"), [])

    def test_ranges(self):
        self.put("range", b"0123456789")
        for asked, told, body in [("bytes=2-4", "bytes 2-4/10", b"234"), ("bytes=7-", "bytes 7-9/10", b"789"),
                                  ("bytes=-3", "bytes 7-9/10", b"789"), ("bytes=8-99", "bytes 8-9/10", b"89")]:
            answer = self.s3.get_object(Bucket=BUCKET, Key="range", Range=asked)
            status = answer["ResponseMetadata"]["HTTPStatusCode"]
            self.assertEqual((status, answer["ContentRange"], answer["Body"].read()), (206, told, body))
        self.refused(416, "InvalidRange", self.s3.get_object, Key="range", Range="bytes=10-")

    def test_conditions(self):
        etag = self.put("condition", b"1")["ETag"]
        modified = self.s3.head_object(Bucket=BUCKET, Key="condition")["LastModified"]
        self.assertEqual(self.get("condition", IfMatch=etag), b"1")
        self.assertEqual(self.get("condition", IfNoneMatch='"other"'), b"1")
        self.assertEqual(self.get("condition", IfUnmodifiedSince=modified), b"1")
        self.refused(412, "PreconditionFailed", self.s3.get_object, Key="condition", IfMatch='"other"')
        self.refused(304, "304", self.s3.get_object, Key="condition", IfNoneMatch=etag)
        self.refused(304, "304", self.s3.get_object, Key="condition", IfModifiedSince=modified)
        self.refused(412, "PreconditionFailed", self.s3.put_object, Key="condition", Body=b"2", IfNoneMatch="*")
        self.refused(412, "PreconditionFailed", self.s3.put_object, Key="condition", Body=b"2", IfMatch='"other"')
        self.put("condition", b"2", IfMatch=etag)
        self.assertEqual(self.get("condition"), b"2")

    def test_copies(self):
        self.put("copy/source é+", b"content", ContentType="text/plain", Metadata={"a": "1"})
        source = {"Bucket": BUCKET, "Key": "copy/source é+"}
        self.s3.copy_object(Bucket=BUCKET, Key="copy/kept", CopySource=source)
        head = self.s3.head_object(Bucket=BUCKET, Key="copy/kept")
        self.assertEqual((head["ContentType"], head["Metadata"]), ("text/plain", {"a": "1"}))
        self.s3.copy_object(Bucket=BUCKET, Key="copy/replaced", CopySource=source, MetadataDirective="REPLACE",
                            Metadata={"b": "2"})
        self.assertEqual(self.s3.head_object(Bucket=BUCKET, Key="copy/replaced")["Metadata"], {"b": "2"})
        self.assertEqual((self.get("copy/kept"), self.get("copy/replaced")), (b"content", b"content"))
        self.refused(404, "NoSuchKey", self.s3.copy_object, Key="copy/x", CopySource={"Bucket": BUCKET, "Key": "none"})

    def test_batches_are_deleted(self):
        keys = [f"batch/{number:04} &<" for number in range(1000)]
        for key in keys[:20]:
            self.put(key, b"")
        self.put("batch/stays", b"")
        answer = self.s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in keys]})
        self.assertEqual([one["Key"] for one in answer["Deleted"]], keys)
        self.assertNotIn("Errors", answer)
        self.assertEqual(self.keys("batch/"), ["batch/stays"])
        answer = self.s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": "batch/stays"}], "Quiet": True})
        self.assertNotIn("Deleted", answer)
        self.assertEqual(self.keys("batch/"), [])

    def test_listings(self):
        keys = [f"list/{folder}/{number}" for folder in "abc" for number in range(4)] + ["list/top"]
        for key in keys:
            self.put(key, key.encode())
        # By key, in pages.
        found, token = [], {}
        while True:
            page = self.s3.list_objects_v2(Bucket=BUCKET, Prefix="list/", MaxKeys=5, **token)
            self.assertEqual(page["KeyCount"], len(page["Contents"]))
            found += page["Contents"]
            if not page["IsTruncated"]:
                break
            self.assertEqual(len(page["Contents"]), 5)
            token = {"ContinuationToken": page["NextContinuationToken"]}
        self.assertEqual([entry["Key"] for entry in found], sorted(keys))
        for entry in found:
            etag = hashlib.md5(entry["Key"].encode()).hexdigest()
            self.assertEqual((entry["Size"], entry["ETag"]), (len(entry["Key"]), f'"{etag}"'))
        # By folder.
        page = self.s3.list_objects_v2(Bucket=BUCKET, Prefix="list/", Delimiter="/")
        self.assertEqual([one["Prefix"] for one in page["CommonPrefixes"]], ["list/a/", "list/b/", "list/c/"])
        self.assertEqual([entry["Key"] for entry in page["Contents"]], ["list/top"])
        # From somewhere.
        page = self.s3.list_objects_v2(Bucket=BUCKET, Prefix="list/", StartAfter="list/b/3")
        self.assertEqual([entry["Key"] for entry in page["Contents"]], [*keys[8:12], "list/top"])
        page = self.s3.list_objects_v2(Bucket=BUCKET, Prefix="list/", Delimiter="/", StartAfter="list/b/3")
        self.assertEqual([one["Prefix"] for one in page["CommonPrefixes"]], ["list/c/"])
        # The first version of the request.
        first = self.s3.list_objects(Bucket=BUCKET, Prefix="list/", MaxKeys=7)
        self.assertTrue(first["IsTruncated"])
        marker = first.get("NextMarker") or first["Contents"][-1]["Key"]
        rest = self.s3.list_objects(Bucket=BUCKET, Prefix="list/", Marker=marker)
        both = first["Contents"] + rest["Contents"]
        self.assertEqual([entry["Key"] for entry in both], sorted(keys))
        self.refused(400, "InvalidArgument", self.s3.list_objects_v2, ContinuationToken="nonsense")

    def test_presigned_addresses(self):
        s3 = connect(signature_version="s3v4")
        put = s3.generate_presigned_url("put_object", Params={"Bucket": BUCKET, "Key": "signed"}, ExpiresIn=60)
        request = urllib.request.Request(put, data=b"by address", method="PUT")
        with urllib.request.urlopen(request) as answer:
            self.assertEqual(answer.status, 200)
        get = s3.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "signed"}, ExpiresIn=60)
        # What boto3 makes unless told otherwise is signed in the older way.
        older = self.s3.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": "signed"}, ExpiresIn=60)
        for address in [get, older]:
            with urllib.request.urlopen(address) as answer:
                self.assertEqual(answer.read(), b"by address")
        other_signature = get[:-1] + ("1" if get[-1] == "0" else "0")
        for wrong in [get.replace("/signed?", "/range?"), get.split("?")[0], other_signature]:
            with self.assertRaises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(wrong)
            self.assertEqual(caught.exception.code, 403, wrong)
            caught.exception.close()

    def test_wrong_keys_are_refused(self):
        wrong = connect(secret_key="not-the-key")
        self.refused(403, "SignatureDoesNotMatch", wrong.list_objects_v2)
        self.refused(403, "SignatureDoesNotMatch", wrong.put_object, Key="intruder", Body=b"x")
        self.refused(403, "SignatureDoesNotMatch", wrong.delete_object, Key="range")
        self.assertEqual(self.keys("intruder"), [])

    def test_buckets(self):
        self.s3.create_bucket(Bucket="second")
        self.assertIn("second", [bucket["Name"] for bucket in self.s3.list_buckets()["Buckets"]])
        self.s3.head_bucket(Bucket="second")
        self.s3.put_object(Bucket="second", Key="k", Body=b"")
        with self.assertRaises(self.s3.exceptions.ClientError) as caught:
            self.s3.delete_bucket(Bucket="second")
        self.assertEqual(caught.exception.response["Error"]["Code"], "BucketNotEmpty")
        self.s3.delete_object(Bucket="second", Key="k")
        self.s3.delete_bucket(Bucket="second")
        with self.assertRaises(ClientError) as caught:
            self.s3.list_objects_v2(Bucket="second")
        self.assertEqual(caught.exception.response["Error"]["Code"], "NoSuchBucket")


if __name__ == "__main__":
    unittest.main(verbosity=2)
