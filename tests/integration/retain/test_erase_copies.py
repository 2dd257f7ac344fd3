"""Erase, with the cold copies: parts are written anew without it, and whatever the cut, nothing else is lost."""

from __future__ import annotations

import gzip
import math
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from dead_rows import NOW, add, row, store_at
from sqlalchemy import select, update

from dlqbatch.amqp.fields import Fields
from dlqbatch.messages.actions import MessageActions
from dlqbatch.retain.archive import lines_of, locate, survey, verify, write_part
from dlqbatch.retain.erase import erase
from dlqbatch.retain.folder import ColdFolder
from dlqbatch.retain.format import ArchiveDamaged, ColdStorageFailed, data_name, edition_of, manifest_name, part_name
from dlqbatch.retain.job import Bounds, Retain
from dlqbatch.retain.restore import Restoring
from dlqbatch.retain.rows import Keep, Retention
from dlqbatch.retain.s3 import ColdBucket
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.states import Status
from dlqbatch.store.tables import COLD_COPIES, MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

    from dlqbatch.messages.changes import Changes
    from dlqbatch.retain.archive import ColdStorage

DAY = timedelta(days=1)
SOON, MUCH_LATER = NOW + 100 * DAY, NOW + 500 * DAY
SECRET = b"max.mustermann"
WHO: dict[str, Any] = {"actor": "ann", "reason": "request 12", "now": SOON}
BUCKET = "cold-copies"


class Cut(BaseException):
    """The process is gone."""


class Watched:
    """A storage that keeps count of what is done to it, and can be cut before each write and removal."""

    def __init__(self, storage: ColdStorage) -> None:
        self.storage, self.left = storage, math.inf
        self.names, self.read = storage.names, storage.read

    def _step(self) -> None:
        if not self.left:
            raise Cut
        self.left -= 1

    def write(self, name: str, data: bytes) -> None:
        self._step()
        self.storage.write(name, data)

    def remove(self, name: str) -> str:
        self._step()
        return self.storage.remove(name)


@pytest.fixture(params=["folder", "bucket"])
def cold(request: pytest.FixtureRequest, tmp_path: Path) -> ColdStorage:
    if request.param == "folder":
        return ColdFolder(tmp_path / "cold")
    place = {"LocationConstraint": request.getfixturevalue("aws")["AWS_DEFAULT_REGION"]}
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
    return ColdBucket(BUCKET, "payments")


@pytest.fixture
def engine(sqlite_url: str) -> Engine:
    return store_at(sqlite_url)


def failed(engine: Engine, number: int, **columns: Any) -> list[int]:
    """Messages that a retain moves to cold storage."""
    rows = [row(**{"body": SECRET + b"%d" % each, "fields": [("customer", "7")]} | columns) for each in range(number)]
    ids = add(engine, *rows)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(ids)).values(status="failed", status_since=NOW))
    return ids


def retain(engine: Engine, cold: ColdStorage, now: Any = SOON) -> Any:
    keep = Keep(30 * DAY, 90 * DAY, 365 * DAY)
    report = Retain(Retention(engine), cold, keep, Bounds(None, math.inf), now).run()
    assert report.outcome == "ok", report.warnings
    return report


def files(cold: ColdStorage) -> bytes:
    """All that the parts hold, whether they are read or not."""
    held = b""
    for name in cold.names():
        if name.endswith(".jsonl.gz"):
            held += gzip.decompress(cold.read(name, 2**30))
    return held


def held(cold: ColdStorage) -> dict[int, bytes]:
    """The bodies of the copies that readers find, each part of which is whole."""
    known = survey(cold)
    assert not known.damaged
    assert [verify(cold, part) for part in known.parts] == [None] * len(known.parts)
    return {line.message["id"]: line.message["body"] for part in known.parts for line in lines_of(cold, part)}


def parts_on_record(engine: Engine) -> dict[int, str]:
    with reading(engine) as connection:
        return dict(connection.execute(select(COLD_COPIES.c.message_id, COLD_COPIES.c.part)).all())


def test_the_part_is_written_anew_without_it_and_the_others_stay(engine: Engine, cold: ColdStorage) -> None:
    first, second, third = failed(engine, 3)
    retain(engine, cold)
    (before,) = survey(cold).parts
    dry = erase(engine, cold, [second], dry_run=True, **WHO)
    assert dry.changes[0].why == f"in cold storage these are to be written anew {data_name(before.part)}"
    assert (survey(cold).parts, dry.left) == ((before,), ())

    done = erase(engine, cold, [second], **WHO)
    (after,) = survey(cold).parts
    assert after.part == f"{before.part}-2"
    assert (done.done, done.left, done.changes[0].left) == (1, (), "")
    assert done.changes[0].why == f"in cold storage it was erased, in {data_name(after.part)}"
    assert list(cold.names()) == [data_name(after.part), manifest_name(after.part)]
    assert held(cold) == {first: SECRET + b"0", second: b"", third: SECRET + b"2"}
    found = locate(cold, survey(cold), second)
    assert found is not None
    assert (found.line.message["erased_at"], found.line.message["error_message"]) == (SOON, None)
    assert found.line.transitions[-1]["reason"] == "erased: request 12"

    assert parts_on_record(engine) == {first: after.part, third: after.part}
    assert retain(engine, cold, MUCH_LATER).counts["deleted"] == 3
    assert {row_id: body for row_id, body in held(cold).items() if row_id != second} == {
        first: SECRET + b"0",
        third: SECRET + b"2",
    }


def test_a_message_that_is_in_cold_storage_only_is_erased_by_its_number(engine: Engine, cold: ColdStorage) -> None:
    row_id, other = failed(engine, 1), failed(engine, 1)
    retain(engine, cold)
    retain(engine, cold, MUCH_LATER)
    done = erase(engine, cold, [*row_id, 10**6], **WHO)
    assert [each.is_done for each in done.changes] == [True, False]
    assert done.action is not None
    assert held(cold)[row_id[0]] == b""
    assert held(cold)[other[0]]


def test_every_copy_of_a_message_is_erased_also_of_one_that_was_restored(database_url: str, tmp_path: Path) -> None:
    engine, cold = store_at(database_url), ColdFolder(tmp_path / "cold")
    (row_id,) = failed(engine, 1, identity="the one")
    retain(engine, cold)
    retain(engine, cold, MUCH_LATER)
    found = locate(cold, survey(cold), row_id)
    restoring = Restoring(engine, Fields())
    restored = restoring.bring_back(row_id, lambda: found, actor="ann", reason="r", dry_run=False, now=SOON)
    assert restored.id is not None
    (change,) = erase(engine, cold, [row_id], **WHO).changes
    assert change.left == f"message {restored.id} of the dead store has its identity: erase that one too"
    (change,) = erase(engine, cold, [restored.id], **WHO).changes
    assert (change.is_done, change.left) == (True, "")
    assert SECRET not in files(cold)
    found = locate(cold, survey(cold), row_id)
    back = Restoring(engine, Fields()).bring_back(
        10**6, lambda: found, actor="ann", reason="r", dry_run=False, now=SOON
    )
    assert (back.is_done, back.why) == (False, "it is erased: nothing is left of it that could be sent")


def erased_at_every_cut(engine: Engine, cold: ColdStorage, ids: list[int]) -> Changes:
    """Cut before the first write, then before the second, and so on, each from where the one before was cut."""
    watched = Watched(cold)
    for step in range(20):
        watched.left = step
        with suppress(Cut):
            return erase(engine, watched, filters=Filters.parse(field="customer=7"), **WHO)
        assert set(held(cold)) == set(ids), "a reader finds all of them"
    raise AssertionError("it does not come to an end")


def test_whatever_the_cut_the_archive_is_whole_and_a_second_erase_finishes_it(
    engine: Engine, cold: ColdStorage
) -> None:
    ids, others = failed(engine, 2), failed(engine, 1, fields=[], body=b"another's")
    retain(engine, cold)
    done = erased_at_every_cut(engine, cold, ids + others)
    assert (done.done, done.left) == (2, ())
    assert SECRET not in files(cold)
    known = survey(cold)
    assert (known.unfinished, known.replaced) == ((), ())
    assert held(cold) == {**dict.fromkeys(ids, b""), others[0]: b"another's"}
    assert parts_on_record(engine) == {others[0]: known.parts[0].part}
    assert SECRET.decode() not in str(MessageActions(engine).show(ids[0]).content)


@pytest.mark.parametrize("step", range(5))
def test_an_erase_of_another_message_finishes_one_that_was_cut(engine: Engine, tmp_path: Path, step: int) -> None:
    cold = ColdFolder(tmp_path / "cold")
    first, second = failed(engine, 1), failed(engine, 1)
    retain(engine, cold)
    watched = Watched(cold)
    watched.left = step
    with suppress(Cut):
        erase(engine, watched, first, **WHO)
    erase(engine, cold, second, **WHO)
    known = survey(cold)
    assert (len(known.parts), known.unfinished, known.replaced) == (1, (), ())
    assert held(cold)[second[0]] == b""
    assert (held(cold)[first[0]] == b"") >= (step > 0), "what was written by the first one is not lost"
    erase(engine, cold, first, **WHO)
    assert SECRET not in files(cold)


def test_two_erases_at_once_do_not_undo_each_other(engine: Engine, tmp_path: Path) -> None:
    """The second one begins where the first one has written nothing but the data of its part."""
    cold = ColdFolder(tmp_path / "cold")
    first, second = failed(engine, 1), failed(engine, 1)
    retain(engine, cold)

    class Slow(Watched):
        def write(self, name: str, data: bytes) -> None:
            if name.endswith(".manifest.json"):
                assert erase(engine, cold, second, **WHO).left == ()
            self.storage.write(name, data)

    done = erase(engine, Slow(cold), first, **WHO)
    assert held(cold)[second[0]] == b""
    if done.left:
        assert "erase it again" in done.left[0]
    assert erase(engine, cold, first, **WHO).left == ()
    assert SECRET not in files(cold)


def test_a_copy_that_cannot_be_read_is_named_and_the_message_is_erased(engine: Engine, tmp_path: Path) -> None:
    cold = ColdFolder(tmp_path / "cold")
    (row_id,) = failed(engine, 1)
    retain(engine, cold)
    (part,) = survey(cold).parts
    (tmp_path / "cold" / data_name(part.part)).write_bytes(b"no copy")
    done = erase(engine, cold, [row_id], **WHO)
    assert (done.done, len(done.left)) == (1, 1)
    assert f"a cold copy in {part.part} may hold it still" in done.left[0]
    assert MessageActions(engine).show(row_id).content.body == b""


def test_without_cold_storage_the_copy_is_named_and_erased_later(engine: Engine, tmp_path: Path) -> None:
    cold = ColdFolder(tmp_path / "cold")
    (row_id,) = failed(engine, 1)
    retain(engine, cold)
    done = erase(engine, None, [row_id], **WHO)
    assert "holds it still: set cold_storage" in done.left[0]
    again = erase(engine, cold, [row_id], **WHO)
    assert (again.done, again.left) == (1, ())
    assert SECRET not in files(cold)
    assert erase(engine, cold, [row_id], **WHO).changes[0].why == "it is erased already"


def test_a_copy_that_retain_writes_meanwhile_is_told(engine: Engine, tmp_path: Path) -> None:
    cold = ColdFolder(tmp_path / "cold")
    (row_id,) = failed(engine, 1)
    retention = Retention(engine)
    due = retention.due(Status.FAILED, MUCH_LATER, 10)
    lines = list(retention.lines(due))

    class Late(Watched):
        def names(self) -> Any:
            found = list(self.storage.names())
            if not found:
                write_part(self.storage, part_name(SOON, "ab12cd34"), lines, SOON)
            return found

    late = Late(cold)
    late.names = Late.names.__get__(late)  # type: ignore[method-assign]
    done = erase(engine, late, [row_id], **WHO)
    assert "meanwhile, which may hold them: erase them again" in done.left[0]
    assert erase(engine, cold, [row_id], **WHO).left == ()
    assert SECRET not in files(cold)


def test_retain_tells_of_a_message_that_was_erased_while_it_wrote_its_copy(engine: Engine, tmp_path: Path) -> None:
    cold = ColdFolder(tmp_path / "cold")
    (row_id,) = failed(engine, 1)

    class Erasing(Watched):
        def write(self, name: str, data: bytes) -> None:
            self.storage.write(name, data)
            if name.endswith(".manifest.json"):
                erase(engine, None, [row_id], **WHO)

    keep = Keep(30 * DAY, 90 * DAY, 365 * DAY)
    report = Retain(Retention(engine), Erasing(cold), keep, Bounds(None, math.inf), SOON).run()
    assert any(f"`dlqbatch messages erase {row_id}` takes them out" in warning for warning in report.warnings)
    assert erase(engine, cold, [row_id], **WHO).done == 1
    assert SECRET not in files(cold)


# --- What only S3 has


@pytest.fixture
def versioned(aws: dict[str, str]) -> Any:
    """A client, and a bucket that keeps versions."""
    s3 = boto3.client("s3")
    place = {"LocationConstraint": aws["AWS_DEFAULT_REGION"]}
    s3.create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place, ObjectLockEnabledForBucket=True)
    return s3


def versions(s3: Any) -> list[str]:
    return [each["Key"] for each in s3.list_object_versions(Bucket=BUCKET).get("Versions", ())]


def test_old_versions_of_a_bucket_are_deleted(engine: Engine, versioned: Any) -> None:
    cold = ColdBucket(BUCKET)
    (row_id,) = failed(engine, 1)
    retain(engine, cold)
    assert erase(engine, cold, [row_id], **WHO).left == ()
    (part,) = survey(cold).parts
    assert edition_of(part.part).number == 2
    assert sorted(versions(versioned)) == [data_name(part.part), manifest_name(part.part)]


def test_a_version_that_is_locked_stays_and_is_named_with_what_to_do(engine: Engine, versioned: Any) -> None:
    rule = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    versioned.put_object_lock_configuration(
        Bucket=BUCKET, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule}
    )
    cold = ColdBucket(BUCKET)
    (row_id,) = failed(engine, 1)
    retain(engine, cold)
    (before,) = survey(cold).parts
    done = erase(engine, cold, [row_id], **WHO)
    (said,) = done.left
    assert f"the bucket keeps a version of {data_name(before.part)} (s3:DeleteObjectVersion: " in said
    assert f"`aws s3api delete-object --bucket {BUCKET} --key '{data_name(before.part)}' --version-id " in said
    assert data_name(before.part) in versions(versioned)
    assert held(cold) == {row_id: b""}


def test_who_may_not_delete_leaves_the_old_part_which_nobody_reads(engine: Engine, tmp_path: Path) -> None:
    cold = ColdFolder(tmp_path / "cold")

    class Refused(Watched):
        def remove(self, name: str) -> str:
            raise ColdStorageFailed("s3://cold-copies", f"{name}: s3:DeleteObject: access is denied")

    (row_id,) = failed(engine, 1)
    retain(engine, cold)
    (before,) = survey(cold).parts
    done = erase(engine, Refused(cold), [row_id], **WHO)
    assert f"a cold copy in {before.part} may hold it still: " in done.left[0]
    assert (survey(cold).replaced, held(cold)) == ((before.part,), {row_id: b""})
    assert erase(engine, cold, [row_id], **WHO).left == ()
    assert (survey(cold).replaced, SECRET in files(cold)) == ((), False)


def test_a_new_part_that_is_not_what_was_written_is_taken_back(engine: Engine, tmp_path: Path) -> None:
    cold = ColdFolder(tmp_path / "cold")

    class Spoiling(Watched):
        def write(self, name: str, data: bytes) -> None:
            self.storage.write(name, data if name.endswith(".json") else data[:-9] + bytes(9))

    (row_id,) = failed(engine, 1)
    retain(engine, cold)
    known = survey(cold)
    done = erase(engine, Spoiling(cold), [row_id], **WHO)
    assert "may hold it still" in done.left[0]
    assert survey(cold) == known
    assert held(cold) == {row_id: SECRET + b"0"}
    with pytest.raises(ArchiveDamaged, match="not there"):
        cold.read(data_name(f"{known.parts[0].part}-2"), 10**6)
