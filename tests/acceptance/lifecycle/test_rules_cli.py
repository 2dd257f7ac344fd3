"""The rules as people meet them: `dlqbatch rules`, in processes of its own."""

from __future__ import annotations

import pytest
from dead_rows import add, row, store_at
from program import Finished, Program
from sqlalchemy import text

from dlqbatch.lifecycle.rules import DEFAULT_RULES
from dlqbatch.store.engine import writing


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


def rules(url: str, *arguments: str) -> Finished:
    return Program({"database_url": url}).run("rules", *arguments)


def test_an_operator_decides_about_an_error_of_their_own(url: str) -> None:
    engine = store_at(url)
    (row_id,) = add(engine, row(error_type="LedgerClosed", error_message="the books are closed until tomorrow"))

    unknown = rules(url, "test", "--message", str(row_id))
    assert (unknown.code, unknown.out) == (1, "manual, because no rule knows it\n"), unknown.said
    given = ("closed-books", "--on", "type", "--pattern", "^LedgerClosed$", "--strategy", "scheduled")
    assert "would be added" in rules(url, "set", *given, "--dry-run").out
    assert rules(url, "test", "--message", str(row_id)).code == 1
    added = rules(url, "set", *given, "--json")
    assert (added.code, added.told[0]["done"], added.told[0]["position"]) == (0, "added", 0), added.said

    decided = rules(url, "test", "--message", str(row_id))
    assert decided.code == 0, decided.said
    assert decided.out == "scheduled, by the rule 'closed-books': its type has 'LedgerClosed'\n"
    told = rules(url, "test", "--type", "LedgerClosed", "--text", "status code 503", "--json").told
    assert (told["strategy"], told["rule"]) == ("scheduled", "closed-books")
    assert [one["strategy"] for one in told["matches"]] == ["scheduled", "conditional"]

    listed = rules(url, "list")
    assert (listed.code, len(listed.out.splitlines())) == (0, len(DEFAULT_RULES) + 2), listed.said
    assert rules(url, "list", "--json").told[0]["name"] == "closed-books"
    assert rules(url, "set", "closed-books", "--strategy", "manual", "--json").told[0]["done"] == "changed"
    assert "would be removed" in rules(url, "remove", "closed-books", "--dry-run").out
    assert rules(url, "remove", "closed-books").code == 0
    assert rules(url, "test", "--message", str(row_id)).code == 1


def test_the_exit_code_tells_how_it_went(sqlite_url: str) -> None:
    store_at(sqlite_url)
    expected = [
        (("remove", "time-out-typ"), 1),
        (("test", "--text", "no such text"), 1),
        (("test", "--message", "999999"), 1),
        (("test",), 2),
        (("test", "--message", "1", "--type", "x"), 2),
        (("set", "mine", "--pattern", "(", "--strategy", "manual"), 2),
        (("set", "mine", "--pattern", "x"), 2),
        (("set", "unknown", "--pattern", "x", "--strategy", "manual"), 2),
        (("set", "mine", "--pattern", "x", "--strategy", "never"), 2),
    ]
    for call, code in expected:
        done = rules(sqlite_url, *call, "--json")
        assert done.code == code, (call, done.said)
        assert done.told is not None
    assert "did you mean time-out-type" in rules(sqlite_url, "remove", "time-out-typ").err
    assert "it repeats can itself match" in rules(sqlite_url, "set", "x", "--pattern", "(a+|b)+x").err
    for command in (("list",), ("remove", "x"), ("test", "--text", "x")):
        assert rules("postgresql://nobody@127.0.0.1:1/none", *command).code == 4


def test_a_row_that_somebody_broke_is_shown_as_such(sqlite_url: str) -> None:
    with writing(store_at(sqlite_url)) as connection:
        connection.execute(text("UPDATE dlq_rules SET pattern = '(' WHERE name = 'time-out-type'"))
    listed = rules(sqlite_url, "list")
    assert listed.code == 0
    assert "the rule 'time-out-type' is left out" in listed.err
    problems = [one["name"] for one in rules(sqlite_url, "list", "--json").told if one["problem"]]
    assert problems == ["time-out-type"]
