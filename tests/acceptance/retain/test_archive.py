"""Cold storage as people meet it: `dlqbatch archive`, in processes of its own."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from dead_rows import add, row, store_at
from program import Finished, Program
from sqlalchemy import func, select, update

from dlqbatch.store.engine import reading, writing
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
EVIL = "\x1b[31mred\x1b]0;title\x07\rover\nnext\x9b2J"


@pytest.fixture(params=["postgresql", "sqlite"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))


@pytest.fixture
def engine(url: str) -> Engine:
    return store_at(url)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def installed(url: str, folder: Path) -> Program:
    return Program({"database_url": url, "cold_storage": str(folder)})


def ask(installed: Program, *arguments: str) -> Finished:
    return installed.run("archive", *arguments)


def put_away(engine: Engine, installed: Program, *rows: dict[str, object]) -> list[int]:
    """Only their cold copies are left."""
    ids = add(engine, *rows, at=LONG_AGO)
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).where(MESSAGES.c.id.in_(ids)).values(status="archived"))
    done = installed.run("retain", "--json")
    assert (done.code, done.told["counts"]["deleted"]) == (0, len(ids)), done.said
    return ids


def rows_in(engine: Engine) -> int:
    with reading(engine) as connection:
        return int(connection.scalar(select(func.count()).select_from(MESSAGES)) or 0)


def test_an_operator_gets_one_message_back(engine: Engine, installed: Program) -> None:
    body = b'{"order": 7}\xff'
    wanted = row(body=body, identity="wanted", error_type="TimeoutError", event="orders.created")
    ids = put_away(engine, installed, row(), wanted, row())

    listed = ask(installed, "list", "--verify", "--json")
    assert listed.code == 0, listed.said
    (part,) = listed.told["parts"]
    assert (part["messages"], part["first"], part["last"], part["state"]) == (3, min(ids), max(ids), "verified")
    assert "3 copies in 1 part(s)" in ask(installed, "list").err

    shown = ask(installed, "show", str(ids[1]))
    assert shown.code == 0, shown.said
    for told in ("TimeoutError", "wanted", "orders.created", part["part"], "00000000  7b 22"):
        assert told in shown.out
    told = ask(installed, "show", "wanted", "--json").told
    assert (base64.b64decode(told["body_base64"]), told["id"], told["part"]) == (body, ids[1], part["part"])

    planned = ask(installed, "restore", "wanted", "--reason", "needed", "--dry-run")
    assert (planned.code, "would be restored" in planned.out, rows_in(engine)) == (0, True, 0)
    done = ask(installed, "restore", "wanted", "--reason", "needed", "--actor", "an operator", "--json")
    assert done.code == 0, done.said
    (change,) = done.told["messages"]
    assert (change["after"], change["is_done"], change["asked"]) == ("manual", True, "wanted")
    assert change["why"] == f"was message {ids[1]}"
    back = installed.run("messages", "show", str(change["id"]), "--json").told
    assert (base64.b64decode(back["body_base64"]), back["identity"], back["status"]) == (body, "wanted", "manual")
    assert back["transitions"][-1]["actor"] == "an operator"
    assert part["part"] in back["transitions"][-1]["reason"]

    again = ask(installed, "restore", str(ids[1]), str(ids[0]), "--reason", "needed", "--json")
    assert (again.code, again.told["done"], again.told["not_done"]) == (3, 1, 1)
    assert "in the dead store again" in again.told["messages"][0]["why"]
    assert rows_in(engine) == 2


def test_nothing_in_a_copy_reaches_the_terminal_raw(engine: Engine, installed: Program) -> None:
    places = dict.fromkeys(("error_type", "error_message", "error_stack", "event", "reason", "origin_queue"), EVIL)
    (row_id,) = put_away(engine, installed, row(**places, body=EVIL.encode(), identity=EVIL, tags=[EVIL]))
    for call in (("list",), ("show", str(row_id)), ("show", str(row_id), "--full"), ("show", EVIL + EVIL)):
        done = ask(installed, *call)
        assert done.code in (0, 1), done.said
        assert {character for character in done.said if not character.isprintable()} <= {"\n"}, call


@pytest.mark.slow
def test_a_damaged_or_forged_archive_is_named_and_nothing_of_it_is_used(
    engine: Engine, installed: Program, folder: Path, tmp_path: Path
) -> None:
    (row_id,) = put_away(engine, installed, row(identity="wanted"))
    (manifest,) = folder.rglob("*.manifest.json")
    (data,) = folder.rglob("*.jsonl.gz")
    whole = (manifest.read_bytes(), data.read_bytes())
    part = json.loads(whole[0])["part"]
    (tmp_path / "secret.jsonl.gz").write_bytes(b"secret")

    def outside() -> None:
        manifest.write_text(json.dumps(json.loads(whole[0]) | {"part": "../secret"}))

    def linked() -> None:
        data.unlink()
        data.symlink_to(tmp_path / "secret.jsonl.gz")

    def flipped() -> None:
        data.write_bytes(whole[1][:30] + b"\0\0\0" + whole[1][33:])

    for harm in (outside, linked, flipped, data.unlink, lambda: manifest.write_bytes(b"[" * 100_000)):
        harm()
        listed = ask(installed, "list", "--verify", "--json")
        assert (listed.code, [each["part"] for each in listed.told["damaged"]]) == (3, [part]), listed.said
        for call in (("show", str(row_id)), ("show", "wanted")):
            shown = ask(installed, *call)
            assert (shown.code, part in shown.err, "is damaged" in shown.err) == (1, True, True), shown.said
        refused = ask(installed, "restore", "wanted", "--reason", "r", "--json")
        assert (refused.code, refused.told["done"], rows_in(engine)) == (1, 0, 0)
        for path, content in zip((manifest, data), whole, strict=True):
            path.unlink(missing_ok=True)
            path.write_bytes(content)
    assert ask(installed, "restore", "wanted", "--reason", "r").code == 0


def test_a_restore_shows_what_was_asked_for_and_what_became_of_it(engine: Engine, installed: Program) -> None:
    number, _ = put_away(engine, installed, row(), row())
    done = ask(installed, "restore", str(number), f"0{number}", "no such", "--reason", "needed")
    (heading, back, unknown) = done.out.splitlines()
    assert (done.code, heading.split()[:2]) == (3, ["asked", "id"])
    assert back.split()[0].lstrip("0") == str(number)
    assert f"restored: was message {number}" in back
    assert unknown.startswith("no such  ")
    assert " 0 " not in unknown
    told = ask(installed, "restore", "no such", "--reason", "needed", "--json").told["messages"]
    assert [(one["asked"], one["id"]) for one in told] == [("no such", None)]


def test_a_folder_that_is_not_there_is_said_to_be_missing(sqlite_url: str, tmp_path: Path) -> None:
    missing = tmp_path / "not mounted" / "cold"
    for arguments in ((), ("--verify",), ("--json",)):
        done = ask(Program({"database_url": sqlite_url, "cold_storage": str(missing)}), "list", *arguments)
        assert (done.code, f"there is no folder {missing}" in done.err) == (1, True), done.said


def test_the_exit_code_tells_how_it_went(sqlite_url: str, tmp_path: Path) -> None:
    engine = store_at(sqlite_url)
    installed = Program({"database_url": sqlite_url, "cold_storage": str(tmp_path / "cold")})
    (waiting,) = add(engine, row())
    expected = [
        (("list",), 1),
        (("list", "--verify"), 1),
        (("show", "1"), 1),
        (("show",), 2),
        (("restore", "1"), 2),
        (("restore", str(waiting), "--reason", "r"), 1),
        (("restore", "no such", "--reason", "r"), 1),
        (("restore", "1", "--reason", ""), 2),
        (("restore", "1", "--reason", "r", "--actor", "retain"), 2),
    ]
    for call, code in expected:
        done = ask(installed, *call, "--json")
        assert done.code == code, (call, done.said)
        assert done.told is not None
    nowhere = Program({"database_url": sqlite_url})
    for call in (("list",), ("show", "1"), ("restore", "1", "--reason", "r")):
        done = ask(nowhere, *call)
        assert (done.code, "DLQBATCH_COLD_STORAGE" in done.err) == (2, True)
    away = installed.but(database_url="postgresql://nobody@127.0.0.1:1/none")
    assert ask(away, "restore", "1", "--reason", "r").code == 4
