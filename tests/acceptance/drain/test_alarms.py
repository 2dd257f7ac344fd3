"""A memory or disk alarm of the broker: it reads no more from whoever publishes, and answers nothing then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dead_rows import NOW, add
from lifecycle_rows import due, properties
from program import DLQ, RETRY_QUEUE, Program, client, slowdown

from dlqbatch.store.engine import create_engine_for
from scripts import services
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from pathlib import Path

ORIGIN = "orders-queue"
BLOCKED = "the broker has blocked publishing (memory or disk alarm)"
MESSAGES = 50


def node_of(release: str, folder: Path) -> RabbitNode:
    return RabbitNode(folder / "rabbitmq") if release == "installed" else services.node_of_43(folder / "rabbitmq")


@pytest.mark.slow
@pytest.mark.parametrize("release", ["installed", "4.3"])
def test_a_standing_alarm_is_named_at_once_and_nothing_is_taken(
    work_folder: Path, sqlite_url: str, release: str
) -> None:
    with node_of(release, work_folder).start() as node, client(node.url) as team:
        program = Program({"broker_url": node.url, "management_url": node.management_url, "database_url": sqlite_url})
        assert program.run("db", "upgrade").code == 0
        assert program.run("events", "set", "orders.*", "3").code == 0
        assert program.run("topology", "apply").code == 0
        team.make_origin(ORIGIN)
        team.fail(ORIGIN, "orders.created", *(b"%d" % number for number in range(MESSAGES)))
        for number in range(MESSAGES):
            death = {"queue": ORIGIN, "exchange": "orders", "routing-keys": ["a"], "reason": "rejected", "count": 9}
            team.publish("", DLQ, b"%d" % number, {"x-death": [death]})
        engine = create_engine_for(sqlite_url, connect_timeout=30)
        rows = (due(n) | {"origin_queue": ORIGIN, "properties": properties(f"due-{n}", ORIGIN)} for n in range(2))
        add(engine, *rows, at=NOW.replace(year=2020))
        node.set_memory_limit(0.000001)

        for job in (("drain",), ("check", DLQ, "--to", "aside"), ("lifecycle",)):
            done = program.run(*job, "--json")
            assert done.code == 3, (job, done.said)
            told = done.told
            assert (told["outcome"], told["stopped_by"]) == ("partial", "failure"), told
            assert any(BLOCKED in warning for warning in told["warnings"]), told
            assert told["counts"].get("delayed", 0) == told["counts"].get("moved", 0) == 0
            assert told["counts"]["left"] == (2 if job == ("lifecycle",) else 0)
            assert told["elapsed_seconds"] < 10 * slowdown(), "it has waited for an answer"
            assert done.seconds < 14 * slowdown(), "it has waited for the connection to be closed"
        # With nothing to publish there is nothing that an alarm could stop; to take messages away helps.
        done = program.run("ingest", "--json")
        assert (done.code, done.told["counts"]["recorded"]) == (0, MESSAGES), done.said

        node.set_memory_limit(0.4)
        done = program.run("drain", "--json")
        assert (done.code, done.told["counts"]["delayed"]) == (0, MESSAGES), done.said
        assert team.depth(RETRY_QUEUE) == 0
