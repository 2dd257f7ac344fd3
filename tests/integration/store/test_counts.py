"""The counts of groups and states are what a look at every message says, whoever wrote the messages, at any moment."""

from __future__ import annotations

import itertools
import random
import secrets
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic import command
from dead_rows import NOW, add, fill, lock, row, store_at
from program import HANGS_AFTER
from query_plans import statements_of, walk
from sqlalchemy import Connection, event, select, text

from dlqbatch.errors import DatabaseForbids, DatabaseUnreadable
from dlqbatch.groups.inbox import inbox
from dlqbatch.messages import queries
from dlqbatch.messages.queries import groups
from dlqbatch.monitor.measure import measure
from dlqbatch.store import count_changes, counts, journal, migrate
from dlqbatch.store.bulk import register_arrays
from dlqbatch.store.count_changes import count_stored, merge
from dlqbatch.store.counts import CHANGES, COUNTS, FACET_COUNTS, FACETS, IS_COUNTED, IS_COUNTED_BY_FACET
from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import of_every_scope, register, scoped
from dlqbatch.store.states import MOVES, Status
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

GROUPS = [f"{number:016x}" for number in range(3)]
QUEUES = ["orders", "mails", None]
FACETS_OF = {
    "error_type": ["shop.Timeout", "Timeout", "y" * 200, None],
    "event": ["order.created", "order.paid", "", None],
    "source": ["shop", "till", None],
}
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
STEPS = 60


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def assert_counts_are_right(connection: Connection) -> None:
    """The transaction is one snapshot."""
    assert connection.scalar(IS_COUNTED) == 0
    wanted = Counter(
        (scope, fingerprint, queue or "", status)
        for scope, fingerprint, queue, status in connection.execute(
            select(MESSAGES.c.scope_id, MESSAGES.c.fingerprint, MESSAGES.c.origin_queue, MESSAGES.c.status)
        )
    )
    found = Counter[tuple[int, str, str, Status]]()
    for table in (COUNTS, CHANGES):
        for each in connection.execute(select(table)):
            for status in Status:
                found[each.scope_id, each.fingerprint, each.origin_queue, status] += getattr(each, status) or 0
    assert {key: number for key, number in found.items() if number} == wanted
    if connection.scalar(IS_COUNTED_BY_FACET) is not None:
        assert_facets_are_right(connection)


def assert_facets_are_right(connection: Connection) -> None:
    names = ("scope_id", "fingerprint", "origin_queue", *FACETS)
    wanted, found = Counter[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
    for *key, status in connection.execute(select(*(MESSAGES.c[name] for name in names), MESSAGES.c.status)):
        wanted[(*key[:2], key[2] or "", *((value or "")[:150] for value in key[3:]), status)] += 1
    for table in (FACET_COUNTS, CHANGES):
        for each in connection.execute(select(table)):
            for status in Status:
                found[(*(getattr(each, name) or "" for name in names), status)] += getattr(each, status) or 0
    assert {key: number for key, number in found.items() if number} == wanted


def check(engine: Engine) -> None:
    with reading(engine, is_snapshot=True) as connection:
        assert_counts_are_right(connection)


class History:
    """Steps that programs and people take, drawn at random, each in a transaction of the caller."""

    def __init__(self, draw: random.Random, remainder: int, of: int) -> None:
        self._draw = draw
        self._facets = random.Random(remainder)
        self._ours = f"id % {of} = {remainder}"
        self._numbers = itertools.count(remainder, of)

    def step(self, connection: Connection) -> None:
        steps = (self._arrive, self._arrive, self._move, self._move_many, self._raw_status, self._raw_key)
        self._draw.choice((*steps, self._nothing, self._delete, self._again))(connection)

    def _new(self, **columns: Any) -> dict[str, Any]:
        group, queue = self._draw.choice(GROUPS), self._draw.choice(QUEUES)
        facets = {name: self._facets.choice(values) for name, values in FACETS_OF.items()}
        return row(fingerprint=group, origin_queue=queue, scope_id=self._draw.choice((1, 2)), **facets, **columns)

    def _arrive(self, connection: Connection) -> None:
        rows = [self._new(id=next(self._numbers)) for _ in range(self._draw.randint(1, 9))]
        journal.arrive(connection, rows, self._time(), "ingest", "test")

    def _again(self, connection: Connection) -> None:
        """An identity that is there already is left, and no row is added."""
        known = connection.scalars(select(MESSAGES.c.identity).where(text(self._ours)).limit(2)).all()
        rows = [self._new(id=next(self._numbers), identity=each) for each in known]
        journal.arrive(connection, [*rows, self._new(id=next(self._numbers))], self._time(), "ingest", "test")

    def _rows(self, connection: Connection) -> list[Any]:
        columns = (MESSAGES.c.id, MESSAGES.c.status, MESSAGES.c.lock_token)
        found = connection.execute(select(*columns).where(text(self._ours)).order_by(MESSAGES.c.id)).all()
        return self._draw.sample(found, min(len(found), self._draw.randint(1, 5)))

    def _moves(self, connection: Connection) -> Iterator[journal.RowMove]:
        for found in self._rows(connection):
            to = self._draw.choice(sorted(MOVES[found.status]))
            locked = lock() if to is Status.PROCESSING else {}
            yield journal.RowMove(found.id, found.status, to, found.lock_token, "test", locked)

    def _move(self, connection: Connection) -> None:
        for each in self._moves(connection):
            journal.move(
                connection, each.row_id, each.from_, each.to, each.token, NOW, "ann", each.reason, **each.columns
            )

    def _move_many(self, connection: Connection) -> None:
        journal.move_many(connection, list(self._moves(connection)), NOW, "ann")

    def _raw_status(self, connection: Connection) -> None:
        to = self._draw.choice(("resolved", "failed", "manual"))
        change = f"status = '{to}', lock_token = NULL, lease_until = NULL"
        connection.execute(text(f"UPDATE dlq_messages SET {change} WHERE {self._ours} AND id % 3 = 0"))

    def _raw_key(self, connection: Connection) -> None:
        values = {"group": self._draw.choice(GROUPS), "queue": self._draw.choice(QUEUES)}
        facets = {name: self._facets.choice(each) for name, each in FACETS_OF.items()}
        change = ", ".join(f"{name} = :{name}" for name in facets)
        connection.execute(text(f"UPDATE dlq_messages SET {change} WHERE {self._ours} AND id % 7 < 2"), facets)
        change = "fingerprint = :group, origin_queue = :queue, scope_id = 3 - scope_id"
        connection.execute(text(f"UPDATE dlq_messages SET {change} WHERE {self._ours} AND id % 5 < 2"), values)

    def _nothing(self, connection: Connection) -> None:
        connection.execute(text(f"UPDATE dlq_messages SET priority = 1 WHERE {self._ours}"))

    def _delete(self, connection: Connection) -> None:
        ids = ", ".join(str(each.id) for each in self._rows(connection)) or "-1"
        connection.execute(text(f"DELETE FROM dlq_messages WHERE id IN ({ids})"))

    def _time(self) -> datetime:
        return NOW - timedelta(minutes=self._draw.randint(0, 4_000))


@pytest.mark.parametrize("seed", range(3))
def test_the_counts_are_right_after_every_step_of_any_history(engine: Engine, seed: int) -> None:
    draw = random.Random(seed)
    history = History(draw, 1, 2)
    for _ in range(STEPS):
        with writing(engine) as connection:
            for _ in range(draw.randint(1, 3)):
                history.step(connection)
            if is_cut := draw.random() < 0.2:
                connection.rollback()
        if not is_cut and draw.random() < 0.3:
            merge(engine)
        check(engine)
    with reading(engine) as connection:
        assert connection.scalar(text("SELECT count(*) FROM dlq_messages"))


@pytest.mark.parametrize("seed", range(2))
def test_two_that_write_at_once_and_one_that_adds_up_are_seen_as_they_commit(database_url: str, seed: int) -> None:
    engine = store_at(database_url)
    draw = random.Random(seed)
    histories = [History(draw, 0, 2), History(draw, 1, 2)]
    for _ in range(STEPS // 4):
        with writing(engine) as one, writing(engine) as other:
            for _ in range(4):
                # What one has written and not committed is in the way of neither the other nor the merge.
                which = draw.randrange(2)
                histories[which].step((one, other)[which])
                if draw.random() < 0.5:
                    merge(engine)
                check(engine)
            if draw.random() < 0.3:
                one.rollback()
        check(engine)
    merge(engine)
    check(engine)
    with reading(engine) as connection:
        assert connection.scalar(text("SELECT count(*) FROM dlq_count_changes")) == 0


def test_one_statement_that_adds_changes_and_deletes_is_counted_once(database_url: str) -> None:
    engine = store_at(database_url)
    add(engine, *(row(fingerprint=each, origin_queue="orders") for each in GROUPS))
    columns = ", ".join(each.name for each in MESSAGES.columns if each.name not in {"id", "identity"})
    with writing(engine) as connection:
        connection.execute(
            text(
                f"WITH gone AS (DELETE FROM dlq_messages WHERE fingerprint = '{GROUPS[0]}'), "
                f"changed AS (UPDATE dlq_messages SET status = 'manual' WHERE fingerprint = '{GROUPS[1]}') "
                f"INSERT INTO dlq_messages (identity, {columns}) "
                f"SELECT 'new' || n, {columns} FROM dlq_messages, generate_series(1, 3) AS n "
                f"WHERE fingerprint = '{GROUPS[2]}'"
            )
        )
    check(engine)
    with writing(engine) as connection:
        connection.execute(
            text(
                f"INSERT INTO dlq_messages (identity, {columns}) SELECT identity, {columns} FROM dlq_messages "
                "ON CONFLICT (identity) DO UPDATE SET status = 'failed'"
            )
        )
    check(engine)
    with writing(engine) as connection:
        connection.execute(text("TRUNCATE dlq_messages CASCADE"))
    check(engine)


def test_a_merge_is_done_in_bounded_steps_and_leaves_no_zeros(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = store_at(database_url)
    monkeypatch.setattr(count_changes, "_AT_ONCE", 4)
    for number in range(5):
        add(engine, row(fingerprint=GROUPS[number % 3]), row(fingerprint=GROUPS[(number + 1) % 3]))
    assert merge(engine, seconds=0) == 4
    check(engine)
    assert merge(engine) == 6
    check(engine)
    with writing(engine) as connection:
        connection.execute(text(f"DELETE FROM dlq_messages WHERE fingerprint = '{GROUPS[0]}'"))
    merge(engine)
    check(engine)
    with reading(engine) as connection:
        for table in (COUNTS, FACET_COUNTS):
            kept = connection.scalars(select(table.c.fingerprint).where(table.c.scope_id != 0)).all()
            assert sorted(kept) == GROUPS[1:]


def test_a_zero_is_forgotten_in_sqlite_too(sqlite_url: str) -> None:
    engine = store_at(sqlite_url)
    add(engine, *(row(fingerprint=each) for each in GROUPS))
    with writing(engine) as connection:
        connection.execute(text(f"DELETE FROM dlq_messages WHERE fingerprint = '{GROUPS[0]}'"))
    merge(engine)
    check(engine)
    with reading(engine) as connection:
        for table in (COUNTS, FACET_COUNTS):
            assert len(connection.execute(select(table)).all()) == 1 + len(GROUPS[1:])


# --- Who writes


def test_two_jobs_that_count_in_one_group_do_not_wait_for_each_other(database_url: str) -> None:
    engine = store_at(database_url)
    with writing(engine) as one, writing(engine) as other:
        journal.arrive(one, [row()], NOW, "ingest", "test")
        other.execute(text("SET LOCAL lock_timeout = 1000"))
        journal.arrive(other, [row()], NOW, "ingest", "test")
        merge(engine)
    check(engine)


def test_a_login_without_a_right_on_the_counts_is_counted_and_cannot_lead_the_trigger_astray(database_url: str) -> None:
    """As a login is that has the grants of an older version."""
    engine = store_at(database_url)
    name = f"old_{secrets.token_hex(6)}"
    (row_id,) = add(engine, row())
    with writing(engine) as connection:
        connection.execute(text(f"CREATE ROLE {name}"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON dlq_messages TO {name}"))
    try:
        with writing(engine) as connection:
            # Else these would be found before ours.
            for table in (CHANGES.name, COUNTS.name, FACET_COUNTS.name):
                connection.execute(text(f"CREATE TEMPORARY TABLE {table} (LIKE public.{table})"))
            connection.execute(text(f"SET LOCAL ROLE {name}"))
            connection.execute(text("UPDATE dlq_messages SET status = 'manual'"))
            times = {"status_since": NOW, "created_at": NOW, "updated_at": NOW}
            connection.execute(MESSAGES.insert().values(row(fingerprint=GROUPS[1], **times)))
            connection.execute(MESSAGES.delete().where(MESSAGES.c.id == row_id))
        check(engine)
        misused = f"""
            SET LOCAL ROLE {name};
            CREATE TEMPORARY TABLE mine (a integer);
            CREATE TRIGGER mine AFTER TRUNCATE ON mine EXECUTE FUNCTION public.dlq_count_messages()
        """
        with pytest.raises(DatabaseForbids, match="dlq_count_messages"), writing(engine) as connection:
            connection.execute(text(misused))
    finally:
        with writing(engine) as connection:
            connection.execute(text(f"DROP OWNED BY {name}"))
            connection.execute(text(f"DROP ROLE {name}"))


# --- Messages that were there before the triggers


def upgrade_to(url: str, revision: str) -> Engine:
    engine = create_engine_for(url, connect_timeout=30, create=True)
    with writing(engine) as connection:
        config = migrate._config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    return engine


@pytest.mark.parametrize("before", ["0017", "0020"])
def test_an_upgrade_counts_what_is_there(sqlite_url: str, before: str) -> None:
    engine = upgrade_to(sqlite_url, before)
    with writing(engine) as connection:
        history = History(random.Random(1), 1, 2)
        for _ in range(STEPS):
            history.step(connection)
    migrate.upgrade(sqlite_url)
    check(engine)


@pytest.mark.parametrize("before", ["0017", "0020"])
@pytest.mark.parametrize("seed", range(3))
def test_what_was_there_is_counted_once_while_others_write_and_after_a_cut(
    database_url: str, seed: int, before: str
) -> None:
    engine = upgrade_to(database_url, before)
    histories = [History(random.Random(seed + number), number, 3) for number in range(3)]
    with writing(engine) as connection:
        for history in (*histories, *histories):
            history.step(connection)
    # The upgrade is killed behind its transaction: the triggers count, and what was there is not counted.
    upgrade_to(database_url, "head")
    with writing(engine) as connection:
        histories[0].step(connection)
    merge(engine)
    with reading(engine) as connection:
        assert connection.scalar(IS_COUNTED_BY_FACET) is None
        assert (connection.scalar(IS_COUNTED) is None) is (before == "0017")
        there = connection.execute(text("SELECT count(*) FROM dlq_messages WHERE scope_id = 1")).scalar_one()
        assert sum(measure(connection, NOW).states.values()) == there
    stop = Event()

    def write(history: History) -> None:
        while not stop.is_set():
            with writing(engine) as connection:
                history.step(connection)
                history.step(connection)

    with ThreadPoolExecutor(2) as pool, writing(engine) as open_one:
        histories[0].step(open_one)
        running = [pool.submit(write, history) for history in histories[1:]]
        try:
            said: list[str] = []
            count_stored(engine, said.append)
            assert said
            merge(engine)
            check(engine)
        finally:
            stop.set()
        for each in running:
            each.result(HANGS_AFTER)
    check(engine)
    assert migrate.upgrade(database_url, waits=said.append).before == migrate.latest()
    assert sum(each.startswith("counting them by") for each in said) == 1
    merge(engine)
    check(engine)


def test_a_count_that_was_cut_is_done_whole_by_the_next_upgrade(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = upgrade_to(database_url, "0017")
    with writing(engine) as connection:
        history = History(random.Random(5), 1, 2)
        for _ in range(STEPS):
            history.step(connection)
    with monkeypatch.context() as patch:
        # The connection is lost behind its first statement.
        patch.setattr(
            count_changes,
            "_ADD_WHAT_WAS_THERE",
            text(f"{count_changes._ADD_WHAT_WAS_THERE}; SELECT pg_terminate_backend(pg_backend_pid())"),
        )
        with pytest.raises(DatabaseUnreadable):
            migrate.upgrade(database_url)
    with reading(engine) as connection:
        assert connection.scalar(text("SELECT count(*) FROM dlq_count_changes")) == 0
    migrate.upgrade(database_url)
    check(engine)


# --- Who reads


def everything_shown(engine: Engine, filters: Filters) -> tuple[Any, ...]:
    with reading(engine, is_snapshot=True) as connection:
        by_group = groups(connection, filters, 4)
    return inbox(engine, filters, 3, NOW), inbox(engine, filters, now=NOW), by_group


FILTERS = (
    Filters(),
    Filters(statuses=(Status.FAILED,)),
    Filters(statuses=tuple(Status)),
    Filters.parse(group=GROUPS[0][:3]),
    Filters.parse(group=GROUPS[1], origin="orders"),
    Filters.parse(origin=["mail*", "orders"], statuses=[Status.RESOLVED, Status.PENDING]),
    Filters.parse(origin="orders-exchange"),
    Filters.parse(origin="nowhere"),
    Filters.parse(error_type="Timeout"),
    Filters.parse(error_type="shop.Timeout", origin="orders"),
    Filters.parse(error_type="y" * 200),
    Filters.parse(event="order.created", statuses=[Status.PENDING, Status.FAILED]),
    Filters.parse(event="#"),
    Filters.parse(event="order.*", source=["shop", "till"], group=GROUPS[0][:3]),
    Filters.parse(source="nowhere"),
    Filters.parse(unwanted=["status=resolved", "status=failed"]),
    Filters.parse(unwanted="event=order.created"),
    Filters.parse(unwanted=["source=shop", "error-type=Timeout", f"group={GROUPS[0][:15]}"]),
    Filters.parse(unwanted=["origin=orders", "origin=orders-exchange"]),
    Filters.parse(statuses=[Status.FAILED], unwanted="status=failed"),
)


def test_groups_are_as_a_look_at_every_message_shows_them(engine: Engine) -> None:
    draw = random.Random(7)
    register(engine, "one/a")
    register(engine, "two/b")
    with writing(engine) as connection:
        history = History(draw, 1, 2)
        for _ in range(2 * STEPS):
            history.step(connection)
        # A broker has no queue with an empty name; whoever writes one into a header is shown with those without.
        empty = connection.scalars(select(MESSAGES.c.id).where(MESSAGES.c.origin_queue.is_(None)).limit(2)).all()
        connection.execute(MESSAGES.update().where(MESSAGES.c.id == empty[0]).values(status=Status.FAILED))
        connection.execute(MESSAGES.update().values(origin_exchange="orders-exchange"))
    for seen in (engine, scoped(engine, 2), of_every_scope(engine)):
        for filters in FILTERS:
            # A time, which no count knows, makes it look at the messages.
            assert everything_shown(seen, filters) == everything_shown(seen, replace(filters, since=LONG_AGO))


def test_groups_that_differ_in_nothing_but_the_group_are_counted_by_all_that_filters_know(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As most are: a failure has one error type, and its queue one event. Not one message is counted then."""
    draw = random.Random(8)
    for number in range(60):
        which = draw.randrange(len(GROUPS))
        facets = {name: values[which % 2] for name, values in FACETS_OF.items()} | {"origin_queue": QUEUES[which]}
        add(
            engine, row(fingerprint=GROUPS[which], origin_exchange="ex", **facets), at=NOW - number * timedelta(hours=1)
        )
    wanted = [(filters, everything_shown(engine, replace(filters, since=LONG_AGO))) for filters in FILTERS]
    assert any(shown[0].lines for filters, shown in wanted if filters.events)
    monkeypatch.setattr(queries, "_nth", None)
    for filters, shown in wanted:
        if not {"y" * 200, "#"} & {*filters.error_types, *filters.events}:
            assert everything_shown(engine, filters) == shown


def test_many_counts_by_facet_are_not_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(engine, *(row(event=f"order.{number}") for number in range(9)))
    with reading(engine) as connection:
        merged = connection.scalar(text("SELECT count(*) FROM dlq_facet_counts WHERE scope_id <> 0"))
    if not merged:
        merge(engine)
    filters = Filters.parse(event="order.3")
    before = everything_shown(engine, filters)
    monkeypatch.setattr(counts, "_MOST_FACETS", 9)
    with statements_of(engine) as seen:
        assert everything_shown(engine, filters) == before
    assert any("dlq_messages.event = " in statement and "count(*)" in statement for statement, _ in seen)


def test_the_figures_and_groups_are_the_same_while_what_was_there_is_not_counted(engine: Engine) -> None:
    with writing(engine) as connection:
        history = History(random.Random(3), 1, 2)
        for _ in range(STEPS):
            history.step(connection)

    def shown() -> tuple[Any, ...]:
        with reading(engine) as connection:
            figures = measure(connection, NOW)
        return figures, [everything_shown(engine, filters) for filters in FILTERS]

    before = shown()
    with writing(engine) as connection:
        for table in (COUNTS, FACET_COUNTS):
            connection.execute(table.delete().where(table.c.scope_id == 0))
            # So that numbers that come from the counts all the same would be wrong.
            connection.execute(table.update().values(pending=table.c.pending + 1))
    assert shown() == before


def test_what_moves_while_groups_are_read_does_not_get_between_their_statements(database_url: str) -> None:
    engine, other = store_at(database_url), create_engine_for(database_url, connect_timeout=30)
    add(engine, *(row(fingerprint=each, origin_queue="orders") for each in GROUPS))
    wanted = everything_shown(engine, Filters())
    left = ["DELETE FROM dlq_messages"]

    def move(*_: Any) -> None:
        while left:
            with writing(other) as connection:
                connection.execute(text(left.pop()))

    event.listen(engine, "after_cursor_execute", move)
    assert inbox(engine, Filters(), now=NOW) == wanted[1]
    assert inbox(engine, Filters(), now=NOW).lines == ()


def test_a_queue_with_an_empty_name_is_shown_with_those_without_one(engine: Engine) -> None:
    add(engine, row(origin_queue=""), at=NOW - timedelta(minutes=5))
    add(engine, row(origin_queue=None), row(origin_queue=None), at=NOW - timedelta(minutes=3))
    add(engine, row(origin_queue=""), at=NOW - timedelta(minutes=1))
    (line,) = inbox(engine, Filters(), now=NOW).lines
    assert (line.queue, line.size, line.recent) == (None, 4, 4)
    assert (line.first, line.last) == (NOW - timedelta(minutes=5), NOW - timedelta(minutes=1))


@pytest.mark.slow
def test_what_a_person_asks_reads_no_group_from_end_to_end(database_url: str) -> None:
    engine = store_at(database_url)
    fill(engine, 50_000, due=200)
    merge(engine)
    with writing(engine) as connection:
        connection.execute(text("UPDATE dlq_messages SET origin_queue = NULL WHERE fingerprint < '0000000000000010'"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM (ANALYZE) dlq_messages"))
    with statements_of(engine) as seen, reading(engine, is_snapshot=True) as connection:
        inbox(engine, Filters(), 25, NOW + timedelta(days=3))
        groups(connection, Filters(), 25)
    assert seen
    for statement, parameters in seen:
        assert walk(engine, statement, parameters) is None
        if "status_since" in statement:
            continue  # the newest of each group by their ids; its oldest resolved rows, of a bounded number
        looks = [node for node in explained(engine, statement, parameters) if "dlq_messages" in node.values()]
        # The one at an end of what the index has of a group in a queue, and none that a filter removes.
        assert [node for node in looks if node["Actual Rows"] + node.get("Rows Removed by Filter", 0) > 1] == []
        assert looks


def explained(engine: Engine, statement: str, parameters: Any) -> list[dict[str, Any]]:
    """The nodes of the plan, as it was carried out."""

    def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield plan
        for each in plan.get("Plans", ()):
            yield from nodes(each)

    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(hide_password=False)) as connection:
        register_arrays(connection)
        asked = f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}".encode()
        (found,) = connection.execute(asked, parameters).fetchone() or ()
    return list(nodes(found[0]["Plan"]))
