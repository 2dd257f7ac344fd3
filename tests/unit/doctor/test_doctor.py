"""The pure part of `doctor`: facts in, findings out; and what its page in the docs says of them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.patterns import matches
from dlqbatch.broker.facts import (
    BindingFacts,
    BrokerFacts,
    ExchangeFacts,
    Map,
    QueueFacts,
    QueuePolicy,
    Refused,
    listed,
)
from dlqbatch.broker.routing import Routes, overlap
from dlqbatch.doctor import commands
from dlqbatch.doctor.database import DatabaseFacts
from dlqbatch.doctor.findings import Code, Severity
from dlqbatch.doctor.job import examine
from dlqbatch.doctor.virtual_host import Deployment, Part
from dlqbatch.drain.event_policy import EventRow

BROKER = BrokerFacts((4, 1, 0), "v", "us er", "http://h:15672")
STORE = DatabaseFacts("sqlite:///x", "sqlite3 x", version="3", newest="3", rows=(EventRow(1, "#", 3),))
NOTHING = Deployment((), frozenset(), frozenset(), "dlq-queue")


def there(
    *queues: QueueFacts, exchanges: tuple[ExchangeFacts, ...] = (), bindings: tuple[BindingFacts, ...] = ()
) -> Map:
    return Map({one.name: one for one in queues}, {one.name: one for one in exchanges}, bindings)


def codes(broker: BrokerFacts = BROKER, store: DatabaseFacts = STORE, deployment: Deployment = NOTHING) -> list[Code]:
    return [one.code for one in examine(broker, store, deployment)]


def test_what_nobody_told_is_not_guessed() -> None:
    assert codes() == []
    assert codes(replace(BROKER, version=())) == []
    assert codes(replace(BROKER, map=there(QueueFacts("q", type="stream", arguments={"x-max-length-bytes": 5})))) == []


@pytest.mark.parametrize(
    ("broker", "code"),
    [
        (replace(BROKER, alarms=("memory alarm on n",)), Code.ALARM),
        (replace(BROKER, version=(3, 12, 9)), Code.OLD_BROKER),
        (replace(BROKER, skew=31.0), Code.CLOCK_SKEW_BROKER),
        (replace(BROKER, skew=-31.0), Code.CLOCK_SKEW_BROKER),
        (replace(BROKER, silent="no answer"), Code.MANAGEMENT_SILENT),
        (replace(BROKER, refused=(Refused("read", "queue", "q"),)), Code.PERMISSION_MISSING),
        (replace(BROKER, change_left_behind=True), Code.DELAY_CHANGE_UNFINISHED),
    ],
)
def test_what_the_broker_itself_tells(broker: BrokerFacts, code: Code) -> None:
    assert codes(broker) == [code]


@pytest.mark.parametrize("broker", [replace(BROKER, version=(3, 13, 0)), replace(BROKER, skew=30.0)])
def test_what_is_still_in_order(broker: BrokerFacts) -> None:
    assert codes(broker) == []


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        (replace(STORE, unreachable="refused", version=None), [Code.DATABASE_UNREACHABLE]),
        (replace(STORE, skew=-31.0), [Code.CLOCK_SKEW_DATABASE]),
        (replace(STORE, skew=30.0), []),
        (replace(STORE, is_there=False, version=None), []),
        (replace(STORE, version=None), [Code.SCHEMA_MISSING]),
        (replace(STORE, version="2"), [Code.SCHEMA_OLD]),
        (replace(STORE, version="9", is_known=False), [Code.SCHEMA_UNKNOWN]),
        (replace(STORE, rows=None, unreadable="no"), [Code.POLICY_UNREADABLE]),
    ],
)
def test_what_a_database_tells(store: DatabaseFacts, expected: list[Code]) -> None:
    assert codes(store=store) == expected


def test_the_worst_stands_first() -> None:
    broker = replace(BROKER, version=(3, 8), alarms=("memory alarm",))
    found = examine(broker, replace(STORE, version=None), NOTHING)
    assert [one.severity for one in found] == [Severity.SERIOUS, Severity.WARNING, Severity.NOTE]


def test_of_several_limits_the_smallest_counts_and_of_several_names_the_declared_one() -> None:
    queue = QueueFacts(
        "q",
        arguments={"x-message-ttl": 9, "x-dead-letter-exchange": "declared"},
        policy=QueuePolicy("p", 1, {"message-ttl": 5, "dead-letter-exchange": "policy", "overflow": "reject-publish"}),
        operator=QueuePolicy("o", 1, {"message-ttl": 7}),
    )
    assert (queue.ttl, queue.dead_letter_exchange, queue.overflow) == (5, "declared", "reject-publish")


@pytest.mark.parametrize(
    ("queue", "version", "limit"),
    [
        (QueueFacts("q"), (4, 1), None),
        (QueueFacts("q", "quorum"), (3, 13), None),
        (QueueFacts("q", "quorum"), (4, 0), 20),
        (QueueFacts("q", "quorum", reported_limit=50), (4, 0), 50),
        (QueueFacts("q", "quorum", reported_limit=-1), (4, 0), None),
        (QueueFacts("q", "quorum", arguments={"x-delivery-limit": -1}), (4, 0), None),
        (QueueFacts("q", "quorum", arguments={"x-delivery-limit": 0}), (3, 13), 0),
        (QueueFacts("q", "quorum", policy=QueuePolicy("p", 0, {"delivery-limit": -1})), (4, 0), None),
        (
            QueueFacts(
                "q", "quorum", arguments={"x-delivery-limit": 9}, policy=QueuePolicy("p", 0, {"delivery-limit": 4})
            ),
            (4, 0),
            4,
        ),
        (
            QueueFacts(
                "q", "quorum", arguments={"x-delivery-limit": 9}, policy=QueuePolicy("p", 0, {"delivery-limit": -1})
            ),
            (4, 0),
            9,
        ),
    ],
)
def test_the_delivery_limit_that_is_in_effect(queue: QueueFacts, version: tuple[int, ...], limit: int | None) -> None:
    assert queue.delivery_limit(version) == limit


@pytest.mark.parametrize(("again", "delivered", "told"), [(9, 9, False), (10, 100, True), (10, 101, False)])
def test_some_repeated_deliveries_are_a_restart_and_many_are_failures(again: int, delivered: int, told: bool) -> None:
    queue = QueueFacts("q", consumers=1, delivered=delivered, redelivered=again)
    found = codes(replace(BROKER, map=there(queue)))
    assert (Code.FAILING_WITHOUT_DEAD_LETTERS in found) is told


def test_a_policy_takes_over_what_the_one_before_it_says() -> None:
    queue = QueueFacts("it's", policy=QueuePolicy("theirs", 7, {"max-length": 5}))
    words = shlex.split(commands.set_policy(BROKER, queue, {"overflow": "reject-publish"}))
    assert words[:8] == ["rabbitmqctl", "set_policy", "-p", "v", "--priority", "8", "--apply-to", "queues"]
    assert re.search(words[-2], "it's")
    assert not re.search(words[-2], "it's not")
    assert json.loads(words[-1]) == {"max-length": 5, "overflow": "reject-publish"}
    ours = replace(queue, policy=QueuePolicy("dlqbatch-it's", 7, {}))
    assert shlex.split(commands.set_policy(BROKER, ours, {}))[5] == "7"


def test_an_option_is_taken_out_of_the_policy_that_says_it() -> None:
    queue = QueueFacts("q", policy=QueuePolicy("theirs", 2, {"message-ttl": 5, "max-length": 3}))
    words = shlex.split(commands.without_option(BROKER, queue, (), "message-ttl"))
    assert json.loads(words[-1]) == {"max-length": 3}
    above = replace(queue, operator=QueuePolicy("above", 1, {"message-ttl": 4}))
    assert commands.without_option(BROKER, above, (), "message-ttl") == "rabbitmqctl clear_operator_policy -p v above"
    declared = QueueFacts("q", arguments={"x-message-ttl": 5, "x-max-length": 3})
    steps = commands.without_option(BROKER, declared, (BindingFacts("e", "k", "q"),), "message-ttl").split(" && ")
    assert [step.partition(" ")[0] for step in steps] == ["rabbitmqctl", "curl", "curl"]
    assert "x-message-ttl" not in steps[1]
    assert '"x-max-length": 3' in steps[1]


def test_a_permission_only_grows() -> None:
    wider = commands.wider("^a$", ["b.c"])
    assert all(re.search(wider, name) for name in ("a", "b.c"))
    assert not any(re.search(wider, name) for name in ("bxc", "c"))
    assert not re.search(commands.wider("", ["b"]), "a")


@given(
    st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=3),
    st.lists(st.sampled_from(["a", "b", "*", "#"]), max_size=3),
)
def test_patterns_overlap_exactly_if_some_key_meets_both(one: list[str], other: list[str]) -> None:
    left, right = ".".join(one), ".".join(other)
    # Two of three words that meet do so in five at most, and a third word stands for all that they do not name.
    keys = (".".join(words) for size in range(6) for words in itertools.product("abc", repeat=size))
    assert overlap(left, right) == any(matches(left, key) and matches(right, key) for key in keys)


def test_exchanges_that_are_bound_in_a_circle_are_followed_once() -> None:
    bindings = (
        BindingFacts("a", "#", "b", to_queue=False),
        BindingFacts("b", "#", "a", to_queue=False),
        BindingFacts("b", "k.*", "q"),
    )
    routes = Routes(there(QueueFacts("q"), exchanges=(ExchangeFacts("a"), ExchangeFacts("b")), bindings=bindings))
    assert routes.possible("a", "k.1") == {"q"}
    assert routes.certain("a", "k.1") == {"q"}
    assert routes.possible("a", "other") == frozenset()
    assert routes.certain("a", None) == frozenset()


def test_a_topology_that_an_older_broker_declared_is_taken_as_it_is() -> None:
    wanted = {"x-queue-type": "quorum", "x-delivery-limit": -1}
    deployment = replace(NOTHING, parts=(Part("ladder", {}, {"q": wanted}, ()),))
    queue = QueueFacts("q", "quorum", arguments={"x-queue-type": "quorum"}, consumers=1)
    assert Code.TOPOLOGY_DIFFERS not in codes(replace(BROKER, map=there(queue)), deployment=deployment)
    other = replace(queue, type="classic", arguments={})
    assert Code.TOPOLOGY_DIFFERS in codes(replace(BROKER, map=there(other)), deployment=deployment)


def test_an_exchange_of_the_plugin_that_will_not_run() -> None:
    told = replace(BROKER, map=there(exchanges=(ExchangeFacts("later", "x-delayed-message"), ExchangeFacts("now"))))
    found = [one for one in examine(told, STORE, NOTHING) if one.code is Code.DELAYED_EXCHANGE]
    assert [one.where for one in found] == ["later"]


def test_what_leads_somewhere_under_some_key_that_a_pattern_allows() -> None:
    exchanges = (
        ExchangeFacts("t"),
        ExchangeFacts("d", "direct"),
        ExchangeFacts("f", "fanout"),
        ExchangeFacts("onward"),
        ExchangeFacts("saved", alternate="f"),
    )
    bindings = (
        BindingFacts("t", "a.*", "q"),
        BindingFacts("d", "a.b", "q"),
        BindingFacts("f", "", "q"),
        BindingFacts("onward", "a.#", "d", to_queue=False),
        BindingFacts("d", "loop", "onward", to_queue=False),
    )
    routes = Routes(there(QueueFacts("q"), QueueFacts("a.b"), exchanges=exchanges, bindings=bindings))
    for exchange, pattern, is_led in [
        *(("t", "*.c", True), ("t", "a.b.#", True), ("t", "b.#", False), ("t", "a", False)),
        *(("d", "a.#", True), ("d", "*.c", False), ("d", "#", True)),
        *(("f", "any.#", True), ("onward", "*.b", True), ("onward", "b.#", False), ("saved", "x", True)),
        *(("", "a.*", True), ("", "b.*", False), ("gone", "#", False)),
    ]:
        assert bool(routes.reached(exchange, pattern)) is is_led, (exchange, pattern)


def test_a_list_of_names_has_an_end() -> None:
    assert listed("cab") == "'a', 'b', 'c'"
    assert listed(map(str, range(10, 17))) == "'10', '11', '12', '13', '14' and 2 more"


def test_the_docs_name_every_finding_with_its_severity() -> None:
    page = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (\w+) \|", page, re.MULTILINE)
    assert dict(rows) == {code.value: code.severity.value for code in Code}
    assert len(rows) == len(Code)
