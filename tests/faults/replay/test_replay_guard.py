"""A message that kills its consumer: the replay is paused at the first crash, within the step that holds it.

How soon, with both kinds of queue on both releases: scripts/bench guard.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from dying_workers import KINDS, Workers
from program import HANGS_AFTER, Client, Program, client, eventually
from ready_store import make_tables
from replay_rows import ORIGIN, fill

from dlqbatch.store.engine import create_engine_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_every_broker")]

FAILED = 1
FIRST = 10
"""Bodies of two figures: they go in the order of their numbers, but for four at most that go first."""
DELIVERIES = 20
"""After so many a quorum queue of 4.3 drops a message."""


@pytest.fixture
def workers(broker_url: str) -> Iterator[Callable[..., Workers]]:
    made: list[Workers] = []

    def make(*arguments: Any, **options: Any) -> Workers:
        made.append(Workers(broker_url, ORIGIN, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def program(request: pytest.FixtureRequest, broker_url: str, broker_release: str, database_url: str) -> Program:
    _, api = request.getfixturevalue("broker43_addresses" if broker_release == "4.3" else "broker_addresses")
    make_tables(database_url)
    return Program({"broker_url": broker_url, "database_url": database_url, "management_url": api})


@pytest.fixture
def team(broker_url: str) -> Iterator[Client]:
    with client(broker_url) as connected:
        yield connected


def planned(program: Program, team: Client, size: int, queue_type: str) -> str:
    fill(create_engine_for(program.settings["database_url"], connect_timeout=30), range(FIRST, FIRST + size))
    team.channel.queue_declare(ORIGIN, durable=True, arguments={"x-queue-type": queue_type})
    return str(program.run("replay", "plan", "--all", "--json").told["hash"])


@pytest.mark.parametrize(
    ("queue_type", "on_every_broker"), [("classic", "installed"), ("quorum", "4.3")], indirect=["on_every_broker"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_poison_pauses_the_replay_within_its_step(
    kind: str, queue_type: str, program: Program, team: Client, workers: Callable[..., Workers]
) -> None:
    """It is in one of the first two steps, of 4 messages and 20 in all; behind them others wait."""
    poison = FIRST + random.randrange(16)
    if queue_type == "classic":
        # The figures of a quorum queue are up to 5 s old, however often the broker collects them.
        program = program.but(statistics_delay="2s")
    name = planned(program, team, 30, queue_type)
    dying = workers(b"%d" % poison, **KINDS[kind])
    done = program.run("replay", "apply", name, "--json")
    dying.stop()
    plan = done.told["plan"]
    # No step after that of the poison has begun. Before the second one, all of the first are handled.
    assert plan["sent"] <= (4 if len(set(dying.handled)) < 4 else 20), (poison, done.said)
    assert (done.code, plan["state"]) == (FAILED, "stopped"), (poison, done.said)
    assert "went away" in plan["stopped_why"], (poison, done.said)
    assert dying.crashed_at
    is_dropped = queue_type == "quorum" and len(dying.crashed_at) >= DELIVERIES
    assert is_dropped or poison in {int(each.body) for each in team.contents(ORIGIN)}, done.said


@pytest.mark.parametrize("on_every_broker", ["installed"], indirect=True)
def test_a_consumer_that_dies_after_the_last_send_ends_the_apply_as_failed(
    program: Program, team: Client, broker_url: str
) -> None:
    """Everything is sent, and the apply waits for the outcomes."""
    name = planned(program, team, 3, "classic")
    with client(broker_url) as consumer:
        consumer.channel.basic_consume(ORIGIN, lambda *_: None)
        process = program.start("replay", "apply", name, "--json")
        assert eventually(lambda: program.run("replay", "status", name, "--json").told["state"] == "done")
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == FAILED, out + err
    told = json.loads(out)
    assert (told["plan"]["state"], told["plan"]["outcomes"]["open"]) == ("done", 3), out + err
    assert any("1 of 1 consumer(s)" in warning for warning in told["warnings"]), out + err
