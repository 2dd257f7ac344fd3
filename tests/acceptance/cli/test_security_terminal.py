"""Whatever a publisher, a team or a database wrote: no command shows it to a terminal or a log as it is."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pika
import psycopg
import pytest
from every_command import ALONE, every_command, everything, run_all
from program import DLQ, Client, client

if TYPE_CHECKING:
    from pathlib import Path

    from every_command import ALONE, Said

EVIL = "\x1b[31mred\x1b]0;title\x07\rover\x7f\x9b2J\u202eback"
"""Colours, a window's title, a bell, a line written over, C1's way to say the first, and text that runs backwards."""
ORIGIN = "orders " + EVIL.replace("\r", "")
"""The broker takes line ends out of a name."""


def fail(team: Client, body: bytes) -> None:
    """A message whose queue, key, headers, ids and body are all hostile, rejected by its consumer."""
    headers = {"x-exception-message": EVIL, "x-exception-stacktrace": f"at {EVIL}\nat {EVIL}", EVIL: EVIL}
    found = pika.BasicProperties(headers=headers, message_id=EVIL, app_id=EVIL, type=EVIL, content_type=EVIL)
    team.fail(ORIGIN, f"orders.{EVIL}", body, headers=found)


def raw(said: Said, what: str) -> list[bytes]:
    """The lines with anything in them that is not meant to be seen; JSON has to be readable besides."""
    found = []
    for stream in (said.out, said.err):
        for line in stream.decode().split("\n"):
            if not line.isprintable():
                found.append(line.encode())
            if line.startswith("{"):
                json.loads(line)
    assert said.out, what
    return found


@pytest.mark.slow
def test_no_command_lets_anything_through(broker_url: str, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "body").write_text("another body")
    (tmp_path / "cold").mkdir()
    settings = {
        "broker_url": broker_url,
        "database_url": database_url,
        "cold_storage": str(tmp_path / "cold"),
        "prometheus_file": str(tmp_path / "dlqbatch.prom"),
        "metrics_namespace": "dlqbatch/test",
        "alert_backlog": "1",
        "tier_ttls": "50,50,50",
        "check_queues": "dlq.*",
        "log_level": "debug",
    }
    steps = everything(tmp_path)
    calls = [step.call for step in steps]
    declared, ingested = calls.index(("drain", "--dry-run")), calls.index(("lifecycle",))
    before = run_all(steps[:declared], settings, {}, tmp_path)
    assert raw(before, "before there is a message") == []
    plain = database_url.replace("+psycopg", "")
    with psycopg.connect(plain) as connection:
        connection.execute("INSERT INTO dlq_event_config (id, name, max_retries) VALUES (7, %s, 0)", (EVIL,))
        connection.execute("INSERT INTO dlq_event_config (id, name, max_retries) VALUES (8, %s, 1)", (EVIL,))
    with client(broker_url) as team:
        team.make_origin(ORIGIN)
        # An unknown origin and headers that are not valid are told of, one by one.
        team.publish("retry-exchange", "retry-routing-key", EVIL.encode(), {"x-original-exchange": EVIL})
        team.publish("retry-exchange", "retry-routing-key", b"x", {"dlqbatch-id": EVIL, "dlqbatch-retries": EVIL})
        for body in (EVIL.encode(), json.dumps({EVIL: EVIL}).encode(), EVIL.encode("utf-16"), b"\xff\x1b[31m"):
            fail(team, body)
        taken = run_all(steps[declared:ingested], settings, {}, tmp_path)
        assert team.depth(DLQ) == 0
    assert raw(taken, "what drains, checks and ingests") == []
    with psycopg.connect(plain) as connection:
        assert connection.execute("SELECT count(*) FROM dlq_messages").fetchone() == (6,)
        connection.execute(
            "UPDATE dlq_messages SET status = 'failed', status_since = now() - interval '1 year' WHERE id > 2"
        )
    after = run_all(steps[ingested:], settings, {}, tmp_path)
    assert raw(after, "what works on the dead store") == []
    # They did what they are for: what is hostile is told of, in a form that can be seen.
    assert b"\\x1b[31mred" in taken.err
    assert b"\\x1b[31mred" in after.out
    called = {step.call[: len(path)] for step in steps if isinstance(step.call, tuple) for path in every_command()}
    assert every_command() - called == ALONE
