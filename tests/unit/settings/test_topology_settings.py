"""`dlqbatch.topology.NAME.OPTION`: what is understood, and what is said of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlqbatch.errors import SettingsError
from dlqbatch.settings import load, topologies
from dlqbatch.topology.kinds import Ladder, Native, PerQueue, Pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from dlqbatch.topology.kinds import Kind

NATIVE = "topology.n.kind=native\ntopology.n.queue=orders"
STEP = "topology.s.kind=pipeline\ntopology.s.exchange=step"
ORDERS = "topology.orders.kind=per-queue\ntopology.orders.queue=created\ntopology.orders.exchange=shop"


def kept(folder: Path, text: str, **given: object) -> dict[str, Kind]:
    config = folder / "application.properties"
    config.write_text("".join(f"dlqbatch.{line}\n" for line in text.splitlines()))
    return topologies(load(given, {"DLQBATCH_CONFIG": str(config)}))


def problems(folder: Path, text: str, **given: object) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        kept(folder, text, **given)
    return list(caught.value.problems)


def test_without_a_word_there_is_the_ladder_alone(tmp_path: Path) -> None:
    assert kept(tmp_path, "") == {"ladder": Ladder()}
    assert kept(tmp_path, "ladder=false") == {}


def test_any_number_of_each_kind_stands_beside_the_ladder(tmp_path: Path) -> None:
    text = f"""{ORDERS}
topology.orders.ttl=45s
topology.orders.exchange-type=direct
topology.paid.kind=per-queue
topology.paid.queue=paid
topology.paid.exchange=shop
topology.paid.exchange_type=direct
topology.paid.queue-type=quorum
topology.paid.delay=false
topology.settle.kind=pipeline
topology.settle.exchange=settlement.requested
topology.slow.kind=ladder
topology.slow.tier-ttls=1h,2h"""
    assert kept(tmp_path, text) == {
        "ladder": Ladder(),
        "orders": PerQueue("created", "shop", "direct", ttl=45_000, dlq_queue_type="classic"),
        "paid": PerQueue("paid", "shop", "direct", queue_type="quorum", has_delay=False, dlq_queue_type="classic"),
        "settle": Pipeline("settlement.requested", "settlement.requested"),
        "slow": Ladder(
            tier_ttls=(3_600_000, 7_200_000),
            retry_exchange="slow.retry-exchange",
            retry_queue="slow.retry-queue",
            delay_exchange="slow.delay-exchange",
            delay_queue="slow.delay-queue",
            dlq_queue_type="classic",
        ),
    }


def test_what_the_set_does_not_say_the_deployment_does(tmp_path: Path) -> None:
    found = kept(tmp_path, f"{ORDERS}\nqueue-type=quorum\ndlq-queue=dead\ntopology.orders.dlq-exchange=own")
    assert found["orders"] == PerQueue(
        "created", "shop", queue_type="quorum", dlq_exchange="own", dlq_queue="dead", dlq_queue_type="quorum"
    )


def test_the_command_line_counts_before_the_file(tmp_path: Path) -> None:
    found = kept(tmp_path, f"{ORDERS}\ntopology.orders.ttl=1s", **{"topology.orders.ttl": "2s"})
    assert found["orders"].topology().queues[2].arguments["x-message-ttl"] == 2000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("topology.orders.kind=per-qeue", "perhaps per-queue was meant"),
        ("topology.orders.queue=q", "has no kind; set dlqbatch.topology.orders.kind"),
        ("topology.orders.kind=per-queue\ntopology.orders.queue=q", "has no exchange"),
        (f"{ORDERS}\ntopology.orders.exchnge-type=topic", "perhaps exchange-type was meant"),
        (f"{ORDERS}\ntopology.orders.exchange-type=fanout", "it must be topic or direct"),
        (f"{ORDERS}\ntopology.orders.ttl=soon", "it must be a delay above 0"),
        (f"{ORDERS}\ntopology.orders.ttl=0", "it must be a delay above 0"),
        (f"{ORDERS}\ntopology.orders.delay=maybe", "it must be true or false"),
        (f"{ORDERS}\ntopology.orders.queue-type=stream", "it must be classic or quorum"),
        (f"{ORDERS}\ntopology.orders.dlq-queue=amq.x", "begins with amq."),
        ("topology.a.kind=per-queue\ntopology.a.exchange=e\ntopology.a.queue=a.#", "a word that is only * or #"),
        ("topology.orders=per-queue", "a topology is written dlqbatch.topology.NAME.OPTION"),
        ("topology.ladder.kind=ladder", "has the name of a kind"),
        (f"{ORDERS}\ntopology.orders.queue=other", "is already set in line"),
        (f"{ORDERS}\ntopology.b.kind=pipeline\ntopology.b.exchange=shop", "both make exchange 'shop', but differ"),
        ("topology.b.kind=pipeline\ntopology.b.exchange=e\ntopology.b.queue=retry-queue", "both make queue"),
        ("topology.n.kind=ladder\ntopology.n.dlq-queue=n.retry-queue", "makes queue 'n.retry-queue' stand for two"),
        ("topology.n.kind=ladder\ntopology.n.dlq-queue=n.retry-queue-1", "makes queue 'n.retry-queue-1' stand for two"),
        ("topology.n.kind=ladder\ntopology.n.delay-exchange=n.retry-exchange", "'n.retry-exchange' stand for two"),
        ("topology.n.kind=ladder\ntopology.n.dlq-exchange=n.delay-exchange", "'n.delay-exchange' stand for two"),
        (f"{ORDERS}\ntopology.orders.dlq-queue=created.retry", "makes queue 'created.retry' stand for two"),
        (f"{ORDERS}\ntopology.orders.dlq-exchange=shop.retry", "makes exchange 'shop.retry' stand for two"),
        (
            f"{ORDERS}\ntopology.orders.dlq-exchange=shop\ntopology.orders.dlq-routing-key=created",
            "makes exchange 'shop' stand for two",
        ),
        (
            "topology.p.kind=pipeline\ntopology.p.exchange=e\ntopology.p.queue=dlq.e",
            "makes queue 'dlq.e' stand for two",
        ),
        (f"{NATIVE}\ntopology.n.queue-type=classic", "is no option of a native"),
        (f"{NATIVE}\ntopology.n.exchange=shop", "is no option of a native"),
        (f"{NATIVE}\ntopology.n.delivery-limit=0", "it must be a whole number from 1 to 1000"),
        (f"{NATIVE}\ntopology.n.delayed-retry-min=0", "it must be a delay above 0"),
        (f"{NATIVE}\ntopology.n.delayed-retry-max=9s", "delayed-retry-max (9000 ms) is below delayed-retry-min"),
        ("topology.n.kind=native", "has no queue; set dlqbatch.topology.n.queue"),
        ("ladder=false\ntopology.n.kind=native\ntopology.n.queue=dlq-queue", "makes queue 'dlq-queue' stand for two"),
        ("topology.n.kind=native\ntopology.n.queue=retry-queue", "both make queue 'retry-queue'"),
        (f"{NATIVE}\ntopology.m.kind=native\ntopology.m.queue=orders", "both make queue 'orders'"),
        (f"{STEP}\ntopology.s.delayed-retry-min=1s", "needs quorum queues"),
        (f"{STEP}\nqueue-type=quorum\ntopology.s.delayed-retry-max=1s", "is nothing without a delayed-retry-min"),
        (f"{STEP}\nqueue-type=quorum\ntopology.s.delayed-retry-min=50s", "after 300000 ms its messages expire"),
    ],
)
def test_what_is_wrong_is_said_with_what_would_be_right(tmp_path: Path, text: str, said: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert said in problem


def test_the_workers_exchange_may_lead_to_the_dead_letters_by_another_key(tmp_path: Path) -> None:
    found = kept(tmp_path, f"{ORDERS}\ntopology.orders.dlq-exchange=shop\ntopology.orders.dlq-routing-key=dead")
    assert found["orders"].dead().exchange == "shop"  # type: ignore[union-attr]


def test_every_problem_is_named_at_once_with_its_line(tmp_path: Path) -> None:
    found = problems(tmp_path, f"{ORDERS}\ntopology.orders.ttl=x\ntopology.b.kind=y\nmax-trips=0")
    assert len(found) == 3
    assert any("application.properties:4)" in problem for problem in found)


def test_the_retries_that_the_broker_delays(tmp_path: Path) -> None:
    text = f"{NATIVE}\ntopology.n.delivery-limit=4\ntopology.n.delayed-retry-min=10m"
    found = kept(tmp_path, f"ladder=false\n{text}\n{STEP}\nqueue-type=quorum\ntopology.s.delayed-retry-min=20s")
    native, step = found["n"], found["s"]
    assert isinstance(native, Native)
    assert native.delayed_retry.delays == (600_000,) * 4
    assert isinstance(step, Pipeline)
    assert step.delayed_retry is not None
    assert step.delayed_retry.delays == (20_000, 40_000, 60_000)
    queues = {queue.name: queue.arguments for queue in native.topology().queues}
    assert queues == {"dlq-queue": {"x-queue-type": "quorum"}}
