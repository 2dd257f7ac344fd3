"""Filters and pasted lists that are hostile, too large, or match everything: a text is a text, and a bound is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, row, store_at

from dlqbatch.cli.commands import run_command
from dlqbatch.groups.inbox import inbox
from dlqbatch.messages.actions import MessageActions
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.store.filters import LONGEST_SOUGHT, MOST_WORDS, Filters, NotUnderstood
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

HOSTILE = (
    "' OR 1=1 --",
    "%' ; DROP TABLE dlq_messages; --",
    '"]} $.a[*]',
    "%_\\",
    "\0a\x1b[31m\u202e",
    "\udcff",
    "x" * 70_000,
    "#",
    "*",
)


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


def selected(engine: Engine, filters: Filters) -> list[int]:
    """The messages, which list, groups, the inbox and a plan have to agree about."""
    store = MessageActions(engine)
    found = sorted(each.id for each in store.page(filters, 100).messages)
    assert sum(group.size for group in store.groups(filters, 100).groups) == len(found)
    assert sum(line.size for line in inbox(engine, filters, 100).lines) == len(found)
    assert freeze(engine, Selection(filters), actor="ann", reason="r", now=NOW, dry_run=True).size == len(found)
    store.near(filters)
    store.values_not_found(filters)
    return found


@pytest.mark.parametrize("word", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_source_tag_or_field_is_a_text_like_any_other(engine: Engine, word: str) -> None:
    """A wildcard is one only where topics are compared; nothing else is read as anything but a text."""
    raw = word.encode("utf-8", "surrogateescape")
    field = raw.decode("utf-8", "backslashreplace")  # as ingest reads it
    (wanted,) = add(engine, row(source=raw, tags=[raw], fields=[("order", field)], status=Status.MANUAL))
    (other,) = add(engine, row(source="shop", tags=["eu"], fields=[("order", "7")], status=Status.MANUAL))
    for words in ({"source": word}, {"tag": word}, {"field": f"order={word}"}):
        assert selected(engine, Filters.parse(**words)) == [wanted], words
    for name in ("source", "tag", "field=order"):
        assert selected(engine, Filters.parse(unwanted=f"{name}={word}")) == [other], name
    assert selected(engine, Filters.parse(field=f"{word.replace('=', '')}=7")) == []
    assert selected(engine, Filters.parse(source=word, tag="eu")) == []


def test_a_filter_that_matches_everything_matches_what_has_such_a_value(engine: Engine) -> None:
    every = add(engine, *(row(event="a.b", origin_queue="q", status=Status.MANUAL) for _ in range(3)))
    none = add(engine, row(status=Status.MANUAL))
    assert selected(engine, Filters.parse(event="#")) == every
    assert selected(engine, Filters.parse(origin=["#", "#.#"])) == every
    assert selected(engine, Filters.parse(unwanted="event=#")) == none
    assert selected(engine, Filters.parse(group="0")) == every + none


@pytest.mark.parametrize("name", ["text", "tag", "group"])
def test_more_conditions_than_a_statement_takes_are_refused_with_their_number(engine: Engine, name: str) -> None:
    words = [f"{number:x}" for number in range(MOST_WORDS + 1)]
    assert selected(engine, Filters.parse(**{name: words[1:]})) == []
    for wrong in ({name: words}, {"unwanted": [f"{name}={word}" for word in words]}):
        with pytest.raises(NotUnderstood, match=f"{MOST_WORDS + 1} .* are more than {MOST_WORDS} at once"):
            Filters.parse(**wrong)


def test_more_fields_or_actions_than_a_statement_takes_are_refused_with_their_number(engine: Engine) -> None:
    names = [f"name{number}=1" for number in range(MOST_WORDS + 1)]
    assert selected(engine, Filters.parse(field=names[1:])) == []
    for wrong in (
        {"field": names},
        {"unwanted": [f"field={each}" for each in names]},
        {"action": [f"A-{number}" for number in range(1, MOST_WORDS + 2)]},
    ):
        with pytest.raises(NotUnderstood, match=f"{MOST_WORDS + 1} .* are more than {MOST_WORDS} at once"):
            Filters.parse(**wrong)


def test_many_names_that_an_index_finds_are_one_condition(engine: Engine) -> None:
    (wanted,) = add(engine, row(event="e.1", origin_queue="q1", source="s1", error_type="x.E1", status=Status.MANUAL))
    many: dict[str, Any] = {
        "event": [f"e.{number}" for number in range(1500)],
        "origin": [f"q{number}" for number in range(1500)],
        "source": [f"s{number}" for number in range(1500)],
        "error_type": [f"E{number}" for number in range(1500)],
        "group": [f"{number:016x}" for number in range(1500)],
    }
    assert selected(engine, Filters.parse(**many)) == [wanted]


def test_a_text_to_look_for_is_bounded() -> None:
    assert Filters.parse(text="x" * LONGEST_SOUGHT).texts
    for wrong in ({"text": "x" * (LONGEST_SOUGHT + 1)}, {"unwanted": "text=" + "%" * (LONGEST_SOUGHT + 1)}):
        with pytest.raises(NotUnderstood, match="a text of 5,001 characters is longer"):
            Filters.parse(**wrong)


LISTS = {
    "windows": ("order", b"P-1\r\n\r\n  P-2 \r\nP-1\r\n", 0, ""),
    "byte order mark": ("order", b"\xef\xbb\xbfP-1\n", 0, ""),
    "name in the first line": ("", b"order\nP-1\n", 0, ""),
    "no end of line": ("order", b"P-1", 0, ""),
    "matches nothing": (
        "order",
        b"P-9\n' OR 1=1 --\n%\n#\n\x1b[31mP-1\n\xff\n",
        1,
        "6 of the values of order are not",
    ),
    "empty": ("order", b"", 2, "holds no values"),
    "blank": ("order", b" \n\r\n\t\n", 2, "holds no values"),
    "only a name": ("", b"order\n", 2, "holds no values"),
    "utf-16": ("order", "P-1\n".encode("utf-16"), 2, "is UTF-16; save it as UTF-8"),
    "unknown field": ("ordr", b"P-1\n", 1, "1 of the values of ordr are not found: P-1"),
    "too many": ("order", b"\n".join(b"%d" % number for number in range(100_001)), 2, "100,001 values"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_pasted_list_is_read_or_refused_and_never_more_than_it_says(
    kind: str, sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, content, code, said = LISTS[kind]
    wanted, _ = add(store_at(sqlite_url), *(row(fields=[("order", f"P-{number}")]) for number in (1, 3)))
    file = tmp_path / "list"
    file.write_bytes(content)
    monkeypatch.setenv("DLQBATCH_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("DLQBATCH_CONFIG", "/dev/null")
    word = f"{name}={file}" if name else str(file)
    assert run_command(("messages", "list", "--field-file", word, "--json")) == code
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out.count('"id"') == (code == 0)
    assert (f'"id": {wanted}' in shown.out) == (code == 0)


@pytest.mark.parametrize("file", ["/nowhere/list", "/"])
def test_a_list_that_cannot_be_read_is_an_error(
    file: str, sqlite_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store_at(sqlite_url)
    monkeypatch.setenv("DLQBATCH_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("DLQBATCH_CONFIG", "/dev/null")
    assert run_command(("messages", "list", "--field-file", f"order={file}")) == 2
    assert "cannot be read" in capsys.readouterr().err
