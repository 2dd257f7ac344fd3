"""What the program says where the world is not as it should be: no UTF-8, nobody who reads, nothing installed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from dead_rows import add, row, store_at
from program import HANDLER, HANGS_AFTER, Program, client, environment

if TYPE_CHECKING:
    from pathlib import Path

NOT_ASCII = "Größe → 🙂"


@pytest.mark.parametrize(
    "variables",
    [
        {"PYTHONIOENCODING": "ascii"},
        {"PYTHONIOENCODING": "latin-1"},
        {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
    ],
    ids=str,
)
def test_what_a_terminal_cannot_show_is_an_escape(sqlite_url: str, variables: dict[str, str]) -> None:
    (row_id,) = add(store_at(sqlite_url), row(error_message=NOT_ASCII, event=NOT_ASCII))
    surroundings = environment(database_url=sqlite_url) | variables
    calls = (("messages", "list"), ("messages", "show", str(row_id)), ("events", "test", NOT_ASCII), ("messages", "-h"))
    for call in calls:
        done = subprocess.run(
            [sys.executable, HANDLER, *call], env=surroundings, capture_output=True, timeout=HANGS_AFTER, check=False
        )
        said = (done.stdout + done.stderr).decode("latin-1")
        assert done.returncode in {0, 1, 2}, said
        assert "Traceback" not in said
        assert "unexpected" not in said
        if call[:1] == ("messages",) and call[1] != "-h":
            assert done.returncode == 0, said
            assert "\\u2192" in said


def through(reader: str, url: str, *arguments: str) -> tuple[int, str, str]:
    """The program's own exit code, what it said on stderr, and what came out of the pipe."""
    # Unbuffered, Python itself drops what a pipe did not take, without an error.
    surroundings = environment(database_url=url)
    surroundings.pop("PYTHONUNBUFFERED", None)
    script = '"$0" "$@" | ' + reader + '; exit "${PIPESTATUS[0]}"'
    done = subprocess.run(
        ["/bin/bash", "-c", script, sys.executable, HANDLER, *arguments],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER,
        check=False,
    )
    return done.returncode, done.stderr, done.stdout


@pytest.fixture
def full(sqlite_url: str) -> str:
    """A message, number 1, that is larger than any pipe's buffer."""
    add(store_at(sqlite_url), row(body=b"a line of it\n" * 500_000))
    return sqlite_url


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-"])
def test_a_program_started_without_its_streams_does_its_work(broker_url: str, sqlite_url: str, closed: str) -> None:
    program = Program({"broker_url": broker_url, "database_url": sqlite_url})
    for prepares in (("db", "upgrade"), ("events", "set", "#", "3"), ("topology", "apply")):
        assert program.run(*prepares).code == 0
    with client(broker_url) as team:
        team.make_origin("orders")
        team.fail("orders", "orders.a", b"one")
        team.await_depth("retry-queue", 1)
        line = f"exec '{sys.executable}' '{HANDLER}' drain {closed}"
        done = subprocess.run(
            ["sh", "-c", line],
            env=environment(**program.settings),
            capture_output=True,
            timeout=HANGS_AFTER,
            check=False,
        )
        assert (done.returncode, team.depth("queue.delay.1")) == (0, 1), done.stderr


@pytest.mark.parametrize("call", ["--full", "--json"])
def test_a_reader_that_has_seen_enough_ends_the_program_quietly(full: str, call: str) -> None:
    code, err, out = through("head -c 20", full, "messages", "show", "1", call)
    assert (code, err, len(out)) == (141, "", 20)


def test_a_reader_that_was_never_there_ends_it_quietly_too(full: str) -> None:
    for call in (("messages", "list"), ("db", "current", "--json"), ("db", "sql")):
        code, err, _ = through("{ exec 0<&-; sleep 5; }", full, *call)
        assert (code, err) == (141, ""), call


def test_a_reader_that_reads_all_changes_nothing(full: str) -> None:
    code, err, out = through("cat", full, "messages", "show", "1", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["body_size"] == 6_500_000


@pytest.mark.parametrize(
    "call", [(), ("drain",), ("messages", "list"), ("--help",), ("db", "upgrade", "--json")], ids=str
)
def test_what_is_not_installed_is_named_with_what_installs_it(tmp_path: Path, call: tuple[str, ...]) -> None:
    # Without its site packages this Python is as bare as the system's.
    bare = Program({"database_url": f"sqlite:///{tmp_path / 'x'}"}, (sys.executable, "-S", HANDLER))
    done = bare.run(*call)
    assert done.code == 2, done.said
    assert "is not installed for" in done.err
    assert "pip install -r requirements.txt" in done.err
    assert "Traceback" not in done.said
    assert (done.told["error"]["type"] if "--json" in call else done.out) in {"", "ModuleNotFoundError"}
