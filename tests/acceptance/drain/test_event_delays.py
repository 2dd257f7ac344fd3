"""Events have delays of their own, and a failure may ask for a longer one; nothing is lost when they are changed."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from program import DLQ, HANGS_AFTER, RETRY_QUEUE, Client, Message, Program, eventually
from slow_link import SlowLink

from dlqbatch import jobs
from dlqbatch.broker.transfer import WINDOW
from dlqbatch.settings import load
from dlqbatch.topology import job as topology
from dlqbatch.topology.declare import apply_topology, kinds_of

if TYPE_CHECKING:
    from pathlib import Path

    from dlqbatch.settings import Settings
    from scripts.servers.management import Management

pytestmark = pytest.mark.usefixtures("on_every_broker")

RETRIES = {"mail.sent": 3, "pay.card": 2}
NUMBERS = "dlqbatch.events.mail.sent=3\ndlqbatch.events.pay.#=2\n"
DELAYS = "dlqbatch.events.mail.sent.delays=200ms,700ms\ndlqbatch.events.pay.#.delays=400ms*2..700ms\n"
TAKES = {"mail.sent": ("200ms", "700ms", "700ms"), "pay.card": ("400ms", "700ms")}
UNDER_WAY = WINDOW + WINDOW // 8
"""What a drain that is killed can double."""
MESSAGES = 800


class Installation:
    """One broker, one policy, and an application.properties that can be written anew."""

    def __init__(self, broker_url: str, database_url: str, folder: Path) -> None:
        self.file = folder / "application.properties"
        self.given = {"broker_url": broker_url, "database_url": database_url, "tier_ttls": "50,50"}

    def settings(self, text: str = NUMBERS + DELAYS, **more: str) -> Settings:
        self.file.write_text(text)
        return load({**self.given, **more}, {"DLQBATCH_CONFIG": str(self.file)})


@pytest.fixture
def installation(broker_url: str, sqlite_url: str, policy_file: Path, tmp_path: Path) -> Installation:
    made = Installation(broker_url, f"sqlite:///{policy_file}", tmp_path)
    apply_topology(made.settings())
    return made


def drained(settings: Settings, *, dry_run: bool = False) -> dict[str, Any]:
    report = jobs.run("drain", settings, jobs.RunOptions(dry_run=dry_run)).as_dict()
    counts: dict[str, int] = report["counts"]  # type: ignore[assignment]
    assert counts["got"] == sum(counts.values()) - counts["got"]
    assert report["outcome"] == "ok", report
    return report


def waited_in(headers: dict[str, Any]) -> list[str]:
    """The delay queues that it has come through, the first one first."""
    queues = [death["queue"] for death in reversed(headers["dlqbatch-history"])]
    return [queue.removeprefix("queue.delay.") for queue in queues if queue.startswith("queue.delay.")]


def test_each_event_comes_back_after_its_own_delays_in_order(installation: Installation, team: Client) -> None:
    settings, totals = installation.settings(), Counter[str]()
    seen: dict[bytes, list[float]] = defaultdict(list)
    rejected: dict[bytes, list[float]] = defaultdict(list)
    order: dict[str, list[tuple[int, bytes]]] = {event: [] for event in RETRIES}
    for event in RETRIES:
        team.make_origin(event, key=event)
        for number in range(3):
            team.publish("orders", event, b"%s %d" % (event.encode(), number))

    def work() -> bool:
        for event in RETRIES:
            while (found := team.channel.basic_get(event))[0] is not None:
                method, _, body = found
                seen[body].append(time.monotonic())
                order[event].append((len(seen[body]), body))
                rejected[body].append(time.monotonic())
                team.channel.basic_reject(method.delivery_tag, requeue=False)
        totals.update(drained(settings)["counts"])
        return totals["dead_lettered"] == 6

    assert eventually(work), totals
    assert {name: number for name, number in totals.items() if number} == {
        "got": 15 + 15 + 6,
        "delayed": 15,
        "returned": 15,
        "dead_lettered": 6,
    }
    for event, retries in RETRIES.items():
        bodies = [b"%s %d" % (event.encode(), number) for number in range(3)]
        assert [[body for nth, body in order[event] if nth == each] for each in range(1, retries + 2)] == [bodies] * (
            retries + 1
        )
        for body in bodies:
            waits = [back - gone for gone, back in zip(rejected[body], seen[body][1:], strict=False)]
            least = [int(name.removesuffix("ms")) / 1000 for name in TAKES[event]]
            assert all(wait >= delay for wait, delay in zip(waits, least, strict=True)), waits
    dead = team.contents(DLQ)
    assert sorted(message.body for message in dead) == sorted(seen)
    for message in dead:
        assert waited_in(message.headers) == list(TAKES[message.body.split()[0].decode()])


def test_a_delay_that_is_removed_or_an_event_that_is_gone_gives_back_what_waits(
    installation: Installation, team: Client, management: Management
) -> None:
    for event in RETRIES:
        team.make_origin(event, key=event)
        team.fail(event, event, event.encode())
    assert drained(installation.settings())["counts"]["delayed"] == 2
    # Neither the delays nor the payments are in the settings any more.
    host, port = management._address
    api = f"http://{host}:{port}"
    settings = installation.settings(NUMBERS.splitlines()[0], management_url=api)
    returned = Counter[str]()

    def all_returned() -> bool:
        returned.update(drained(settings)["counts"])
        return returned["returned"] == 2

    assert eventually(all_returned), returned
    assert [message.body for event in RETRIES for message in team.contents(event)] == [b"mail.sent", b"pay.card"]
    team.reject_all("pay.card")
    team.await_depth(RETRY_QUEUE, 1)
    assert drained(settings)["reasons"] == {"not-configured": 1}
    old = tuple(f"queue.delay.{name}" for name in ("200ms", "400ms", "700ms"))
    assert topology.plan(settings, kinds_of(settings)).left_behind == old
    assert topology.plan(installation.settings(management_url=api), kinds_of(installation.settings())).is_done
    # They go with the ladder.
    assert set(old) <= {one.name for one in topology.delete(settings, kinds_of(settings), dry_run=True)}


def test_a_drain_that_is_killed_on_either_way_loses_nothing(installation: Installation, team: Client) -> None:
    settings = installation.settings()
    bodies = {event: {b"%s %d" % (event.encode(), number) for number in range(MESSAGES)} for event in RETRIES}
    for event, its in bodies.items():
        team.make_origin(event, key=event)
        team.expire("orders", event, its)
    team.await_depth(RETRY_QUEUE, 2 * MESSAGES)
    _kill_in_the_middle(installation)

    def delayed() -> bool:
        if team.depth(RETRY_QUEUE):
            drained(settings)
        queues = (RETRY_QUEUE, "queue.delay.200ms", "queue.delay.400ms")
        return not any(team.depth(queue) for queue in queues)

    found: dict[str, list[Message]] = {}

    def all_returned() -> bool:
        drained(settings)
        if any(team.depth(event) < MESSAGES for event in RETRIES):
            return False
        found.update({event: team.contents(event) for event in RETRIES})
        return all({message.body for message in found[event]} == its for event, its in bodies.items())

    assert eventually(delayed)
    if team.depth("retry-queue-1") >= MESSAGES // 2:  # it is less only where a run was slower than the delays
        _kill_in_the_middle(installation)
    assert eventually(all_returned), {event: team.depth(event) for event in RETRIES}
    assert sum(map(len, found.values())) <= 2 * (MESSAGES + UNDER_WAY)
    for event, messages in found.items():
        assert {tuple(waited_in(message.headers)) for message in messages} == {TAKES[event][:1]}


def _kill_in_the_middle(installation: Installation) -> None:
    given = {name: text for name, text in installation.given.items() if name != "broker_url"}
    with SlowLink(installation.given["broker_url"], pause_after=100_000) as link:
        program = Program({**given, "broker_url": link.url, "config": str(installation.file)})
        running = program.start("drain", "--json")
        assert link.paused.wait(HANGS_AFTER)
        running.kill()
        running.wait(HANGS_AFTER)
        link.hang_up()


@pytest.mark.parametrize(
    ("header", "value", "name"),
    [
        ("dlqbatch-retry-after", "1", "2s"),
        ("dlqbatch-retry-after", 2, "2s"),
        ("Retry-After", "3", "5s"),
        ("Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT", "5s"),
        ("Retry-After", "Thu, 01 Jan 1970 00:00:00 GMT", "1"),
        ("Retry-After", "-1", "1"),
        ("Retry-After", "NaN", "1"),
    ],
)
def test_a_failure_asks_for_a_longer_delay(
    installation: Installation, team: Client, header: str, value: object, name: str
) -> None:
    more = {"retry_after_delays": "2s,5s", "origins_allowed": "work"}
    settings = installation.settings("dlqbatch.events.orders.created=1", **more)
    apply_topology(settings)
    team.make_origin("work", key="orders.created")
    failed = {"queue": "work", "exchange": "orders", "key": "orders.created"}
    headers = {f"dlqbatch-failed-{part}": text for part, text in failed.items()} | {header: value}
    team.publish("retry-exchange", "retry-routing-key", b"1", headers)
    [preview] = drained(settings, dry_run=True)["preview"]
    assert preview["key"] == f"binding.orders.created.{name}"
    assert drained(settings)["counts"]["delayed"] == 1
    if name == "5s":
        return
    assert eventually(lambda: drained(settings)["counts"]["returned"] == 1)
    [message] = team.contents("work")
    assert waited_in(message.headers) == [name]
    # Ours was for this failure alone; another one stays in the message.
    assert (header in message.headers) == (header == "Retry-After"), json.dumps(sorted(message.headers))
