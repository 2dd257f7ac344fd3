"""What `doctor` says of our own queues on a real broker, and of what RabbitMQ 4 does otherwise."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pika
import pytest
from broker_client import Side
from diagnosis import Patient
from program import eventually

from dlqbatch.broker.consume import CONSUMERS
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.job import diagnose
from dlqbatch.settings import load
from dlqbatch.topology.declare import apply_topology
from scripts.servers.management import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

pytestmark = pytest.mark.usefixtures("on_every_broker")

RETRY = {"dead-letter-exchange": "retry-exchange", "dead-letter-routing-key": "retry-routing-key"}


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    opened = Side(broker_url)
    yield opened
    opened.close()


@pytest.fixture
def patient(broker_url: str, management: Management, sqlite_url: str) -> Patient:
    return Patient(broker_url, management, sqlite_url)


@pytest.fixture
def ladder(patient: Patient) -> None:
    apply_topology(load(patient.settings, {"DLQBATCH_CONFIG": "/dev/null"}))


def policy(management: Management, pattern: str, priority: int = 0, **options: object) -> None:
    definition = {name.replace("_", "-"): value for name, value in options.items()}
    body = {"pattern": pattern, "definition": definition, "priority": priority, "apply-to": "queues"}
    management.put(f"policies/{quoted(management.vhost)}/p-{priority}", body)


def declared(options: dict[str, str]) -> dict[str, object]:
    return {name.replace("-", "_"): value for name, value in options.items()}


def test_failures_that_the_ladders_exchange_leads_nowhere(patient: Patient, side: Side, ladder: None) -> None:
    side.queue("by-pattern", dead_letter_exchange="retry-exchange")
    side.channel.queue_bind("by-pattern", "amq.topic", "orders.#")
    side.queue("by-key", dead_letter_exchange="retry-exchange")
    side.channel.queue_bind("by-key", "amq.topic", "orders.exact")
    side.queue("by-fanout", dead_letter_exchange="retry-exchange")
    side.channel.queue_bind("by-fanout", "amq.fanout", "")
    side.queue("declared", dead_letter_exchange="retry-exchange", dead_letter_routing_key="slip")
    side.queue("to-nobody", dead_letter_exchange="gone", dead_letter_routing_key="k")
    side.queue("right", **declared(RETRY))
    side.channel.queue_bind("right", "amq.topic", "orders.#")
    lost = patient.found(Code.DEAD_LETTER_KEY_UNROUTED)
    assert lost.keys() == {"by-pattern", "by-key", "declared"}
    unknown = patient.found(Code.DEAD_LETTER_KEY_UNKNOWN)
    assert unknown.keys() == {"by-fanout"}
    for found in (lost["by-pattern"], lost["by-key"], unknown["by-fanout"]):
        assert '"dead-letter-routing-key": "retry-routing-key"' in found.fix
    assert "bindings" in lost["declared"].fix
    assert "q/retry-queue" in lost["declared"].fix
    missing = patient.found(Code.DEAD_LETTER_EXCHANGE_MISSING)
    assert "q/retry-queue" in missing["to-nobody"].fix
    assert not any("dlq-queue" in one.fix for one in patient.findings())


def test_one_policy_for_all_that_lets_everything_expire_into_the_ladder(
    patient: Patient, ladder: None, management: Management
) -> None:
    policy(management, ".*", message_ttl=3000, **declared(RETRY))
    cycle = patient.found(Code.DEAD_LETTER_CYCLE)
    assert cycle.keys() == {"retry-queue"}
    assert "message-ttl" not in cycle["retry-queue"].fix
    assert patient.found(Code.DEAD_LETTERS_RETURN).keys() == {"dlq-queue", *(f"retry-queue-{n}" for n in (1, 2, 3))}
    short = patient.found(Code.DELAY_CUT_SHORT)
    assert short.keys() == {f"queue.delay.{n}" for n in (1, 2, 3)}
    assert "after 3000 ms" in short["queue.delay.3"].what
    assert "message-ttl" not in short["queue.delay.3"].fix


def test_what_is_bound_to_our_queues_and_is_not_ours(patient: Patient, side: Side, ladder: None) -> None:
    side.channel.queue_bind("retry-queue", "dlq-exchange", "dlq-routing-key")
    side.channel.queue_bind("retry-queue", "route-delay", "#")
    side.channel.queue_bind("queue.delay.2", "amq.topic", "odd ~ é/key.*")
    side.channel.exchange_bind("route-delay", "amq.direct", "binding.a.1")
    # These harm nobody: a second key between the same two, a listener, what others lead to the ends of the ladder.
    side.channel.queue_bind("retry-queue", "retry-exchange", "other")
    side.queue("audit")
    side.channel.queue_bind("audit", "dlq-exchange", "#")
    side.channel.queue_bind("retry-queue", "amq.fanout", "")
    side.channel.queue_bind("dlq-queue", "amq.fanout", "")
    side.channel.exchange_bind("retry-exchange", "amq.direct", "retry-routing-key")
    found = [one for one in patient.findings() if one.code is Code.BINDING_NOT_OURS]
    assert sorted(one.where for one in found) == ["amq.direct", "amq.topic", "dlq-exchange", "route-delay"]


def test_consumers_on_our_queues_that_are_not_ours(
    patient: Patient, side: Side, ladder: None, management: Management
) -> None:
    for queue in ("retry-queue-1", "queue.delay.1", "dlq-queue"):
        side.channel.basic_consume(queue, lambda *_: None)
    side.channel.basic_consume("retry-queue-2", lambda *_: None, consumer_tag=f"{CONSUMERS.decode()}3")

    def is_told() -> bool:
        told = (management.queue(queue) for queue in ("retry-queue-1", "retry-queue-2", "queue.delay.1"))
        return all(one.get("consumer_details") for one in told)

    assert eventually(is_told)
    assert patient.found(Code.CONSUMER_ON_OURS).keys() == {"retry-queue-1", "queue.delay.1"}


def test_listeners_that_get_each_return(patient: Patient, side: Side, tmp_path: Path) -> None:
    file = tmp_path / "application.properties"
    file.write_text(
        "dlqbatch.topology.set.kind=per-queue\ndlqbatch.topology.set.queue=work\ndlqbatch.topology.set.exchange=shop\n"
    )
    settings = load(patient.settings, {"DLQBATCH_CONFIG": str(file)})
    apply_topology(settings)

    def found() -> list[str]:
        return [one.what for one in diagnose(settings).findings if one.code is Code.RETURNS_OVERHEARD]

    side.queue("invoices")
    side.channel.queue_bind("invoices", "shop", "invoice.#")
    assert found() == []
    side.queue("audit")
    side.channel.queue_bind("audit", "shop", "#")
    [what] = found()
    assert "'work'" in what
    assert "'audit'" in what
    assert "invoices" not in what


def test_a_delay_before_the_ladder(patient: Patient, side: Side, ladder: None) -> None:
    side.queue("orders", dead_letter_exchange="", dead_letter_routing_key="orders.dlq")
    side.queue("orders.dlq", message_ttl=3_600_000, **declared(RETRY))
    side.queue("work", message_ttl=3_600_000, **declared(RETRY))
    found = patient.found(Code.ORIGIN_ONLY_DELAYS)
    assert found.keys() == {"orders.dlq"}
    assert '"x-dead-letter-exchange": "retry-exchange"' in found["orders.dlq"].fix


def test_ways_back_to_queues_that_are_gone(patient: Patient, side: Side, ladder: None) -> None:
    side.queue("there")
    for queue in ("there", "gone", "unbound"):
        side.channel.exchange_declare(f"dlqbatch.return.{queue}", "fanout", durable=True)
    side.queue("unbound")
    side.channel.queue_bind("there", "dlqbatch.return.there", "")
    [found] = patient.found(Code.RETURN_EXCHANGE_LEFT).values()
    assert found.where == "'dlqbatch.return.gone'"
    assert "dlqbatch.return.gone?if-unused=true" in found.fix


def test_tiers_that_were_taken_away(patient: Patient, side: Side, ladder: None) -> None:
    for queue in ("retry-queue-4", "queue.delay.5", "other-queue-4", "retry-queue-6"):
        side.queue(queue)
    side.queue("queue.delay.4", dead_letter_exchange="", dead_letter_routing_key="retry-queue-4")
    for queue in ("retry-queue-4", "queue.delay.5", "other-queue-4"):
        side.fill(queue, [b"forgotten"])
    assert eventually(lambda: patient.found(Code.TIER_LEFT_BEHIND).keys() == {"retry-queue-4", "queue.delay.5"}), (
        patient.found(Code.TIER_LEFT_BEHIND)
    )
    # An ingest would take retries for dead letters.
    assert not patient.found(Code.DEAD_LETTERS_PILE_UP)


def test_delays_that_were_taken_away(patient: Patient, side: Side, ladder: None) -> None:
    out = {"dead_letter_exchange": "retry-exchange-1", "dead_letter_routing_key": "retry.#.1"}
    for queue in ("queue.delay.3600s", "queue.delay.1500ms", "other.3600s"):
        side.queue(queue, message_ttl=3_600_000, **out)
    side.queue("queue.delay.60s", message_ttl=60_000, dead_letter_exchange="amq.topic")
    side.fill("queue.delay.3600s", [b"it comes back"])

    def found() -> dict[str, Finding]:
        return patient.found(Code.DELAY_LEFT_BEHIND)

    assert found().keys() == {"queue.delay.3600s", "queue.delay.1500ms"}
    assert eventually(lambda: "holds 1 message(s)" in found()["queue.delay.3600s"].what)
    assert "delete_queue" in found()["queue.delay.3600s"].fix
    assert not patient.found(Code.TIER_LEFT_BEHIND)
    assert not patient.found(Code.ORIGIN_ONLY_DELAYS)


def test_quorum_queues_that_nobody_can_get_from(patient: Patient, side: Side) -> None:
    for name, kind in (("one-taker", "quorum"), ("one-taker-classic", "classic"), ("not-read", "quorum")):
        side.queue(name, kind, single_active_consumer=True)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="single active consumer"):
        side.channel.basic_get("one-taker")
    found = patient.found(Code.SINGLE_ACTIVE_CONSUMER, ingest_queues="one-taker,one-taker-classic")
    assert found.keys() == {"one-taker"}
    assert patient.found(Code.SINGLE_ACTIVE_CONSUMER, check_queues="one-taker").keys() == {"one-taker"}


def _url(patient: Patient) -> str:
    return str(patient.settings["broker_url"])


def test_a_consumer_that_requeues_for_ever(patient: Patient, side: Side, ladder: None) -> None:
    side.queue("looping", **declared(RETRY))
    side.fill("looping", [b"x"])
    stop = threading.Event()

    def work() -> None:
        other = Side(_url(patient))

        def give_back(channel: object, method: object, *_: object) -> None:
            channel.basic_nack(method.delivery_tag, requeue=True)  # type: ignore[attr-defined]

        other.channel.basic_qos(prefetch_count=1)
        other.channel.basic_consume("looping", give_back)
        while not stop.is_set():
            other._connection.process_data_events(0.01)
        other.close()

    worker = threading.Thread(target=work)
    worker.start()
    try:
        assert eventually(lambda: patient.found(Code.REQUEUED_FOR_EVER).keys() == {"looping"})
    finally:
        stop.set()
        worker.join()


def test_dead_letters_that_nobody_confirms(patient: Patient, side: Side) -> None:
    stuck = {"dead_letter_strategy": "at-least-once", "overflow": "reject-publish", "message_ttl": 1}
    side.queue("sticking", "quorum", **stuck, dead_letter_exchange="", dead_letter_routing_key="nobody")
    side.queue("parked")
    side.queue("flowing", "quorum", **stuck, dead_letter_exchange="", dead_letter_routing_key="parked")
    for queue in ("sticking", "flowing"):
        side.channel.basic_publish("", queue, b"x")
    side.wait(lambda: side.depth("parked") == 1)
    assert eventually(lambda: patient.found(Code.STUCK_DEAD_LETTERS).keys() == {"sticking"})


def test_options_that_rabbitmq_4_3_refuses(patient: Patient, side: Side, broker_release: str) -> None:
    if broker_release == "4.3":
        with pytest.raises(pika.exceptions.AMQPError):
            side.queue("old", queue_version=1)
        return
    side.queue("lazy", queue_mode="lazy")
    side.queue("old", queue_version=1)
    side.queue("new", queue_version=2)
    side.queue("placed", queue_master_locator="client-local")
    found = patient.found(Code.QUEUE_MODE_ARGUMENT)
    assert found.keys() == {"lazy", "old", "placed"}
    assert "x-queue-mode" not in found["lazy"].fix


def test_what_the_broker_says_is_deprecated(patient: Patient, side: Side, broker_release: str) -> None:
    assert patient.found(Code.DEPRECATED_IN_USE) == {}
    if broker_release == "4.3":
        side.channel.queue_declare("passing", durable=False, exclusive=False)
        assert eventually(lambda: patient.found(Code.DEPRECATED_IN_USE).keys() == {"transient_nonexcl_queues"})


def test_delayed_retry(patient: Patient, side: Side, ladder: None, management: Management, broker_release: str) -> None:
    side.queue("orders", "quorum", **declared(RETRY))
    side.queue("slow", "quorum", **declared(RETRY))
    side.queue("dead", "quorum")
    if broker_release != "4.3":
        side.queue("asked", "quorum", delayed_retry_type="all", delayed_retry_min=1000)  # means nothing there
        assert patient.found(Code.DELAYED_RETRY_ON_OURS, ingest_queues="asked") == {}
        return
    policy(management, "^(orders|dead)$", delayed_retry_type="all", delayed_retry_min=1000, delayed_retry_max=60_000)
    policy(management, "^slow$", 1, delayed_retry_type="failed", delayed_retry_min=1000, delayed_retry_max=3_600_000)
    side.queue("told", "quorum", delayed_retry_type="all", delayed_retry_min=1000, delayed_retry_max=60_000)
    read = "dead,told"
    assert patient.found(Code.DELAYED_RETRY_ON_OURS, ingest_queues=read).keys() == {"dead", "told"}
    late = patient.found(Code.DELAYED_RETRY_LONGER_THAN_WINDOW, ingest_queues=read)
    assert late.keys() == {"slow"}
    assert '"delayed-retry-max": 900000' in late["slow"].fix


def test_limits_that_a_nack_does_not_count_for(patient: Patient, side: Side, broker_release: str) -> None:
    side.queue("limited", "quorum", delivery_limit=5)
    side.queue("free", "quorum")
    side.queue("classic")
    side.fill("limited", [b"x"])
    for _ in range(12):
        side.wait(lambda: side.depth("limited") == 1 or broker_release != "4.3")
        method, _, _ = side.channel.basic_get("limited")
        if method is None:
            break
        side.channel.basic_nack(method.delivery_tag, requeue=True)
    goes_on = broker_release == "4.3"
    side.wait(lambda: side.depth("limited") == int(goes_on))
    expected = {"'limited'"} if goes_on else set()
    assert patient.found(Code.NACK_NEVER_COUNTS).keys() == expected


def test_a_virtual_host_whose_queues_are_quorum_queues(
    patient: Patient, management: Management, broker_release: str
) -> None:
    where = f"virtual host '{management.vhost}'"
    assert patient.found(Code.DEFAULT_QUEUE_TYPE) == {}
    management.put(f"vhosts/{quoted(management.vhost)}", {"default_queue_type": "quorum"})
    expected = {where} if broker_release == "4.3" else set()
    assert patient.found(Code.DEFAULT_QUEUE_TYPE).keys() == expected


def test_it_says_what_it_looked_at(patient: Patient, management: Management) -> None:
    found = diagnose(load(patient.settings, {"DLQBATCH_CONFIG": "/dev/null"}))
    port = _url(patient).rpartition(":")[2].partition("/")[0]
    assert f"at 127.0.0.1:{port}, virtual host '{management.vhost}', as 'guest'" in found.looked_at()
    assert str(patient.settings["database_url"]) in found.looked_at()
