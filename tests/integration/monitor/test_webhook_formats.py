"""What Slack, Teams and PagerDuty are sent over HTTP, held to what they document; and how it is signed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace
from typing import Any

import pytest
from empty_metrics import NOW
from webhook_receiver import OK, Hook, hook, status

from dlqbatch import settings
from dlqbatch.errors import SettingsError
from dlqbatch.monitor.alert_rules import BACKLOG, Alert, LargestGroup, Notice, Severity, with_most
from dlqbatch.monitor.receivers import Webhook
from dlqbatch.monitor.webhook_formats import SHOWN, Form, Message, signature_headers
from dlqbatch.settings import secrets_of
from dlqbatch.store.states import NEW_GROUP

SCOPE = "rabbit@one/shop"
CONSOLE = "https://dlq.example/shop"
GROUP = Notice(7, NEW_GROUP, "f" * 16, Severity.WARNING, "new group: 3 messages need a person", 3, None, NOW)
BACKLOGGED = replace(GROUP, id=8, name=BACKLOG, subject="", severity=Severity.CRITICAL, summary="many")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def headers(other: Hook, number: int = 0) -> dict[str, str]:
    head = other.requests[number].partition(b"\r\n\r\n")[0].decode()
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}


def body(other: Hook, number: int = 0) -> bytes:
    return other.requests[number].partition(b"\r\n\r\n")[2]


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The vector that the libraries of Standard Webhooks are tested with."""
    message = Message("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}')
    assert signature_headers(SECRET, message, 1614265330) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_what_is_sent_is_signed_and_a_second_try_is_the_same_message() -> None:
    with hook(status(503), OK) as other:
        assert Webhook(other.url, secret=SECRET).send([GROUP]) is None
    first, second = headers(other, 0), headers(other, 1)
    assert first["webhook-id"] == second["webhook-id"]
    for number, found in enumerate((first, second)):
        signed = f"{found['webhook-id']}.{found['webhook-timestamp']}.".encode() + body(other, number)
        made = hmac.new(base64.b64decode(SECRET.removeprefix("whsec_")), signed, hashlib.sha256).digest()
        assert found["webhook-signature"] == f"v1,{base64.b64encode(made).decode()}"
    with hook(OK) as other:
        assert Webhook(other.url).send([replace(GROUP, resolved_at=NOW)]) is None
    assert not any(name.startswith("webhook-") for name in headers(other))


def test_slack_has_the_command_the_console_and_a_key_that_stays() -> None:
    form = Form("slack", SCOPE, CONSOLE)
    with hook(OK) as other:
        for notice in (GROUP, replace(GROUP, resolved_at=NOW), replace(GROUP, id=99)):
            assert Webhook(other.url, form=form).send([notice]) is None
    told = other.told
    assert told[0]["text"].endswith(f" <{CONSOLE}/groups/{'f' * 16}|console>")
    alert = told[0]["alerts"][0]
    assert (alert["scope"], alert["command"]) == (SCOPE, f"dlqbatch groups show {'f' * 16}")
    assert {each["alerts"][0]["dedup_key"] for each in told} == {f"{SCOPE}/NewGroupNeedsPerson/{'f' * 16}"}
    assert len({json.dumps(block) for each in told for block in each["blocks"]}) == 2


def test_teams_is_sent_an_adaptive_card() -> None:
    with hook(OK) as other:
        assert Webhook(other.url, form=Form("teams", SCOPE, CONSOLE)).send([BACKLOGGED] * (SHOWN + 5)) is None
    (told,) = other.told
    assert told.keys() == {"type", "attachments"}
    (attachment,) = told["attachments"]
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    card = attachment["content"]
    assert (card["type"], card["version"], card["$schema"]) == (
        "AdaptiveCard",
        "1.4",
        "http://adaptivecards.io/schemas/adaptive-card.json",
    )
    assert len(card["body"]) == 2 * SHOWN + 1
    for block in card["body"]:
        assert block["type"] == "TextBlock"
        assert block.keys() <= {"type", "text", "wrap", "weight", "color"}
        assert block.get("color", "Default") in {"Default", "Dark", "Light", "Accent", "Good", "Warning", "Attention"}
    assert card["body"][0]["text"] == f"DLQBacklogGrowing (critical), {SCOPE}"
    assert card["body"][-1]["text"] == "and 5 more: dlqbatch status"
    assert card["actions"] == [{"type": "Action.OpenUrl", "title": "Console", "url": f"{CONSOLE}/"}]
    assert len(body(other)) < 28 * 1024  # what a workflow takes


def test_pagerduty_is_sent_an_event_for_each_alert_which_its_end_resolves() -> None:
    form = Form("pagerduty", SCOPE, CONSOLE, "k" * 32)
    with hook(OK) as other:
        assert Webhook(other.url, form=form).send([GROUP, BACKLOGGED, replace(GROUP, resolved_at=NOW)]) is None
    fired, second, ended = other.told
    for event in (fired, second):
        assert event["routing_key"] == "k" * 32
        assert (event["event_action"], len(event["dedup_key"]) <= 255) == ("trigger", True)
        payload: dict[str, Any] = event["payload"]
        assert payload.keys() >= {"summary", "source", "severity"}
        assert payload["severity"] in {"critical", "error", "warning", "info"}
        assert (payload["source"], payload["timestamp"]) == (SCOPE, "2030-06-01T12:00:00+00:00")
        assert len(payload["summary"]) <= 1_024
    assert fired["links"] == [{"href": f"{CONSOLE}/groups/{'f' * 16}", "text": "Console"}]
    assert ended == {"routing_key": "k" * 32, "event_action": "resolve", "dedup_key": fired["dedup_key"]}


def test_a_long_subject_has_a_key_of_its_own_that_pagerduty_takes() -> None:
    form = Form("pagerduty", SCOPE)
    keys = {form.dedup_key(replace(GROUP, subject="q" * 254 + end)) for end in "ab"}
    assert {len(key) for key in keys} == {255}
    assert len(keys) == 2


def test_an_event_that_is_not_taken_is_said_without_the_address_or_the_key() -> None:
    with hook(status(400)) as other:
        why = Webhook(other.url, form=Form("pagerduty", SCOPE, None, "k" * 32)).send([GROUP, BACKLOGGED])
    assert why is not None
    assert "it answered 400" in why
    assert "SECRET" not in why
    assert "kkk" not in why
    assert len(other.requests) == 1


def test_an_alert_says_where_most_of_it_is() -> None:
    most = LargestGroup("f" * 16, "TimeoutError", {"manual": 3, "pending": 0, "failed": 9_000})
    alert = Alert(BACKLOG, "", Severity.CRITICAL, "many. Look: dlqbatch status")
    said = with_most(alert, most).summary
    assert said.endswith(f"Most of it: TimeoutError (3 manual, 9,000 failed): dlqbatch groups show {'f' * 16}")
    assert with_most(replace(alert, name="QueueStaysDeep"), most).summary == alert.summary
    assert with_most(alert, None) == alert


def test_the_secret_is_checked_and_never_shown() -> None:
    given = {"webhook_secret": SECRET, "pagerduty_key": "k" * 32}
    loaded = settings.load(given, {"DLQBATCH_CONFIG": "/dev/null"})
    assert set(given.values()) <= set(secrets_of(loaded))
    assert not any(value in repr(loaded) + str(loaded.model_dump()) for value in given.values())
    with pytest.raises(SettingsError, match="at least 24 bytes as base64") as raised:
        settings.load({"webhook_secret": "whsec_c2hvcnQ="}, {"DLQBATCH_CONFIG": "/dev/null"})
    assert "c2hvcnQ" not in str(raised.value)
