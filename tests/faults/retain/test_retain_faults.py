"""A retain is killed at every arrow: copy, manifest, archive, delete.

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

import psycopg
import pytest
from dead_rows import add, row, store_at
from program import HANGS_AFTER, Program, eventually

from dlqbatch.retain.archive import lines_of, survey, verify
from dlqbatch.retain.folder import ColdFolder

if TYPE_CHECKING:
    from pathlib import Path

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
KILLS = 6
_WAITING = (
    "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = pg_locks.database "
    "WHERE NOT granted AND datname = current_database()"
)


class Scene:
    def __init__(self, url: str, folder: Path) -> None:
        self.engine = store_at(url)
        self.folder = folder
        self.program = Program({"database_url": url, "cold_storage": str(folder), "log_level": "error"})
        self.store = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)

    def put(self, status: str, number: int, size: int = 10) -> set[int]:
        ids = add(self.engine, *(row(body=random.randbytes(size)) for _ in range(number)), at=LONG_AGO)
        self.store.execute("UPDATE dlq_messages SET status = %s WHERE id = ANY(%s)", (status, ids))
        return set(ids)

    def ids(self, status: str) -> set[int]:
        return {each[0] for each in self.store.execute("SELECT id FROM dlq_messages WHERE status = %s", (status,))}

    def copied(self) -> set[int]:
        """Whoever is in a part that is whole; a part that has a manifest is."""
        cold = ColdFolder(self.folder)
        known = survey(cold)
        assert not known.damaged
        assert [verify(cold, part) for part in known.parts] == [None] * len(known.parts)
        return {line.message["id"] for part in known.parts for line in lines_of(cold, part)}

    def killed_while_it_waits(self, lock: str) -> None:
        """Start a retain, kill it as soon as it waits for a lock that this test holds."""
        with self.store.transaction():
            self.store.execute(lock)
            process = self.program.start("retain", "--json")
            assert eventually(lambda: self.store.execute(_WAITING).fetchone() != (0,))
            process.kill()
            process.communicate(timeout=HANGS_AFTER)
            assert process.returncode == -signal.SIGKILL

    def run(self) -> Any:
        done = self.program.run("retain", "--json")
        assert done.code == 0, done.said
        return done.told["counts"]


@pytest.fixture
def scene(database_url: str, tmp_path: Path) -> Any:
    made = Scene(database_url, tmp_path / "cold")
    with made.store:
        yield made


def test_killed_between_the_copy_and_the_archiving_a_second_copy_is_the_worst(scene: Scene) -> None:
    failed = scene.put("failed", 20)
    scene.killed_while_it_waits("LOCK TABLE dlq_cold_copies IN EXCLUSIVE MODE")
    assert scene.copied() == scene.ids("failed") == failed
    assert scene.run()["archived"] == 20
    assert scene.ids("archived") == failed
    assert len(survey(ColdFolder(scene.folder)).parts) == 2


def test_killed_between_the_copy_on_record_and_the_deletion_the_copy_is_used(scene: Scene) -> None:
    archived = scene.put("archived", 20)
    scene.killed_while_it_waits("LOCK TABLE dlq_messages IN SHARE MODE")
    assert scene.copied() == scene.ids("archived") == archived
    assert scene.store.execute("SELECT count(*) FROM dlq_cold_copies").fetchone() == (20,)
    assert scene.run()["deleted"] == 20
    assert scene.copied() == archived
    assert len(survey(ColdFolder(scene.folder)).parts) == 1


@pytest.mark.slow
def test_killed_at_any_instant_every_message_is_in_the_database_or_in_a_copy_that_is_whole(scene: Scene) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")  # pytest shows it when the test fails
    chance = random.Random(seed)
    failed = scene.put("failed", 600, 20_000)
    archived = scene.put("archived", 600, 20_000)
    killed = 0
    for _ in range(KILLS):
        before = len(list(scene.folder.rglob("*")))
        process = scene.program.start("retain", "--json", "--max-messages", "200")
        assert eventually(
            lambda seen=before, one=process: len(list(scene.folder.rglob("*"))) > seen or one.poll() is not None
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=chance.uniform(0, 0.1))
        process.kill()
        process.communicate(timeout=HANGS_AFTER)
        killed += process.returncode == -signal.SIGKILL
        copied = scene.copied()
        assert scene.ids("failed") | (scene.ids("archived") & copied) >= failed
        assert scene.ids("archived") | copied >= archived
    assert killed > KILLS // 2
    while scene.run()["got"]:
        pass
    assert scene.ids("failed") == set()
    assert scene.ids("archived") == failed
    assert scene.copied() >= failed | archived
