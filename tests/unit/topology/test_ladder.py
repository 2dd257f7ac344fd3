from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import Route
from dlqbatch.amqp.patterns import matches
from dlqbatch.amqp.retry_headers import RETURN_PREFIX, return_exchange
from dlqbatch.amqp.table import to_bytes
from dlqbatch.topology.kinds import Ladder, demonstration
from dlqbatch.topology.model import Binding, Exchange, Queue, Source

queue_names = st.text(min_size=1, max_size=255)


def test_the_topology_is_the_contracts_table() -> None:
    topology = Ladder().topology()
    assert sorted(topology.exchanges, key=str) == sorted(
        map(
            Exchange,
            [
                "retry-exchange",
                "route-delay",
                "retry-exchange-1",
                "retry-exchange-2",
                "retry-exchange-3",
                "dlq-exchange",
            ],
        ),
        key=str,
    )
    assert {queue.name: dict(queue.arguments) for queue in topology.queues} == {
        "retry-queue": {"x-queue-type": "classic"},
        "queue.delay.1": {
            "x-dead-letter-exchange": "retry-exchange-1",
            "x-dead-letter-routing-key": "retry.#.1",
            "x-message-ttl": 10000,
            "x-queue-type": "classic",
        },
        "queue.delay.2": {
            "x-dead-letter-exchange": "retry-exchange-2",
            "x-dead-letter-routing-key": "retry.#.2",
            "x-message-ttl": 15000,
            "x-queue-type": "classic",
        },
        "queue.delay.3": {
            "x-dead-letter-exchange": "retry-exchange-3",
            "x-dead-letter-routing-key": "retry.#.3",
            "x-message-ttl": 20000,
            "x-queue-type": "classic",
        },
        "retry-queue-1": {"x-queue-type": "classic"},
        "retry-queue-2": {"x-queue-type": "classic"},
        "retry-queue-3": {"x-queue-type": "classic"},
        "dlq-queue": {"x-queue-type": "classic"},
    }
    assert len(topology.bindings) == 9
    assert set(topology.bindings) == {
        Binding("retry-exchange", "retry-routing-key", "retry-queue"),
        Binding("route-delay", "binding.#.1", "queue.delay.1"),
        Binding("route-delay", "binding.#.2", "queue.delay.2"),
        Binding("route-delay", "binding.#.3", "queue.delay.3"),
        Binding("retry-exchange-1", "retry.#.1", "retry-queue-1"),
        Binding("retry-exchange-2", "retry.#.2", "retry-queue-2"),
        Binding("retry-exchange-3", "retry.#.3", "retry-queue-3"),
        Binding("dlq-exchange", "dlq-routing-key", "dlq-queue"),
        Binding("dlq-exchange", "dlq-exchange", "dlq-queue"),
    }


def test_the_demonstration_is_the_contracts_last_row() -> None:
    topology = demonstration(Ladder())
    arguments = {
        "x-dead-letter-exchange": "retry-exchange",
        "x-dead-letter-routing-key": "retry-routing-key",
        "x-queue-type": "classic",
    }
    assert topology.exchanges == (Exchange("test-retry-exchange"),)
    assert topology.queues == tuple(
        Queue(name, arguments) for name in ("test-pass-queue", "test-fail-queue", "test-fail-pass-queue")
    )
    assert topology.bindings == (
        Binding("test-retry-exchange", "rk.test.pass", "test-pass-queue"),
        Binding("test-retry-exchange", "rk.test.fail", "test-fail-queue"),
        Binding("test-retry-exchange", "rk.test.fail.pass", "test-fail-pass-queue"),
    )


def test_quorum_queues_hand_on_at_least_once_and_those_that_are_read_have_no_limit_where_there_is_one() -> None:
    ladder = Ladder(tier_ttls=(1000,), queue_type="quorum")
    safe = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    delay = safe | {
        "x-dead-letter-exchange": "retry-exchange-1",
        "x-dead-letter-routing-key": "retry.#.1",
        "x-message-ttl": 1000,
    }
    for unlimited, limit in ((False, {}), (True, {"x-delivery-limit": -1})):
        read = {"x-queue-type": "quorum", **limit}
        found = {queue.name: dict(queue.arguments) for queue in ladder.topology(unlimited_deliveries=unlimited).queues}
        assert found == {"retry-queue": read, "dlq-queue": read, "retry-queue-1": read, "queue.delay.1": delay}
    test_queue = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
    assert {tuple(sorted(queue.arguments.items())) for queue in demonstration(ladder).queues} == {
        tuple(sorted((safe | test_queue).items()))
    }


def test_a_classic_ladder_never_sets_a_delivery_limit() -> None:
    assert Ladder().topology(unlimited_deliveries=True) == Ladder().topology()


def test_the_first_stage_is_read_first_and_each_tier_after_it() -> None:
    assert Ladder(tier_ttls=(1, 2), retry_queue="failed").sources == (
        Source("failed", first_stage=True),
        Source("failed-1", first_stage=False),
        Source("failed-2", first_stage=False),
    )


def test_every_name_that_is_ours_is_known() -> None:
    ladder = Ladder(tier_ttls=(1,))
    assert ladder.queue_names == {"retry-queue", "retry-queue-1", "queue.delay.1", "dlq-queue"}
    assert ladder.exchange_names == {"retry-exchange", "retry-exchange-1", "route-delay", "dlq-exchange"}


@given(st.text(max_size=255), st.integers(1, 12))
def test_a_delayed_message_reaches_its_tier_alone(event: str, tier: int) -> None:
    ladder = Ladder(tier_ttls=(1000,) * 12)
    route = ladder.delay(event, tier)
    assert len(to_bytes(route.key)) <= 255
    assert route.key in (f"binding.{event}.{tier}", f"binding.{tier}")
    bindings = [binding for binding in ladder.topology().bindings if binding.exchange == route.exchange]
    assert [binding.queue for binding in bindings if matches(binding.key, route.key)] == [f"queue.delay.{tier}"]


def test_the_dead_go_to_their_exchange() -> None:
    assert Ladder().dead() == Route("dlq-exchange", "dlq-routing-key")


@given(queue_names, queue_names)
def test_return_exchanges_are_valid_names_each_of_one_queue(one: str, other: str) -> None:
    name = return_exchange(one)
    assert name.startswith(RETURN_PREFIX)
    assert len(name.encode()) <= 255
    assert (name == return_exchange(other)) == (one == other)


def test_the_return_exchange_of_an_ordinary_queue_bears_its_name() -> None:
    assert return_exchange("orders") == "dlqbatch.return.orders"


@given(st.integers(0, 3), st.sampled_from(["a", "ö", "€", "😀"]), st.integers(220, 255))
def test_long_names_that_differ_at_their_end_stay_apart(offset: int, character: str, size: int) -> None:
    start = "a" * offset + character * ((size - offset) // len(character.encode()))
    names = {return_exchange(start[:-1] + end) for end in "xyz"}
    assert len(names) == 3
    assert all(len(name.encode()) <= 255 for name in names)


def test_no_queue_can_be_named_after_the_hash_of_another() -> None:
    hashed = return_exchange("q" * 250)
    assert return_exchange(hashed.removeprefix(RETURN_PREFIX)) != hashed


@given(st.binary(min_size=1, max_size=255))
def test_the_return_exchange_of_any_bytes_fits(name: bytes) -> None:
    assert len(to_bytes(return_exchange(name.decode("utf-8", "surrogateescape")))) <= 255
