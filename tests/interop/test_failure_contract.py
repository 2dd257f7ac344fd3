"""The recipes of docs/failure-contract.md, taken out of the page and run by a worker in their language."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest
from client_loop import DYING, ONCE, WORKERS, assert_one_group_for_each_cause, code_of
from program import HANGS_AFTER, ROOT

from scripts import clients
from scripts.servers.server import ServiceError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from client_loop import Loop

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "failure-contract.md").read_text()
RECIPES = dict(re.findall(r"^```(python|js|java|go)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
AUDIT = "audit"
"""Another subscriber of the same exchange: what comes back is none of its business."""


@pytest.fixture
def start(
    request: pytest.FixtureRequest, loop: Loop, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], subprocess.Popen[bytes]]:
    """Starts the worker of a language on the queue `orders`."""

    def started(language: str) -> subprocess.Popen[bytes]:
        if language == "python":
            (loop.folder / "recipe.py").write_text(RECIPES["python"])
            return loop.start(sys.executable, str(WORKERS / "pika_worker.py"))
        if language == "go":
            return loop.start(str(go_worker(loop.folder)))
        if language == "java":
            class_path = request.getfixturevalue("class_path")
            return loop.start(*java_worker(loop, class_path, RECIPES["java"]))
        (loop.folder / "recipe.js").write_text(RECIPES["js"])
        channel_of = "manager" if "manager" in language else "amqplib"
        variables = request.getfixturevalue("node_modules")
        return loop.start("node", str(WORKERS / "amqplib_worker.js"), channel_of, **variables)

    return started


def go_worker(folder: Path) -> str:
    source = folder / "worker.go"
    source.write_text((WORKERS / "worker.go").read_text().replace("// RECIPE\n", RECIPES["go"]))
    try:
        return clients.compile_go(source)
    except ServiceError as error:
        pytest.fail(str(error), pytrace=False)


def java_worker(loop: Loop, class_path: str, recipe: str) -> list[str]:
    source = (WORKERS / "Worker.java").read_text().replace("  // RECIPE\n", recipe)
    (loop.folder / "Worker.java").write_text(source)
    loop.call("javac", "-cp", class_path, "Worker.java")
    return ["java", "-Xshare:auto", "-cp", f"{class_path}:{loop.folder}", "Worker"]


LANGUAGES = ["python", "js", "js with amqp-connection-manager", "java", "go"]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.usefixtures("on_every_broker")
def test_a_recipe_leads_a_failure_through_the_ladder_the_store_and_back(
    loop: Loop, start: Callable[[str], object], language: str
) -> None:
    publish(loop, AUDIT)
    start(language)

    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.created"}
    assert rows["declined-1"]["error_type"].endswith("PaymentDeclined")
    assert rows["declined-1"]["error_message"] == "card of order 1 declined"
    loop.replay("orders")
    loop.await_depth(AUDIT, 1 + len(DYING))


def publish(loop: Loop, *subscribers: str, names: tuple[str, ...] = (ONCE, *DYING)) -> None:
    channel = loop.team.channel
    channel.exchange_declare("shop", "topic", durable=True)
    for queue in ("orders", *subscribers):
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, "shop", "#")
    for name in names:
        loop.team.publish("shop", "order.created", name.encode())


@pytest.mark.usefixtures("on_every_broker")
def test_what_the_recoverer_of_spring_sends_goes_the_same_way(loop: Loop, class_path: str) -> None:
    """Spring AMQP itself cannot be had: its headers are sent by the broker's client for Java."""
    recoverer = (WORKERS / "republish_message_recoverer.java").read_text()
    (shown,) = code_of("spring.md", "java")
    own = set(re.findall(r'"(dlqbatch-[a-z-]+)"', shown))
    assert own == set(re.findall(r'"(dlqbatch-[a-z-]+)"', recoverer))
    publish(loop, AUDIT)
    loop.start(*java_worker(loop, class_path, recoverer))

    loop.climb()
    rows = loop.bury()
    assert_one_group_for_each_cause(rows)
    assert {row["event"] for row in rows.values()} == {"order.created"}
    assert rows["declined-1"]["error_type"].endswith("PaymentDeclined")
    loop.replay("orders")
    loop.await_depth(AUDIT, 1 + len(DYING))


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_recipe_acknowledges_nothing_that_could_not_be_published(
    loop: Loop, start: Callable[[str], subprocess.Popen[bytes]], language: str
) -> None:
    loop.team.channel.queue_unbind("retry-queue", "retry-exchange", "retry-routing-key")
    publish(loop, names=("declined-1",))
    assert start(language).wait(HANGS_AFTER) != 0, loop.log()
    assert loop.count("failed") >= 1
    loop.team.await_depth("orders", 1)


@pytest.mark.parametrize("language", ["python", "js", "java", "go"])
def test_a_recipe_has_at_most_fifteen_lines(language: str) -> None:
    lines = [line for line in RECIPES[language].splitlines() if line.strip()]
    assert len(lines) <= 15
