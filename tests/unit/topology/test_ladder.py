from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.delivery import Route
from dlqbatch.amqp.patterns import matches
from dlqbatch.amqp.retry_headers import RETURN_PREFIX, return_exchange
from dlqbatch.amqp.table import to_bytes
from dlqbatch.topology.kinds import Ladder, demonstration
from dlqbatch.topology.model import Binding, Exchange, Queue, Source
from dlqbatch.topology.plan import is_left_behind

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


MINUTE = 60_000
delays = st.lists(st.integers(1, 2**32 - 1), max_size=12).map(tuple)


def test_a_delay_that_no_tier_has_takes_one_queue_and_nothing_else() -> None:
    ladder = Ladder(more_delays=(MINUTE, 10_000, 1_500, MINUTE))
    plain, more = Ladder().topology(), ladder.topology()
    assert more.exchanges == plain.exchanges
    added = {queue.name: dict(queue.arguments) for queue in more.queues if queue not in plain.queues}
    out = {"x-dead-letter-exchange": "retry-exchange-1", "x-dead-letter-routing-key": "retry.#.1"}
    assert added == {
        "queue.delay.1500ms": {**out, "x-message-ttl": 1_500, "x-queue-type": "classic"},
        "queue.delay.60s": {**out, "x-message-ttl": MINUTE, "x-queue-type": "classic"},
    }
    assert {one for one in more.bindings if one not in plain.bindings} == {
        Binding("route-delay", "binding.#.1500ms", "queue.delay.1500ms"),
        Binding("route-delay", "binding.#.60s", "queue.delay.60s"),
    }
    # The tier of 10 s is there already, and its queue is the one for 10 s.
    assert ladder.delays == {"1": 10_000, "2": 15_000, "3": 20_000, "1500ms": 1_500, "60s": MINUTE}
    assert ladder.sources == Ladder().sources


@given(delays, delays.filter(bool), st.text(max_size=300))
def test_each_delay_leads_into_its_own_queue_and_out_to_one_that_is_read(
    more: tuple[int, ...], tiers: tuple[int, ...], event: str
) -> None:
    ladder = Ladder(tier_ttls=tiers, more_delays=more)
    topology = ladder.topology()
    ttls = {
        queue.name: queue.arguments["x-message-ttl"] for queue in topology.queues if "x-message-ttl" in queue.arguments
    }
    assert ttls == dict(zip(ladder.delay_queues, ladder.delays.values(), strict=True))
    assert set(more) <= set(ttls.values())
    into = [one for one in topology.bindings if one.exchange == ladder.delay_exchange]
    read = {source.queue for source in ladder.sources}
    for number, queue in enumerate(ladder.delay_queues, 1):
        route = ladder.delay(event, number)
        assert len(to_bytes(route.key or "")) <= 255
        assert [one.queue for one in into if matches(one.key, route.key or "")] == [queue]
        assert ladder.ways_out[number].queue in read


def test_the_queue_of_a_delay_that_was_taken_away_is_known() -> None:
    ladders = (Ladder(more_delays=(MINUTE,)), Ladder(delay_queue="slow", retry_exchange="slow-retry"))
    assert is_left_behind("queue.delay.600s", "retry-exchange-1", ladders)
    assert is_left_behind("slow.60s", "slow-retry-1", ladders)
    for other in ("queue.delay.60s", "queue.delay.1", "queue.delay.4", "queue.delay.600s.relay", "other.600s"):
        assert not is_left_behind(other, "retry-exchange-1", ladders)
    assert not is_left_behind("queue.delay.600s", "elsewhere", ladders)
    assert not is_left_behind("queue.delay.600s", None, ladders)
