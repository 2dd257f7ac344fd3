"""What a person sees on a terminal of 80 columns."""

from __future__ import annotations

import re

import pytest
from dead_rows import add, row, store_at
from program import Client, Program

GROUP = "dba642681715e5f0"
ERROR = ("inventory.InventoryTimeout", "inventory-service timed out after 3000 ms, giving up on the order")
WHOLE_ERROR = ": ".join(ERROR)


@pytest.fixture
def failed(sqlite_url: str) -> Program:
    """Three messages of one group: a night's, in small."""
    columns = {"error_type": ERROR[0], "error_message": ERROR[1], "fingerprint": GROUP, "event": "orders.created"}
    add(store_at(sqlite_url), *(row(**columns, origin_queue="shop.orders", status="manual") for _ in range(3)))
    return Program({"database_url": sqlite_url})


def words_of(shown: str) -> list[list[str]]:
    """The words of each line; a value that is cut or folded is none of them."""
    return [line.split() for line in shown.splitlines()]


def test_groups_on_a_terminal_show_the_whole_group_its_queue_and_its_error(failed: Program) -> None:
    done = failed.on_terminal("messages", "groups")
    assert done.code == 0, done.out
    (group,) = (words for words in words_of(done.out) if GROUP in words)
    assert {"3", "manual=3", "shop.orders"} <= set(group)
    assert any(line.startswith("    ") and line.endswith(WHOLE_ERROR) for line in done.out.splitlines())
    assert [len(line) for line in done.out.splitlines() if len(line) > 80 and WHOLE_ERROR not in line] == []


def test_groups_in_a_pipe_are_one_line_each_with_all_columns(failed: Program) -> None:
    head, group = failed.run("messages", "groups").out.splitlines()
    assert head.split() == ["group", "messages", "states", "first", "last", "newest", "queue", "error"]
    assert group.startswith(GROUP)
    assert group.endswith(f"  shop.orders  {WHOLE_ERROR}")


def test_a_list_on_a_terminal_has_its_error_and_event_on_a_line_of_their_own(failed: Program) -> None:
    done = failed.on_terminal("messages", "list")
    lines = done.out.splitlines()
    assert lines[0].split() == ["id", "status", "ingested", "origin", "retries", "group"]
    assert "error" in " ".join(lines[1:3])
    assert [words[0] for words in words_of(done.out) if GROUP in words] == ["3", "2", "1"]
    assert done.out.count(WHOLE_ERROR) == done.out.count("orders.created") == 3
    assert max(len(line) for line in lines if WHOLE_ERROR not in line) <= 80


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_nothing_is_cut_or_folded_however_narrow_a_terminal_is(failed: Program, columns: int) -> None:
    listed = failed.on_terminal("messages", "list", columns=columns)
    rows = [line.split() for line in listed.out.splitlines() if not line.startswith(" ")][1:]
    assert [words[0] for words in rows] == ["3", "2", "1"]
    assert sum(words.count(GROUP) for words in words_of(listed.out)) == 3
    assert listed.out.count(WHOLE_ERROR) == 3
    grouped = failed.on_terminal("messages", "groups", columns=columns)
    assert [words[0] for words in words_of(grouped.out) if GROUP in words] == [GROUP]
    assert grouped.out.count(WHOLE_ERROR) == 1


def test_what_fits_on_a_terminal_stays_on_one_line(failed: Program) -> None:
    wide = failed.on_terminal("messages", "list", columns=220)
    assert wide.out == failed.run("messages", "list").out


def test_the_plans_on_a_terminal_show_whole_hashes_and_counts(failed: Program) -> None:
    planned = failed.run("replay", "plan", "--all", "--actor", "a-person-with-a-long-name", "--json").told
    done = failed.on_terminal("replay", "status")
    lines = done.out.splitlines()
    assert lines[0].split() == ["hash", "state", "size", "sent", "waiting", "skipped", "failed", "succeeded", "open"]
    assert lines[2].split() == [planned["hash"], "planned", "3", "0", "3", "0", "0", "0", "0"]
    assert "a-person-with-a-long-name" in lines[3]
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80


# --- one report ------------------------------------------------------------------------------------------------------


def test_a_run_on_a_terminal_prints_its_report_once(program: Program, team: Client) -> None:
    team.make_origin("orders-queue")
    team.fail("orders-queue", "orders.created", b"one")
    done = program.on_terminal("drain")
    assert done.code == 0, done.out
    assert re.findall(r"(?m)^.*\bdrain\b.*$", done.out) == [done.out.splitlines()[0]]
    assert done.out.startswith("drain: ok, stopped by empty")
    assert "{" not in done.out


@pytest.mark.parametrize("form", ["auto", "json", "text"])
def test_a_run_whose_logs_go_elsewhere_writes_its_line_there(program: Program, form: str) -> None:
    done = program.but(log_format=form).run("drain")
    (line,) = [one for one in done.err.splitlines() if "outcome" in one]
    assert line.startswith("{") == (form != "text")


def test_a_run_on_a_terminal_that_was_told_to_log_json_does(program: Program) -> None:
    assert '"event": "run"' in program.but(log_format="json").on_terminal("drain").out
