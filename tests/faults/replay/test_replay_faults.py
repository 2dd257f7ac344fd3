"""A replay is cut in the middle, and applied again: everything goes out, and little of it twice."""

from __future__ import annotations

import itertools
import signal
import sys
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from program import HANGS_AFTER, Client, Program, client, eventually
from ready_store import make_tables
from replay_rows import ORIGIN, end_leases, fill
from sqlalchemy import func, select

from dlqbatch.broker.transfer import WINDOW
from dlqbatch.store.engine import create_engine_for, reading
from dlqbatch.store.tables import ATTEMPTS, MESSAGES

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

    from sqlalchemy import Engine

MANY = 10_000
RESERVED = (MESSAGES.c.plan_id.is_not(None)) & (MESSAGES.c.status != "processing")
"""For a plan; what it has sent is under observation."""
PARTIAL = 3


class Scene:
    def __init__(self, program: Program, engine: Engine, team: Client) -> None:
        self.program, self.engine, self.team = program, engine, team

    def told(self, *arguments: str) -> Any:
        done = self.program.run("replay", *arguments, "--json")
        assert done.code in {0, PARTIAL}, done.said
        return done.told

    def marked(self) -> int:
        with reading(self.engine) as connection:
            sent = select(func.count()).select_from(ATTEMPTS).where(ATTEMPTS.c.sent_at.is_not(None))
            return int(connection.scalar(sent) or 0)

    def start(self, name: str, *arguments: str, out: int) -> subprocess.Popen[str]:
        """An apply that has sent some."""
        process = self.program.start("replay", "apply", name, "--no-canary", "--json", *arguments)
        assert eventually(lambda: self.team.depth(ORIGIN) >= out or process.poll() is not None)
        return process

    def copies(self) -> Counter[int]:
        """How often each body is in the queue, read to its end by a client that is none of ours."""
        channel, found = self.team.channel, Counter[int]()
        while depth := self.team.depth(ORIGIN):
            for _, _, body in itertools.islice(channel.consume(ORIGIN, auto_ack=True), depth):
                found[int(body)] += 1
            channel.cancel()
        return found


@pytest.fixture(params=["postgresql", "sqlite"])
def scene(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Scene]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    make_tables(url)
    with client(broker_url) as team:
        team.channel.queue_declare(ORIGIN, durable=True)
        engine = create_engine_for(url, connect_timeout=30)
        yield Scene(Program({"broker_url": broker_url, "database_url": url}), engine, team)


@pytest.mark.slow
def test_ten_thousand_killed_in_the_middle_and_applied_again_all_go_and_few_twice(scene: Scene) -> None:
    fill(scene.engine, range(MANY))
    name = scene.told("plan", "--all")["hash"]
    process = scene.start(name, out=MANY // 3)
    process.kill()
    process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == -signal.SIGKILL
    marked = scene.marked()
    assert 0 < marked < MANY
    held = end_leases(scene.engine, datetime.now(UTC))

    report = scene.told("apply", name, "--no-canary")

    assert (report["outcome"], report["plan"]["state"]) == ("ok", "done")
    assert (report["plan"]["sent"], report["plan"]["waiting"]) == (MANY, 0)
    # What is recorded as confirmed is not sent again.
    assert report["counts"]["sent"] <= MANY - marked
    found = scene.copies()
    twice = sum(found.values()) - MANY
    sys.stdout.write(f"{marked} were marked, {held} held, {twice} doubled\n")
    assert set(found) == set(range(MANY))
    assert max(found.values()) <= 2
    assert twice <= min(held, WINDOW)
    with reading(scene.engine) as connection:
        numbers = connection.execute(select(ATTEMPTS.c.number, func.count()).group_by(ATTEMPTS.c.number)).all()
        reserved = connection.scalar(select(func.count()).where(RESERVED))
    assert (numbers, reserved) == ([(1, MANY)], 0)


def test_a_run_of_the_job_that_is_killed_loses_nothing_and_the_next_one_goes_on(scene: Scene) -> None:
    number = 2_000
    fill(scene.engine, range(number))
    name = scene.told("plan", "--all")["hash"]
    scene.told("release", name, "--no-canary", "--rate", "500/s")
    process = scene.program.start("replay", "run", "--json")
    assert eventually(lambda: scene.team.depth(ORIGIN) >= 300 or process.poll() is not None)
    process.kill()
    process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == -signal.SIGKILL
    marked = scene.marked()
    held = end_leases(scene.engine, datetime.now(UTC))
    scene.told("rate", name, "none")

    sent = 0
    while scene.told("status", name)["state"] != "done":
        report = scene.told("run")
        assert report["outcome"] == "ok", report
        sent += report["counts"]["sent"]

    assert sent <= number - marked
    found = scene.copies()
    assert set(found) == set(range(number))
    assert sum(found.values()) - number <= min(held, WINDOW)


def test_an_apply_at_once_after_a_crash_sends_the_rest_and_says_until_when_some_are_held(scene: Scene) -> None:
    fill(scene.engine, range(400))
    name = scene.told("plan", "--all")["hash"]
    process = scene.start(name, "--rate", "100/s", out=50)
    process.kill()
    process.communicate(timeout=HANGS_AFTER)
    again = scene.told("apply", name, "--no-canary", "--wait", "0")
    assert again["outcome"] == "partial"
    held = again["plan"]["held"]
    assert 0 < held <= 200  # a batch on its way, and the next one
    assert "apply again then" in " ".join(again["warnings"])
    assert end_leases(scene.engine, datetime.now(UTC)) == held
    assert scene.told("apply", name, "--no-canary")["plan"]["state"] == "done"
    assert set(scene.copies()) == set(range(400))


def test_a_signal_ends_it_with_everything_settled_and_the_next_apply_doubles_nothing(scene: Scene) -> None:
    fill(scene.engine, range(400))
    name = scene.told("plan", "--all")["hash"]
    process = scene.start(name, "--rate", "100/s", out=50)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == PARTIAL, out + err
    assert '"stopped_by": "signal"' in out
    told = scene.told("status", name)
    assert (told["held"], told["sent"]) == (0, scene.team.depth(ORIGIN))
    assert scene.told("apply", name, "--no-canary")["plan"]["state"] == "done"
    assert scene.copies() == Counter(range(400))


def test_an_abort_while_it_runs_ends_it_and_lets_the_rest_go(scene: Scene) -> None:
    fill(scene.engine, range(3_000))
    name = scene.told("plan", "--all")["hash"]
    process = scene.start(name, "--rate", "100/s", "--batch-size", "20", out=50)
    aborted = scene.told("abort", name)
    assert aborted["state"] == "aborted"
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == PARTIAL, out + err
    with reading(scene.engine) as connection:
        reserved = connection.scalar(select(func.count()).where(RESERVED))
        by_status = {
            str(k): v
            for k, v in connection.execute(select(MESSAGES.c.status, func.count()).group_by(MESSAGES.c.status))
        }
    sent = scene.team.depth(ORIGIN)
    assert 50 <= sent < 3_000
    assert (reserved, by_status) == (0, {"processing": sent, "pending": 3_000 - sent})


def test_two_applies_at_once_send_each_message_once(scene: Scene) -> None:
    fill(scene.engine, range(1_000))
    name = scene.told("plan", "--all")["hash"]
    both = [scene.program.start("replay", "apply", name, "--no-canary", "--json") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=HANGS_AFTER)
        assert process.returncode in {0, PARTIAL, 2}, out + err  # 2: the other one was done before it looked
    assert scene.told("status", name)["state"] == "done"
    assert scene.copies() == Counter(range(1_000))


def test_a_broker_connection_that_is_cut_loses_nothing(scene: Scene, management: Any) -> None:
    fill(scene.engine, range(600))
    name = scene.told("plan", "--all")["hash"]
    process = scene.start(name, "--rate", "60/s", out=50)

    def cut() -> bool:
        # Not that of the guard, which has a longer name: it connects again.
        for each in management.get("connections"):
            is_its_own = each["client_properties"].get("connection_name") == "dlqbatch replay"
            if each["vhost"] == management.vhost and is_its_own:
                management.delete(f"connections/{quote(each['name'])}")
                return True
        return process.poll() is not None

    assert eventually(cut)
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == PARTIAL, out + err
    assert "connection to the broker was lost" in out
    # Whether the broker has what it did not confirm nobody knows: it goes out again when its lease is over.
    end_leases(scene.engine, datetime.now(UTC))
    assert scene.told("apply", name, "--no-canary")["plan"]["state"] == "done"
    found = scene.copies()
    assert set(found) == set(range(600))
    assert sum(found.values()) <= 600 + WINDOW
