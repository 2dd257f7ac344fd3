"""A retain to S3 is killed, or S3 goes away, at every arrow: put, manifest, archive, delete.

Whatever the cut, every message is in the database, or its copy is whole.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import signal
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import boto3
import psycopg
import pytest
from dead_rows import add, row, store_at
from program import HANGS_AFTER, Program, eventually
from s3_link import HOLD, LOSE, Asked, Link, refusal, s3_link

from dlqbatch.retain.archive import lines_of, survey, verify
from dlqbatch.retain.s3 import ColdBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
BUCKET = "cold-copies"
KILLS = 3
_WAITING = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database "
    "WHERE NOT granted AND datname = current_database()"
)


class Scene:
    def __init__(self, url: str, link: Link) -> None:
        self.engine = store_at(url)
        self.link = link
        self.program = Program({"database_url": url, "cold_storage": f"s3://{BUCKET}/cold", "log_level": "error"})
        self.store = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)
        self.cold = ColdBucket(BUCKET, "cold")

    def put(self, status: str, number: int, size: int = 10) -> set[int]:
        ids = add(self.engine, *(row(body=random.randbytes(size)) for _ in range(number)), at=LONG_AGO)
        self.store.execute("UPDATE dlq_messages SET status = %s WHERE id = ANY(%s)", (status, ids))
        return set(ids)

    def ids(self, status: str) -> set[int]:
        return {each[0] for each in self.store.execute("SELECT id FROM dlq_messages WHERE status = %s", (status,))}

    def copied(self) -> set[int]:
        """Whoever is in a part that is whole; a part that has a manifest is."""
        known = survey(self.cold)
        assert not known.damaged
        assert [verify(self.cold, part) for part in known.parts] == [None] * len(known.parts)
        return {line.message["id"] for part in known.parts for line in lines_of(self.cold, part)}

    def killed(self, when: Callable[[], bool]) -> None:
        process = self.program.start("retain", "--json")
        assert eventually(when), process.poll()
        process.kill()
        process.communicate(timeout=HANGS_AFTER)
        assert process.returncode == -signal.SIGKILL

    def killed_while_it_waits(self, lock: str) -> None:
        """For a lock that this test holds."""
        with self.store.transaction():
            self.store.execute(lock)
            self.killed(lambda: self.store.execute(_WAITING).fetchone() != (0,))

    def run(self, code: int = 0) -> Any:
        done = self.program.run("retain", "--json")
        assert done.code == code, done.said
        return done.told


@pytest.fixture
def scene(database_url: str, aws: dict[str, str], aws_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    place = {"LocationConstraint": aws["AWS_DEFAULT_REGION"]}
    boto3.client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=place)
    with s3_link(aws_server) as link:
        monkeypatch.setenv("AWS_ENDPOINT_URL", link.url)
        made = Scene(database_url, link)
        with made.store:
            yield made


def at(ending: str, what: object) -> Callable[[Asked], object]:
    """For the puts whose name ends so."""
    return lambda asked: what if asked.method == "PUT" and asked.path.partition("?")[0].endswith(ending) else None


def test_killed_between_the_copy_and_the_archiving_a_second_copy_is_the_worst(scene: Scene) -> None:
    failed = scene.put("failed", 20)
    scene.killed_while_it_waits("LOCK TABLE dlq_cold_copies IN EXCLUSIVE MODE")
    assert scene.copied() == scene.ids("failed") == failed
    assert scene.run()["counts"]["archived"] == 20
    assert scene.ids("archived") == failed
    assert len(survey(scene.cold).parts) == 2


def test_killed_between_the_copy_on_record_and_the_deletion_the_copy_is_used(scene: Scene) -> None:
    archived = scene.put("archived", 20)
    scene.killed_while_it_waits("LOCK TABLE dlq_messages IN SHARE MODE")
    assert scene.copied() == scene.ids("archived") == archived
    assert scene.store.execute("SELECT count(*) FROM dlq_cold_copies").fetchone() == (20,)
    assert scene.run()["counts"]["deleted"] == 20
    assert scene.copied() == archived
    assert len(survey(scene.cold).parts) == 1


@pytest.mark.parametrize(("ending", "unfinished"), [(".jsonl.gz", 0), (".manifest.json", 1)])
def test_killed_during_a_put_the_rows_stay_and_the_next_run_copies_them(
    scene: Scene, ending: str, unfinished: int
) -> None:
    failed, archived = scene.put("failed", 5), scene.put("archived", 5)
    scene.link.meddle = at(ending, HOLD)
    scene.killed(scene.link.held.is_set)
    scene.link.meddle = lambda _: None
    assert (scene.ids("failed"), scene.ids("archived"), scene.copied()) == (failed, archived, set())
    assert len(survey(scene.cold).unfinished) == unfinished
    told = scene.run()
    assert (told["counts"]["archived"], told["counts"]["deleted"]) == (5, 5)
    assert len([warning for warning in told.get("warnings", ()) if "no manifest" in warning]) == unfinished
    assert (scene.ids("archived"), scene.copied()) == (failed, failed | archived)


def test_answers_that_are_lost_cost_neither_a_row_nor_a_second_copy(scene: Scene) -> None:
    failed, lost = scene.put("failed", 5), set[str]()

    def lose(asked: Asked) -> object:
        if asked.method != "PUT" or asked.path in lost:
            return None
        lost.add(asked.path)
        return LOSE

    scene.link.meddle = lose
    assert scene.run()["counts"]["archived"] == 5
    assert (len(lost), scene.ids("archived"), scene.copied()) == (2, failed, failed)
    assert len(survey(scene.cold).parts) == 1


def test_what_s3_did_not_store_as_it_was_sent_is_not_taken_for_a_copy(scene: Scene) -> None:
    failed, archived = scene.put("failed", 5), scene.put("archived", 5)
    client = boto3.client("s3", endpoint_url=scene.link.target)

    def spoil(asked: Asked) -> object:
        path = asked.path.partition("?")[0]
        if asked.method == "GET" and path.endswith(".jsonl.gz"):
            client.put_object(Bucket=BUCKET, Key=path.removeprefix(f"/{BUCKET}/"), Body=b"spoilt")
        return None

    scene.link.meddle = spoil
    told = scene.run(3)
    assert (told["counts"]["left"], told["reasons"]) == (10, {"not-copied": 10})
    assert (scene.ids("failed"), scene.ids("archived")) == (failed, archived)
    scene.link.meddle = lambda _: None
    # The spoilt files stay, are named, and are believed by nobody.
    told = scene.run()
    assert (told["counts"]["archived"], told["counts"]["deleted"]) == (5, 5)
    found = [verify(scene.cold, part) for part in survey(scene.cold).parts]
    assert [damage is None for damage in found] == [True, True, False, False]


def test_s3_that_goes_away_in_the_middle_leaves_the_rest_in_the_database(scene: Scene) -> None:
    failed = scene.put("failed", 2_500)

    def away(_: Asked) -> object:
        return refusal(503, "SlowDown") if len(scene.link.of("PUT")) > 3 else None

    scene.link.meddle = away
    told = scene.run(3)
    assert (told["counts"]["archived"], told["reasons"]) == (1_000, {"not-copied": 1_000})
    assert "SlowDown" in told["warnings"][0]
    scene.link.meddle = lambda _: None
    assert scene.ids("archived") == scene.copied()
    assert scene.ids("failed") == failed - scene.copied()
    assert scene.run()["counts"]["archived"] == 1_500
    assert scene.ids("archived") == scene.copied() == failed


@pytest.mark.slow
def test_killed_at_any_instant_every_message_is_in_the_database_or_in_a_copy_that_is_whole(scene: Scene) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
    chance = random.Random(seed)
    failed, archived = scene.put("failed", 300, 2_000), scene.put("archived", 300, 2_000)
    killed = 0
    for _ in range(KILLS):
        before = len(scene.link.of("PUT"))
        process = scene.program.start("retain", "--json", "--max-messages", "100")
        assert eventually(lambda seen=before, one=process: len(scene.link.of("PUT")) > seen or one.poll() is not None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=chance.uniform(0, 0.3))
        process.kill()
        process.communicate(timeout=HANGS_AFTER)
        killed += process.returncode == -signal.SIGKILL
        copied = scene.copied()
        assert scene.ids("failed") | (scene.ids("archived") & copied) >= failed
        assert scene.ids("archived") | copied >= archived
    assert killed
    while scene.run()["counts"]["got"]:
        pass
    assert (scene.ids("failed"), scene.ids("archived")) == (set(), failed)
    assert scene.copied() >= failed | archived
