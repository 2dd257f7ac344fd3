"""The fixes of `doctor`, pasted on a real broker: they come to an end, and what fails then climbs the ladder."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pika
import pytest
from broker_client import Side
from diagnosis import Patient
from example_counts import examples
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pasted_commands import Shell
from program import Program
from ready_store import make_tables

from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.drain.event_config import event_config
from dlqbatch.jobs import RunOptions, run
from dlqbatch.settings import load
from dlqbatch.topology.declare import apply_topology
from scripts.servers.management import Management, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

BY_HAND = {Code.OLD_BROKER, Code.DEAD_LETTER_AT_MOST_ONCE, Code.NACK_NEVER_COUNTS}
"""What is no fault of this topology, and what no one command mends."""
ROUNDS = 5
QUICK = "100,100,100"
"""The ladder's delays."""
LONG = 600_000
LADDER = {"dead-letter-exchange": "retry-exchange", "dead-letter-routing-key": "retry-routing-key"}

ARRIVALS = ("topic-key", "topic-pattern", "direct", "fanout", "headers", "by-name")
DEAD_LETTERS: tuple[tuple[str, str | None], ...] = (
    ("retry-exchange", "retry-routing-key"),
    ("retry-exchange", None),
    ("retry-exchange", "wrong"),
    ("retry-exchange-1", "wrong"),
    ("gone", None),
    ("gone", "wrong"),
    ("", None),
    ("", "orders"),
    ("", "nobody"),
    ("", "waiting"),
    ("x-direct", None),
    ("x-direct", "wrong"),
    ("x-topic", None),
    ("x-topic", "wrong"),
    ("x-fanout", None),
    ("x-exact", None),
)
POLICIES: dict[str, tuple[str, int, dict[str, object]]] = {
    "everything-expires-soon": ("^(?!orders)", 1, {"message-ttl": 6}),
    "everything-expires-into-the-ladder": (".*", 2, {"message-ttl": LONG, **LADDER}),
    "dead-letters-come-back": ("^dlq-queue$", 3, {"message-ttl": LONG, **LADDER}),
    "limited": ("^(parked|orders)$", 4, {"max-length": 5, "dead-letter-exchange": "x-exact"}),
}
FLAWS = (
    *POLICIES,
    "operator-expires-everything",
    "dead-letters-copied-back",
    "delayed-copied-back",
    "fed-by-others",
    "fed-through-an-exchange",
    "unbound",
    "left-behind",
)


@dataclass(frozen=True, slots=True)
class Bad:
    """A topology as somebody may have made it."""

    arrival: str = "topic-key"
    dead_letters: tuple[str, str | None] = DEAD_LETTERS[0]
    by_policy: bool = False
    quorum: bool = False
    expires: bool = False
    flaws: frozenset[str] = frozenset()


@st.composite
def bad_topologies(draw: st.DrawFn) -> Bad:
    return Bad(
        draw(st.sampled_from(ARRIVALS)),
        draw(st.sampled_from(DEAD_LETTERS)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        frozenset(draw(st.sets(st.sampled_from(FLAWS), max_size=3))),
    )


class Ground:
    """A virtual host with a ladder, and a queue of somebody's."""

    def __init__(self, broker_url: str, management: Management, database_url: str) -> None:
        self.api = management
        self.patient = Patient(broker_url, management, database_url)
        self.patient.settings["tier_ttls"] = QUICK
        self.settings = load(self.patient.settings, {"DLQBATCH_CONFIG": "/dev/null"})
        apply_topology(self.settings)
        self.side = Side(broker_url)

    def make(self, bad: Bad) -> None:
        channel = self.side.channel
        for name, kind in (("x-direct", "direct"), ("x-topic", "topic"), ("x-fanout", "fanout"), ("x-exact", "direct")):
            channel.exchange_declare(name, kind, durable=True)
        self.side.queue("parked")
        channel.queue_bind("parked", "x-exact", "somebody.else")
        waiting = {name.replace("-", "_"): value for name, value in LADDER.items()}
        if bad.dead_letters == ("", "waiting"):
            self.side.queue("waiting", message_ttl=LONG, **waiting)
        exchange, key = bad.dead_letters
        dead: dict[str, Any] = {"dead-letter-exchange": exchange}
        if key is not None:
            dead["dead-letter-routing-key"] = key
        if bad.expires:
            dead["message-ttl"] = LONG
        arguments = {} if bad.by_policy else {name.replace("-", "_"): value for name, value in dead.items()}
        self.side.queue("orders", "quorum" if bad.quorum else "classic", **arguments)
        if bad.by_policy:
            self.policy("orders", "^orders$", 5, dead)
        source, bound = self.way_in(bad)
        if source:
            channel.queue_bind("orders", source, bound)
        for flaw in sorted(bad.flaws):
            self.spoil(flaw)

    @staticmethod
    def way_in(bad: Bad) -> tuple[str, str]:
        return {
            "topic-key": ("amq.topic", "orders.created"),
            "topic-pattern": ("amq.topic", "orders.#"),
            "direct": ("amq.direct", "orders.created"),
            "fanout": ("amq.fanout", ""),
            "headers": ("amq.headers", ""),
            "by-name": ("", ""),
        }[bad.arrival]

    def spoil(self, flaw: str) -> None:
        channel = self.side.channel
        match flaw:
            case flaw if flaw in POLICIES:
                self.policy(flaw, *POLICIES[flaw])
            case "operator-expires-everything":
                body = {"pattern": "delay", "definition": {"message-ttl": 5}, "apply-to": "queues"}
                self.api.put(f"operator-policies/{quoted(self.api.vhost)}/theirs", {**body, "priority": 1})
            case "dead-letters-copied-back":
                channel.queue_bind("retry-queue", "dlq-exchange", "dlq-routing-key")
            case "delayed-copied-back":
                channel.queue_bind("retry-queue", "route-delay", "#")
            case "fed-by-others":
                channel.queue_bind("queue.delay.1", "amq.topic", "#.~ é/x")
            case "fed-through-an-exchange":
                channel.exchange_bind("route-delay", "amq.topic", "binding.#")
            case "unbound":
                channel.queue_unbind("retry-queue-1", "retry-exchange-1", "retry.#.1")
            case "left-behind":
                channel.exchange_declare("dlqbatch.return.it's gone", "fanout", durable=True)

    def policy(self, name: str, pattern: str, priority: int, definition: dict[str, object]) -> None:
        body = {"pattern": pattern, "definition": definition, "priority": priority, "apply-to": "queues"}
        self.api.put(f"policies/{quoted(self.api.vhost)}/{name}", body)

    def findings(self) -> list[Finding]:
        return [one for one in self.patient.findings() if one.code not in BY_HAND]

    def paste_all(self) -> list[list[str]]:
        """Until nothing is found; what was found in each round."""
        settings = {name: str(value) for name, value in self.patient.settings.items()}
        shell = Shell(self.api, Program(settings), self.side.depth)
        rounds = []
        for _ in range(ROUNDS):
            found = self.findings()
            rounds.append([f"{one.code} {one.where}: {one.fix}" for one in found])
            if not found:
                return rounds
            for fix in dict.fromkeys(one.fix for one in found):  # one command may mend several
                shell.paste(fix)
        raise AssertionError(
            "\n".join(f"round {number}: {line}" for number, each in enumerate(rounds) for line in each)
        )

    def fail_one(self, bad: Bad) -> None:
        """A message comes in, is rejected, climbs the ladder, and is there again: once, and as it was."""
        source, _ = self.way_in(bad)
        key = "orders.created" if source else "orders"
        self.side.channel.basic_publish(source, key, b"pay 5", pika.BasicProperties(delivery_mode=2))
        self.side.wait(lambda: self.side.depth("orders") == 1)
        method, _, _ = self.side.channel.basic_get("orders")
        self.side.channel.basic_reject(method.delivery_tag, requeue=False)
        self.side.wait(lambda: self.side.depth("retry-queue") == 1)
        assert run("drain", self.settings, RunOptions()).as_dict()["counts"]["delayed"] == 1
        self.side.wait(lambda: self.side.depth("retry-queue-1") == 1)
        assert run("drain", self.settings, RunOptions()).as_dict()["counts"]["returned"] == 1
        self.side.wait(lambda: self.side.depth("orders") == 1)
        [message] = self.side.empty("orders")
        assert (message.body, message.routing_key) == (b"pay 5", key)
        assert self.side.depth("dlq-queue") == 0


@contextlib.contextmanager
def ground(broker_url: str, management: Management, database_url: str) -> Iterator[Ground]:
    """A virtual host for one example."""
    api = Management(f"http://{management._address[0]}:{management._address[1]}", f"test-{secrets.token_hex(6)}")
    api.make_vhost()
    try:
        made = Ground(broker_url.rpartition("/")[0] + f"/{api.vhost}", api, database_url)
        with contextlib.closing(made.side):
            yield made
    finally:
        api.drop_vhost()


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    make_tables(sqlite_url)
    event_config(load({"database_url": sqlite_url}, {"DLQBATCH_CONFIG": "/dev/null"})).set("#", 3)
    return sqlite_url


@pytest.mark.usefixtures("on_every_broker")
@settings(
    max_examples=examples(8),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(bad=bad_topologies())
@example(Bad("topic-pattern", ("retry-exchange", None)))
@example(Bad("fanout", ("retry-exchange", None)))
@example(Bad("topic-key", ("retry-exchange", "wrong")))
@example(Bad("headers", ("", "orders"), by_policy=True))
@example(Bad("direct", ("", "waiting"), flaws=frozenset({"dead-letters-come-back", "left-behind"})))
@example(Bad(flaws=frozenset({"everything-expires-into-the-ladder"})))
@example(Bad(flaws=frozenset({"everything-expires-soon", "dead-letters-copied-back", "delayed-copied-back"})))
@example(Bad(flaws=frozenset({"operator-expires-everything", "fed-by-others", "fed-through-an-exchange"})))
def test_fixes_come_to_an_end_and_what_fails_then_comes_back(
    broker_url: str, management: Management, database_url: str, bad: Bad
) -> None:
    with ground(broker_url, management, database_url) as made:
        made.make(bad)
        made.paste_all()
        made.fail_one(bad)
