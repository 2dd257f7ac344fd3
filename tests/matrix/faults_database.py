"""The database is restarted, full, locked or read-only, ends sessions or statements, or has no connection left."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
from cutting_link import CuttingLink

from matrix.faults_store import commits
from matrix.scenario import fault
from matrix.store_jobs import (
    DONE,
    PARTIAL,
    PROGRAM,
    UNREACHABLE,
    Heavy,
    Ingesting,
    Lifecycling,
    Replaying,
    Retaining,
    Scene,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from matrix.ground import Ground
    from matrix.scenario import Count

JOBS: tuple[type[Scene], ...] = (Ingesting, Lifecycling, Replaying, Retaining)
MANY = 200
"""Connections: more than the server gives."""
ENDS_WELL = {DONE, PARTIAL, UNREACHABLE}


def _broken(ground: Ground, scene: type[Scene], breaking: Callable[[Scene], Any], **settings: str) -> Count:
    """One run while the database is broken, then runs until quiet."""
    with scene(ground) as one:
        with breaking(one) as hits:
            done = one.end(one.start(**settings))
            assert done.code in ENDS_WELL, (done.code, done.err)
            assert done.code == DONE or "database" in done.out + done.err or done.told.get("reasons"), done.err
        return one.found(crashes=1, hits=int(hits()))


def _at_a_commit(ground: Ground, scene: type[Scene], act: Callable[[Scene], object], *, cuts: bool = False) -> Count:
    """`act`, while a commit of the run waits for it; by chance the first or the last or any between."""
    number = ground.random.randint(1, commits(ground, scene))
    is_heard = ground.random.random() < 0.5  # only where the link cuts it
    ground.note(f"at commit {number}")
    with (
        scene(ground) as one,
        CuttingLink(one.database, number, is_heard=is_heard, act=lambda: act(one), cuts=cuts) as link,
    ):
        done = one.end(one.start(database_url=link.url))
        assert done.code in ENDS_WELL, (done.code, done.err)
        hit = link.has_cut.is_set()
        assert not hit or link.has_acted.wait(120)
        one.recover()
        return one.found(crashes=int(hit), hits=int(hit))


def restarted_at_once(ground: Ground, scene: type[Scene]) -> Count:
    """PostgreSQL's `immediate`: as after a power cut; it recovers from its log."""
    cluster = ground.cluster

    def act(_: Scene) -> None:
        cluster.abandon()
        cluster.start()

    return _at_a_commit(ground, scene, act, cuts=True)


def sessions_ended(ground: Ground, scene: type[Scene]) -> Count:
    """An administrator ends all our sessions."""

    def act(one: Scene) -> None:
        one.tables.number(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'dlqbatch' "
            "AND datname = current_database()"
        )

    return _at_a_commit(ground, scene, act)


def statements_cancelled(ground: Ground, scene: type[Scene]) -> Count:
    """An administrator cancels whatever our sessions are doing, a thousand times."""
    over = threading.Event()

    def cancel(one: Scene) -> None:
        with psycopg.connect(one.database.replace("+psycopg", ""), autocommit=True) as connection:
            while not over.is_set():
                connection.execute(
                    "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE application_name = 'dlqbatch' "
                    "AND datname = current_database() AND state = 'active'"
                )

    with scene(ground) as one:
        thread = threading.Thread(target=cancel, args=(one,), daemon=True)
        thread.start()
        try:
            done = one.end(one.start())
        finally:
            over.set()
            thread.join(60)
        assert done.code in ENDS_WELL, (done.code, done.err)
        return one.found(crashes=1, hits=int(done.code != DONE))


def out_of_connections(ground: Ground, scene: type[Scene]) -> Count:
    """From a commit on, nobody gets another connection."""
    held: list[psycopg.Connection[Any]] = []

    def act(one: Scene) -> None:
        with contextlib.suppress(psycopg.OperationalError):
            while len(held) < MANY:
                held.append(psycopg.connect(one.database.replace("+psycopg", "")))

    def let_go() -> None:
        while held:
            held.pop().close()

    try:
        return _at_a_commit(ground, type(scene.__name__, (scene,), {"recover": lambda _: let_go()}), act)
    finally:
        let_go()


@contextlib.contextmanager
def _stranger(one: Scene) -> Iterator[Callable[[], bool]]:
    """Locks rows in an order of its own, two and two, so that it and the run wait for each other now and then."""
    over, met = threading.Event(), threading.Event()

    def work() -> None:
        with psycopg.connect(one.database.replace("+psycopg", ""), autocommit=True) as stranger:
            while not over.is_set():
                with contextlib.suppress(psycopg.OperationalError), stranger.transaction():
                    stranger.execute("SET LOCAL deadlock_timeout = '50ms'")
                    for order in ("DESC", "ASC"):
                        stranger.execute(
                            "SELECT 1 FROM dlq_messages WHERE id IN "
                            f"(SELECT id FROM dlq_messages ORDER BY id {order} LIMIT 150) FOR UPDATE".encode()
                        )
                        met.set()
                        over.wait(0.02)
                over.wait(0.02)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield met.is_set
    finally:
        over.set()
        thread.join(60)


def a_stranger_locks_rows(ground: Ground, scene: type[Scene]) -> Count:
    return _broken(ground, scene, _stranger)


@contextlib.contextmanager
def _locked(one: Scene) -> Iterator[Callable[[], bool]]:
    """Everything is locked for longer than a run waits."""
    if one.tables.is_sqlite:
        other = sqlite3.connect(one.database.removeprefix("sqlite:///"), isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        yield lambda: True
        other.execute("ROLLBACK")
        other.close()
    else:
        with psycopg.connect(one.database.replace("+psycopg", "")) as other:
            other.execute("LOCK TABLE dlq_messages IN ACCESS EXCLUSIVE MODE")
            yield lambda: True


def locked_for_too_long(ground: Ground, scene: type[Scene]) -> Count:
    bounds = {"max_seconds": "3", "settle_seconds": "1", "connect_timeout_seconds": "2"}
    return _broken(ground, scene, _locked, **bounds)


FULL_AT = {"postgresql": 17 * 1024 * 1024, "sqlite": 700 * 1024}
"""Bytes of one file; PostgreSQL writes its log in files of 16 MiB."""


@contextlib.contextmanager
def _full(one: Scene) -> Iterator[Callable[[], bool]]:
    """No file may grow beyond a limit: for the file's user the same as a disk that is full."""
    _limit_files(one.ground.cluster.pid, str(FULL_AT["postgresql"]))
    try:
        yield lambda: True
    finally:
        _limit_files(one.ground.cluster.pid, "unlimited")


def _limit_files(pid: int, size: str) -> None:
    """As the user whose process it is: root without all its rights may not do so for another."""
    process = psutil.Process(pid)
    owner = {"user": process.uids().real, "group": process.gids().real, "extra_groups": []}
    subprocess.run(["prlimit", f"--pid={pid}", f"--fsize={size}:"], check=True, timeout=30, **owner)


def full_disk(ground: Ground, scene: type[Scene]) -> Count:
    if ground.kind == "postgresql":
        _ = ground.cluster
        return _broken(ground, scene, _full)
    with scene(ground) as one:
        # Its log beside it and the file itself: neither may grow beyond what there is now.
        size = sum(path.stat().st_size for path in ground.folder.glob("*.sqlite3"))
        # A retain writes little, and all of it into the log first.
        limit = ("prlimit", f"--fsize={size * (scene is not Retaining) + one.ground.random.randint(4, 200) * 1024}")
        command = one.program()
        process = type(command)(command.settings, (*limit, *PROGRAM)).start(*one.command(), "--json")
        done = one.end(process)
        assert done.code in ENDS_WELL, (done.code, done.err)
        hit = done.code != DONE
        return one.found(crashes=int(hit), hits=int(hit))


def read_only(ground: Ground, scene: type[Scene]) -> Count:
    """A database that may be read alone: nothing moves, and everything is where it was."""
    with scene(ground) as one:
        if one.tables.is_sqlite:
            # As root no mode of a file keeps us out; a file system that is mounted so does, which needs one.
            one.tables.do("PRAGMA journal_mode = DELETE")
            path = Path(one.database.removeprefix("sqlite:///"))
            with _unwritable(path):
                done = one.end(one.start())
        else:
            name = one.database.rpartition("/")[2]
            one.tables.do(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
            done = one.end(one.start())
            one.tables.do(f"BEGIN READ WRITE; ALTER DATABASE {name} RESET default_transaction_read_only; COMMIT")
        assert done.code == UNREACHABLE, (done.code, done.out, done.err)
        return one.found(crashes=0)


@contextlib.contextmanager
def _unwritable(path: Path) -> Iterator[None]:
    """A version number of its format that asks programs to read alone; it holds for root too."""
    with path.open("r+b") as file:
        file.seek(18)
        was = file.read(1)
        file.seek(18)
        file.write(b"\x03")
    try:
        yield
    finally:
        with path.open("r+b") as file:
            file.seek(18)
            file.write(was)


BOTH = ("postgresql", "sqlite")
POSTGRESQL = ("postgresql",)
FAULTS: tuple[tuple[Callable[[Ground, type[Scene]], Count], str, tuple[str, ...]], ...] = (
    (restarted_at_once, "PostgreSQL killed (immediate) and started again", POSTGRESQL),
    (sessions_ended, "all sessions ended by an administrator", POSTGRESQL),
    (statements_cancelled, "statements cancelled by an administrator, without end", POSTGRESQL),
    (out_of_connections, "no connection left", POSTGRESQL),
    (a_stranger_locks_rows, "another program locks rows in another order: deadlocks", POSTGRESQL),
    (locked_for_too_long, "locked by another process for longer than a run waits", BOTH),
    (full_disk, "disk full", ("sqlite",)),
    (read_only, "the database may only be read", BOTH),
)


def _register() -> None:
    for breaks, title, kinds in FAULTS:
        for scene in JOBS:

            def make(
                ground: Ground,
                breaks: Callable[[Ground, type[Scene]], Count] = breaks,
                scene: type[Scene] = scene,
            ) -> Count:
                return breaks(ground, scene)

            make.__name__ = f"{scene.__name__.lower()}_{breaks.__name__}"
            fault(title, job=scene.job, kinds=kinds, releases=("3.10",), runs=5)(make)


_register()


@fault("disk full", job="ingest", kinds=POSTGRESQL, releases=("3.10",), runs=5)
def heavy_full_disk(ground: Ground) -> Count:
    return full_disk(ground, Heavy)
