"""A webhook that is slow, broken, hostile or gone ends in a sentence, in time, and never shows its address."""

from __future__ import annotations

import base64
import json
import socket
import time
from dataclasses import replace
from typing import Any

import pytest
from empty_metrics import NOW
from webhook_receiver import OK, drip, flood, hang, hook, reset, status

from dlqbatch.monitor.alert_rules import BACKLOG, Notice, Severity
from dlqbatch.monitor.receivers import Webhook
from dlqbatch.monitor.webhook_formats import SHOWN, Form
from dlqbatch.store.states import NEW_GROUP

FIRED = Notice(1, NEW_GROUP, "f" * 16, Severity.WARNING, "TimeoutError: <!channel> & <http://evil|x>", 7, None, NOW)
RESOLVED = replace(FIRED, id=2, name=BACKLOG, subject="", severity=Severity.CRITICAL, resolved_at=NOW, summary="many")
SECRETS = ("SECRET", "S3CRET", "open-sesame")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_what_slack_shows_and_what_a_program_reads() -> None:
    with hook(OK) as other:
        assert Webhook(other.url).send([FIRED, RESOLVED]) is None
    (told,) = other.told
    head = other.requests[0].partition(b"\r\n\r\n")[0].decode()
    assert head.startswith("POST /services/T0SECRET/B0SECRET?key=S3CRET HTTP/1.1\r\n")
    assert "content-type: application/json" in head.lower()
    assert told["text"].splitlines() == [
        ":warning: *NewGroupNeedsPerson* (warning): TimeoutError: &lt;!channel&gt; &amp; &lt;http://evil|x&gt;",
        ":white_check_mark: *DLQBacklogGrowing* (resolved): it was: many",
    ]
    assert [block["text"]["text"] for block in told["blocks"]] == told["text"].splitlines()
    assert (told["source"], told["more"]) == ("dlqbatch", 0)
    assert told["alerts"][0] == {
        "state": "fired",
        "name": "NewGroupNeedsPerson",
        "subject": "f" * 16,
        "severity": "warning",
        "summary": "TimeoutError: <!channel> & <http://evil|x>",
        "value": 7,
        "threshold": None,
        "fired_at": "2030-06-01T12:00:00+00:00",
        "resolved_at": None,
        "scope": "dlqbatch",
        "dedup_key": f"dlqbatch/NewGroupNeedsPerson/{'f' * 16}",
        "command": f"dlqbatch groups show {'f' * 16}",
        "console": None,
    }
    assert told["alerts"][1]["state"] == "resolved"


def test_of_many_the_first_are_told_and_of_the_rest_the_number() -> None:
    told = json.loads(Form().messages([FIRED] * 5_000)[0].body)
    assert (len(told["alerts"]), told["more"]) == (SHOWN, 5_000 - SHOWN)
    assert "and 4,980 more" in told["text"]
    # Slack takes 50 blocks of 3,000 characters and 40,000 characters of text.
    largest = json.loads(Form().messages([replace(FIRED, summary="&" * 2_000)] * 5_000)[0].body)
    assert len(largest["blocks"]) <= 50
    assert max(len(block["text"]["text"]) for block in largest["blocks"]) <= 3_000
    assert len(json.dumps(largest)) < 200_000


@pytest.mark.parametrize(
    ("answer", "why", "tries"),
    [
        (status(500, body=b"T0SECRET"), "it answered 500 Internal Server Error", 3),
        (status(429), "it answered 429 Too Many Requests", 3),
        (status(404, body=b"Cannot POST /services/T0SECRET"), "it answered 404 Not Found", 1),
        (status(799), "it answered 799", 3),
        (b"this is no HTTP at all\r\n\r\n", "BadStatusLine", 3),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "LineTooLong", 3),
        (b"", "RemoteDisconnected", 3),
        (reset, "Connection reset by peer", 3),
    ],
)
def test_a_broken_one_is_tried_again_if_that_may_help(answer: Any, why: str, tries: int) -> None:
    with hook(answer) as other:
        said = Webhook(other.url).send([FIRED])
    assert said == f"the webhook at http://127.0.0.1/*** was not told: {why}"
    assert len(other.requests) == tries


def test_one_that_recovers_is_told() -> None:
    with hook(status(503), reset, OK) as other:
        assert Webhook(other.url).send([FIRED]) is None
    assert len(other.requests) == 3


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    said = Webhook(f"http://user:open-sesame@127.0.0.1:{port}/T0SECRET").send([FIRED])
    assert said == "the webhook at http://127.0.0.1/*** was not told: Connection refused"


@pytest.mark.parametrize("answer", [hang, drip], ids=["silence", "a byte now and then"])
def test_one_that_does_not_come_to_an_end_is_left(answer: Any) -> None:
    with hook(answer) as other:
        said = Webhook(other.url, timeout=2, total=60).send([FIRED])
    assert said in {
        "the webhook at http://127.0.0.1/*** was not told: no answer within 2 s",
        "the webhook at http://127.0.0.1/*** was not told: no answer in time",
    }
    assert len(other.requests) == 3


def test_all_tries_together_have_their_time() -> None:
    with hook(hang) as other:
        began = time.monotonic()
        assert Webhook(other.url, timeout=1, total=2).send([FIRED]) is not None
        assert time.monotonic() - began < 30
    assert len(other.requests) < 3


def test_an_endless_answer_is_not_read_to_its_end() -> None:
    with hook(flood) as other:
        began = time.monotonic()
        assert Webhook(other.url).send([FIRED]) is None
        assert time.monotonic() - began < 60


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(code: int) -> None:
    with hook(OK) as elsewhere, hook(status(code, f"Location: http://127.0.0.1:{elsewhere.port}/T0SECRET")) as other:
        said = Webhook(other.url).send([FIRED]) or ""
    assert f"it answered {code} " in said
    assert "a redirect is not followed" in said
    assert (len(other.requests), elsewhere.requests) == (1, [])
    assert not any(secret in said for secret in SECRETS)


def test_a_login_in_the_address_is_sent_as_one() -> None:
    with hook(OK) as other:
        url = f"http://me:open%2Dsesame@127.0.0.1:{other.port}/"
        assert Webhook(url).send([FIRED]) is None
    login = base64.b64encode(b"me:open-sesame").decode()
    assert f"Authorization: Basic {login}".encode() in other.requests[0]
    assert b"@127" not in other.requests[0]


def test_no_certificate_no_alert() -> None:
    with hook(OK) as other:
        said = Webhook(other.url.replace("http:", "https:"), timeout=1).send([FIRED]) or ""
    assert said.startswith("the webhook at https://127.0.0.1/*** was not told: ")
    assert not any(secret in said for secret in SECRETS)


def test_a_name_that_nobody_knows() -> None:
    said = Webhook("https://no-such-host.invalid/T0SECRET", timeout=2, total=3).send([FIRED]) or ""
    assert said.startswith("the webhook at https://no-such-host.invalid/*** was not told: ")
    assert not any(secret in said for secret in SECRETS)
