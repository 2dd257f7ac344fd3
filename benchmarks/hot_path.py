"""The drain's own work for each message, without a broker: what one would answer is recorded, then played to it.

Everything is real except the transport: wire, frames, transfer, policy, headers and report. So the figure has no
broker, no socket and no scheduler in it, and shows what a change of the code costs where a whole run would hide it.
`delay` is what becomes of a message that has failed, `return` of one that has waited. `yardstick` is a plain loop over
the same bytes: the ratio to it says how much work there is, on whatever machine.

Usage: .venv/bin/python benchmarks/hot_path.py [--messages N] [--rounds N] [--same-second] [--instructions] [--json F]
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from struct import Struct, pack
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

from pika import BasicProperties, ConnectionParameters, frame, spec

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from workload import EVENTS, properties

from dlqbatch import logs
from dlqbatch.amqp.origin import Trust
from dlqbatch.broker import connection as connecting
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.transfer import Bounds
from dlqbatch.broker.wire import Wire
from dlqbatch.drain.event_delays import DelayQueues, EventDelays
from dlqbatch.drain.event_policy import EventRow, Policy
from dlqbatch.drain.retry_decision import Rules
from dlqbatch.drain.run import Drain
from dlqbatch.topology.kinds import Ladder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlqbatch.jobs import Report

READ: Final = 64 * 1024
"""Bytes that arrive at once; from a broker on the same machine it is 30 to 256 KiB."""
BODY: Final = b"x" * 1024
PER_SECOND: Final = 10
"""Failures that die in the same second, so that their deaths are the same bytes."""
LADDER: Final = Ladder()
FIRST_FAILED_AT: Final = "dlqbatch-first-failed-at"
STAGES: Final = {"delay": "delayed", "return": "returned"}
"""What a drain does with a message, and the count in its report."""
ANSWERS: Final = {
    spec.Connection.StartOk: spec.Connection.Tune(channel_max=2047, frame_max=131072, heartbeat=0),
    spec.Connection.Open: spec.Connection.OpenOk(),
    spec.Connection.Close: spec.Connection.CloseOk(),
    spec.Channel.Open: spec.Channel.OpenOk(),
    spec.Channel.Close: spec.Channel.CloseOk(),
    spec.Confirm.Select: spec.Confirm.SelectOk(),
    spec.Exchange.Declare: spec.Exchange.DeclareOk(),
    spec.Exchange.Unbind: spec.Exchange.UnbindOk(),
}
SERVER: Final = {"version": "3.10.8", "capabilities": {"publisher_confirms": True, "basic.nack": True}}
_FRAME: Final = Struct(">BHI").unpack_from


class Broker:
    """Answers what a drain asks, gives it failed messages, and confirms what it publishes."""

    def __init__(self, queue: str, messages: Sequence[BasicProperties]) -> None:
        self.reads: list[bytes] = []
        self.published: list[bytes] = []
        """The properties of each."""
        self.routes: list[tuple[str, str]] = []
        """Exchange and routing key of each."""
        self._queue, self._messages = queue, messages
        self._delivered, self._confirmed, self._acknowledged = 0, 0, 0
        self.publishing = 0
        """The channel."""
        self._inbox, self._outbox = b"", bytearray()

    @property
    def is_drained(self) -> bool:
        return len(self._messages) == self._delivered == len(self.published) == self._acknowledged

    def write(self, data: bytes) -> None:
        self._inbox += data
        if self._inbox.startswith(b"AMQP"):
            self._inbox = self._inbox[8:]
            self.say(0, spec.Connection.Start(server_properties=SERVER))
        position = 0
        while position < len(self._inbox):
            kind, channel, length = _FRAME(self._inbox, position)
            payload = self._inbox[position + 7 : position + 7 + length]
            position += length + 8
            if kind == spec.FRAME_METHOD:
                self._answer(channel, payload)
            elif kind == spec.FRAME_HEADER:
                self.publishing = channel
                self.published.append(payload[12:])
        self._inbox = b""
        if len(self.published) > self._confirmed:
            self.confirm(self._confirmed + 1, len(self.published))
            self._confirmed = len(self.published)

    def confirm(self, first: int, last: int) -> None:  # noqa: ARG002  (for a broker of other habits)
        self.say(self.publishing, spec.Basic.Ack(last, multiple=True))

    def acknowledge(self, ack: spec.Basic.Ack) -> None:
        self._acknowledged = ack.delivery_tag

    def read(self) -> bytes:
        data = bytes(self._outbox[:READ])
        del self._outbox[:READ]
        self.reads.append(data)
        return data

    def say(self, channel: int, method: Any, properties: bytes | None = None) -> None:
        """A method, and for those that bring a message, its properties and the one body there is."""
        self._outbox += frame.Method(channel, method).marshal()
        if properties is not None:
            header = pack(">HHQ", 60, 0, len(BODY)) + properties
            self._outbox += pack(">BHI", spec.FRAME_HEADER, channel, len(header)) + header + b"\xce"
            self._outbox += frame.Body(channel, BODY).marshal()

    def _answer(self, channel: int, payload: bytes) -> None:
        kind = spec.methods[int.from_bytes(payload[:4], "big")]
        if kind is spec.Basic.Get:
            self._deliver(channel)
        elif kind is spec.Basic.Ack:
            self.acknowledge(kind().decode(payload, 4))
        elif kind is spec.Basic.Publish:
            publish = kind().decode(payload, 4)
            self.routes.append((publish.exchange, publish.routing_key))
        elif kind is spec.Queue.Declare:
            queue = kind().decode(payload, 4).queue
            self.say(channel, spec.Queue.DeclareOk(queue, len(self._messages) if queue == self._queue else 0, 0))
        elif kind in ANSWERS:
            self.say(channel, ANSWERS[kind])

    def _deliver(self, channel: int) -> None:
        if self._delivered == len(self._messages):
            self.say(channel, spec.Basic.GetEmpty())
            return
        properties = b"".join(self._messages[self._delivered].encode())
        self._delivered += 1
        got = spec.Basic.GetOk(self._delivered, False, LADDER.retry_exchange, LADDER.retry_routing_key, 0)
        self.say(channel, got, properties)


def failed(number: int, *, same_second: bool) -> BasicProperties:
    """A message as it arrives where failures arrive."""
    made = properties(number)
    if not same_second:
        made.headers["x-death"][0]["time"] += timedelta(seconds=number // PER_SECOND)
    return made


def waited(delayed: bytes, number: int) -> BasicProperties:
    """One that a drain has delayed, as it comes out of the delay queue."""
    made = BasicProperties().decode(delayed)
    key = f"binding.{EVENTS[number % len(EVENTS)]}.1"
    death = {"count": 1, "reason": "expired", "queue": LADDER.delay_queues[0], "time": made.headers[FIRST_FAILED_AT]}
    made.headers["x-death"] = [death | {"exchange": LADDER.delay_exchange, "routing-keys": [key]}]
    made.headers["x-first-death-exchange"] = LADDER.delay_exchange
    made.headers["x-first-death-queue"] = LADDER.delay_queues[0]
    made.headers["x-first-death-reason"] = "expired"
    return made


class Recording:
    """The same answers once more, whatever is asked."""

    def __init__(self, reads: Sequence[bytes]) -> None:
        self._reads = deque(reads)

    def write(self, data: bytes) -> None:
        """Nobody is there to read it."""

    def read(self) -> bytes:
        return self._reads.popleft()


class Transport:
    """In the place of pika's, with no socket behind it."""

    _sock = None

    def __init__(self, wire: PlayedWire, partner: Broker | Recording) -> None:
        self._wire, self.write, self.read = wire, partner.write, partner.read

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self._wire._proto_connection_lost(None)  # noqa: SLF001  (what pika's transport calls)


class PlayedWire(Wire):
    def __init__(self, partner: Broker | Recording, *arguments: Any, **options: Any) -> None:
        self.partner = partner
        super().__init__(*arguments, **options)

    def _adapter_connect_stream(self) -> None:
        self._proto_connection_made(Transport(self, self.partner))


class PlayedConnection(connecting.Connection):
    def _poll(self) -> None:
        self._loop.process_timeouts()
        data = self.wire._transport.read()  # noqa: SLF001  (the loop's part)
        if data:
            self.wire._proto_data_received(data)  # noqa: SLF001  (the loop's part)


@contextmanager
def played(partner: Broker | Recording) -> Iterator[Drain]:
    with mock.patch.object(connecting, "Wire", partial(PlayedWire, partner)):
        connection = PlayedConnection(ConnectionParameters(heartbeat=0))
    bounds = Bounds(time.monotonic() + 3600, 10.0, 1 << 40, lambda: False)
    origins = Origins(connection)
    rules = Rules(tiers=0, trust=Trust(LADDER.own_queues, LADDER.own_exchanges))
    rows = [EventRow(number, f"shop-{number}.{'*.' if number % 2 else ''}created", 3) for number in range(1000)]
    policy = Policy([*rows, EventRow(1000, "orders.#", 3)], {}, 3)
    session = Session(connection, origins, bounds)
    queues = DelayQueues(tuple(LADDER.delays.values()), LADDER.tiers, EventDelays({}), follows=True)
    yield Drain(session, origins, (LADDER,), rules, lambda: policy, 1 << 30, delay_queues=lambda _: queues)
    connection.close()


def checked(report: Report, messages: int, stage: str) -> None:
    if report.counts[STAGES[stage]] != messages or report.outcome != "ok":
        raise SystemExit(f"the drain did not do its work: {report.as_dict()}")


def record(messages: int, stage: str = "delay", *, same_second: bool = False) -> list[bytes]:
    """What a broker says while so many messages are drained, read by read."""
    came = [failed(number, same_second=same_second) for number in range(messages)]
    broker = _drained("delay", LADDER.retry_queue, came)
    if stage == "return":
        came = [waited(properties, number) for number, properties in enumerate(broker.published)]
        broker = _drained("return", LADDER.sources[1].queue, came)
    return broker.reads


def _drained(stage: str, queue: str, messages: Sequence[BasicProperties]) -> Broker:
    broker = Broker(queue, messages)
    with played(broker) as drain:
        checked(drain.run(), len(messages), stage)
    if not broker.is_drained:
        raise SystemExit("not every message was published and acknowledged")
    return broker


def play(reads: Sequence[bytes], messages: int, stage: str = "delay") -> float:
    """Microseconds of CPU for each message."""
    with played(Recording(reads)) as drain:
        began = time.process_time()
        report = drain.run()
        busy = time.process_time() - began
    checked(report, messages, stage)
    return busy / messages * 1e6


def yardstick(reads: Sequence[bytes], messages: int) -> float:
    """Microseconds of CPU for each message to cut the same bytes into frames and put them together again."""
    began = time.process_time()
    buffer, position, out = b"".join(reads), 0, []
    while position < len(buffer):
        kind, channel, length = _FRAME(buffer, position)
        start = position + 7
        position = start + length + 1
        pieces = {at: (kind, buffer[at : at + 16]) for at in range(start, position, 128)}
        out.append(b"".join([piece for number, piece in pieces.values() if number != channel]))
        out.append(buffer[start:position])
    b"".join(out)
    return (time.process_time() - began) / messages * 1e6


def instructions(messages: int, stage: str = "delay", *, same_second: bool = False) -> float:
    """Machine instructions for each message, counted by valgrind: nearly the same however busy the machine is."""
    counts = [_count(number, stage, same_second=same_second) for number in (messages, 2 * messages)]
    return (counts[1] - counts[0]) / messages


def _count(messages: int, stage: str, *, same_second: bool) -> int:
    with tempfile.NamedTemporaryFile(suffix=".reads") as file:
        pickle.dump((record(messages, stage, same_second=same_second), messages, stage), file)
        file.flush()
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, __file__]
        # Where things lie in memory, and so in which order sets are walked, must not differ from run to run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command += ["--play", file.name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = re.search(r"Collected : (\d+)", done.stderr)
    if found is None:
        raise SystemExit(f"valgrind did not say what it counted:\n{done.stderr}")
    return int(found[1])


def measure(options: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {
        "benchmark": "hot_path",
        "python": platform.python_version(),
        "messages": options.messages,
        "body_bytes": len(BODY),
        "events": len(EVENTS),
        "failures_per_second": "all" if options.same_second else PER_SECOND,
    }
    for stage in STAGES:
        reads = record(options.messages, stage, same_second=options.same_second)
        play(reads, options.messages, stage)
        took, beside = [], []
        for _ in range(options.rounds):
            took.append(play(reads, options.messages, stage))
            beside.append(yardstick(reads, options.messages))
        result[f"{stage}_cpu_microseconds"] = {
            "median": round(statistics.median(took), 2),
            "least": round(min(took), 2),
            "most": round(max(took), 2),
        }
        result[f"{stage}_to_yardstick"] = round(min(took) / min(beside), 2)
        if options.instructions:
            result[f"{stage}_instructions"] = round(instructions(1000, stage, same_second=options.same_second))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--same-second", action="store_true", help="all messages failed at once")
    parser.add_argument("--instructions", action="store_true", help="count machine instructions as well (valgrind)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logs.configure("warning")
    if options.play:
        play(*pickle.loads(options.play.read_bytes()))
        return 0
    result = measure(options)
    for name, value in result.items():
        shown = "{median:,} ({least:,} to {most:,})".format_map(value) if isinstance(value, dict) else value
        sys.stdout.write(f"{name:<26}{shown}\n")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
