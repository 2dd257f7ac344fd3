"""A filter selects the same messages in every command: those that a plain reading of its words selects."""

from __future__ import annotations

import random
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, fill, row, store_at
from query_plans import statements_of, walk
from sqlalchemy import select, update

from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.edit_many import edit_many, edits
from dlqbatch.messages.erase import erase
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store import filter_conditions
from dlqbatch.store import filters as grammar
from dlqbatch.store.bulk import distinct
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.filters import Filters, NotUnderstood
from dlqbatch.store.journal import EDIT_OF, arrive
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES, PLAN_ITEMS

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine

HOUR = timedelta(hours=1)
ERRORS = ("TimeoutError", "net.TimeoutError", "net::TimeoutError", "MyTimeoutError", "java.io.IOException", None)
EVENTS = ("orders.created", "orders.paid", "orders.eu.created", "mail", None)
QUEUES = ("orders", "orders.eu", "mail.out", None)
EXCHANGES = ("", "mails", "shop", None)
SOURCES = ("shop", "billing", None)
TAGS = ("orders", "eu", 'it\'s "odd"')
FIELDS = ("order=1", "order=2", "order=1=2", "tenant=a", "tenant=it's")
TEXTS = ("connection refused", "Card 4711 DECLINED", "50%_off", None)
STATES = (Status.PENDING, Status.MANUAL, Status.FAILED, Status.ARCHIVED, Status.RESOLVED)
COLUMNS = {"id": "ids", "group": "fingerprint", "origin": "origin_queue", "tag": "tags", "text": "error_message"}
REPLAYABLE = {Status.PENDING, Status.MANUAL, Status.FAILED}


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def filled(engine: Engine, chance: random.Random) -> dict[int, dict[str, Any]]:
    """What each row is, by its id; some of them look like edits."""
    rows: dict[int, dict[str, Any]] = {}
    for _ in range(80):
        error = chance.choice(ERRORS)
        columns: dict[str, Any] = {
            "error_type": error,
            "error_message": chance.choice(TEXTS),
            "fingerprint": chance.choice(("ab", "ac", "f0")) * 7 + chance.choice(("00", "ff")),
            "event": chance.choice(EVENTS),
            "origin_queue": chance.choice(QUEUES),
            "origin_exchange": chance.choice(EXCHANGES),
            "source": chance.choice(SOURCES),
            "tags": chance.sample(TAGS, chance.randint(0, 2)),
            "fields": [tuple(each.split("=", 1)) for each in chance.sample(FIELDS, chance.randint(0, 2))],
        }
        is_edit = chance.random() < 0.1
        at = NOW - chance.randint(0, 72) * HOUR
        status = chance.choice(STATES)
        with writing(engine) as connection:
            why = f"{EDIT_OF}7 (body): typo" if is_edit else "arrived"
            (row_id,) = arrive(connection, [row(status=Status.MANUAL, **columns)], at, "ann", why).values()
            connection.execute(update(MESSAGES).where(MESSAGES.c.id == row_id).values(status=status))
        rows[row_id] = columns | {"ids": str(row_id), "status": status, "at": at, "is_edit": is_edit}
    behind = {
        exchange: {one["origin_queue"] for one in rows.values() if one["origin_exchange"] == exchange}
        for exchange in EXCHANGES
    }
    return {row_id: one | {"behind": behind} for row_id, one in rows.items()}


def some_filters(chance: random.Random) -> dict[str, Any]:
    """Words as a person would write them."""
    words: dict[str, Any] = {}
    choices: dict[str, tuple[Any, ...]] = {
        "ids": tuple(map(str, range(1, 40))),
        "error_type": ("TimeoutError", "net.TimeoutError", "IOException", "io.IOException", "Nothing", "imeoutError"),
        "group": ("a", "ab", "ab" * 7 + "00", "f0" * 7 + "ff", "F0", "0", "zz"),
        "event": ("orders.created", "orders.*", "orders.#", "#", "*", "#.created", "*.eu.*", "nothing"),
        "origin": ("orders", "orders.#", "*.out", "#", "nothing.#", "mails", "shop"),
        "source": SOURCES[:2],
        "tag": TAGS,
        "field": (*FIELDS, "order=3", "nothing=1"),
        "text": ("refused", "declined", "%_", "4711", "%%"),
    }
    for name in chance.sample(sorted(choices), chance.randint(0, 3)):
        words[name] = chance.sample(choices[name], chance.randint(1, 2))
    if chance.random() < 0.2:
        words["statuses"] = chance.sample(STATES, chance.randint(1, 3))
    if chance.random() < 0.3:
        words["since"] = f"{chance.randint(20, 80)}h"
    if chance.random() < 0.2:
        words["until"] = f"{chance.randint(0, 19)}h"
    if chance.random() < 0.2:
        words["is_edit"] = chance.random() < 0.5
    if chance.random() < 0.4:
        name = chance.choice([*sorted(choices), "status"])
        value = chance.choice(choices[name] if name != "status" else STATES)
        words["unwanted"] = [f"{'id' if name == 'ids' else name.replace('_', '-')}={value}"]
    return words


def word_matches(pattern: list[str], words: list[str]) -> bool:
    """Topic patterns, read slowly."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(word_matches(pattern[1:], words[taken:]) for taken in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and word_matches(pattern[1:], words[1:])


def is_behind(exchange: str, one: dict[str, Any]) -> bool:
    queue = one["origin_queue"]
    return bool(one["origin_exchange"] == exchange if queue is None else queue in one["behind"][exchange])


def holds(name: str, value: str, one: dict[str, Any]) -> bool:
    """One filter and one value, as the docs say it."""
    if name in ("field", "tag"):
        return (tuple(value.split("=", 1)) if name == "field" else value) in one[f"{name}s"]
    stored = one[COLUMNS.get(name, name)]
    if stored is None:
        return name == "text" and mentioned(value, one)
    if name == "error_type":
        return bool(stored == value or any(stored.endswith(end + value) for end in (".", "::")))
    if name == "group":
        return bool(stored.startswith(value.lower()))
    if name in ("event", "origin"):
        return word_matches(value.split("."), stored.split("."))
    return mentioned(value, one) if name == "text" else bool(stored == value)


def is_held(name: str, value: str, one: dict[str, Any]) -> bool:
    """As `holds`; an exchange stands for the queues behind it."""
    return is_behind(value, one) if name == "origin" and value in EXCHANGES else holds(name, value, one)


def mentioned(value: str, one: dict[str, Any]) -> bool:
    return any(value.lower() in (one[name] or "").lower() for name in ("error_type", "error_message"))


def is_meant(words: dict[str, Any], one: dict[str, Any]) -> bool:
    for name, wanted in words.items():
        if name == "statuses":
            ok = one["status"] in wanted
        elif name == "since":
            ok = one["at"] >= NOW - int(wanted[:-1]) * HOUR
        elif name == "until":
            ok = one["at"] <= NOW - int(wanted[:-1]) * HOUR
        elif name == "is_edit":
            ok = one["is_edit"] is wanted
        elif name == "unwanted":
            option, _, value = wanted[0].partition("=")
            ok = not is_held(option.replace("-", "_"), value, one)
        elif name == "field":
            names = {value.partition("=")[0] for value in wanted}
            ok = all(
                any(holds(name, each, one) for each in wanted if each.startswith(f"{one_of}=")) for one_of in names
            )
        else:
            ok = any(is_held(name, value, one) for value in wanted)
        if not ok:
            return False
    return True


def listed(store: MessageActions, filters: Filters) -> list[int]:
    found, after = [], None
    while True:
        page = store.page(filters, 30, after)
        found += [record.id for record in page.messages]
        after = page.next
        if after is None:
            return found


def planned(engine: Engine, filters: Filters, now: datetime) -> list[int]:
    if filters.statuses and not set(filters.statuses) <= REPLAYABLE:
        return []
    everything = filters == Filters()
    frozen = freeze(engine, Selection(filters, everything=everything), actor="ann", reason="r", now=now)
    with reading(engine) as connection:
        asked = select(PLAN_ITEMS.c.message_id).where(PLAN_ITEMS.c.plan_id == frozen.plan_id)
        return list(connection.scalars(asked)) if frozen.size else []


def test_every_command_selects_what_a_plain_reading_of_the_filter_selects(engine: Engine) -> None:
    seed = secrets.randbits(32)
    chance = random.Random(seed)
    rows = filled(engine, chance)
    store = MessageActions(engine)
    people = {"actor": "ann", "reason": "r", "now": NOW, "dry_run": True}
    for turn in range(25):
        words = some_filters(chance)
        filters = Filters.parse(**words, now=NOW)
        this = f"seed {seed}: {words}"
        meant = {row_id for row_id, one in rows.items() if is_meant(words, one)}
        waiting = {row_id for row_id in meant if rows[row_id]["status"] in REPLAYABLE}
        assert sorted(listed(store, filters)) == sorted(meant), this
        assert sum(group.size for group in store.groups(filters, 1000).groups) == len(
            meant if filters.statuses else waiting
        ), this
        if set(filters.statuses) <= REPLAYABLE:
            assert set(planned(engine, filters, NOW + timedelta(microseconds=turn))) == waiting, this
        discarded = store.discard(filters=filters, everything=filters == Filters(), **people)
        assert {one.id for one in discarded.changes} == (meant if filters.statuses else waiting), this
        if filters != Filters():
            edited = edit_many(engine, edits(["body.n=1"], None), filters=filters, **people)
            assert {one.id for one in edited.messages} == (meant if filters.statuses else waiting), this
            assert {one.id for one in erase(engine, filters=filters, **people).changes} == meant, this
        if filters != Filters() and not filters.statuses:
            archived = {row_id for row_id in meant if rows[row_id]["status"] is Status.ARCHIVED}
            assert {one.id for one in store.restore(filters=filters, **people).changes} == archived, this


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"since": "2h", "until": "5h"}, "later than --until"),
        ({"since": "tomorrow-ish"}, "2h, 3d, today, yesterday"),
        ({"since": "999999999w"}, "is no time"),
        ({"unwanted": ["event"]}, "--not FILTER=VALUE"),
        ({"unwanted": ["colour=red"]}, "error-type, group, event"),
        ({"unwanted": ["status=lost"]}, "the states are"),
        ({"unwanted": ["id=A-17"]}, "'A-17' is no number of a message"),
        ({"ids": ["7", "0"]}, "'0' is no number of a message"),
        ({"ids": "9" * 5_000}, "is no number of a message"),
        ({"event": ["a", ""]}, "the event to look for is empty"),
    ],
)
def test_a_filter_that_makes_no_sense_says_how_it_is_written(words: dict[str, Any], says: str) -> None:
    with pytest.raises(NotUnderstood, match=says) as refused:
        Filters.parse(**words, now=NOW)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "first", "behind"),
    [
        ("2h", NOW - 2 * HOUR, NOW - 2 * HOUR + timedelta(microseconds=1)),
        ("90m ago", NOW - 1.5 * HOUR, NOW - 1.5 * HOUR + timedelta(microseconds=1)),
        ("yesterday", NOW.replace(hour=0) - 24 * HOUR, NOW.replace(hour=0)),
        ("Today", NOW.replace(hour=0), NOW.replace(hour=0) + 24 * HOUR),
    ],
)
def test_times_are_written_as_people_say_them(words: str, first: Any, behind: Any) -> None:
    now = NOW.replace(minute=0, second=0, microsecond=0)
    assert now == NOW
    assert grammar.parse_time(words, now) == first
    assert grammar.parse_end(words, now) == behind


def test_an_exchange_means_the_queues_behind_it_and_that_is_said(engine: Engine) -> None:
    ids = add(
        engine,
        row(origin_queue="mail.out", origin_exchange="emails"),
        row(origin_queue="mail.bulk", origin_exchange="emails"),
        row(origin_queue="mail.out", origin_exchange="other"),
        row(origin_queue=None, origin_exchange="emails"),
        row(origin_queue="orders", origin_exchange="shop"),
    )
    store = MessageActions(engine)
    emails = Filters.parse(origin="emails")
    assert sorted(listed(store, emails)) == ids[:4]
    said = ["'emails' is an exchange, by which messages came that failed in mail.bulk, mail.out"]
    assert store.values_not_found(emails) == said
    assert store.near(emails) == []
    assert sorted(listed(store, Filters.parse(unwanted=["origin=emails"]))) == ids[4:]
    # A queue of that name is what is meant, whatever an exchange is called.
    add(engine, row(origin_queue="emails", origin_exchange=""))
    assert len(listed(store, emails)) == 1
    assert store.values_not_found(emails) == []


def test_an_unwanted_name_that_no_message_has_is_named_with_what_is_near(engine: Engine) -> None:
    add(engine, row(event="orders.test", tags=["blue"]), row(event="paid"))
    store = MessageActions(engine)
    misspelt = Filters.parse(unwanted=["event=orders.tset", "group=ffff", "id=999999", "tag=bleu", "text=nothing"])
    assert len(listed(store, misspelt)) == 2
    says = "--not leaves out less than it says: "
    assert store.values_not_found(misspelt) == [
        f"{says}no message has the event 'orders.tset'; there is orders.test (1)",
        f"{says}no message has the group 'ffff'",
        f"{says}no message has the tag 'bleu'; there is blue (1)",
        f"{says}1 of the values of id are not found: 999999",
    ]
    assert store.values_not_found(Filters.parse(unwanted=["event=orders.test", "tag=blue", "status=failed"])) == []


def test_the_numbers_of_a_list_that_no_message_has_are_named(engine: Engine) -> None:
    ids = add(engine, *(row() for _ in range(1_200)))
    store = MessageActions(engine)
    pasted = Filters.parse(ids=[*map(str, ids[:3]), "999999", str(ids[0])])
    assert sorted(listed(store, pasted)) == ids[:3]
    assert store.values_not_found(pasted) == ["1 of the values of id are not found: 999999"]
    but_these = Filters.parse(unwanted=[f"id={row_id}" for row_id in ids[:1_100]])
    assert sorted(listed(store, but_these)) == ids[1_100:]


def test_what_matches_nothing_is_met_with_what_is_near(engine: Engine) -> None:
    add(
        engine,
        *(row(error_type="handlers.RateLimited", event="orders.created", origin_queue="orders") for _ in range(3)),
    )
    store = MessageActions(engine)

    def near(**words: Any) -> list[str]:
        return store.near(Filters.parse(**words))

    assert near(error_type="RateLimited") == []
    assert near(error_type="RateLimted") == [
        "no message has the error type 'RateLimted'; there is handlers.RateLimited (3)"
    ]
    assert near(event=["orders.created", "order.created"]) == [
        "no message has the event 'order.created'; there is orders.created (3)"
    ]
    assert near(origin="ORDERS") == ["no message has the origin 'ORDERS'; there is orders (3)"]
    assert near(origin="#.zebra") == ["no message has the origin '#.zebra'"]
    assert near(group="123") == ["no message has the group '123'"]


def test_a_source_or_a_tag_that_nothing_has_is_met_with_what_is_near(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(engine, *(row(source="shop-eu", tags=["orders", "tenant-7"]) for _ in range(3)), row(status=Status.MANUAL))
    add(engine, row(source="billing", tags=["billing"]), at=NOW - timedelta(days=1))
    store = MessageActions(engine)

    def near(**words: Any) -> list[str]:
        return store.near(Filters.parse(**words))

    assert near(source="shop-eu", tag=["tenant-7", "orders"]) == []
    assert near(source="shop-us") == ["no message has the source 'shop-us'; there is shop-eu (3)"]
    assert near(source="shop-eu", tag="tenant") == ["no message has the tag 'tenant'; there is tenant-7 (3)"]
    assert near(tag="zebra") == ["no message has the tag 'zebra'"]
    monkeypatch.setattr(filter_conditions, "_LABELS_LOOKED_AT", 2)
    assert near(source="Shop") == [
        "none of the newest 3 messages has the source 'Shop'; there is shop-eu (2)",
    ]
    assert near(source="billing") == ["none of the newest 3 messages has the source 'billing'"]


def test_what_is_near_is_found_without_reading_the_whole_table(engine: Engine) -> None:
    fill(engine, 5_000, due=0)
    wanted = Filters.parse(source="shop", tag="eu", error_type="Eror1", event="evnt-1", origin="quue-1", group="fff")
    with statements_of(engine) as statements:
        assert len(MessageActions(engine).near(wanted)) == 6
    assert [plan for each in statements if (plan := walk(engine, *each))] == []


def test_the_different_values_of_a_column_are_listed_once_and_without_null(engine: Engine) -> None:
    add(engine, *(row(error_type=f"a.b.E{number % 7}", event=None) for number in range(500)))
    with reading(engine) as connection:
        assert distinct(connection, MESSAGES.c.error_type) == [f"a.b.E{number}" for number in range(7)]
        assert distinct(connection, MESSAGES.c.event) == []
