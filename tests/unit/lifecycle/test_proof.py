"""The proof beside a queue that is played out, with statistics that are late, and that knows what really happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from example_counts import examples
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dlqbatch.broker.facts import ChannelReading, QueueCounters, QueueReading
from dlqbatch.lifecycle.proof import History, Proof, Sent, Sighting, Unproven, counted_from, proof_of, worth_keeping

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = datetime(2026, 2, 11, 12, tzinfo=UTC)
LATEST = 10
"""Seconds that a figure may be late."""


def at(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


@dataclass
class Message:
    number: int
    priority: int = 0
    is_ours: bool = False
    was_delivered: bool = False
    is_settled: bool = False
    """A consumer acknowledged or rejected it."""
    is_back: bool = False
    """It was dead-lettered, and somebody has taken it in."""
    born: int = 0


@dataclass
class Worker:
    """It takes in order and acknowledges in order, so many a second, until it hangs or dies."""

    prefetch: int
    speed: int
    hangs_at: int | None = None
    dies_at: int | None = None
    comes_back: bool = True
    gives_back: float = 0.0
    """The share that it requeues instead."""
    rejects: float = 0.0
    """The share that it rejects, to be dead-lettered."""
    lives: int = 0
    held: list[Message] = field(default_factory=list)
    acknowledged: int = 0
    is_up: bool = True


@dataclass
class World:
    workers: list[Worker]
    others: int
    """Messages a second that somebody else publishes."""
    to_the_back: bool
    """Requeued messages go to the end of the queue, as on quorum queues of 3.10."""
    has_priorities: bool = False
    delays: int = 0
    """Seconds that a returned message is held back."""
    ttl: int | None = None
    """Seconds after which a ready message is dropped."""
    silent: float = 0.0
    """The share of looks at which the management API does not answer."""
    random: Random | None = None
    now: int = 0
    ready: list[Message] = field(default_factory=list)
    delayed: list[tuple[int, Message]] = field(default_factory=list)
    published: int = 0
    acknowledged: int = 0
    redelivered: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)
    shown: dict[str, int] = field(default_factory=dict)
    number: int = 0
    acknowledged_at: int | None = None
    """When a message was acknowledged last."""
    purged_at: int | None = None

    def publish(self, *, is_ours: bool = False) -> Message:
        self.number += 1
        priority = self.chance.randrange(3) if self.has_priorities and not is_ours else 0
        message = Message(self.number, priority, is_ours, born=self.now)
        self.ready.append(message)
        self.published += 1
        return message

    @property
    def chance(self) -> Random:
        assert self.random is not None
        return self.random

    def tick(self) -> None:
        self.now += 1
        for due, message in [each for each in self.delayed if each[0] <= self.now]:
            self.delayed.remove((due, message))
            self.ready.append(message)
        if self.ttl is not None:
            self.ready = [each for each in self.ready if self.now - each.born < self.ttl]
        for _ in range(self.others):
            self.publish()
        for worker in self.chance.sample(self.workers, len(self.workers)):
            self._work(worker)
        self.note()

    def _work(self, worker: Worker) -> None:
        if worker.dies_at is not None and self.now % worker.dies_at == 0 and worker.is_up:
            self.requeue(worker.held)
            worker.held, worker.is_up, worker.acknowledged = [], worker.comes_back, 0
            worker.lives += 1
        if not worker.is_up:
            return
        is_hung = worker.hangs_at is not None and self.now >= worker.hangs_at
        for _ in range(worker.speed):
            self._fill(worker)
            if worker.held and not is_hung:
                self._settle(worker, worker.held.pop(0))
        self._fill(worker)

    def _fill(self, worker: Worker) -> None:
        while self.ready and (not worker.prefetch or len(worker.held) < worker.prefetch):
            first = max(self.ready, key=lambda each: each.priority) if self.has_priorities else self.ready[0]
            self.ready.remove(first)
            self.redelivered += first.was_delivered
            first.was_delivered = True
            worker.held.append(first)

    def _settle(self, worker: Worker, message: Message) -> None:
        what = self.chance.random()
        if what < worker.gives_back:
            self.requeue([message])
            return
        message.is_settled = True
        if what < worker.gives_back + worker.rejects:
            message.is_back = True
            return
        worker.acknowledged += 1
        self.acknowledged += 1
        self.acknowledged_at = self.now

    def requeue(self, messages: list[Message]) -> None:
        if self.delays:
            self.delayed += [(self.now + self.delays, each) for each in messages]
        elif self.to_the_back:
            self.ready += messages
        else:
            self.ready = sorted(self.ready + messages, key=lambda each: each.number)

    def restart(self, *, keeps: bool) -> None:
        """The node, or the queue anew: nothing of the old count is left."""
        for worker in self.workers:
            self.requeue(worker.held)
            worker.held, worker.acknowledged = [], 0
            worker.lives += 1
        if not keeps:
            self.ready, self.delayed = [], []
        self.published = self.acknowledged = self.redelivered = 0
        self.history, self.shown = [], {}
        self.note()

    def is_quiet(self, seconds: int) -> bool:
        """Nothing was acknowledged since so many seconds before the oldest ready message came."""
        oldest = min((each.born for each in self.ready), default=self.now)
        return self.acknowledged_at is None or self.acknowledged_at < oldest - seconds

    @property
    def hides_a_purge(self) -> bool:
        """Other messages were acknowledged since, and may be counted for what was purged: docs/lifecycle.md says so."""
        return self.purged_at is not None and (self.acknowledged_at or -1) >= self.purged_at

    def note(self) -> None:
        channels = {
            f"{number}-{each.lives}": (len(each.held), each.prefetch, each.acknowledged)
            for number, each in enumerate(self.workers)
            if each.is_up
        }
        held = sum(len(each.held) for each in self.workers)
        self.history.append(
            {
                "depth": (len(self.ready), held, len(self.delayed)),
                "published": self.published,
                "acknowledged": self.acknowledged,
                "redelivered": self.redelivered,
                "channels": channels,
            }
        )

    def read(self) -> QueueReading:
        def of(what: str) -> Any:
            # Each figure has a time of its own, and none goes back.
            last = len(self.history) - 1
            self.shown[what] = max(self.shown.get(what, 0), last - self.chance.randint(0, LATEST))
            return self.history[self.shown[what]][what]

        if self.chance.random() < self.silent:
            figures = {"ready": len(self.ready), "total": len(self.ready), "consumers": len(self.workers)}
            return QueueReading("q", at(self.now), is_there=True, **figures, missing="it does not answer")
        ready, held, delayed = of("depth")
        channels = of("channels")
        return QueueReading(
            "q",
            at(self.now),
            is_there=True,
            ready=ready,
            unacknowledged=held,
            delayed=delayed,
            total=ready + held + delayed,
            consumers=len(channels),
            counters=QueueCounters(of("published"), of("acknowledged"), of("redelivered")),
            in_order=not self.has_priorities and not self.delays,
            may_drop="" if self.ttl is None else "what is older than its TTL is dropped",
            channels=tuple(ChannelReading(name, *figures) for name, figures in channels.items()),
            by_management=True,
        )


@dataclass
class Watched:
    """The readings of a world, kept as the program keeps them."""

    sightings: list[Sighting] = field(default_factory=list)

    def look(self, world: World, oldest: datetime | None) -> None:
        self.see(world.read(), oldest)

    def see(self, reading: QueueReading, oldest: datetime | None) -> None:
        self.sightings.append(Sighting(reading, counted_from(self.sightings, reading)))
        kept = worth_keeping([each.at for each in self.sightings], oldest, reading.at)
        self.sightings = [each for each in self.sightings if each.at in kept]


def _is_left_to_the_window(answer: Proof | Unproven, sent: Sent, watched: Watched) -> bool:
    """Though the broker's counts could be had since the send."""
    if isinstance(answer, Proof) or not answer.by_window or watched.sightings[-1].reading.by_management:
        return False
    return any(each.reading.by_management and each.at >= sent.sent_at for each in watched.sightings)


def play(
    world: World, sends: dict[int, int], seconds: int, looks: int, what_else: dict[int, str] | None = None
) -> dict[int, tuple[int, Proof]]:
    """When each retry was claimed, by its number; whoever claims what no consumer has settled is found out."""
    what_else = what_else or {}
    watched, ours, claimed = Watched(), dict[int, tuple[Message, Sent]](), dict[int, tuple[int, Proof]]()
    world.note()
    broke = False
    for _ in range(seconds):
        broke = broke or what_else.get(world.now) in {"restart", "anew"}
        match what_else.get(world.now):
            case "purge" if world.is_quiet(LATEST + looks):
                world.ready = []
                world.purged_at = world.now
            case "restart":
                world.restart(keeps=True)
            case "anew":
                world.restart(keeps=False)
                oldest = min((each.begun_at for _, each in ours.values()), default=None)
                watched.see(QueueReading("q", at(world.now), is_there=False, by_management=True), oldest)
            case _:
                pass
        for _ in range(sends.get(world.now, 0)):
            message = world.publish(is_ours=True)
            ours[message.number] = message, Sent(at(world.now), at(world.now))
        if world.now % looks == 0:
            open_ = {number: each for number, each in ours.items() if number not in claimed and not each[0].is_back}
            watched.look(world, min((sent.begun_at for _, sent in open_.values()), default=None))
            # A new count that has reached the old one already: nobody can tell, and docs/lifecycle.md says so.
            is_hidden = broke and len(watched.sightings) > 1 and watched.sightings[-1].counted_from < at(world.now)
            if is_hidden or world.hides_a_purge:
                return claimed
            broke = False
            history = History("q", watched.sightings, [sent for _, sent in open_.values()])
            for number, (message, sent) in open_.items():
                answer = history.acknowledged(sent)
                assert not _is_left_to_the_window(answer, sent, watched)
                if isinstance(answer, Proof):
                    assert message.is_settled, f"{answer} of {message} at {world.now}"
                    claimed[number] = world.now, answer
        world.tick()
    return claimed


RANDOM = st.integers(0, 2**32).map(Random)
SILENT = st.sampled_from([0.0, 0.0, 0.2, 0.7])
WORKERS = st.lists(
    st.builds(
        Worker,
        prefetch=st.sampled_from([0, 1, 2, 5, 20]),
        speed=st.integers(0, 4),
        hangs_at=st.none() | st.integers(0, 100),
        dies_at=st.none() | st.integers(3, 60),
        comes_back=st.booleans(),
        gives_back=st.sampled_from([0.0, 0.0, 0.2, 0.9]),
        rejects=st.sampled_from([0.0, 0.0, 0.3]),
    ),
    max_size=3,
)
WORLDS = st.builds(
    World,
    workers=WORKERS,
    others=st.integers(0, 4),
    to_the_back=st.booleans(),
    has_priorities=st.booleans(),
    delays=st.sampled_from([0, 0, 5, 40]),
    ttl=st.sampled_from([None, None, 3, 20]),
    silent=SILENT,
    random=RANDOM,
)
SENDS = st.dictionaries(st.integers(0, 60), st.integers(1, 4), min_size=1, max_size=4)
PLAYED = settings(deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
"""A world is not made smaller by less of it."""
BREAKS = st.dictionaries(st.integers(0, 150), st.sampled_from(["restart", "anew"]), max_size=2)


@settings(PLAYED, max_examples=examples(600))
@given(WORLDS, SENDS, st.integers(3, 7), BREAKS)
def test_what_no_consumer_has_settled_is_never_claimed(
    world: World, sends: dict[int, int], looks: int, breaks: dict[int, str]
) -> None:
    play(world, sends, 130, looks, breaks)


@settings(PLAYED, max_examples=examples(60))
@given(WORKERS, SENDS, st.sets(st.integers(1, 100), max_size=3), SILENT, RANDOM)
def test_what_was_purged_from_a_queue_without_other_acknowledgements_is_never_claimed(
    workers: list[Worker], sends: dict[int, int], purges: set[int], silent: float, random: Random
) -> None:
    for worker in workers:
        worker.rejects = 0.0
    world = World(workers, others=0, to_the_back=False, silent=silent, random=random)
    play(world, sends, 120, 4, dict.fromkeys(purges, "purge"))


def world(workers: list[Worker], random: Random, others: int = 0, **how: Any) -> World:
    return World(workers, others, to_the_back=False, random=random, **how)


@settings(PLAYED, max_examples=examples(10))
@given(RANDOM)
def test_an_emptied_queue_proves_it_at_the_first_look_that_can(random: Random) -> None:
    claimed = play(world([Worker(5, 2)], random), {5: 3}, 30, 1)
    assert {proof.how for _, proof in claimed.values()} == {"emptied"}
    assert [when for when, _ in claimed.values()] == [17] * 3
    assert next(iter(claimed.values()))[1].why == "queue 'q' was empty at 12:00:17 UTC"


@settings(PLAYED, max_examples=examples(5))
@given(RANDOM)
def test_a_queue_that_never_empties_proves_it_by_its_count(random: Random) -> None:
    busy = world([Worker(5, 2), Worker(5, 2)], random, others=4)
    for _ in range(40):
        busy.publish()
    claimed = play(busy, {5: 2}, 200, 5)
    assert {proof.how for _, proof in claimed.values()} == {"counted"}
    assert len(claimed) == 2


HINDERED = {
    "no consumer": lambda: {"workers": []},
    "hung beside a live one": lambda: {"workers": [Worker(5, 4), Worker(5, 2, hangs_at=3)]},
    "priorities": lambda: {"workers": [Worker(5, 2), Worker(5, 2)], "has_priorities": True},
    "requeues": lambda: {"workers": [Worker(5, 2), Worker(5, 2, gives_back=0.3)]},
    "drops": lambda: {"workers": [Worker(5, 2), Worker(5, 2)], "ttl": 15},
}


@pytest.mark.parametrize("hindered", HINDERED.values(), ids=HINDERED.keys())
@settings(PLAYED, max_examples=examples(3))
@given(random=RANDOM)
def test_a_queue_that_never_empties_proves_nothing_where_its_order_cannot_be_known(
    hindered: Callable[[], dict[str, Any]], random: Random
) -> None:
    busy = World(**{"others": 4, "to_the_back": False, "random": random} | hindered())
    for _ in range(40):
        busy.publish()
    assert not play(busy, {5: 2}, 200, 5)


def reading(seconds: float, ready: int = 0, acknowledged: int | None = 0, **more: Any) -> QueueReading:
    counters = None if acknowledged is None else QueueCounters(acknowledged, acknowledged, 0)
    how = {"consumers": 1, "channels": (ChannelReading("c", 0, 1, 0),), "in_order": True, "by_management": True}
    figures = {"is_there": True, "ready": ready, "total": ready, "counters": counters}
    return QueueReading("q", at(seconds), **{**figures, **how, **more})


def sightings(*readings: QueueReading) -> list[Sighting]:
    found: list[Sighting] = []
    for each in readings:
        found.append(Sighting(each, counted_from(found, each)))
    return found


def sent(seconds: float) -> Sent:
    return Sent(at(seconds), at(seconds))


def answer(*readings: QueueReading, retries: int = 1) -> Proof | Unproven:
    return History("q", sightings(*readings), [sent(0)] * retries).acknowledged(sent(0))


UNPROVEN: dict[str, tuple[tuple[QueueReading, ...], str, bool]] = {
    "no look": ((), "nobody has looked at it yet", False),
    "too early": ((reading(11.9),), "the broker's figures may be from before the send", False),
    "no consumer": ((reading(20, 4, consumers=0, channels=()),), "it has no consumer", False),
    "hung": ((reading(20, unacknowledged=1, total=1),), "its consumers have not acknowledged what they hold", False),
    "delayed": ((reading(20, delayed=1, total=1),), "delayed retry holds messages back", False),
    "stuck": ((reading(20, total=1),), "dead letters of it have not been handed on", False),
    "priorities": ((reading(20, 1, in_order=False),), "it does not deliver in order", False),
    "uncounted": ((reading(20, 1, acknowledged=None),), "the broker does not count for it", False),
    "backlog": ((reading(20, 1),), "its acknowledgements do not account for what stood in it", False),
    "purged": ((reading(-1, 0, 7), reading(20, 0, 8)), "only 1 message(s) of it were acknowledged since", False),
    "anew": ((reading(-1, 0, 7), reading(20, 0, 5)), "its counters began again after the send", True),
    "anew and full": ((reading(-1, 0, 7), reading(20, 3, 5)), "do not account for what stood in it", False),
    "drops": ((reading(20, may_drop="it has a TTL"),), "it is empty, but it has a TTL", False),
    "gone": ((reading(20, is_there=False),), "is not there any more", True),
    "by amqp": ((reading(20, by_management=False, missing="set it"),), "0 ready, 1 consumer(s); set it", True),
    "by amqp, none takes": ((reading(20, 1, by_management=False, consumers=0),), "1 ready, 0 consumer(s)", False),
    "by amqp, silent since": (
        (
            reading(20, unacknowledged=1, total=1),
            reading(40, acknowledged=None, by_management=False, missing="it is silent"),
        ),
        "0 ready, 1 consumer(s); the newest counts are of 12:00:20 UTC: 0 ready, 1 unacknowledged",
        False,
    ),
    "by amqp, silent at the send": (
        (reading(-20, 0, 7), reading(-1, acknowledged=None, by_management=False), reading(20, 0, 7)),
        "only 0 message(s) of it were acknowledged since they were sent",
        False,
    ),
    "by amqp, hidden": ((reading(20, by_management=False, may_hide_delayed=True),), "0 ready", False),
}


@pytest.mark.parametrize(("readings", "why", "by_window"), UNPROVEN.values(), ids=UNPROVEN.keys())
def test_what_is_not_proven_says_what_is_missing(
    readings: tuple[QueueReading, ...],
    why: str,
    by_window: bool,
) -> None:
    found = answer(*readings, retries=2)
    assert isinstance(found, Unproven)
    assert why in found.why
    assert found.why.startswith("queue 'q'")
    assert found.by_window == by_window


def test_a_queue_that_drops_proves_it_where_its_counters_account_for_everything() -> None:
    """Nothing moved for a while before the send, and nothing moves for a while after it was emptied."""
    drops = {"may_drop": "it has a TTL"}
    still = (reading(-30, 0, 7, **drops), reading(-15, 0, 7, **drops))
    empty = reading(20, 0, 9, **drops)
    assert isinstance(answer(*still, empty), Unproven)
    assert isinstance(answer(*still, empty, empty._replace(at=at(32))), Proof)
    lost = QueueCounters(10, 9, 0)
    dropped = (empty._replace(counters=lost), empty._replace(at=at(32), counters=lost))
    assert isinstance(answer(*still, *dropped), Unproven)


def test_a_queue_that_drops_what_is_delivered_too_often_proves_it_where_little_was_redelivered() -> None:
    def seen(seconds: float, redelivered: int) -> QueueReading:
        return reading(seconds, acknowledged=1, counters=QueueCounters(1, 1, redelivered), drops_after=20)

    before = seen(-20, 5)
    assert "not counted yet" in str(answer(before, seen(13, 24)))
    assert isinstance(answer(before._replace(counters=QueueCounters(0, 0, 5)), seen(13, 24), seen(26, 24)), Proof)
    dropped = answer(before._replace(counters=QueueCounters(0, 0, 5)), seen(13, 5), seen(26, 25), seen(39, 25))
    assert isinstance(dropped, Unproven)
    assert "after 20 deliveries" in dropped.why


def test_every_queue_that_it_can_have_gone_to_has_to_prove_it() -> None:
    empty = History("q", sightings(reading(20, 0, 1)))
    other = History("p", [])
    held = History("h", sightings(reading(20, by_management=False)))
    proven = proof_of({"q": empty}, ["q"], sent(0))
    assert isinstance(proven, tuple)
    assert [each.queue for each in proven] == ["q"]
    missing = proof_of({"q": empty, "p": other, "h": held}, ["q", "h", "p"], sent(0))
    assert isinstance(missing, Unproven)
    assert missing.queue == "p"  # by the window alone the other would be decided
    assert not missing.by_window


@given(st.lists(st.integers(0, 20_000), max_size=200, unique=True), st.none() | st.integers(-10, 20_000))
def test_few_readings_are_kept_and_those_around_the_oldest_send_are(seconds: list[int], oldest: int | None) -> None:
    times = sorted(at(each) for each in seconds)
    now = at(20_000)
    kept = worth_keeping(times, None if oldest is None else at(oldest), now)
    assert kept <= set(times)
    assert len([each for each in kept if now - each >= timedelta(minutes=2)]) <= 70
    if times:
        assert oldest is not None or times[-1] in kept
    if oldest is not None:
        before = [each for each in times if each < at(oldest)]
        assert set(before[-1:]) <= kept
        recent = [each for each in times if each >= at(oldest) and now - each < timedelta(minutes=2)]
        assert set(recent) <= kept


def test_a_reading_at_the_very_time_of_a_send_is_not_the_one_before_it() -> None:
    times = [at(0), at(10), at(20)]
    assert at(0) in worth_keeping(times, at(10), at(21))
