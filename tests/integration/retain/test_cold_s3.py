"""Cold copies in S3, over real HTTP: whole objects or none, never overwritten, and every failure in plain words."""

from __future__ import annotations

import hashlib
import os
import time
from base64 import b64encode
from contextlib import closing
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from program import HANGS_AFTER
from s3_link import LOSE, Answer, Asked, Link, refusal, s3_link

from dlqbatch.retain import s3 as cold_s3
from dlqbatch.retain.archive import survey
from dlqbatch.retain.folder import ColdFolder
from dlqbatch.retain.format import ArchiveDamaged, ColdStorageFailed
from dlqbatch.retain.s3 import ColdBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlqbatch.retain.archive import ColdStorage

BUCKET = "cold-copies"
REGION = "eu-central-1"
PLACE = {"LocationConstraint": REGION}
NAME = "2030/06/01/20300601T120000-ab12cd34.jsonl.gz"


@pytest.fixture(scope="module")
def owner(aws_server: str) -> Any:
    """Whom the bucket belongs to. Made once: a client of boto3 takes longer than most of these tests."""
    login = {"aws_access_key_id": "owner", "aws_secret_access_key": "owner"}
    return boto3.client("s3", region_name=REGION, endpoint_url=aws_server, **login)


@pytest.fixture
def s3(aws: dict[str, str], owner: Any) -> Any:
    owner.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=PLACE)
    return owner


@pytest.fixture
def cold(s3: Any) -> ColdBucket:
    return ColdBucket(BUCKET, "payments/cold")


@pytest.fixture
def link(s3: Any, aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    with s3_link(aws_server) as link:
        monkeypatch.setenv("AWS_ENDPOINT_URL", link.url)
        yield link


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between boto3's own tries."""
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=lambda _: None, time=time.time))


@pytest.fixture
def linked(link: Link, without_pauses: None, monkeypatch: pytest.MonkeyPatch) -> ColdBucket:
    monkeypatch.setattr(cold_s3, "_PAUSES", (0, 0, None))
    return ColdBucket(BUCKET, "payments/cold")


def keys(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())]


# --- What a folder does too


@pytest.fixture(params=["folder", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ColdStorage:
    return ColdFolder(tmp_path) if request.param == "folder" else request.getfixturevalue("cold")


@pytest.mark.parametrize("data", [b"", b"\0data", os.urandom(200_000)], ids=len)
def test_what_was_written_is_read_again(storage: ColdStorage, data: bytes) -> None:
    storage.write(NAME, data)
    assert storage.read(NAME, len(data)) == data
    assert list(storage.names()) == [NAME]


def test_days_are_listed_in_order_and_nothing_is_listed_where_nothing_is(storage: ColdStorage) -> None:
    assert list(storage.names()) == []
    names = ["2030/06/01/a", "2030/06/01/b", "2030/06/02/a", "2031/01/01/a"]
    for name in reversed(names):
        storage.write(name, b"x")
    assert list(storage.names()) == names


def test_nothing_is_ever_overwritten(storage: ColdStorage) -> None:
    storage.write(NAME, b"first")
    for other in (b"other", b"longer"):
        with pytest.raises(ColdStorageFailed, match="nothing is overwritten"):
            storage.write(NAME, other)
    assert storage.read(NAME, 99) == b"first"
    assert list(storage.names()) == [NAME]


def test_a_file_that_is_missing_or_too_large_is_damage(storage: ColdStorage) -> None:
    storage.write(NAME, b"12345")
    with pytest.raises(ArchiveDamaged, match="5 bytes"):
        storage.read(NAME, 4)
    with pytest.raises(ArchiveDamaged, match="not there"):
        storage.read("2030/06/01/other", 99)


@pytest.mark.parametrize("name", ["../x", "2030/../../x", "/etc/passwd", "2030//x", "./x", "", "2030/\0/x"])
def test_no_name_leads_out_of_it(storage: ColdStorage, name: str) -> None:
    for use in (lambda: storage.read(name, 99), lambda: storage.write(name, b"y")):
        with pytest.raises(ArchiveDamaged, match="leads out"):
            use()
    assert list(storage.names()) == []


# --- What only S3 has


def test_only_what_is_below_the_prefix_is_listed_and_no_folder_of_a_console(cold: ColdBucket, s3: Any) -> None:
    for key in ("payments/cold/", "payments/cold/2030/", "payments/colder/x", "payments/cold.txt", "other"):
        s3.put_object(Bucket=BUCKET, Key=key, Body=b"")
    cold.write(NAME, b"x")
    assert list(cold.names()) == [NAME]
    assert f"payments/cold/{NAME}" in keys(s3)
    assert set(ColdBucket(BUCKET).names()) == {*keys(s3)} - {"payments/cold/", "payments/cold/2030/"}


def test_more_than_a_thousand_objects_are_listed_page_by_page(linked: ColdBucket, link: Link, s3: Any) -> None:
    names = [f"2030/{month:02}/01/2030{month:02}01T120000-{n:08x}" for month in range(1, 12) for n in range(50)]
    files = [name + ending for name in names for ending in (".jsonl.gz", ".manifest.json")]
    # Without boto3, which takes longer over it than all the rest of this file.
    with closing(HTTPConnection(link.target.removeprefix("http://"), timeout=HANGS_AFTER)) as connection:
        for name in files:
            connection.request("PUT", f"/{BUCKET}/payments/cold/{name}", b"{")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"")
    assert list(linked.names()) == sorted(files)
    assert (len(files), len(link.asked)) == (1_100, 2)


def test_a_put_is_encrypted_has_its_checksum_and_refuses_a_name_that_is_taken(
    linked: ColdBucket, link: Link, s3: Any
) -> None:
    linked.write(NAME, b"data")
    checksum = b64encode(hashlib.sha256(b"data").digest()).decode()
    (asked,) = link.asked
    assert (asked.method, asked.path.partition("?")[0]) == ("PUT", f"/{BUCKET}/payments/cold/{NAME}")
    wanted = {
        "if-none-match": "*",
        "x-amz-checksum-sha256": checksum,
        "x-amz-sdk-checksum-algorithm": "SHA256",
        "x-amz-server-side-encryption": "AES256",
        "content-length": "4",
    }
    assert {name: asked.headers[name] for name in wanted} == wanted
    stored = s3.head_object(Bucket=BUCKET, Key=f"payments/cold/{NAME}", ChecksumMode="ENABLED")
    assert (stored["ServerSideEncryption"], stored["ChecksumSHA256"]) == ("AES256", checksum)
    linked.read(NAME, 4)
    assert link.asked[-1].headers["x-amz-checksum-mode"] == "ENABLED"


def test_a_key_of_ones_own_encrypts(s3: Any) -> None:
    key = boto3.client("kms").create_key()["KeyMetadata"]["Arn"]
    ColdBucket(BUCKET, "", key).write(NAME, b"data")
    stored = s3.head_object(Bucket=BUCKET, Key=NAME)
    assert (stored["ServerSideEncryption"], stored["SSEKMSKeyId"]) == ("aws:kms", key)


def test_a_bucket_whose_objects_are_locked_takes_them(s3: Any) -> None:
    s3.create_bucket(Bucket="locked", CreateBucketConfiguration=PLACE, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    s3.put_object_lock_configuration(
        Bucket="locked", ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    cold = ColdBucket("locked")
    cold.write(NAME, b"data")
    assert cold.read(NAME, 4) == b"data"


def test_an_object_is_deleted_by_a_removal_and_what_a_folder_had_only_begun_is_not_listed(
    linked: ColdBucket, link: Link, s3: Any
) -> None:
    begun = "2020/01/01/.part.jsonl.gz.ab12cd34.tmp"
    s3.put_object(Bucket=BUCKET, Key=f"payments/cold/{begun}", Body=b"x")
    linked.write(NAME, b"data")
    assert list(linked.names()) == [NAME]
    assert linked.remove(NAME) == linked.remove(NAME) == ""
    assert list(linked.names()) == []
    assert keys(s3) == [f"payments/cold/{begun}"]
    link.meddle = lambda asked: refusal(403, "AccessDenied") if asked.method == "DELETE" else None
    with pytest.raises(ColdStorageFailed, match="it needs s3:DeleteObject on s3://cold-copies/payments/cold/"):
        linked.remove(NAME)


# --- What goes wrong on the way


def once(*answers: object, method: str = "PUT") -> Callable[[Asked], object]:
    """These for the first requests; then everything goes on."""
    left = list(answers)
    return lambda asked: left.pop(0) if left and asked.method == method else None


def test_a_put_whose_answer_was_lost_is_not_taken_for_somebody_elses(linked: ColdBucket, link: Link, s3: Any) -> None:
    link.meddle = once(LOSE)
    linked.write(NAME, b"data")
    assert [each.method for each in link.asked] == ["PUT", "PUT", "HEAD"]
    assert linked.read(NAME, 4) == b"data"
    assert len(keys(s3)) == 1


def test_a_lost_answer_does_not_hide_that_somebody_else_was_faster(linked: ColdBucket, link: Link, s3: Any) -> None:
    def another_first(asked: Asked) -> object:
        if len(link.of("PUT")) > 1:
            return None
        s3.put_object(Bucket=BUCKET, Key=f"payments/cold/{NAME}", Body=b"DATA", ChecksumAlgorithm="SHA256")
        return LOSE if asked.method == "PUT" else None

    link.meddle = another_first
    with pytest.raises(ColdStorageFailed, match="nothing is overwritten"):
        linked.write(NAME, b"data")
    assert linked.read(NAME, 4) == b"DATA"


def test_what_was_not_written_with_a_checksum_is_nobodys_own(linked: ColdBucket, s3: Any, link: Link) -> None:
    s3.put_object(Bucket=BUCKET, Key=f"payments/cold/{NAME}", Body=b"data", ChecksumAlgorithm="CRC32")
    with pytest.raises(ColdStorageFailed, match="nothing is overwritten"):
        linked.write(NAME, b"data")


@pytest.mark.parametrize("conflicts", [2, 9])
def test_two_writers_at_once_are_asked_to_try_again_and_not_for_ever(
    linked: ColdBucket, link: Link, conflicts: int
) -> None:
    link.meddle = once(*[refusal(409, "ConditionalRequestConflict")] * conflicts)
    if conflicts == 2:
        linked.write(NAME, b"data")
        assert linked.read(NAME, 4) == b"data"
    else:
        with pytest.raises(ColdStorageFailed, match="ConditionalRequestConflict"):
            linked.write(NAME, b"data")
    assert len(link.of("PUT")) == 3


def cut(answer: Answer) -> Answer:
    return answer._replace(sent=2)


def changed(answer: Answer) -> Answer:
    return answer._replace(body=b"DATA")


@pytest.mark.parametrize("harm", [cut, changed])
def test_a_body_that_comes_broken_is_asked_for_again(linked: ColdBucket, link: Link, harm: object) -> None:
    linked.write(NAME, b"data")
    link.meddle = once(harm, method="GET")
    assert linked.read(NAME, 4) == b"data"
    assert len(link.of("GET")) == 2


def test_what_is_not_what_its_checksum_says_is_damage(linked: ColdBucket, link: Link) -> None:
    linked.write(NAME, b"data")
    link.meddle = once(changed, changed, changed, method="GET")
    with pytest.raises(ArchiveDamaged, match="not what its checksum in S3 says"):
        linked.read(NAME, 4)


def test_a_body_that_always_breaks_off_is_no_damage(linked: ColdBucket, link: Link) -> None:
    linked.write(NAME, b"data")
    link.meddle = once(cut, cut, cut, method="GET")
    with pytest.raises(ColdStorageFailed, match="broke off"):
        linked.read(NAME, 4)


def test_a_body_without_an_end_is_not_taken_into_memory(linked: ColdBucket, link: Link) -> None:
    linked.write(NAME, b"data")
    chunked = Answer(200, b"40000\r\n" + b"x" * 0x40000 + b"\r\n0\r\n\r\n", {"Transfer-Encoding": "chunked"})
    link.meddle = once(chunked, method="GET")
    with pytest.raises(ArchiveDamaged, match="too many"):
        linked.read(NAME, 100_000)


def test_an_answer_that_comes_too_slowly_is_given_up(
    linked: ColdBucket, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked.write(NAME, b"data")
    monkeypatch.setattr(cold_s3, "_LONGEST_SECONDS", -1.0)
    with pytest.raises(ColdStorageFailed, match="too slow"):
        linked.read(NAME, 4)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (refusal(403, "AccessDenied"), "{permission} on {place}"),
        (refusal(403, "KMS.AccessDeniedException"), "access is denied"),
        (refusal(403, "InvalidAccessKeyId"), "does not know this access key"),
        (refusal(403, "SignatureDoesNotMatch"), "secret access key is not that"),
        (refusal(400, "ExpiredToken"), "have expired"),
        (refusal(403, "RequestTimeTooSkewed"), "clock"),
        (refusal(400, "AuthorizationHeaderMalformed"), "set AWS_REGION"),
        (refusal(400, "KMS.NotFoundException"), "cold_storage_key"),
        (refusal(404, "NoSuchBucket"), "no such bucket"),
        (refusal(403, "InvalidObjectState"), "restore-object"),
        (refusal(503, "SlowDown", "Please reduce your request rate."), "SlowDown"),
        (Answer(500, b"not XML"), "cannot be used"),
    ],
    ids=lambda each: each[:20] if isinstance(each, str) else each.status,
)
def test_what_s3_refuses_is_said_in_words_with_the_permission_that_is_needed(
    linked: ColdBucket, link: Link, answer: Answer, said: str
) -> None:
    link.meddle = lambda _: answer
    uses: list[tuple[str, str, Callable[[], object]]] = [
        ("s3:ListBucket", "s3://cold-copies", lambda: list(linked.names())),
        ("s3:PutObject", "s3://cold-copies/payments/cold/*", lambda: linked.write(NAME, b"x")),
        ("s3:GetObject", "s3://cold-copies/payments/cold/*", lambda: linked.read(NAME, 9)),
    ]
    for permission, place, use in uses:
        with pytest.raises(ColdStorageFailed) as failed:
            use()
        assert said.format(permission=permission, place=place) in str(failed.value)
        assert "s3://cold-copies/payments/cold cannot be used" in str(failed.value)
        assert permission in str(failed.value)


def test_a_bucket_that_is_not_there_is_named(s3: Any) -> None:
    missing = ColdBucket("missing", "cold")
    for use in (lambda: list(missing.names()), lambda: missing.write(NAME, b"x"), lambda: missing.read(NAME, 9)):
        with pytest.raises(ColdStorageFailed, match=r"s3://missing/cold.*no such bucket"):
            use()


def test_no_secret_is_in_an_error(aws: dict[str, str], without_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S3CRET")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:S3CRET@127.0.0.1:1")
    with pytest.raises(ColdStorageFailed) as failed:
        ColdBucket(BUCKET).write(NAME, b"x")
    assert "no connection" in str(failed.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(ColdStorageFailed, match="no AWS credentials") as without:
        ColdBucket(BUCKET).write(NAME, b"x")
    assert "S3CRET" not in f"{failed.value!r}{without.value!r}"


def test_a_survey_reads_what_is_there_and_names_what_is_damaged(cold: ColdBucket) -> None:
    cold.write(NAME.replace(".jsonl.gz", ".manifest.json"), b"{")
    (damage,) = survey(cold).damaged
    assert "not JSON" in str(damage)
