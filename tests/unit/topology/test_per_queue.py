from __future__ import annotations

import messages
import pytest

from dlqbatch.amqp.delivery import Route, open_envelope
from dlqbatch.drain.retry_decision import DeadLetter, Decision, Delay, Rules, decide
from dlqbatch.topology.kinds import Ladder, PerQueue, whole
from dlqbatch.topology.model import Binding, Exchange, Source

CLASSIC = {"x-queue-type": "classic"}
SET = PerQueue("created", "shop", ttl=30_000)
DEAD = {Binding("dlq-exchange", "dlq-routing-key", "dlq-queue"), Binding("dlq-exchange", "dlq-exchange", "dlq-queue")}


def test_the_topology_is_the_originals() -> None:
    topology = SET.topology()
    assert set(topology.exchanges) == {Exchange("shop"), Exchange("shop.retry"), Exchange("dlq-exchange")}
    assert {queue.name: dict(queue.arguments) for queue in topology.queues} == {
        "created": CLASSIC | {"x-dead-letter-exchange": "shop.retry", "x-dead-letter-routing-key": "created.retry"},
        "created.retry": CLASSIC | {"x-dead-letter-exchange": "shop", "x-dead-letter-routing-key": "created"},
        "created.delay": CLASSIC
        | {
            "x-dead-letter-exchange": "shop",
            "x-dead-letter-routing-key": "created",
            "x-message-ttl": 30_000,
        },
        "dlq-queue": CLASSIC,
    }
    assert set(topology.bindings) - DEAD == {
        Binding("shop", "created", "created"),
        Binding("shop.retry", "created.retry", "created.retry"),
        Binding("shop", "created.delay", "created.delay"),
    }


@pytest.mark.parametrize("unlimited", [False, True])
def test_a_quorum_set_dead_letters_at_least_once_and_is_read_without_a_limit(unlimited: bool) -> None:
    topology = PerQueue("x", "t", queue_type="quorum").topology(unlimited_deliveries=unlimited)
    arguments = {queue.name: queue.arguments for queue in topology.queues}
    for queue in ("x", "x.delay"):
        assert arguments[queue].items() >= {
            ("x-queue-type", "quorum"),
            ("x-dead-letter-strategy", "at-least-once"),
            ("x-overflow", "reject-publish"),
        }
        assert "x-delivery-limit" not in arguments[queue]
    for queue in ("x.retry", "dlq-queue"):
        assert arguments[queue]["x-queue-type"] == "quorum"
        assert arguments[queue].get("x-delivery-limit") == (-1 if unlimited else None)


def test_without_a_delay_there_is_no_such_queue_and_the_way_leads_back() -> None:
    bare = PerQueue("x", "t", has_delay=False)
    assert [queue.name for queue in bare.topology().queues] == ["x", "x.retry", "dlq-queue"]
    assert not bare.waits
    assert bare.delay_queues == ()
    assert bare.delay("x", 1) == Route("", "x")


def test_the_delay_is_entered_through_the_default_exchange_whatever_the_event() -> None:
    assert SET.delay("anything.at.all", 1) == Route("", "created.delay")
    assert SET.dead() == Route("dlq-exchange", "dlq-routing-key")
    assert SET.sources == (Source("created.retry", first_stage=True),)
    assert (SET.home, SET.tiers) == ("created", 1)


def test_a_death_in_the_queue_itself_is_a_failure_and_one_in_its_delay_queue_is_not() -> None:
    assert "created" not in SET.own_queues
    assert SET.own_queues >= {"created.retry", "created.delay", "created.delay.relay", "dlq-queue"}
    assert SET.own_exchanges == {"shop.retry", "dlq-exchange"}
    assert SET.exchange_names == {"shop", "shop.retry", "dlq-exchange"}


def test_what_several_topologies_share_is_declared_once() -> None:
    both = whole([Ladder(), SET, PerQueue("paid", "shop")])
    names = [queue.name for queue in both.queues]
    assert len(names) == len(set(names))
    assert names.count("dlq-queue") == 1
    assert [exchange.name for exchange in both.exchanges].count("shop") == 1


def test_what_others_need_is_not_part_of_what_is_taken_away() -> None:
    left = SET.topology().without(whole([Ladder(), PerQueue("paid", "shop")]))
    assert {queue.name for queue in left.queues} == {"created", "created.retry", "created.delay"}
    assert left.exchanges == ()
    assert not DEAD & set(left.bindings)


class Always:
    def max_retries(self, _event: str) -> int:
        return 3


def decided(home: str | None, died_in: str) -> Decision:
    headers = messages.with_headers(messages.x_death(messages.death(died_in)))
    envelope = open_envelope("shop.retry", "created.retry", False, 0, headers)
    return decide(
        envelope, Always(), Rules(1, home=home), first_stage=True, now=1, new_id=lambda: "new", digest=lambda: ""
    )


def test_a_message_that_failed_elsewhere_is_not_delayed_towards_a_queue_that_never_saw_it() -> None:
    assert isinstance(decided("created", "created"), Delay)
    assert isinstance(decided(None, "elsewhere"), Delay)
    decision = decided("created", "elsewhere")
    assert isinstance(decision, DeadLetter)
    assert decision.text.startswith("origin-unknown: it failed in 'elsewhere'")
