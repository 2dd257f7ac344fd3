"""The demo with the console: dead messages to look at, and nothing left on the broker afterwards."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import httpx2
import pytest
from program import HANGS_AFTER, Program

if TYPE_CHECKING:
    from scripts.servers.management import Management


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_messages_of_four_causes_are_dead_and_the_console_shows_them_until_a_signal(
    broker_url: str, management: Management, number: signal.Signals
) -> None:
    program = Program({"broker_url": broker_url}, (*Program({}).command, "demo", "--console", "--json"))
    with program.start() as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line, running.communicate()[1]
        with httpx2.Client(follow_redirects=True) as browser:
            page = browser.get(json.loads(line)["open"]).text
            for error in ("TimeoutError", "com.shop.ValidationError", "handlers.RateLimited", "KeyError"):
                assert error in page
            found = browser.get(f"{json.loads(line)['address']}/messages?error-type=KeyError").text
            assert "9 match" in found.replace("<small>", "")
        running.send_signal(number)
        _, err = running.communicate(timeout=HANGS_AFTER)
    assert running.returncode == 0, err
    assert "329 messages of 4 causes are dead" in err
    assert management.queues() == []
    assert management.exchanges() == []


def test_without_a_broker_it_says_so_and_leaves_nothing_running() -> None:
    away = Program({"broker_url": "amqp://127.0.0.1:1/", "connect_timeout_seconds": "0.5"})
    assert away.run("demo", "--console").code == 4
    assert away.run("demo", "--console", "--real-time").code == 2
