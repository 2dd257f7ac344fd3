"""Editing as people meet it: `dlqbatch messages edit`, with editors that are programs of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import messages
import pytest
from dead_rows import add, row, store_at
from program import HANDLER, HANGS_AFTER, Finished, Program, environment
from sqlalchemy import update

from dlqbatch.messages.actions import MessageActions
from dlqbatch.store.engine import writing
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

HELD = messages.with_headers((b"tenant", messages.text("blue")), (b"old", messages.long(1)))


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


def edit(url: str, *arguments: str, given: bytes = b"", **variables: str) -> Finished:
    """With no editor but the given one."""
    surroundings = {
        name: text for name, text in environment(database_url=url).items() if name not in {"VISUAL", "EDITOR"}
    }
    done = subprocess.run(
        [sys.executable, HANDLER, "messages", "edit", *arguments],
        env=surroundings | variables,
        input=given,
        capture_output=True,
        timeout=HANGS_AFTER,
        check=False,
    )
    return Finished(done.returncode, done.stdout.decode(), done.stderr.decode(), 0)


def an_editor(folder: Path, what: str) -> str:
    """A program that writes down what it was given, then does `what` to the file."""
    script = folder / "an editor.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[-1])\n"
        f"seen = pathlib.Path({str(folder / 'seen')!r})\n"
        "seen.write_text(json.dumps([sys.argv[1:], oct(file.stat().st_mode), oct(file.parent.stat().st_mode),"
        " file.read_text()]))\n"
        "pathlib.Path(str(file) + '~').write_text('a copy beside it')\n"
        "print('drawn on the screen')\n"
        f"{what}\n"
    )
    return f"{sys.executable} '{script}' --wait"


def test_an_operator_mends_a_message_in_an_editor(engine: Engine, url: str, tmp_path: Path) -> None:
    (row_id,) = add(engine, row(body=b'{"amount": "7"}', properties=HELD))
    editor = an_editor(tmp_path, "file.write_text('{\"amount\": 7}\\n')")
    done = edit(
        url, str(row_id), "--actor", "an operator", "--reason", "a number", "--json", VISUAL=editor, EDITOR="false"
    )
    assert done.code == 0, done.said
    told = done.told
    assert (told["original"], told["before"], told["changed"]) == (row_id, "pending", ["body"])
    assert "drawn on the screen" in done.err
    arguments, mode, folder_mode, text = json.loads((tmp_path / "seen").read_text())
    assert (arguments[0], mode[-3:], folder_mode[-3:], text) == ("--wait", "600", "700", '{"amount": "7"}')
    assert arguments[-1].endswith(".json")
    assert not os.path.exists(os.path.dirname(arguments[-1]))  # noqa: PTH110, PTH120  (a text out of JSON)
    review = MessageActions(engine)
    assert review.show(told["id"]).content.body == b'{"amount": 7}'
    assert review.show(row_id).record.status == "archived"
    assert review.journal(told["id"]).entries[0].actor == "an operator"


def test_what_was_typed_is_kept_when_the_message_has_moved_on_meanwhile(
    engine: Engine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a lifecycle claims it while somebody types."""
    (row_id,) = add(engine, row(body=b'{"amount": "7"}', properties=HELD))
    claims = tmp_path / "claims.py"
    claims.write_text(
        "import sys, sqlalchemy\n"
        "with sqlalchemy.create_engine(sys.argv[1]).begin() as connection:\n"
        "    connection.execute(sqlalchemy.text(\"UPDATE dlq_messages SET status='processing', lock_token='t'\"))\n"
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    what = "file.write_text('{\"amount\": 7}\\n')\nimport subprocess\n"
    what += f"subprocess.run([sys.executable, {str(claims)!r}, {url!r}], check=True)"
    done = edit(url, str(row_id), "--actor", "an operator", "--reason", "a number", EDITOR=an_editor(tmp_path, what))
    assert (done.code, "--body-file" in done.err) == (1, True), done.said
    (kept,) = tmp_path.glob("dlqbatch-edit-*")
    assert (kept.read_text(), oct(kept.stat().st_mode)[-3:]) == ('{"amount": 7}\n', "600")
    assert str(kept) in done.err


def test_a_file_stdin_and_headers_need_no_editor(engine: Engine, url: str, tmp_path: Path) -> None:
    file = tmp_path / "body"
    file.write_bytes(b"\xff\0")
    one, other = add(engine, row(body=b"text", properties=HELD), row(body=b"{}", properties=HELD))
    done = edit(url, str(one), "--body-file", str(file), "--set-header", "tenant=a=b", "--remove-header", "old")
    assert done.code == 0, done.said
    assert f"`dlqbatch messages replay {one + 2}` sends it" in done.out
    shown = MessageActions(engine).show(one + 2)
    assert (shown.content.body, shown.readable.headers["tenant"], "old" in shown.readable.headers) == (
        b"\xff\0",
        "a=b",
        False,
    )
    planned = edit(url, str(other), "--body-file", "-", "--dry-run", given=b"[]")
    assert (planned.code, "would be archived" in planned.out) == (0, True), planned.said
    done = edit(url, str(other), "--body-file", "-", "--json", given=b"[]")
    assert MessageActions(engine).show(done.told["id"]).content.body == b"[]"


def test_the_exit_code_tells_how_it_went(sqlite_url: str, tmp_path: Path) -> None:
    engine = store_at(sqlite_url)
    (row_id,) = add(engine, row(body=b'{"a": 1}', properties=HELD))
    archived, resolved = add(engine, row(), row())
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id == resolved).values(status="resolved"))
    MessageActions(engine).discard((archived,), actor="x", reason="x", now=row()["first_failed_at"])
    nothing, failing = an_editor(tmp_path, ""), "false"
    this = str(row_id)
    expected: list[tuple[tuple[str, ...], dict[str, str], int, str]] = [
        ((this,), {}, 2, "VISUAL nor EDITOR"),
        ((this,), {"EDITOR": failing}, 1, "ended with 1"),
        ((this,), {"EDITOR": "/no/such/editor"}, 1, "failed"),
        ((this,), {"EDITOR": "an 'open quote"}, 1, "failed"),
        ((this,), {"EDITOR": nothing}, 1, "like that already"),
        ((this, "--set-header", "tenant=blue"), {}, 1, "like that already"),
        (("999999", "--set-header", "a=b"), {}, 1, "no message 999999"),
        ((str(archived),), {"EDITOR": nothing}, 1, "restore"),
        ((str(resolved),), {"EDITOR": nothing}, 1, "handled already"),
        ((str(resolved), "--force"), {"EDITOR": nothing}, 1, "like that already"),
        ((this, "--set-header", "tenant"), {}, 2, "NAME=VALUE"),
        ((this, "--set-header", "x-death=1"), {}, 2, "broker's own"),
        ((this, "--set-header", "dlqbatch-id=1"), {}, 2, "dlqbatch's own"),
        ((this, "--remove-header", "nope"), {}, 2, "no header 'nope'"),
        ((this, "--body-file", "/no/such/file"), {}, 2, "cannot be read"),
        ((this, "--body-file", os.devnull), {}, 2, "--force"),
        ((this, "--set-header", "a=b", "--actor", "ingest"), {}, 2, "--actor"),
    ]
    for arguments, variables, code, why in expected:
        done = edit(sqlite_url, *arguments, **variables)
        assert (done.code, why in done.err) == (code, True), (arguments, done.said)
        assert "Traceback" not in done.said
    # An editor that opened has shown the body; nothing else came of it.
    *opened, arrived = [each.reason for each in MessageActions(engine).journal(row_id).entries]
    assert (set(opened), arrived) == ({"shown unmasked: edited"}, "test")
    assert (
        Program({"database_url": "postgresql://nobody@127.0.0.1:1/x"})
        .run("messages", "edit", "1", "--set-header", "a=b")
        .code
        == 4
    )
