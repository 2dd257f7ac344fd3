"""Declaring a topology, refusing one that differs, and telling the types of queues."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import pytest
from broker_client import Side, connected

from dlqbatch.broker.queue_types import quorum_queues
from dlqbatch.broker.session import depths
from dlqbatch.errors import SettingsError, TopologyMismatch, TopologyMissing
from dlqbatch.topology import declare
from dlqbatch.topology.kinds import Ladder, demonstration
from dlqbatch.topology.model import Binding, Exchange, Queue, Topology
from scripts.servers.cluster import RabbitCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from scripts.servers.management import Management


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    yield side
    side.close()


@pytest.fixture
def login(broker_url: str, management: Management) -> Iterator[Callable[..., str]]:
    name = f"user-{secrets.token_hex(4)}"
    management.put(f"users/{name}", {"password": name, "tags": ""})

    def make(*, configure: str) -> str:
        management.put(f"permissions/{management.vhost}/{name}", {"configure": configure, "write": ".*", "read": ".*"})
        return broker_url.replace("guest:guest", f"{name}:{name}")

    yield make
    management.delete(f"users/{name}")


def state(management: Management) -> tuple[object, ...]:
    queues = [(queue["name"], queue["durable"], queue["arguments"]) for queue in management.queues()]
    exchanges = [(exchange["name"], exchange["type"], exchange["durable"]) for exchange in management.exchanges()]
    bindings = [(one["source"], one["destination"], one["routing_key"]) for one in management.bindings()]
    return sorted(queues, key=str), sorted(exchanges), sorted(bindings)


@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_declaring_twice_changes_nothing(broker_url: str, management: Management, queue_type: str) -> None:
    ladder = Ladder(queue_type=queue_type)
    topology = ladder.topology() + demonstration(ladder)
    with connected(broker_url) as connection:
        declare.declare(connection, topology)
        first = state(management)
        assert len(first[0]) == len(topology.queues)  # type: ignore[arg-type]
        assert len(first[2]) == len(topology.bindings)  # type: ignore[arg-type]
        declare.declare(connection, topology)
        assert state(management) == first
        declare.look(connection, topology)


def test_a_topology_without_exchanges_is_declared(broker_url: str, management: Management) -> None:
    with connected(broker_url) as connection:
        declare.declare(connection, Topology((), (Queue("alone"),), ()))
    assert [queue["name"] for queue in management.queues()] == ["alone"]


@pytest.mark.parametrize(
    ("there", "wanted", "argument", "found", "asked"),
    [
        ({"x-message-ttl": 5000}, {"x-message-ttl": 9000}, "x-message-ttl", "5000", "9000"),
        ({}, {"x-message-ttl": 9000}, "x-message-ttl", "none", "9000"),
        ({"x-message-ttl": 5000}, {}, "x-message-ttl", "5000", "none"),
        ({"x-queue-type": "quorum"}, {"x-queue-type": "classic"}, "x-queue-type", "quorum", "classic"),
        (
            {"x-dead-letter-exchange": "it's here"},
            {"x-dead-letter-exchange": "there"},
            "x-dead-letter-exchange",
            "it's here",
            "there",
        ),
    ],
)
def test_a_queue_that_differs_is_named_with_both_values(
    side: Side,
    broker_url: str,
    there: dict[str, object],
    wanted: dict[str, str | int],
    argument: str,
    found: str,
    asked: str,
) -> None:
    side.channel.queue_declare("retry-queue", durable=True, arguments=there)
    with connected(broker_url) as connection, pytest.raises(TopologyMismatch) as error:
        declare.declare(connection, Topology((Exchange("e"),), (Queue("retry-queue", wanted),), ()))
    mismatch = error.value
    assert (mismatch.kind, mismatch.name, mismatch.argument) == ("queue", "retry-queue", argument)
    assert (mismatch.found, mismatch.wanted) == (found, asked)


def test_a_queue_that_is_not_durable_is_a_mismatch(side: Side, broker_url: str) -> None:
    side.channel.queue_declare("retry-queue", durable=False)
    with connected(broker_url) as connection, pytest.raises(TopologyMismatch) as error:
        declare.declare(connection, Topology((), (Queue("retry-queue"),), ()))
    assert (error.value.argument, error.value.found, error.value.wanted) == ("durable", "false", "true")


def test_an_exchange_of_another_type_is_a_mismatch(side: Side, broker_url: str) -> None:
    side.channel.exchange_declare("route-delay", "direct", durable=True)
    with connected(broker_url) as connection, pytest.raises(TopologyMismatch) as error:
        declare.declare(connection, Ladder().topology())
    assert (error.value.kind, error.value.name, error.value.argument) == ("exchange", "route-delay", "type")
    assert (error.value.found, error.value.wanted) == ("direct", "topic")


def test_a_mismatch_is_recognised_where_a_long_name_leaves_no_room_for_the_values(side: Side, broker_url: str) -> None:
    name = "q" * 240
    side.channel.queue_declare(name, durable=True, arguments={"x-message-ttl": 1000})
    with connected(broker_url) as connection, pytest.raises(TopologyMismatch) as error:
        declare.declare(connection, Topology((), (Queue(name, {"x-message-ttl": 2000}),), ()))
    assert error.value.argument == "x-message-ttl"
    assert error.value.name.startswith("q" * 100)


def test_without_the_right_to_configure_what_is_there_is_enough(
    broker_url: str, login: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    topology = Ladder().topology()
    with connected(broker_url) as connection:
        declare.declare(connection, topology)
    caplog.set_level("INFO", logger="dlqbatch")
    with connected(login(configure="^$")) as connection:
        declare.declare(connection, topology)
    assert "may not declare the topology" in caplog.text


def test_without_the_right_to_configure_what_is_missing_is_named(side: Side, login: Callable[..., str]) -> None:
    side.channel.exchange_declare("there", "topic", durable=True)
    topology = Topology((Exchange("there"),), (Queue("not-there"),), (Binding("there", "key", "not-there"),))
    with connected(login(configure="^$")) as connection, pytest.raises(TopologyMissing) as error:
        declare.declare(connection, topology)
    assert (error.value.kind, error.value.name) == ("queue", "not-there")


def test_depths_are_exact_and_a_missing_exchange_or_queue_is_named(side: Side, broker_url: str) -> None:
    side.channel.exchange_declare("there", "topic")
    for name, count in (("a", 0), ("b", 3)):
        side.fill(side.queue(name), [b"x"] * count)
    with connected(broker_url) as connection:
        assert depths(connection, ["a", "b"], ["there"]) == {"a": 0, "b": 3}
        with pytest.raises(TopologyMissing, match="exchange 'nowhere'"):
            depths(connection, ["a"], ["there", "nowhere"])
        with pytest.raises(TopologyMissing, match="queue 'c'"):
            depths(connection, ["a", "c"], ["there"])


def test_the_type_of_a_queue_is_known_whatever_its_other_arguments(
    side: Side, broker_url: str, management: Management
) -> None:
    side.queue("quorum", "quorum")
    side.queue(
        "quorum-with-much-else", "quorum", delivery_limit=5, dead_letter_exchange="dlx", overflow="reject-publish"
    )
    side.channel.queue_declare("plain", durable=True)
    side.queue("classic", message_ttl=100_000, max_priority=3)
    forged = (" of queue type rabbit_quorum_queue", "queue 'a' does not have a replica on the local node")
    for name in forged:
        side.queue(name)
    names = ["quorum", "quorum-with-much-else", "plain", "classic", *forged]
    with connected(broker_url) as connection:
        for otherwise in (True, False):
            found = quorum_queues(connection, names, otherwise=otherwise, refuse_streams=True)
            assert found == {"quorum", "quorum-with-much-else"}
    assert sorted(queue["name"] for queue in management.queues()) == sorted(names)


def test_the_type_is_known_where_the_virtual_host_has_a_default(broker_url: str, management: Management) -> None:
    # A virtual host gets its default queue type when it is made.
    management.drop_vhost()
    management.put(f"vhosts/{management.vhost}", {"defaultqueuetype": "quorum", "default_queue_type": "quorum"})
    everything = {"configure": ".*", "write": ".*", "read": ".*"}
    management.put(f"permissions/{management.vhost}/guest", everything)
    with connected(broker_url) as connection:
        declare.declare(connection, Topology((), (Queue("of-no-type"), Queue("c", {"x-queue-type": "classic"})), ()))
        assert quorum_queues(connection, ["of-no-type", "c"], otherwise=False) == {"of-no-type"}


def test_asking_for_a_type_takes_no_message_and_makes_no_queue(
    side: Side, broker_url: str, management: Management
) -> None:
    side.fill(side.queue("quorum", "quorum"), [b"x"] * 10)
    with connected(broker_url) as connection:
        assert quorum_queues(connection, ["quorum", "missing"], otherwise=False) == {"quorum"}
    assert not any(message.redelivered for message in side.empty("quorum"))
    assert [queue["name"] for queue in management.queues()] == ["quorum"]


@pytest.mark.usefixtures("on_every_broker")
def test_a_stream_among_queues_to_take_from_is_an_error_that_names_it(side: Side, broker_url: str) -> None:
    for name, kind in (("dlq.q", "quorum"), ("dlq.s", "stream"), ("dlq.z", "classic")):
        side.queue(name, kind)
    with connected(broker_url) as connection:
        assert quorum_queues(connection, ["dlq.q", "dlq.z"], otherwise=False, refuse_streams=True) == {"dlq.q"}
        assert quorum_queues(connection, ["dlq.q", "dlq.s", "dlq.z"], otherwise=True) == {"dlq.q"}
        with pytest.raises(SettingsError, match=r"'dlq\.s' is a stream"):
            quorum_queues(connection, ["dlq.q", "dlq.s", "dlq.z"], otherwise=False, refuse_streams=True)


@pytest.mark.slow
def test_a_stream_that_only_another_node_has_is_told_all_the_same(work_folder: Path) -> None:
    with RabbitCluster(work_folder / "cluster").start() as cluster:
        side = Side(cluster.nodes[0].url)
        side.queue("dlq.s", "stream", initial_cluster_size=1)
        side.close()
        for node in cluster.nodes:
            with connected(node.url) as connection, pytest.raises(SettingsError, match=r"'dlq\.s' is a stream"):
                quorum_queues(connection, ["dlq.s"], otherwise=False, refuse_streams=True)


def test_the_type_is_known_without_the_right_to_configure(side: Side, login: Callable[..., str]) -> None:
    side.queue("quorum", "quorum")
    side.queue("classic")
    with connected(login(configure="^$")) as connection:
        assert quorum_queues(connection, ["quorum", "classic"], otherwise=False) == {"quorum"}
