"""A newer dlqbatch beside an older one on the same broker and database, under load, while `db upgrade` runs.

Messages come all the time, and the jobs of both versions work on them at once. What must come of each message is
decided here, by its number and by how often its consumer has seen it; nothing of dlqbatch is asked for that.
`DLQBATCH_TEST_UPGRADE=3000 scripts/test tests/acceptance/deploy/test_upgrade.py` is the long one, of every older
version in both directions.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pika
import psycopg
import pytest
from old_version import SCHEMAS, Version, checked_out, version_of
from program import DLQ, HANGS_AFTER, RETRY_QUEUE, ROOT, Client, Finished, client, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

SIZE = int(os.environ.get("DLQBATCH_TEST_UPGRADE", "20"))
"""Messages of a round; there are three rounds."""
CASES = [("0009", "back")]
if SIZE >= 1000:
    CASES = list(itertools.product(SCHEMAS, ("forward", "back")))

WORK = "orders-queue"
RETRIES = 1
"""Of the policy: the consumer sees a message once more before it is a dead letter."""
SETTINGS = {
    "events.orders.#": str(RETRIES),
    "tier_ttls": "50,50,50",
    "retry_delays": "200ms",
    "max_attempts": "2",
    "recheck": "200ms",
    "observation_window": "500ms",
    "breaker_min_attempts": "1000000",
    "off_peak_hours": ",".join(map(str, range(24))),
    "connect_timeout_seconds": "120",
    "max_seconds": "20",
    "allow_empty_policy": "true",
}
AT_ONCE, BY_POLICY, BY_LIFECYCLE, AFTER_THE_MEND = range(4)
"""The kinds of messages, by their numbers: when their consumer succeeds."""
SUCCEEDS_AT = {AT_ONCE: 1, BY_POLICY: RETRIES + 1, BY_LIFECYCLE: RETRIES + 2}
JOBS = (("drain",), ("ingest",), ("lifecycle",)), (("lifecycle",), ("drain",), ("monitor",), ("ingest",), ("retain",))
"""What each version runs at once, one after the other."""
WELL, USAGE, PARTIAL, UNREACHABLE = 0, 2, 3, 4


class Consumer:
    """Rejects each message as often as its number says; from `mend` on it takes all."""

    def __init__(self, url: str) -> None:
        self.seen: Counter[int] = Counter()
        self.done: Counter[int] = Counter()
        self.is_mended = False
        parameters = pika.URLParameters(url)
        parameters.heartbeat = 0
        self._connection = pika.BlockingConnection(parameters)
        channel = self._connection.channel()
        channel.basic_qos(prefetch_count=50)
        channel.basic_consume(WORK, self._take)
        self._channel = channel
        self._thread = threading.Thread(target=channel.start_consuming)
        self._thread.start()

    def _take(self, channel: Any, method: Any, _: Any, body: bytes) -> None:
        number = int(body)
        self.seen[number] += 1
        at = SUCCEEDS_AT.get(number % 4)
        if self.is_mended or (at is not None and self.seen[number] >= at):
            self.done[number] += 1
            channel.basic_ack(method.delivery_tag)
        else:
            channel.basic_reject(method.delivery_tag, requeue=False)

    def close(self) -> None:
        self._connection.add_callback_threadsafe(self._channel.stop_consuming)
        self._thread.join(HANGS_AFTER)
        self._connection.close()


class Deployment:
    """The jobs of one version, again and again, several at once, until it is stopped."""

    def __init__(self, version: Version) -> None:
        self.version = version
        self.ended: list[tuple[tuple[str, ...], Finished]] = []
        self._stops = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(jobs,)) for jobs in JOBS]
        for thread in self._threads:
            thread.start()

    def _work(self, jobs: Sequence[tuple[str, ...]]) -> None:
        for words in itertools.cycle(jobs):
            if self._stops.is_set():
                return
            self.ended.append((words, self.version.run(*words, "--json")))
            self._stops.wait(0.5)

    def stop(self) -> None:
        self._stops.set()
        for thread in self._threads:
            thread.join(HANGS_AFTER)

    def have_run(self, code: int, *but: str) -> Callable[[], bool]:
        """Whether each job, but these, has ended with this code from now on."""
        since, jobs = len(self.ended), {words for each in JOBS for words in each if words[0] not in but}
        return lambda: {words for words, done in self.ended[since:] if done.code == code} >= jobs


class Oracle:
    """What the broker and the tables say, in its own words."""

    def __init__(self, database: str, team: Client) -> None:
        self._url, self._team = database.replace("+psycopg", ""), team

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._url) as connection:
            return connection.execute(query.encode()).fetchall()

    def states(self) -> dict[int, str]:
        """Of each message in the dead store, by its number."""
        found = self.sql("SELECT convert_from(body, 'UTF8')::int, status FROM dlq_messages")
        assert len(found) == len({number for number, _ in found}), f"stored twice: {sorted(found)}"
        return dict(found)

    def depths(self) -> dict[str, int]:
        queues = (WORK, RETRY_QUEUE, DLQ, *(f"{RETRY_QUEUE}-{tier}" for tier in (1, 2, 3)))
        return {queue: depth for queue in queues if (depth := self._team.depth(queue))}

    def stuck(self) -> list[tuple[Any, ...]]:
        """What no run will ever look at again, or is counted wrongly."""
        return [
            *self.sql("SELECT 'locked', id FROM dlq_messages WHERE lock_token IS NOT NULL OR lease_until IS NOT NULL"),
            *self.sql("SELECT 'reserved', id FROM dlq_messages WHERE plan_id IS NOT NULL"),
            *self.sql("SELECT 'open attempt', message_id FROM dlq_attempts WHERE closed_at IS NULL"),
            *self.sql("SELECT 'waits in a plan', plan_id FROM dlq_plan_items WHERE state = 'waiting'"),
            *self.sql("SELECT 'another scope', id FROM dlq_messages WHERE scope_id <> 1"),
            *self.sql(
                "SELECT 'an attempt of another scope', a.id FROM dlq_attempts a WHERE a.scope_id <> 1"
                " OR NOT EXISTS (SELECT FROM dlq_messages m WHERE m.id = a.message_id)"
            ),
        ]


def is_right(done: Finished) -> bool:
    """How a run may end. Where an upgrade and a run wait for each other, PostgreSQL ends one of them."""
    reason = {USAGE: "db upgrade", UNREACHABLE: "deadlock"}.get(done.code, "")
    return done.code in (WELL, PARTIAL, USAGE, UNREACHABLE) and reason in done.said


def plan_of_failed(version: Version) -> str:
    return str(json.loads(version.run("replay", "plan", "--status", "failed", "--json").out)["hash"])


def send(version: Version, plan: str) -> None:
    ended: list[Finished] = []

    def is_sent() -> bool:
        ended.append(version.run("replay", "apply", plan, "--no-canary", "--json"))
        return ended[-1].code == WELL

    assert eventually(is_sent), ended[-1]


@pytest.fixture(params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def versions(
    case: tuple[str, str], broker_url: str, broker_addresses: tuple[str, str], database_url: str, tmp_path: Path
) -> Iterator[tuple[Version, Version]]:
    """The older and today's."""
    given = {"broker_url": broker_url, "management_url": broker_addresses[1], "database_url": database_url} | SETTINGS
    config = tmp_path / "application.properties"
    config.write_text(f"dlqbatch.events.orders.#={given.pop('events.orders.#')}\n")
    given["config"] = str(config)
    old = checked_out(SCHEMAS[case[0]], tmp_path / "old")
    with version_of(old, given) as older, version_of(ROOT, given) as newer:
        yield older, newer


def test_both_work_at_once_and_every_message_arrives(
    case: tuple[str, str], versions: tuple[Version, Version], broker_url: str, database_url: str
) -> None:
    older, newer = versions
    assert older.run("db", "upgrade").code == WELL
    assert older.run("topology", "apply", "--yes").code == WELL
    with contextlib.ExitStack() as stack:
        team = stack.enter_context(client(broker_url))
        team.make_origin(WORK)
        oracle = Oracle(database_url, team)
        consumer = Consumer(broker_url)
        stack.callback(consumer.close)
        numbers: list[int] = []

        def load() -> None:
            new = range(len(numbers), len(numbers) + SIZE)
            numbers.extend(new)
            for number in new:
                failure = {"x-exception-message": "connection timed out"}
                team.publish("orders", "orders.created", b"%d" % number, failure)

        old_jobs, new_jobs = Deployment(older), Deployment(newer)
        stack.callback(old_jobs.stop)
        stack.callback(new_jobs.stop)

        # The newer program is there before its tables are: it says so, and moves nothing. A drain needs none of them.
        load()
        assert eventually(new_jobs.have_run(USAGE, "drain")), new_jobs.ended
        assert eventually(old_jobs.have_run(WELL)), old_jobs.ended
        assert all("db upgrade" in done.err for _, done in new_jobs.ended if done.code == USAGE)
        assert eventually(lambda: "failed" in oracle.states().values()), oracle.states()
        planned = plan_of_failed(older)

        load()
        upgraded = newer.run("db", "upgrade")
        assert upgraded.code == WELL, upgraded.said
        load()
        for jobs in (old_jobs, new_jobs):
            assert eventually(jobs.have_run(WELL)), jobs.ended[-20:]

        # One of them goes: the older one, as planned, or the newer one, because somebody went back.
        (stays, goes) = (new_jobs, old_jobs) if case[1] == "forward" else (old_jobs, new_jobs)
        goes.stop()
        broken = {number for number in numbers if number % 4 == AFTER_THE_MEND}

        def are_dead() -> bool:
            states = oracle.states()
            return all(states.get(number) == "failed" for number in broken)

        assert eventually(are_dead), sorted(oracle.states().items())
        consumer.is_mended = True
        # What one has planned, the other one sends.
        rest = plan_of_failed(goes.version)
        for plan in (planned, rest):
            send(stays.version, plan)

        def is_over() -> bool:
            at_rest = all(state == "resolved" for state in oracle.states().values())
            return at_rest and not oracle.depths() and not oracle.stuck()

        assert eventually(is_over), (oracle.depths(), oracle.stuck(), sorted(oracle.states().items()))
        stays.stop()
        assert set(consumer.done) == set(numbers)
        assert set(oracle.states()) == {n for n in numbers if n % 4 in (BY_LIFECYCLE, AFTER_THE_MEND)}
        assert not oracle.depths()
        for jobs in (old_jobs, new_jobs):
            assert [(words, done) for words, done in jobs.ended if not is_right(done)] == []
