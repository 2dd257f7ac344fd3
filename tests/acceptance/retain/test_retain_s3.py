"""`dlqbatch retain` and `dlqbatch archive` on S3, in processes of their own, on both databases."""

from __future__ import annotations

import base64
import json
import re
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import boto3
import pytest
from dead_rows import add, row, store_at
from program import HANDLER, HANGS_AFTER, ROOT, Finished, Program
from s3_link import refusal, s3_link
from sqlalchemy import select, update

from dlqbatch.store.engine import reading, writing
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
BUCKET = "cold-copies"
PREFIX = "payments/cold"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def s3(aws: dict[str, str]) -> Any:
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": aws["AWS_DEFAULT_REGION"]})
    return client


@pytest.fixture
def installed(url: str, s3: Any) -> Program:
    return Program({"database_url": url, "cold_storage": f"s3://{BUCKET}/{PREFIX}"})


def old(engine: Engine, status: str, *rows: dict[str, object]) -> list[int]:
    ids = add(engine, *rows, at=LONG_AGO)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(ids)).values(status=status))
    return ids


def statuses(engine: Engine) -> dict[int, str]:
    with reading(engine) as connection:
        return {each.id: each.status.value for each in connection.execute(select(MESSAGES.c.id, MESSAGES.c.status))}


def objects(s3: Any) -> dict[str, bytes]:
    found = s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    return {each["Key"]: s3.get_object(Bucket=BUCKET, Key=each["Key"])["Body"].read() for each in found}


def archive(installed: Program, *arguments: str) -> Finished:
    return installed.run("archive", *arguments, "--json")


def test_what_goes_to_s3_is_listed_verified_shown_and_comes_back(engine: Engine, installed: Program, s3: Any) -> None:
    body = b'{"order": 7}\0\xff'
    failed, wanted = old(engine, "failed", row(body=body)), row(body=body, identity="wanted")
    archived = old(engine, "archived", row(), wanted)
    old(engine, "resolved", row())
    (waiting,) = add(engine, row())

    nothing = archive(installed, "list")
    assert (nothing.code, nothing.told["parts"]) == (1, [])
    planned = installed.run("retain", "--dry-run", "--json")
    assert (planned.code, planned.told["counts"]["archived"], planned.told["counts"]["deleted"]) == (0, 1, 3)
    assert objects(s3) == {}

    done = installed.run("retain", "--json")
    assert done.code == 0, done.said
    assert done.told["counts"] == {"got": 4, "archived": 1, "deleted": 3, "skipped": 0, "left": 0}
    assert statuses(engine) == {failed[0]: "archived", waiting: "pending"}

    stored = objects(s3)
    manifests = [json.loads(data) for key, data in stored.items() if key.endswith(".manifest.json")]
    day = f"{datetime.now(UTC):%Y/%m/%d}"
    assert {key.rpartition("/")[0] for key in stored} == {f"{PREFIX}/{day}"}
    assert (len(stored), sorted(each["count"] for each in manifests)) == (4, [1, 2])
    for key in stored:
        head = s3.head_object(Bucket=BUCKET, Key=key, ChecksumMode="ENABLED")
        assert (head["ServerSideEncryption"], "ChecksumSHA256" in head) == ("AES256", True)

    listed = archive(installed, "list", "--verify")
    assert listed.code == 0, listed.said
    assert [part["state"] for part in listed.told["parts"]] == ["verified"] * 2
    shown = archive(installed, "show", str(archived[1]))
    assert shown.code == 0, shown.said
    assert (base64.b64decode(shown.told["body_base64"]), shown.told["identity"]) == (body, "wanted")
    back = archive(installed, "restore", "wanted", "--reason", "the customer asks")
    assert back.code == 0, back.said
    (change,) = back.told["messages"]
    assert statuses(engine)[change["id"]] == "manual"
    again = installed.run("messages", "show", str(change["id"]), "--json").told
    assert (base64.b64decode(again["body_base64"]), again["identity"]) == (body, "wanted")
    assert objects(s3) == stored


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_a_tampered_copy_is_found_and_nothing_is_deleted_on_its_word(
    engine: Engine, installed: Program, s3: Any
) -> None:
    (row_id,) = old(engine, "failed", row(identity="wanted"))
    assert installed.run("retain", "--json").told["counts"]["archived"] == 1
    (data,) = [key for key in objects(s3) if key.endswith(".jsonl.gz")]
    whole = objects(s3)[data]
    # Whoever overwrites an object gets a new checksum from S3: only the manifest knows the old one.
    s3.put_object(Bucket=BUCKET, Key=data, Body=whole[:30] + b"\0\0\0" + whole[33:], ChecksumAlgorithm="SHA256")

    part = data.removeprefix(f"{PREFIX}/").removesuffix(".jsonl.gz")
    listed = archive(installed, "list", "--verify")
    assert (listed.code, [each["part"] for each in listed.told["damaged"]]) == (3, [part]), listed.said
    shown = archive(installed, "show", "wanted")
    assert (shown.code, "is damaged" in shown.err) == (1, True), shown.said
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).values(status_since=LONG_AGO))
    done = installed.run("retain", "--json")
    assert (done.code, done.told["reasons"]) == (3, {"cold-copy-damaged": 1}), done.said
    assert statuses(engine) == {row_id: "archived"}
    assert installed.run("retain", "--json").told["counts"]["deleted"] == 1
    assert archive(installed, "show", "wanted").code == 0


def documented_policy(bucket: str, prefix: str) -> Any:
    """What docs/retention.md grants, for this bucket; without its conditions, which moto cannot evaluate."""
    text = (ROOT / "docs" / "retention.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    policy = json.loads(block.replace("my-cold-copies", bucket).replace("payments/*", f"{prefix}/*"))
    for statement in policy["Statement"]:
        del statement["Condition"]
    return policy


def test_the_permissions_in_the_docs_are_enough_and_a_missing_one_is_named(
    sqlite_url: str, s3: Any, aws_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = store_at(sqlite_url)
    installed = Program({"database_url": sqlite_url, "cold_storage": f"s3://{BUCKET}/{PREFIX}"})
    (row_id,) = old(engine, "failed", row(identity="wanted"))
    policy = documented_policy(BUCKET, PREFIX)
    iam = boto3.client("iam")
    iam.create_user(UserName="dlqbatch")
    key = iam.create_access_key(UserName="dlqbatch")["AccessKey"]

    def grant(*actions: str) -> None:
        for statement in policy["Statement"]:
            statement["Action"] = [one for one in actions if one in statement["Action"]] or ["s3:GetBucketLocation"]
        iam.put_user_policy(UserName="dlqbatch", PolicyName="cold", PolicyDocument=json.dumps(policy))

    def check_permissions(after: str) -> None:
        """After so many requests."""
        plain = {"Content-Type": "text/plain"}
        with urlopen(Request(f"{aws_server}/moto-api/reset-auth", after.encode(), plain), timeout=HANGS_AFTER):
            pass

    allowed = ["s3:ListBucket", "s3:GetObject", "s3:PutObject"]
    assert sorted(one for each in policy["Statement"] for one in [*_listed(each["Action"])]) == sorted(allowed)
    whole = json.dumps(policy)
    try:
        for missing in allowed:
            policy = json.loads(whole)
            check_permissions("inf")
            grant(*(one for one in allowed if one != missing))
            check_permissions("0")
            with monkeypatch.context() as patched:
                _log_in(patched, key)
                done = installed.run("retain", "--json")
            assert (done.code, statuses(engine)) == (3, {row_id: "failed"}), done.said
            assert f"access is denied; it needs {missing} on s3://{BUCKET}" in done.told["warnings"][0]
            assert key["SecretAccessKey"] not in done.said
        policy = json.loads(whole)
        check_permissions("inf")
        grant(*allowed)
        check_permissions("0")
        with monkeypatch.context() as patched:
            _log_in(patched, key)
            assert installed.run("retain", "--json").told["counts"]["archived"] == 1
    finally:
        check_permissions("inf")


def _listed(action: str | list[str]) -> list[str]:
    return [action] if isinstance(action, str) else action


def _log_in(patched: pytest.MonkeyPatch, key: dict[str, str]) -> None:
    patched.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    patched.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])


@pytest.mark.slow
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_without_s3_nothing_that_needs_a_copy_is_touched_and_the_run_says_so(
    engine: Engine, installed: Program, s3: Any, aws_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {old(engine, status, row())[0]: status for status in ("failed", "archived")}
    gone = old(engine, "resolved", row())

    def fails(said: str, store: Program = installed) -> None:
        done = store.run("retain", "--json")
        assert (done.code, done.told["outcome"]) == (3, "partial"), done.said
        assert said in done.told["warnings"][0], done.told["warnings"]
        assert statuses(engine) == kept
        assert "testing" not in done.said

    missing = installed.but(cold_storage="s3://missing/cold")
    fails("no such bucket", missing)
    listed = archive(missing, "list")
    assert (listed.code, "no such bucket" in listed.err) == (1, True), listed.said
    assert set(gone).isdisjoint(statuses(engine))
    with s3_link(aws_server) as link:
        monkeypatch.setenv("AWS_ENDPOINT_URL", link.url)
        link.meddle = lambda _: refusal(503, "SlowDown", "Please reduce your request rate.")
        fails("SlowDown")
        link.meddle = lambda asked: refusal(403, "AccessDenied") if asked.method == "PUT" else None
        done = installed.run("retain", "--json")
        assert (done.code, done.told["reasons"], statuses(engine)) == (3, {"not-copied": 1}, kept), done.said
        assert f"s3:PutObject on s3://{BUCKET}/{PREFIX}/*" in done.told["warnings"][0]
    fails("no connection")
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws_server)
    assert objects(s3) == {}
    assert installed.run("retain", "--json").code == 0


def test_what_a_folder_held_can_be_moved_to_s3(sqlite_url: str, s3: Any, tmp_path: Path) -> None:
    engine = store_at(sqlite_url)
    old(engine, "failed", row(identity="wanted"))
    folder = tmp_path / "cold"
    installed = Program({"database_url": sqlite_url, "cold_storage": str(folder)})
    assert installed.run("retain", "--json").told["counts"]["archived"] == 1
    for path in folder.rglob("*.*"):
        s3.upload_file(str(path), BUCKET, f"{PREFIX}/{path.relative_to(folder)}")
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).values(status_since=LONG_AGO))
    moved = installed.but(cold_storage=f"s3://{BUCKET}/{PREFIX}")
    done = moved.run("retain", "--json")
    assert (done.code, done.told["counts"]["deleted"], statuses(engine)) == (0, 1, {}), done.said
    assert len(objects(s3)) == 2
    assert archive(moved, "show", "wanted").code == 0


def test_boto3_is_loaded_for_s3_only(sqlite_url: str, s3: Any, tmp_path: Path) -> None:
    store_at(sqlite_url)
    command = (sys.executable, "-X", "importtime", HANDLER)
    for where, is_loaded in ((str(tmp_path / "cold"), False), (f"s3://{BUCKET}", True)):
        done = Program({"database_url": sqlite_url, "cold_storage": where}, command).run("retain", "--json")
        assert (done.code, "botocore" in done.err) == (0, is_loaded)


def test_a_place_that_is_none_is_refused_before_anything_is_read() -> None:
    away = Program({"database_url": "postgresql://nobody@127.0.0.1:1/none", "cold_storage": "s3:/bucket/cold"})
    done = away.run("retain")
    assert (done.code, "DLQBATCH_COLD_STORAGE" in done.err) == (2, True), done.said
