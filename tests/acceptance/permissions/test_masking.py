"""Secrets in messages: no command shows one without --reveal, and with it the journal says who saw it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pika
import pytest
from every_command import ALONE, Step, every_command, everything, run_all
from planted_secrets import PLAIN, leaks
from program import client
from sqlalchemy import text, update
from webhook_receiver import OK, hook

from dlqbatch.store.engine import create_engine_for, reading, writing
from dlqbatch.store.tables import MESSAGES, TRANSITIONS

if TYPE_CHECKING:
    from pathlib import Path

ORIGIN = "orders-queue"
CARD = "4111 1111 1111 1111"
SAID = f"login failed: password={PLAIN}, Authorization: Bearer {PLAIN}{PLAIN}; card {CARD}"
BODIES = (
    json.dumps({"order": 7, "password": PLAIN, "deep": [{"apiKey": [PLAIN]}], "card": CARD, "email": PLAIN}).encode(),
    b"<login><password>" + PLAIN.encode() + b"</password></login>",
    b"\xff\x81\xa8password\xab" + PLAIN.encode(),
    f"user=u&token={PLAIN}&x={CARD}".encode(),
)
PROPERTIES = pika.BasicProperties(
    correlation_id=f"token={PLAIN}",
    app_id=f"bearer {PLAIN}{PLAIN}",
    message_id=f"password={PLAIN}",
    headers={
        "authorization": f"Bearer {PLAIN}",
        "X-Api-Key": PLAIN,
        "x-customer-name": PLAIN,
        "nested": {"cookie": PLAIN, "list": [{"session-id": PLAIN}, f"secret={PLAIN}"]},
        "x-exception-fqcn": f"net.LoginError token={PLAIN}",
        "x-exception-message": SAID,
        "x-exception-stacktrace": f"net.LoginError: {SAID}\n\tat app.Login.enter(Login.java:7)\nCaused by: {SAID}",
    },
)
RULES = {"masking_headers": "x-customer-*", "masking_paths": "$..email"}


def assert_masked(said: bytes, where: object) -> None:
    assert not leaks(said), (where, leaks(said))
    assert CARD.encode() not in said, where


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_no_command_shows_a_secret_of_a_message(
    kind: str, request: pytest.FixtureRequest, broker_url: str, tmp_path: Path
) -> None:
    database = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[kind]))
    (tmp_path / "cold").mkdir()
    (tmp_path / "body").write_text("another body")
    steps = everything(tmp_path)
    called = {step.call[: len(path)] for step in steps if isinstance(step.call, tuple) for path in every_command()}
    assert every_command() - called == ALONE
    engine = create_engine_for(database, connect_timeout=30)
    with hook(OK) as receiver, client(broker_url) as team:
        settings = RULES | {
            "broker_url": broker_url,
            "database_url": database,
            "webhook_url": receiver.url,
            "alert_backlog": "1",
            "cold_storage": str(tmp_path / "cold"),
            "prometheus_file": str(tmp_path / "dlqbatch.prom"),
            "tier_ttls": "50,50,50",
            "log_level": "debug",
            "check_queues": "dlq-queue",
        }
        calls = [step.call for step in steps]
        first, lifecycle = calls.index(("drain", "--dry-run")), calls.index(("lifecycle",))
        said = run_all(steps[:first], settings, {}, tmp_path)
        team.make_origin(ORIGIN)
        team.fail(ORIGIN, "orders.created", *BODIES, headers=PROPERTIES)
        for part in (steps[first:lifecycle], [Step(("rules", "test", "--message", "1"))], steps[lifecycle:]):
            done = run_all(part, settings, {}, tmp_path)
            said.out += done.out
            said.err += done.err
            with writing(engine) as connection:
                old = update(MESSAGES).where(MESSAGES.c.id > 2)  # old enough for the cold
                connection.execute(old.values(status="failed", status_since=_long_ago(connection)))
        assert_masked(said.out, "stdout")
        assert_masked(said.err, "stderr")
        assert b"***" in said.out
        assert receiver.requests
        for sent in receiver.requests:
            assert_masked(sent.partition(b"\r\n\r\n")[2], "webhook")
        assert_masked((tmp_path / "dlqbatch.prom").read_bytes(), "metrics")
        assert any((tmp_path / "cold").rglob("*.gz"))
        assert_nothing_is_shown_without_a_reason(settings, tmp_path)
        for call in ("messages list", "messages search net.", "messages show 1", "messages show 3", "archive show 3"):
            _assert_revealed(engine, call, settings, tmp_path)
    with reading(engine) as connection:
        stored = {bytes(body) for body in connection.scalars(text("SELECT body FROM dlq_messages"))}
    assert stored >= set(BODIES)


def assert_nothing_is_shown_without_a_reason(settings: dict[str, str], folder: Path) -> None:
    done = run_all([Step(("messages", "show", "1", "--reveal"))], settings, {}, folder)
    assert done.codes == ["2"]
    assert_masked(done.out + done.err, "no reason")


def _assert_revealed(engine: Any, call: str, settings: dict[str, str], folder: Path) -> None:
    words = (*call.split(), "--json", "--reveal", "--reason", "ticket 7", "--actor", "ann")
    seen = [each for each in _journal(engine) if each == ("ann", "shown unmasked: ticket 7")]
    done = run_all([Step(words)], settings, {}, folder)
    assert done.codes == ["0"]
    assert leaks(done.out)
    assert_masked(done.err, call)
    assert len([each for each in _journal(engine) if each == ("ann", "shown unmasked: ticket 7")]) > len(seen)


def _journal(engine: Any) -> list[tuple[str, str]]:
    with reading(engine) as connection:
        rows = connection.execute(TRANSITIONS.select().with_only_columns(TRANSITIONS.c.actor, TRANSITIONS.c.reason))
        return [(row.actor, row.reason) for row in rows]


def _long_ago(connection: Any) -> Any:
    from datetime import timedelta  # noqa: PLC0415

    from dlqbatch.store.access import StoreClock  # noqa: PLC0415

    return StoreClock(connection.engine)() - timedelta(days=365)
