"""`--remote`: the commands of the night by a console's API, where neither broker nor database is known."""

from __future__ import annotations

import re
import shlex
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import add, row, store_at
from program import Program
from remote_console import Remote, remote_console

from dlqbatch.console.rights import Role
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from pathlib import Path

    from program import Client, Finished

NIGHT = """
status
groups list
groups list --json
groups list --event nobody.has.this
groups show aaaa
groups show aaaa --json
groups show bbbb --json
groups show dddd
messages list --limit 3
messages list --limit 3 --json
messages list --error-type TimeoutErorr
messages list --field-file order.id={file}
messages list --since 2030-07-01 --until 2030-06-01
messages groups
messages groups --json
messages search "timed out" --limit 2
messages search P-0003 --body
messages search P-0003 --body --json
messages search O-7
messages show {first}
messages show {first} --json
messages show {first} --full
messages show {first} --reveal --reason "ticket 12"
messages show 999999
messages journal {first}
messages journal {first} --json
messages journal --actor nobody
actions list
discard-by-filter --dry-run
discard-by-filter --yes
discard-by-filter --yes --expect 7
discard-by-filter --yes --expect 121
discard-by-filter --yes --json --expect 0
actions list
actions show A-1 --limit 2
actions show A-1 --json --limit 2
actions show A-99
undo A-1 --dry-run
undo A-1 --reason "the wrong group"
undo A-1
messages discard {first} {second} 999999 --reason "sent twice"
messages restore {first} --reason "after all" --json
messages restore --group bbbb --yes
messages edit {third} --set-header tenant=blue --dry-run
messages edit {third} --set-header tenant=blue
messages edit --group cccc --set 'body.currency="EUR"' --dry-run
messages edit --group cccc --set 'body.currency="EUR"' --yes --expect 5
messages edit --group cccc --set 'currency' --yes
messages edit --group cccc --set 'body.a[0]=1' --yes --json
groups hold aaaa --queue orders --reason "for the developers"
groups hold aaaa --reason "for the developers" --json
groups list
groups note aaaa "the tenant is gone" --owner ann --tag shop
groups note aaaa
groups ack bbbb --more 100 --reason "ticket 4711" --json
groups ack bbbb --until 2001-01-01
groups unhold aaaa --queue orders
groups unhold aaaa --queue orders
groups hold 11 --reason x
events simulate orders.created=0
events simulate --since 2030-01-01 'orders.#=5' --json
events simulate orders
replay plan --error-type TimeoutError --limit 20 --dry-run
replay plan --error-type ConnectionError --reason "the api is back"
replay plan --error-type NoSuchError
replay status
replay status {hash}
replay status {hash} --json
replay release {hash} --rate 50/s
replay release {hash}
replay pause {hash} --reason "the consumers restart"
replay rate {hash} faster --json
replay rate {hash} nonsense
replay resume {hash}
replay abort {hash}
replay status ffffffff
messages list --action A-3 --json
status --json
"""
"""What is typed, in this order, on either side; the time is the same, and whoever types it."""
TIME = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?(\+00:00| UTC|Z)?")
AGE = re.compile(r"\b\d+ (s|min|h|d)( +ago)?\b")
DIFFERS = re.compile(r'"(verified|lock_token|identity|parent|id)": [^,}]+|\b(not )?verified\b|\b[0-9a-f]{32}\b|R-\S+')


def filled(url: str) -> list[int]:
    made: list[dict[str, Any]] = [
        row(
            identity=f"orders-{number:03}",
            body=b'{"id": "P-%04d", "password": "geheim"}' % number,
            error_type="TimeoutError",
            error_message="timed out after 3000 ms",
            error_stack="Traceback\n  line 1\nTimeoutError: timed out",
            fingerprint="aaaa" * 4,
            origin_queue="orders",
            event="orders.created",
            status=Status.MANUAL,
        )
        for number in range(121)
    ]
    made += [
        row(
            identity=f"mail-{number}",
            error_type="ConnectionError",
            fingerprint="bbbb" * 4,
            origin_queue="mail",
            event="mail.wanted",
            status=Status.MANUAL if number % 2 else Status.PENDING,
        )
        for number in range(12)
    ]
    made += [
        row(
            identity=f"pay-{number}",
            error_type="KeyError",
            body=b'{"amount": 1.50}',
            fingerprint="cccc" * 4,
            origin_queue="payments",
            status=Status.MANUAL,
        )
        for number in range(5)
    ]
    return add(store_at(url), *made)


def typed(program: Program, words: str, **marks: object) -> Finished:
    command = shlex.split(
        words.format_map(marks).replace("discard-by-filter", "messages discard --group aaaa --reason x")
    )
    return program.run(*command, COLUMNS="100", USER="ann", LOGNAME="ann", LNAME="ann", USERNAME="ann")


def shown(done: Finished, plan: str) -> tuple[list[str], list[str]]:
    return told(done.out, plan).splitlines(), told(done.err, plan).splitlines()


def told(text: str, plan: str) -> str:
    without = AGE.sub("AGE", TIME.sub("TIME", text.replace(plan, "PLAN") if plan else text))
    return re.sub(r" +|-{2,}", " ", DIFFERS.sub("DIFFERS", without))


@pytest.fixture
def sides(tmp_path: Path, broker_url: str, team: Client) -> tuple[Program, Remote, list[int]]:
    team.channel.queue_declare("mail", durable=True)
    local, other = (f"sqlite:///{tmp_path / name}.sqlite3" for name in ("local", "other"))
    ids = filled(local)
    assert filled(other) == ids
    program = Program({"broker_url": broker_url, "database_url": local, "log_format": "text"})
    return program, remote_console(program.but(database_url=other), tmp_path), ids


def test_every_command_of_the_night_prints_the_same_and_ends_with_the_same_code(
    sides: tuple[Program, Remote, list[int]], tmp_path: Path
) -> None:
    program, remote, ids = sides
    pasted = tmp_path / "ids.txt"
    pasted.write_text("".join(f"P-{number:04}\n" for number in range(2_000)))
    marks = dict(zip(("first", "second", "third"), ids, strict=False), file=pasted)
    plans = {"here": "", "there": ""}
    for words in NIGHT.strip().splitlines():
        done = {}
        for side, where in (("here", program), ("there", remote.program)):
            done[side] = typed(where, words, hash=plans[side], **marks)
            if found := re.search(r"^plan ([0-9a-f]{16})$", done[side].out, re.MULTILINE):
                plans[side] = found[1]
        here, there = done["here"], done["there"]
        assert (there.code, *shown(there, plans["there"])) == (here.code, *shown(here, plans["here"])), words
    assert plans["there"]


def test_what_needs_the_broker_or_files_says_that_it_does_not_go_by_remote(tmp_path: Path) -> None:
    away = Program({"remote": "https://dlq.example.org", "remote_token": "dlq_x", "log_format": "text"})
    for words in (
        "replay apply 0123456789abcdef",
        "messages replay 1",
        "messages erase 1 --reason x --yes",
        "peek orders",
        "ingest orders --head --reason x",
        "drain",
        "doctor",
        "rules list",
        "archive list",
        "status --prometheus x.prom",
        "schedule",
        "console",
    ):
        done = typed(away, words)
        assert (done.code, "does not go by --remote" in done.err) == (2, True), (words, done.said)
    assert "replay release HASH" in typed(away, "replay apply 0123456789abcdef").err
    assert typed(Program({}), "peek orders --remote https://dlq.example.org").code == 2


def test_the_token_comes_from_a_file_or_the_environment_and_says_who_it_is(tmp_path: Path) -> None:
    away = Program({"remote": "http://127.0.0.1:1", "log_format": "text"})
    for program, words, why in (
        (away, "groups list", "DLQBATCH_REMOTE_TOKEN_FILE"),
        (away, "groups list -s remote_token=dlq_geheim", "on the command line"),
        (away.but(remote_token="dlq_x", remote="http://192.0.2.1"), "groups list", "readable for everybody"),
        (away.but(remote_token="dlq_x"), "undo A-1 --actor bob", "the token says who it is"),
        (away.but(remote_token="dlq_x"), "messages list --scope shop", "a scope of its own"),
    ):
        done = typed(program, words)
        assert (done.code, why in done.err) == (2, True), (words, done.said)
        assert "geheim" not in done.said
    away = typed(away.but(remote_token="dlq_x"), "groups list")
    assert (away.code, "cannot be reached" in away.err, "Nothing was done" in away.err) == (4, True, True), away.said


def test_a_token_may_do_what_its_role_may_until_its_end(sqlite_url: str, tmp_path: Path) -> None:
    (first, *_), program = filled(sqlite_url), Program({"database_url": sqlite_url})
    remote = remote_console(program, tmp_path)
    reader = remote.but_as(tmp_path, Role.READER)
    assert typed(reader, "groups list --json").code == 0
    for words, why in (
        (f"messages discard {first} --reason x", "takes the role operator"),
        (f"messages show {first} --reveal --reason x", "a right of its own"),
    ):
        done = typed(reader, words)
        assert (done.code, why in done.err, "nothing was done" in done.err) == (2, True, True), done.said
    for refused in (
        remote.but_as(tmp_path, Role.ADMIN, ends_in=timedelta(seconds=-1)),
        remote.program.but(remote_token_file="", remote_token="dlq_wrong"),
    ):
        done = typed(refused, f"messages discard {first} --reason x")
        assert (done.code, "does not take this token" in done.err) == (4, True), done.said
    assert typed(program, "actions list --json").told == []
    remote.tokens.write_text("")
    assert typed(reader, "groups list").code == 4
