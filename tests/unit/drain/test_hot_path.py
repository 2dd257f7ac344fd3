"""The engine and all that is done with a message, with a broker played to it: no socket, so any order can be tried."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
from pika import spec

from benchmarks.hot_path import LADDER, STAGES, Broker, Recording, failed, play, played, record, yardstick

MESSAGES = 1500
MOST = {"delay": 5.8, "return": 7.9}
"""Work for each message as a multiple of the yardstick's: a fifth above the most that a busy machine has shown.

Beside other work the ratio is up to a third higher than alone, where it is 3.5 and 4.7. Whoever makes a drain slower on
purpose raises it, and says why.
"""


@pytest.mark.parametrize("stage", STAGES)
def test_the_work_for_a_message_has_not_grown(stage: str) -> None:
    reads = record(MESSAGES, stage)
    # Taking turns, and the least of each: what else the machine does can only add, so that a busy one needs more turns.
    turns: list[tuple[float, float]] = []
    drain = plain = 0.0
    while len(turns) < 60:
        turns.append((play(reads, MESSAGES, stage), yardstick(reads, MESSAGES)))
        drain, plain = (min(times) for times in zip(*turns, strict=True))
        if len(turns) >= 12 and drain / plain < MOST[stage]:
            break
    assert drain / plain < MOST[stage], f"{drain:.1f} µs for each message, {plain:.1f} µs for the yardstick"


class Listening(Recording):
    """Plays a recording, and keeps what is said to it."""

    def __init__(self, reads: list[bytes]) -> None:
        super().__init__(reads)
        self.heard = b""

    def write(self, data: bytes) -> None:
        self.heard += data


_OUR_ID = re.compile(rb"dlqbatch-idS\x00\x00\x00\x20([0-9a-f]{24})")


def published(reads: list[bytes]) -> bytes:
    """The publishing channel's frames, without what is different in every run."""
    partner = Listening(reads)
    with played(partner) as drain:
        assert drain.run().outcome == "ok"
    heard, position, kept = partner.heard[8:], 0, []
    while position < len(heard):
        channel, length = int.from_bytes(heard[position + 1 : position + 3], "big"), heard[position + 3 : position + 7]
        end = position + int.from_bytes(length, "big") + 8
        if channel == 2:
            kept.append(heard[position:end])
        position = end
    return _OUR_ID.sub(b"", b"".join(kept))


def test_however_the_bytes_arrive_the_same_is_published() -> None:
    """A message that is here whole takes a shorter way than one that comes in pieces."""
    reads = record(200)
    # The login, the channels and the depths are one answer for each question, before the messages and after them.
    start = next(number for number, read in enumerate(reads) if spec.Basic.GetOk.INDEX.to_bytes(4, "big") in read)
    closed = spec.Channel.CloseOk.INDEX.to_bytes(4, "big")
    end = next(number for number, read in enumerate(reads) if number > start and closed in read)
    stream = b"".join(reads[start:end])
    expected = published(reads)
    assert expected.count(b"x" * 1024) == 200
    for seed in range(8):
        chance = random.Random(seed)
        longest = chance.choice([1, 7, 100, 3000])
        pieces, position = [], 0
        while position < len(stream):
            size = chance.randint(1, longest)
            pieces.append(stream[position : position + size])
            position += size
        assert published([*reads[:start], *pieces, *reads[end:]]) == expected, f"seed {seed}"


class Moody(Broker):
    """Confirms some, refuses some and returns some, one by one or many at once, in any order it may."""

    def __init__(self, messages: int, chance: random.Random) -> None:
        super().__init__(LADDER.retry_queue, [failed(number, same_second=False) for number in range(messages)])
        self.became: Counter[str] = Counter()
        self.acknowledged: set[int] = set()
        self.routed: set[int] = set()
        self._chance = chance

    def confirm(self, first: int, last: int) -> None:
        waiting = {
            number: self._chance.choice(["routed", "routed", "routed", "nack", "returned"])
            for number in range(first, last + 1)
        }
        for number, mood in waiting.items():
            self.became[mood] += 1
            if mood == "routed":
                self.routed.add(number)
            if mood == "returned":
                route = self.routes[number - 1]
                self.say(self.publishing, spec.Basic.Return(312, "NO_ROUTE", *route), self.published[number - 1])
        while waiting:
            number = self._chance.choice(list(waiting))
            is_nack = waiting[number] == "nack"
            together = [other for other in waiting if other <= number]
            multiple = all((waiting[other] == "nack") == is_nack for other in together)
            kind = spec.Basic.Nack if is_nack else spec.Basic.Ack
            self.say(self.publishing, kind(number, multiple=multiple))
            for other in together if multiple else [number]:
                del waiting[other]

    def acknowledge(self, ack: spec.Basic.Ack) -> None:
        first = max(self.acknowledged, default=0) + 1 if ack.multiple else ack.delivery_tag
        self.acknowledged |= set(range(first, ack.delivery_tag + 1))


@pytest.mark.parametrize("seed", range(8))
def test_the_window_ends_as_one_message_at_a_time_would(seed: int) -> None:
    """Whatever is confirmed in whatever order: what was routed is acknowledged, and nothing else is."""
    chance = random.Random(seed)
    broker = Moody(chance.choice([1, 40, 1500]), chance)
    with played(broker) as drain:
        report = drain.run()
    became = broker.became
    # The n-th that is published is the n-th that was delivered, and nothing was published twice.
    assert broker.acknowledged == broker.routed
    assert report.counts["delayed"] == became["routed"]
    assert report.reasons == {
        reason: became[mood] for mood, reason in (("nack", "not-confirmed"), ("returned", "unroutable")) if became[mood]
    }
    assert report.outcome == ("ok" if became["routed"] == became.total() else "partial")
