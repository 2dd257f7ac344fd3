"""The stage a drain is tested on: a ladder, origin queues, a policy, and a login of dlqbatch's own.

The login differs from the one that publishes, so that a foreign user_id is one. `ordinary` makes messages that are as
good as dead-lettered already, and the queue where each belongs is part of its ticket.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import oracle
import rawamqp
from forked_program import Forked, Warm
from program import HANDLER, environment
from rawamqp import Message, Peer, Seen

from dlqbatch.jobs import RunOptions, run
from dlqbatch.settings import load
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dlqbatch.settings import Settings
    from scripts.servers.management import Management

ORIGIN = "work.orders"
COPY = "copy"
"""A plain queue of the ladder's type: what it delivers is what a message is compared with."""
LADDER = ("retry-queue", *(f"retry-queue-{n}" for n in (1, 2, 3)))
ROWS: tuple[tuple[int, str | None, int | None], ...] = (
    (1, "orders.created", 3),
    (2, "orders.cancelled", 1),
    (3, "stock.*.changed", 2),
    (4, "never.retried", 0),
    (5, "defaulted", None),
    (6, None, 7),
    (7, "twice", 1),
    (8, "twice", 2),
)
PROPERTIES = """\
dlqbatch.events.orders.created=9
dlqbatch.events.payment.#=5
dlqbatch.events.long.#=2
dlqbatch.events.odd.#=2
"""


@dataclass(frozen=True, slots=True)
class Stage:
    url: str
    """As the user that publishes."""
    login: str
    variables: dict[str, str]

    def settings(self, **overrides: object) -> Settings:
        return load(overrides, self.variables)

    def drain(self, settings: Settings) -> dict[str, Any]:
        """The report of one run in this process, checked to add up."""
        report = run("drain", settings, RunOptions()).as_dict()
        check_sum(report)
        return report

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """`python handler.py drain --json` in a process of its own."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DLQBATCH_")}
        command = ["drain", "--json", *arguments]
        pipe = subprocess.PIPE
        variables = inherited | self.variables
        return Forked(Warm.of(HANDLER, environment()), command, env=variables, stdout=pipe, stderr=pipe)

    def changes(self, before: Seen, after: Seen) -> list[str]:
        login = self.login.encode()
        return oracle.changes(before, after, login) + oracle.moved(before, after, login)


@contextmanager
def set_stage(url: str, management: Management, folder: Path, **variables: str) -> Iterator[Stage]:
    """A declared ladder with an hour's delay at each tier, and ORIGIN, whose rejects arrive in the retry queue."""
    login, password = f"drain-{secrets.token_hex(4)}", secrets.token_hex(8)
    database = folder / f"{login}.sqlite3"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE dlq_event_config (id integer PRIMARY KEY, name text, max_retries integer)")
        connection.executemany("INSERT INTO dlq_event_config VALUES (?, ?, ?)", ROWS)
    connection.close()
    config = folder / f"{login}.properties"
    config.write_text(PROPERTIES)
    management.put(f"users/{login}", {"password": password, "tags": ""})
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    management.put(f"permissions/{management.vhost.replace('/', '%2F')}/{login}", rights)
    queue_type = variables.get("DLQBATCH_QUEUE_TYPE", "classic")
    stage = Stage(
        url,
        login,
        {
            "DLQBATCH_BROKER_URL": f"amqp://{login}:{password}@{url.rpartition('@')[2]}",
            "DLQBATCH_DATABASE_URL": f"sqlite:///{database}",
            "DLQBATCH_CONFIG": str(config),
            "DLQBATCH_TIER_TTLS": "1h,1h,1h",
            "DLQBATCH_LOG_LEVEL": "error",
            **variables,
        },
    )
    try:
        apply_topology(stage.settings())
        with Peer(url) as peer:
            kind = {"x-queue-type": queue_type}
            dead = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
            peer.queue(ORIGIN, kind | dead)
            peer.queue(COPY, kind)
        yield stage
    finally:
        management.delete(f"users/{login}")


def ordinary(numbers: range, size: int = 200) -> list[Message]:
    """One message for each number, on the queue it is to be drained from."""
    return [_ordinary(number, size) for number in numbers]


def _ordinary(number: int, size: int) -> Message:
    key, retries, source, place = _CASES[number % len(_CASES)]
    ticket = b"t-%d-%b" % (number, place.encode())
    headers = [(b"attempted", b"d" + number.to_bytes(8, "big")), (b"", rawamqp.binary(b"\xff%d" % number))]
    if source == "retry-queue":
        headers.append(rawamqp.death(ORIGIN, key.encode()))
    if retries:
        headers += [
            (b"dlqbatch-id", rawamqp.text(f"id-{number}")),
            (b"dlqbatch-retries", rawamqp.number(retries)),
            (b"dlqbatch-trips", rawamqp.number(retries)),
            (b"dlqbatch-origin-queue", rawamqp.text(ORIGIN)),
            (b"dlqbatch-origin-exchange", rawamqp.text("")),
            (b"dlqbatch-origin-key", rawamqp.text(key)),
        ]
    properties = rawamqp.properties(headers, correlation_id=ticket, delivery_mode=2, content_type=b"text/plain")
    return Message("", source.encode(), properties, (ticket * size)[:size])


_CASES = (
    ("orders.created", 0, "retry-queue", "queue.delay.1"),
    ("payment.refused", 2, "retry-queue", "queue.delay.3"),
    ("nobody.knows", 0, "retry-queue", "dlq-queue"),
    ("orders.created", 1, "retry-queue-1", ORIGIN),
    ("orders.created", 1, "retry-queue", "queue.delay.2"),
    ("orders.cancelled", 1, "retry-queue", "dlq-queue"),
    ("stock.eu.changed", 2, "retry-queue-2", ORIGIN),
    ("never.retried", 0, "retry-queue", "dlq-queue"),
)
PLACES = tuple(sorted({place for *_, place in _CASES}))


def put(peer: Peer, messages: Sequence[Message]) -> dict[bytes, Seen]:
    """Publish them, confirmed, and learn from copies on a plain queue how the broker delivers each."""
    peer.publish(message._replace(key=COPY.encode()) for message in messages)
    copies = {oracle.ticket_of(seen): seen for seen in peer.read(COPY)}
    assert len(copies) == len(messages)
    peer.publish(messages)
    return copies


def waiting(peer: Peer) -> int:
    return sum(peer.depth(queue) for queue in LADDER)


def arrived(peer: Peer) -> int:
    return sum(peer.depth(queue) for queue in PLACES)


def verify(stage: Stage, expected: dict[bytes, Seen], found: Sequence[Seen]) -> int:
    """Nothing lost, changed or in the wrong place; the number of copies too many."""
    sightings = oracle.by_ticket(found)
    lost, unknown = expected.keys() - sightings.keys(), sightings.keys() - expected.keys()
    wrong = [
        (seen.queue, ticket, problems)
        for ticket, copies in sightings.items()
        if ticket in expected
        for seen in copies
        if (problems := _problems(stage, expected[ticket], seen))
    ]
    assert not lost, f"{len(lost)} lost, such as {sorted(lost)[:5]}"
    assert not unknown, f"{len(unknown)} from nowhere, such as {sorted(unknown)[:5]}"
    assert not wrong, f"{len(wrong)} changed, such as {wrong[:3]}"
    return len(found) - len(expected)


def _problems(stage: Stage, before: Seen, after: Seen) -> list[str]:
    belongs = oracle.ticket_of(before).split(b"-", 2)[2].decode()
    return ([] if after.queue == belongs else [f"belongs in {belongs}"]) + stage.changes(before, after)


def check_sum(report: dict[str, Any]) -> None:
    counts = dict(report["counts"])
    assert counts.pop("got") == sum(counts.values()), report


def report_of(output: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(output)
    check_sum(report)
    return report
