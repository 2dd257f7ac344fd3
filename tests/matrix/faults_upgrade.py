"""The schema is upgraded while a job works, and stays newer than the job: two versions at once, as in every upgrade."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from typing import TYPE_CHECKING

import psycopg
from cutting_link import CuttingLink

from matrix.faults_database import BOTH, ENDS_WELL, JOBS
from matrix.faults_store import commits
from matrix.scenario import fault

if TYPE_CHECKING:
    from matrix.ground import Ground
    from matrix.scenario import Count
    from matrix.store_jobs import Scene

NEXT_VERSION = (
    "ALTER TABLE dlq_attempts ADD COLUMN of_the_next_version text",
    "ALTER TABLE dlq_messages ADD COLUMN of_the_next_version text",
    "CREATE TABLE dlq_of_the_next_version (id integer PRIMARY KEY)",
    "CREATE INDEX dlq_of_the_next_version_index ON dlq_messages (of_the_next_version)",
    "UPDATE dlqbatch_version SET version_num = 'next'",
)
"""As an upgrade changes the tables: new things only, in one transaction."""


def upgraded_meanwhile(ground: Ground, scene: type[Scene]) -> Count:
    """It waits for what the run has locked, and the run for it; then the older program goes on with newer tables."""
    number = ground.random.randint(1, commits(ground, scene))
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(scene(ground))
        thread = threading.Thread(target=_upgrade, args=(one,), daemon=True)
        if one.tables.is_sqlite:
            process = one.start()
            thread.start()
        else:
            link = stack.enter_context(CuttingLink(one.database, number, act=thread.start, cuts=False))
            process = one.start(database_url=link.url)
        done = one.end(process)
        assert done.code in ENDS_WELL, (done.code, done.err)
        hit = thread.ident is not None
        thread.join(60)
        assert one.tables.all("SELECT version_num FROM dlqbatch_version") == [("next" if hit else "0018",)]
        return one.found(crashes=int(hit), hits=int(hit))


def _upgrade(one: Scene) -> None:
    if one.tables.is_sqlite:
        with contextlib.closing(
            sqlite3.connect(one.database.removeprefix("sqlite:///"), isolation_level=None, timeout=60)
        ) as file:
            file.execute("BEGIN IMMEDIATE")
            for statement in NEXT_VERSION:
                file.execute(statement)
            file.execute("COMMIT")
        return
    while True:
        with (
            contextlib.suppress(psycopg.errors.DeadlockDetected),
            psycopg.connect(one.database.replace("+psycopg", "")) as connection,
        ):
            for statement in NEXT_VERSION:
                connection.execute(statement.encode())
            return


def _register(scene: type[Scene]) -> None:
    def make(ground: Ground) -> Count:
        return upgraded_meanwhile(ground, scene)

    make.__name__ = f"{scene.__name__.lower()}_upgraded_meanwhile"
    fault("the schema is upgraded meanwhile", job=scene.job, kinds=BOTH, releases=("3.10",), runs=5)(make)


for _scene in JOBS:
    _register(_scene)
