"""Where cold copies may be said to be: a folder, or a place in S3; what is neither is refused and not made a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlqbatch.errors import SettingsError
from dlqbatch.settings import load
from dlqbatch.settings.store_options import Bucket

NOTHING = {"DLQBATCH_CONFIG": os.devnull}


def place(text: str) -> object:
    return load({"cold_storage": text}, NOTHING).cold_storage


@pytest.mark.parametrize(
    ("text", "found", "shown"),
    [
        ("s3://my-bucket", Bucket("my-bucket", ""), "s3://my-bucket"),
        ("s3://my-bucket/", Bucket("my-bucket", ""), "s3://my-bucket"),
        ("S3://my.bucket.7/a/b=c/", Bucket("my.bucket.7", "a/b=c"), "s3://my.bucket.7/a/b=c"),
        ("s3://abc/..a", Bucket("abc", "..a"), "s3://abc/..a"),
        ("/var/cold", Path("/var/cold"), "/var/cold"),
        ("s3", Path("s3"), "s3"),
    ],
)
def test_a_folder_or_a_bucket(text: str, found: object, shown: str) -> None:
    assert (place(text), str(place(text))) == (found, shown)


@pytest.mark.parametrize(
    "text",
    [
        "s3:bucket/cold",
        "s3:/bucket/cold",
        "gs://bucket/cold",
        "https://bucket.s3.amazonaws.com/cold",
        "s3://",
        "s3:///cold",
        "s3://ab",
        "s3://" + "a" * 64,
        "s3://Bucket",
        "s3://my_bucket",
        "s3://-bucket",
        "s3://bucket-",
        "s3://my..bucket",
        "s3://192.168.5.4/cold",
        "s3://key:S3CRET@bucket/cold",
        "s3://bucket:443/cold",
        "s3://bucket//cold",
        "s3://bucket/cold//",
        "s3://bucket/../cold",
        "s3://bucket/cold/.",
        "s3://bucket/cold?X-Amz-Signature=S3CRET",
        "s3://bucket/co ld",
        "s3://bucket/c\u00f6ld",
        "s3://bucket/co\nld",
        "s3://bucket/" + "a" * 501,
    ],
)
def test_what_is_neither_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(SettingsError) as refused:
        place(text)
    (problem,) = refused.value.problems
    assert problem.startswith("--cold-storage (command line) ")
    assert "s3://bucket/prefix" in problem or "prefix that is not taken" in problem
    assert "S3CRET" not in problem


@pytest.mark.parametrize(
    "key",
    [
        "1234abcd-12ab-34cd-56ef-1234567890ab",
        "mrk-1234abcd12ab34cd56ef1234567890ab",
        "alias/payments/cold",
        "arn:aws:kms:eu-central-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab",
        "arn:aws-cn:kms:cn-north-1:123456789012:alias/cold",
    ],
)
def test_the_key_of_a_bucket(key: str) -> None:
    assert load({"cold_storage": "s3://bucket", "cold_storage_key": key}, NOTHING).cold_storage_key == key


@pytest.mark.parametrize(
    ("where", "key", "said"),
    [
        ("s3://bucket", "my key", "is neither the id"),
        ("s3://bucket", "arn:aws:s3:::bucket", "is neither the id"),
        ("/var/cold", "alias/cold", "no s3://bucket"),
        ("", "alias/cold", "no s3://bucket"),
    ],
)
def test_a_key_that_encrypts_nothing_is_refused(where: str, key: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        load({"cold_storage": where or None, "cold_storage_key": key}, NOTHING)
    assert refused.value.problems[0].startswith("--cold-storage-key")
