"""Bounds that are one off would go unnoticed for long: each is met exactly, from outside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from program import HANGS_AFTER, RETRY_QUEUE, Client, Program, eventually
from slow_link import SlowLink

if TYPE_CHECKING:
    from scripts.servers.management import Management

ORIGIN, MESSAGES = "orders-queue", 2_000


def test_a_message_that_failed_just_as_often_as_it_may_stays(
    program: Program, team: Client, management: Management
) -> None:
    team.channel.queue_declare("dlq.exact", durable=True)
    for deaths in (2, 3, 4):
        death = {"count": deaths, "queue": "orders", "reason": "rejected"}
        team.publish("", "dlq.exact", b"%d" % deaths, {"x-death": [death]})
    team.await_depth("dlq.exact", 3)
    host, port = management._address
    done = program.but(management_url=f"http://{host}:{port}").run(
        "check", "dlq.exact", "--to", "dead.exact", "--max-deaths", "3"
    )
    assert done.code == 0, done.said
    assert [message.body for message in team.contents("dead.exact")] == [b"4"]
    assert [message.body for message in team.contents("dlq.exact")] == [b"2", b"3"]


def test_what_comes_back_while_a_run_works_waits_for_the_next_run(
    program: Program, team: Client, broker_url: str
) -> None:
    """More than may be asked for at once: what is in the queue again by then would be asked for as well."""
    team.make_origin(ORIGIN)
    team.expire("orders", "orders.created", (b"%d" % number + b"." * 500 for number in range(MESSAGES)))
    team.await_depth(RETRY_QUEUE, MESSAGES)
    with SlowLink(broker_url, pause_after=100_000) as link:
        running = program.but(broker_url=link.url).start("drain", "--json")
        assert link.paused.wait(HANGS_AFTER)
        team.expire("orders", "orders.created", (b"again %d" % number for number in range(MESSAGES)))
        assert eventually(lambda: team.depth(RETRY_QUEUE) >= MESSAGES)
        link.go_on()
        out, err = running.communicate(timeout=HANGS_AFTER)
    told = json.loads(out)
    assert (told["counts"]["got"], told["stopped_by"]) == (MESSAGES, "empty"), err
    team.await_depth(RETRY_QUEUE, MESSAGES)
