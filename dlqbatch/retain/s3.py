"""Cold storage in S3: objects are whole, and never overwritten; only an erase deletes any.

A part is sent in one request, for which S3 allows 5 GiB: it has 32 MiB of rows, or a single larger row, and no database
takes a row of more than 1 GiB. S3 compares the content with the SHA-256 that is sent with it, and refuses a name that
is taken.
"""

from __future__ import annotations

import hashlib
import io
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http import HTTPStatus
from typing import Final, TypeVar

from dlqbatch.aws import client as aws
from dlqbatch.aws.client import AwsRefused
from dlqbatch.retain.format import ArchiveDamaged, ColdStorageFailed, steps_of
from dlqbatch.settings.store_options import Bucket

T = TypeVar("T")
_LIST, _PUT, _GET, _DELETE = "s3:ListBucket", "s3:PutObject", "s3:GetObject", "s3:DeleteObject"
_LIST_VERSIONS, _DELETE_VERSION = "s3:ListBucketVersions", "s3:DeleteObjectVersion"
# Seconds before each next try; None after the last one.
_PAUSES: Final = (0.2, 0.8, None)
_PIECE: Final = 64 * 1024
# A time-out ends silence; these two bound an answer that comes a few bytes at a time.
_LONGEST_SECONDS: Final = 60.0
_LEAST_PER_SECOND: Final = 128 * 1024
_DENIED: Final = frozenset({"AccessDenied", "AccessDeniedException", "KMS.AccessDeniedException", "Forbidden", "403"})
# boto3 tries again itself when there was no answer. It leaves to us a body that broke off or came wrong, and the
# conflict of two writers of one name.
_AGAIN: Final = frozenset({"ResponseStreamingError", "IncompleteReadError", "FlexibleChecksumError"})

_WORDS: Final = {
    "ResponseStreamingError": "the answer broke off",
    "IncompleteReadError": "the answer broke off",
    "HTTPClientError": "the connection broke off",
    "NoSuchBucket": "there is no such bucket; make it, or correct cold_storage",
    "PermanentRedirect": "the bucket is in another region; set AWS_REGION to that one",
    "AuthorizationHeaderMalformed": "the bucket is in another region; set AWS_REGION to that one",
    "IllegalLocationConstraintException": "the bucket is in another region; set AWS_REGION to that one",
    "InvalidObjectState": "it is in an archive of S3 that cannot be read at once; bring it back there first "
    "(aws s3api restore-object), and keep such lifecycle rules away from cold storage",
    "InvalidAccessKeyId": "AWS does not know this access key",
    "SignatureDoesNotMatch": "the secret access key is not that of the access key",
    "ExpiredToken": "the AWS credentials have expired",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "KMS.NotFoundException": "there is no such key; correct cold_storage_key, it has to be in the bucket's region",
    "KMS.DisabledException": "the key of cold_storage_key is disabled",
}


class ColdBucket:
    """Names are keys below a prefix, with `/` between their steps."""

    def __init__(self, bucket: str, prefix: str = "", kms_key: str | None = None) -> None:
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        self._where = str(Bucket(bucket, prefix))
        # Named even where it is the bucket's default, because some bucket policies demand it.
        self._encryption = (
            {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key}
            if kms_key
            else {"ServerSideEncryption": "AES256"}
        )
        self._s3 = aws.client("s3")

    def names(self) -> Iterator[str]:
        """The names of all objects, the oldest day first."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._root)
        with self._translated(_LIST):
            for page in pages:
                for each in page.get("Contents", ()):
                    name = str(each["Key"]).removeprefix(self._root)
                    # A console shows folders by empty objects that end in a slash. What a killed run began to write
                    # is a folder's, and came here by a copy of it.
                    if name and not name.endswith(("/", ".tmp")):
                        yield name

    def write(self, name: str, data: bytes) -> None:
        """Store an object; a name that is taken by anything but these very bytes is an error."""
        key, checksum = self._key(name), b64encode(hashlib.sha256(data).digest()).decode()
        try:
            self._persist(_PUT, lambda: self._put(key, data, checksum))
        except AwsRefused as refused:
            if refused.status != HTTPStatus.PRECONDITION_FAILED:
                raise self._failed(_PUT, refused, name) from None
            # boto3 sends a put whose answer was lost again, which then finds its own object.
            with self._translated(_GET, name):
                is_ours = self._holds(key, len(data), checksum)
            if not is_ours:
                raise ColdStorageFailed(self._where, f"{name} is there already, and nothing is overwritten") from None

    def read(self, name: str, most: int) -> bytes:
        """Read and compare the checksum; ArchiveDamaged if it is not there, too large, or not what S3 says it is."""
        key = self._key(name)
        with self._translated(_GET, name):
            return self._persist(_GET, lambda: self._get(name, key, most))

    def remove(self, name: str) -> str:
        """Delete an object with all its versions; what a bucket with versions keeps is named, with what to do about it.

        Of a bucket without versions nothing is left. An object lock keeps each version until its time is over.
        """
        key = self._key(name)
        with self._translated(_DELETE, name):
            answer = self._s3.delete_object(Bucket=self._bucket, Key=key)
        if not answer.get("DeleteMarker"):
            return ""
        of_key = f"--bucket {self._bucket} --key '{key}' --version-id"
        try:
            with aws.asking(_LIST_VERSIONS):
                versions = self._versions(key)
        except AwsRefused as refused:
            return (
                f"the bucket keeps old versions of {name}, which could not be listed ({_LIST_VERSIONS}: "
                f"{refused.why}): `aws s3api list-object-versions --bucket {self._bucket} --prefix '{key}'` shows "
                f"them, and `aws s3api delete-object {of_key} …` deletes each"
            )
        kept = [why for version in versions if (why := self._remove_version(key, version))]
        return "; ".join(
            f"the bucket keeps a version of {name} ({_DELETE_VERSION}: {why}): when its object lock is over, or with "
            f"that right, `aws s3api delete-object {of_key} {version}` deletes it"
            for version, why in kept
        )

    def _versions(self, key: str) -> list[str]:
        """Of this object, without the marks of its deletions."""
        pages = self._s3.get_paginator("list_object_versions").paginate(Bucket=self._bucket, Prefix=key)
        found = [each for page in pages for each in page.get("Versions", ())]
        return [str(each["VersionId"]) for each in found if each["Key"] == key]

    def _remove_version(self, key: str, version: str) -> tuple[str, str] | None:
        """The version and why it stays; None: it is deleted."""
        try:
            with aws.asking(_DELETE_VERSION):
                self._s3.delete_object(Bucket=self._bucket, Key=key, VersionId=version)
        except AwsRefused as refused:
            return version, refused.why
        return None

    def _put(self, key: str, data: bytes, checksum: str) -> None:
        self._s3.put_object(
            Bucket=self._bucket,
            Key=key,
            Body=io.BytesIO(data),  # a file is sent in pieces, each with its own time-out
            IfNoneMatch="*",
            ChecksumAlgorithm="SHA256",
            ChecksumSHA256=checksum,
            **self._encryption,
        )

    def _holds(self, key: str, size: int, checksum: str) -> bool:
        found = self._s3.head_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
        return (found.get("ContentLength"), found.get("ChecksumSHA256")) == (size, checksum)

    def _get(self, name: str, key: str, most: int) -> bytes:
        answer = self._s3.get_object(Bucket=self._bucket, Key=key, ChecksumMode="ENABLED")
        with closing(answer["Body"]) as body:
            size = answer.get("ContentLength", 0)
            if size > most:
                raise ArchiveDamaged(name, f"it has {size:,} bytes, which is too many")
            # A list of pieces would be joined into a second copy.
            found, taken = io.BytesIO(), 0
            seconds = _LONGEST_SECONDS + most / _LEAST_PER_SECOND
            ends = time.monotonic() + seconds
            # The checksum is compared by the read that finds the end.
            while piece := body.read(_PIECE):
                found.write(piece)
                taken += len(piece)
                if taken > most:
                    raise ArchiveDamaged(name, f"it has more than {most:,} bytes, which is too many")
                if time.monotonic() > ends:
                    why = f"{name}: it took more than {seconds:,.0f} s; the connection to S3 is too slow"
                    raise ColdStorageFailed(self._where, why)
        return found.getvalue()

    def _persist(self, action: str, call: Callable[[], T]) -> T:
        for pause in _PAUSES:
            try:
                with aws.asking(action):
                    return call()
            except AwsRefused as refused:
                if pause is None or not (refused.status == HTTPStatus.CONFLICT or refused.code in _AGAIN):
                    raise
                time.sleep(pause)
        raise AssertionError

    def _key(self, name: str) -> str:
        return self._root + "/".join(steps_of(name))

    @contextmanager
    def _translated(self, action: str, name: str = "") -> Iterator[None]:
        try:
            with aws.asking(action):
                yield
        except AwsRefused as refused:
            raise self._failed(action, refused, name) from None

    def _failed(self, action: str, refused: AwsRefused, name: str) -> ColdStorageFailed | ArchiveDamaged:
        if name and action == _GET:
            if refused.code == "NoSuchKey":
                return ArchiveDamaged(name, "it is not there")
            if refused.code == "FlexibleChecksumError":
                return ArchiveDamaged(name, "it is not what its checksum in S3 says")
        if refused.code in _DENIED:
            place = f"{self._where}/*, and the use of the key that encrypts it" if name else f"s3://{self._bucket}"
            why = f"access is denied; it needs {action} on {place}; AWS says: {refused.why}"
        else:
            why = _WORDS.get(refused.code, refused.why)
        return ColdStorageFailed(self._where, f"{f'{name}: ' if name else ''}{action}: {why} ({refused.code})")
