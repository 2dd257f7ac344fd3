"""A stop is a stop: after an abort has returned nothing more of the plan arrives, and what it says is what happened."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from lifecycle_rows import connect, number
from matrix.store_jobs import PROGRAM
from program import HANGS_AFTER, Program, client, eventually
from ready_store import make_tables
from replay_rows import ORIGIN
from replay_scene import PARTIAL, SLOWLY, Scene
from slow_database import SlowDatabase
from stalling_link import StallingLink

from dlqbatch.replay.plan import status

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator


HOURS = 3 * 3600


@pytest.fixture(params=["postgresql", "sqlite"])
def scene(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Scene]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    make_tables(url)
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        yield Scene(broker_url, url, team)


@pytest.fixture
def served(broker_url: str, database_url: str) -> Iterator[Scene]:
    """With a database that has a network before it."""
    make_tables(database_url)
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        yield Scene(broker_url, database_url, team)


def ended(scene: Scene, process: subprocess.Popen[str], told: Any, depth: int, size: int) -> None:
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == PARTIAL, out + err
    # Nothing has arrived since the abort returned, and it has said what was sent.
    assert (told["state"], told["sent"], told["held"]) == ("aborted", depth, 0)
    assert scene.team.depth(ORIGIN) == depth < size
    assert (told["sent"] + told["waiting"], len(told["sent_ids"])) == (size, min(depth, 1000))
    assert (scene.rows("processing"), scene.rows("pending")) == (depth, size - depth)


@pytest.mark.parametrize(("pace", "size", "out"), [(SLOWLY, 900, 3), ((), 6_000, 300)], ids=["5/s", "full speed"])
def test_nothing_arrives_after_an_abort_has_returned(scene: Scene, pace: tuple[str, ...], size: int, out: int) -> None:
    name = scene.plan(size)
    process = scene.sends(name, *pace, out=out)
    ended(scene, process, *scene.abort(name), size)


@pytest.mark.parametrize(("sender", "stopper"), [(HOURS, 0), (0, HOURS)])
def test_an_abort_from_another_machine_stops_it_whatever_the_clocks_say(
    served: Scene, sender: int, stopper: int
) -> None:
    name = served.plan(900)
    by = [Program(served.program.settings, ("env", f"STRANGE_CLOCK={ahead}", *PROGRAM)) for ahead in (sender, stopper)]
    process = served.sends(name, *SLOWLY, out=2, by=by[0])
    ended(served, process, *served.abort(name, by=by[1]), 900)


@pytest.mark.parametrize("pace", [SLOWLY, ()], ids=["5/s", "full speed"])
def test_an_abort_stops_it_while_the_database_is_slow(served: Scene, pace: tuple[str, ...]) -> None:
    name = served.plan(3_000)
    with ExitStack() as stack:
        slow = [stack.enter_context(SlowDatabase(served.database_url, 0.05)) for _ in range(2)]
        by = [served.program.but(database_url=link.url) for link in slow]
        process = served.sends(name, *pace, out=2, by=by[0])
        ended(served, process, *served.abort(name, by=by[1]), 3_000)


def test_a_run_that_cannot_reach_the_database_stops_and_the_abort_says_what_is_not_known(served: Scene) -> None:
    name = served.plan(99)
    # Its third confirm is noted, and then it hears no more of the database, which is there for everybody else.
    script = [b"UPDATE dlq_attempts SET sent_at"] * 3
    with StallingLink(served.database_url, *script, is_heard=True) as link:
        by = served.program.but(database_url=link.url, max_seconds="3", settle_seconds="2", connect_timeout_seconds="4")
        process = by.start("replay", "apply", name, "--no-canary", "--json", *SLOWLY)
        assert link.asked.wait(HANGS_AFTER)
        done = served.program.run("replay", "abort", name, "--json")
        depth = served.team.depth(ORIGIN)
        assert done.code == PARTIAL, done.said
        told = done.told
        assert told["held"] > 0
        assert "had begun to send" in told["do_next"]
        assert told["sent"] <= depth <= told["sent"] + told["held"]
        out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode in {PARTIAL, 4}, out + err
    assert served.team.depth(ORIGIN) == depth


def test_what_an_abort_prints_is_what_happened(scene: Scene) -> None:
    name = scene.plan(400)
    # The oldest and the largest go first: messages 1, 3, 2, and then the rest in order.
    process = scene.sends(name, *SLOWLY, out=3)
    said = scene.program.run("replay", "abort", name)
    depth = scene.team.depth(ORIGIN)
    process.communicate(timeout=HANGS_AFTER)
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert said.code == 0
    assert f"sent {depth}" in lines
    # Which of them went first is the plan's choice.
    (listed,) = (line.removeprefix("messages ") for line in lines if line.startswith("messages "))
    spans = [part.split("-") for part in listed.split(", ")]
    assert sum(int(span[-1]) - int(span[0]) + 1 for span in spans) == depth
    assert f"not sent {400 - depth} as they were before the plan" in lines
    assert "held" not in said.out


@pytest.mark.parametrize(("job", "kind"), [("replay", signal.SIGINT), ("lifecycle", signal.SIGTERM)])
def test_a_signal_acts_before_the_next_publish(served: Scene, job: str, kind: signal.Signals) -> None:
    """While a batch of hundreds is here, and the database takes its time."""
    size = 3_000
    name = served.plan(size)
    with served.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE dlq_messages SET next_retry_at = now()")
    with SlowDatabase(served.database_url, 0.04) as link, connect(served.database_url) as store:
        by = served.program.but(database_url=link.url)
        if job == "replay":
            process = served.sends(name, "--batch-size", "1000", out=1, by=by)
        else:
            process = by.start("lifecycle", "--json")
            assert eventually(lambda: served.team.depth(ORIGIN) > 0)
        process.send_signal(kind)
        out, err = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode in {0, PARTIAL}, out + err
        assert '"stopped_by": "signal"' in out
        sent = number(store, "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL")
        assert served.team.depth(ORIGIN) == sent < size
        # Nothing is held: what was begun and not published is as it was.
        assert number(store, "SELECT count(*) FROM dlq_messages WHERE status = 'processing'") == sent
        assert number(store, "SELECT count(*) FROM dlq_messages WHERE lock_owner IS NULL") == size - sent


def test_a_plan_that_was_aborted_while_a_canary_is_waited_for_ends_its_apply(scene: Scene) -> None:
    name = scene.plan(30)
    process = scene.program.start("replay", "apply", name, "--wait", "3600", "--json")
    assert eventually(lambda: status(scene.engine, name).sent == 4)
    assert scene.abort(name)[0]["sent"] == 4
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert (process.returncode, '"aborted"' in out) == (PARTIAL, True), out + err
