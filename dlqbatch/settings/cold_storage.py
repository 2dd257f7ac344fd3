"""Where cold copies are to be: a folder, or a place in S3; and the key that encrypts them there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dlqbatch.settings.values import place

_BUCKET: Final = re.compile(r"(?!.*\.\.)(?!\d+\.\d+\.\d+\.\d+$)[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
# S3 keeps what is longer than 1,024 bytes out, and a part's own name needs some.
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()=+,/-]{0,500}")
_KMS_KEY: Final = re.compile(r"(arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:(key|alias)/|alias/)?[A-Za-z0-9/_-]{1,256}")


@dataclass(frozen=True, slots=True)
class Bucket:
    """A place in S3; the prefix is empty, or it is between slashes and has none at its ends."""

    name: str
    prefix: str

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


def cold_place(value: object) -> object:
    """A folder, unless it looks like an address: a misspelt bucket must not become a folder of that name."""
    if isinstance(value, str) and ("://" in value or value.lower().startswith("s3:")):
        return bucket(value)
    return place(Path(value)) if isinstance(value, (str, Path)) else value


def bucket(address: str) -> Bucket:
    scheme, separator, rest = address.partition("://")
    if scheme.lower() != "s3" or not separator:
        raise ValueError("is neither the path of a folder nor an address like s3://bucket/prefix")
    name, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(name):
        raise ValueError(
            "names a bucket that cannot be: write s3://bucket/prefix, the bucket with 3 to 63 small letters, digits, "
            "dots and dashes, beginning and ending with a letter or digit; credentials do not go here"
        )
    prefix = prefix.removesuffix("/")
    steps = prefix.split("/") if prefix else []
    if not _PREFIX.fullmatch(prefix) or not {"", ".", ".."}.isdisjoint(steps):
        raise ValueError(
            "has a prefix that is not taken: at most 500 letters, digits or any of ! - _ . * ' ( ) = + , with single "
            "slashes between its steps, and neither . nor .. as a step"
        )
    return Bucket(name, prefix)


def kms_key(value: str) -> str:
    if not _KMS_KEY.fullmatch(value):
        raise ValueError("is neither the id, nor the ARN, nor the alias/NAME of a KMS key")
    return value
