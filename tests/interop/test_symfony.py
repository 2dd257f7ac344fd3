"""Symfony Messenger with the code of its page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml
from client_loop import DYING, ONCE, WORKERS, assert_one_group_for_each_cause, code_of
from program import HANGS_AFTER

from scripts import clients
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    from client_loop import Loop

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def php() -> tuple[list[str], dict[str, str]]:
    """The command that runs a file, and its variables."""
    try:
        return clients.php()
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)


def start_symfony(loop: Loop, php: tuple[list[str], dict[str, str]], names: list[str], retries: int) -> None:
    command, variables = php
    (listener,) = code_of("symfony.md", "php")
    (loop.folder / "HandOverFailures.php").write_text(f"<?php\n{listener}")
    worker = str(WORKERS / "symfony_worker.php")
    (settings,) = (yaml.safe_load(text) for text in code_of("symfony.md", "yaml"))
    (transport,) = settings["framework"]["messenger"]["transports"].values()
    variables = {**variables, "TRANSPORT_OPTIONS": json.dumps(transport["options"])}
    loop.call(*command, worker, "send", *names, **variables)
    loop.start(*command, worker, "work", RETRIES=str(retries), **variables)


@pytest.mark.usefixtures("on_every_broker")
def test_symfony_hands_over_what_its_own_retries_could_not_save(
    loop: Loop, php: tuple[list[str], dict[str, str]]
) -> None:
    start_symfony(loop, php, [ONCE, *DYING], retries=0)
    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.pay"}
    assert rows["declined-1"]["error_type"] == "PaymentDeclined"
    assert rows["declined-1"]["error_message"] == "card of order 1 declined"
    loop.replay("orders")


def test_symfony_hands_over_nothing_that_it_tries_again_itself(
    loop: Loop, php: tuple[list[str], dict[str, str]]
) -> None:
    start_symfony(loop, php, ["declined-1"], retries=1)
    loop.await_depth("retry-queue", 1)
    assert loop.calls() == 2 * ["declined-1 failed"]
    for outcome in ("delayed", "returned"):
        loop.team.await_depth({"delayed": "retry-queue", "returned": "retry-queue-1"}[outcome], 1)
        assert loop.run("drain")["counts"][outcome] == 1
    # It comes back with the count of Symfony at its maximum.
    loop.await_depth("retry-queue", 1)
    assert loop.calls() == 3 * ["declined-1 failed"]


def test_symfony_keeps_what_could_not_be_handed_over(loop: Loop, php: tuple[list[str], dict[str, str]]) -> None:
    loop.team.channel.queue_unbind("retry-queue", "retry-exchange", "retry-routing-key")
    start_symfony(loop, php, ["declined-1"], retries=0)
    assert loop.processes[-1].wait(HANGS_AFTER) != 0, loop.log()
    assert "NO_ROUTE" in loop.log()
    loop.team.await_depth("orders", 1)
