"""Search in bodies and headers: bounded, it says how far it was, and it finds nothing that is masked."""

from __future__ import annotations

import gzip
import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, add, row, store_at
from messages import encode_table, text

from dlqbatch.messages import search
from dlqbatch.messages.search import fields_with, search_bodies
from dlqbatch.store.filters import Filters

if TYPE_CHECKING:
    from sqlalchemy import Engine


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def found(engine: Engine, sought: str, **filters: str) -> list[int]:
    done = search_bodies(engine, sought, Filters.parse(**filters), limit=50, seconds=60)  # type: ignore[arg-type]
    return [record.id for record in done.messages]


def test_bodies_and_headers_are_searched_as_they_are_shown(engine: Engine) -> None:
    table = encode_table([(b"x-order", text("P-000087")), (b"x-api-key", text("P-000087-key"))])
    held = b"\x20\x00" + len(table).to_bytes(4, "big") + table
    body, in_header, umlaut, binary = add(
        engine,
        row(body=b'{"order": "P-000087"}', event="a"),
        row(body=b"nothing", properties=held, event="b"),
        row(body=json.dumps({"name": "MÜLLER"}, ensure_ascii=False).encode()),
        row(body=b"\xff\xfe P-000087"),
    )
    (packed,) = add(engine, row(body=gzip.compress(b'{"order": "P-000099", "password": "hunter23"}')))
    assert found(engine, "P-000099") == [packed]
    assert found(engine, "hunter23") == []
    add(engine, row(body=b'{"password": "hunter22"}', error_message="P-000088"), row(body=b"4111 1111 1111 1111"))
    assert sorted(found(engine, "p-000087")) == [body, in_header, binary]
    assert found(engine, "p-000087", event="b") == [in_header]
    assert found(engine, "müller") == [umlaut]
    for masked in ("hunter22", "4111 1111", "P-000087-key", "P-000088", "nothing of it"):
        assert found(engine, masked) == []


def test_a_search_that_is_cut_says_how_far_it_was_and_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_AT_ONCE", 10)
    ids = [
        add(engine, row(body=b"wanted" if n % 7 == 0 else b"x"), at=NOW + timedelta(seconds=n))[0] for n in range(35)
    ]
    seen: list[int] = []
    looked_at, after, calls = 0, None, 0
    while True:
        done = search_bodies(engine, "wanted", Filters(), limit=2, after=after, seconds=0)
        seen += [record.id for record in done.messages]
        looked_at, after, calls = looked_at + done.looked_at, done.next, calls + 1
        if after is None:
            break
    assert seen == [each for n, each in reversed([*enumerate(ids)]) if n % 7 == 0]
    assert looked_at == len(ids)
    assert calls > 3
    monkeypatch.setattr(search, "MOST_ROWS", 10)
    bounded = search_bodies(engine, "nothing", Filters(), limit=50, seconds=60)
    assert (bounded.looked_at, bounded.back_to) == (10, NOW + timedelta(seconds=25))
    assert bounded.next is not None


def test_a_field_with_the_value_is_named(engine: Engine) -> None:
    add(engine, row(fields=[("order.id", "P-1"), ("ref", "P-1")]), row(fields=[("ref", "P-2")]))
    assert sorted(fields_with(engine, "P-1")) == ["order.id=P-1", "ref=P-1"]
    assert fields_with(engine, "P-3") == []
