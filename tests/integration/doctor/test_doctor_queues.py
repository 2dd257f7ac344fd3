"""What `doctor` says of queues on a real broker: for each finding a queue that has it, and ones that have not."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pika
import pytest
from broker_client import Side
from diagnosis import Patient
from program import eventually

from dlqbatch.doctor.findings import Code
from dlqbatch.doctor.job import diagnose
from dlqbatch.settings import load
from dlqbatch.topology.declare import apply_topology
from scripts.servers.management import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

pytestmark = pytest.mark.usefixtures("on_every_broker")


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


def policy(management: Management, pattern: str, kind: str = "policies", priority: int = 0, **options: object) -> None:
    definition = {name.replace("_", "-"): value for name, value in options.items()}
    body = {"pattern": pattern, "definition": definition, "priority": priority, "apply-to": "queues"}
    management.put(f"{kind}/{quoted(management.vhost)}/p-{priority}", body)


def to(queue: str) -> dict[str, Any]:
    return {"dead_letter_exchange": "", "dead_letter_routing_key": queue}


def unlimited(release: str) -> dict[str, Any]:
    return {"delivery_limit": -1} if release == "4.3" else {}


def test_a_ladder_as_it_is_declared_has_nothing_to_be_said_of_it(
    patient: Patient, side: Side, ladder: None, management: Management
) -> None:
    side.queue("orders", dead_letter_exchange="retry-exchange", dead_letter_routing_key="retry-routing-key")
    side.channel.queue_bind("orders", "amq.topic", "orders.created")
    told = {one.code for one in patient.findings()} - {Code.OLD_BROKER, Code.POLICY_EMPTY, Code.SCHEMA_MISSING}
    assert told == {Code.DEAD_LETTER_AT_MOST_ONCE}


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_every_topology_of_ours_is_sound(patient: Patient, tmp_path: Path, broker_release: str, kind: str) -> None:
    file = tmp_path / "application.properties"
    file.write_text(
        "dlqbatch.topology.set.kind=per-queue\ndlqbatch.topology.set.queue=work\n"
        "dlqbatch.topology.set.exchange=work.x\n"
        "dlqbatch.topology.pay.kind=pipeline\ndlqbatch.topology.pay.exchange=payments\n"
    )
    settings = load(patient.settings | {"queue_type": kind}, {"DLQBATCH_CONFIG": str(file)})
    apply_topology(settings)
    found = diagnose(settings)
    assert found.broker.map is not None
    assert {"work", "work.delay", "payments"} <= found.broker.map.queues.keys()
    quiet = {Code.OLD_BROKER, Code.POLICY_EMPTY, Code.SCHEMA_MISSING, Code.DEAD_LETTER_AT_MOST_ONCE}
    # What a team's consumers give back is theirs to bound; the broker does it for them, and they should know.
    expected = [(Code.DELIVERY_LIMIT_UNSET, "work")] if (broker_release, kind) == ("4.3", "quorum") else []
    expected += [(Code.NACK_NEVER_COUNTS, "'payments'")] if expected else []
    assert [(one.code, one.where) for one in found.findings if one.code not in quiet] == expected


def test_dead_letters_that_lead_to_a_stream_are_lost_on_an_old_broker(
    patient: Patient, side: Side, broker_release: str
) -> None:
    side.queue("dead.letters", "stream")
    side.queue("by-name", dead_letter_exchange="", dead_letter_routing_key="dead.letters")
    side.queue("by-binding", dead_letter_exchange="amq.fanout")
    side.channel.queue_bind("dead.letters", "amq.fanout", "")
    side.queue("elsewhere", dead_letter_exchange="", dead_letter_routing_key="by-name")
    lost = {"by-name", "by-binding"} if broker_release != "4.3" else set()
    assert patient.found(Code.DEAD_LETTERS_LOST_IN_STREAM).keys() == lost


def test_a_dead_letter_exchange_that_is_missing(patient: Patient, side: Side, management: Management) -> None:
    side.channel.exchange_declare("dlx", "topic", durable=True)
    side.queue("parked")
    side.channel.queue_bind("parked", "dlx", "#")
    side.queue("lost", dead_letter_exchange="gone")
    side.queue("kept", dead_letter_exchange="dlx")
    side.queue("by-policy")
    policy(management, "^by-", dead_letter_exchange="gone as well")
    assert patient.found(Code.DEAD_LETTER_EXCHANGE_MISSING).keys() == {"lost", "by-policy"}


def test_a_dead_letter_key_that_leads_nowhere(patient: Patient, side: Side, management: Management) -> None:
    for name, kind in (("d", "direct"), ("t", "topic"), ("f", "fanout"), ("bare", "topic"), ("h", "headers")):
        side.channel.exchange_declare(name, kind, durable=True)
    side.channel.exchange_declare("saved", "direct", durable=True, arguments={"alternate-exchange": "f"})
    side.channel.exchange_declare("onward", "topic", durable=True)
    side.channel.exchange_bind("t", "onward", "a.#")
    side.queue("parked")
    for exchange, key in (("d", "k"), ("t", "a.*"), ("f", ""), ("h", "")):
        side.channel.queue_bind("parked", exchange, key)
    good = [("d", "k"), ("t", "a.b"), ("f", "any"), ("h", "any"), ("saved", "none"), ("onward", "a.b"), ("", "parked")]
    bad = [("d", "other"), ("t", "b.a"), ("bare", "k"), ("onward", "a.b.c"), ("", "nobody"), ("bare", None)]
    for number, (exchange, key) in enumerate(good):
        side.queue(f"good-{number}", dead_letter_exchange=exchange, dead_letter_routing_key=key)
    for number, (exchange, key) in enumerate(bad):
        named = {} if key is None else {"dead_letter_routing_key": key}
        side.queue(f"bad-{number}", dead_letter_exchange=exchange, **named)
    for name, key in (
        ("own-key-lost", "b.a"),
        ("own-key-kept", "a.b"),
        ("own-pattern-lost", "b.#"),
        ("own-pattern-kept", "*.c"),
    ):
        side.queue(name, dead_letter_exchange="t")
        side.channel.queue_bind(name, "amq.topic", key)
    found = patient.found(Code.DEAD_LETTER_KEY_UNROUTED)
    assert found.keys() == {f"bad-{number}" for number in range(len(bad))} | {"own-key-lost", "own-pattern-lost"}
    # And it is so: what these dead-letter is gone, what the others do is there.
    for queue in ("bad-3", "own-key-lost", "good-4", "good-5", "own-key-kept"):
        way = (
            ("amq.topic", "b.a") if queue.endswith("lost") else ("amq.topic", "a.b") if "own" in queue else ("", queue)
        )
        side.channel.basic_publish(*way, b"x", pika.BasicProperties(expiration="0"))
    side.wait(lambda: side.depth("parked") == 3)


def test_a_cycle_that_the_broker_drops(patient: Patient, side: Side) -> None:
    side.queue("a", message_ttl=50, **to("b"))
    side.queue("b", message_ttl=50, **to("a"))
    side.queue("self", message_ttl=50, dead_letter_exchange="")
    side.queue("self-rejected", dead_letter_exchange="")
    side.queue("work", **to("wait"))
    side.queue("wait", message_ttl=50, **to("work"))
    found = patient.found(Code.DEAD_LETTER_CYCLE)
    assert found.keys() == {"a", "self", "self-rejected"}
    assert "'a' → 'b' → 'a'" in found["a"].what
    side.channel.basic_publish("", "a", b"x")
    side.channel.basic_publish("", "wait", b"x")
    side.wait(lambda: side.depth("work") == 1 and side.depth("a") + side.depth("b") == 0)


def test_consumers_that_fail_without_a_dead_letter_exchange(
    patient: Patient, side: Side, management: Management
) -> None:
    for name, arguments in {"failing": {}, "caught": to("parked"), "fine": {}}.items():
        side.queue(name, **arguments)
        side.fill(name, [b"x"])
        for _ in range(20 if name != "fine" else 2):
            side.wait(lambda name=name: side.depth(name) == 1)
            method, _, _ = side.channel.basic_get(name)
            side.channel.basic_nack(method.delivery_tag)
    side.wait(lambda: all(side.depth(name) == 1 for name in ("failing", "caught", "fine")))
    other = side._connection.channel()
    for name in ("failing", "caught", "fine"):
        other.basic_consume(name, lambda *_: None)
    assert eventually(lambda: patient.found(Code.FAILING_WITHOUT_DEAD_LETTERS).keys() == {"failing"})

    def redelivered() -> int:
        stats = {one["name"]: one.get("message_stats", {}) for one in management.queues()}
        return int(stats["caught"].get("redeliver", 0))

    assert eventually(lambda: redelivered() >= 10)
    other.close()
    assert eventually(lambda: patient.found(Code.FAILING_WITHOUT_DEAD_LETTERS) == {})


def test_a_delivery_limit_that_deletes_dead_letters(
    patient: Patient, side: Side, broker_release: str, management: Management
) -> None:
    for name in ("dead-limited", "dead-default", "dead-by-policy", "dead-free", "dead-with-exit", "dead-classic"):
        side.queue(f"work-{name}", **to(name))
    free = unlimited(broker_release)
    side.queue("dead-limited", "quorum", delivery_limit=3)
    side.queue("dead-default", "quorum")
    side.queue("dead-by-policy", "quorum", **({"delivery_limit": 9} if not free else {}))
    side.queue("dead-free", "quorum", **free)
    side.queue("dead-with-exit", "quorum", delivery_limit=3, **to("dead-free"))
    side.queue("dead-classic")
    policy(management, "^dead-by-policy$", delivery_limit=4)
    expected = {"dead-limited", "dead-by-policy"} | ({"dead-default"} if free else set())
    assert patient.found(Code.DELIVERY_LIMIT_DELETES).keys() == expected
    # A queue of nobody's dead letters is one thing, a queue that ingest reads is another.
    side.queue("lonely", "quorum", delivery_limit=3)
    assert "lonely" not in patient.found(Code.DELIVERY_LIMIT_DELETES)
    assert "lonely" in patient.found(Code.DELIVERY_LIMIT_DELETES, ingest_queues="lonely")


def test_the_default_delivery_limit_of_rabbitmq_4(patient: Patient, side: Side, broker_release: str) -> None:
    side.queue("bare", "quorum")
    side.queue("with-exit", "quorum", **to("parked"))
    side.queue("parked")
    side.queue("said", "quorum", delivery_limit=20)
    side.queue("classic")
    is_new = broker_release == "4.3"
    assert patient.found(Code.DELIVERY_LIMIT_DEFAULT).keys() == ({"bare"} if is_new else set())
    assert patient.found(Code.DELIVERY_LIMIT_UNSET).keys() == ({"with-exit"} if is_new else set())


def test_dead_letters_that_expire_and_queues_that_do(patient: Patient, side: Side, management: Management) -> None:
    for name in ("short", "lasting", "by-policy", "by-operator", "vanishing"):
        side.queue(f"work-{name}", **to(name))
    side.queue("short", message_ttl=600_000)
    side.queue("lasting")
    side.queue("by-policy")
    side.queue("by-operator")
    side.queue("vanishing", expires=86_400_000)
    side.queue("cache", expires=86_400_000)
    policy(management, "^by-policy$", message_ttl=600_000)
    policy(management, "^by-operator$", "operator-policies", message_ttl=600_000)
    assert patient.found(Code.DEAD_LETTERS_EXPIRE).keys() == {"short", "by-policy", "by-operator"}
    assert patient.found(Code.QUEUE_EXPIRES).keys() == {"vanishing"}


def test_a_delay_queue_without_an_outlet(patient: Patient, side: Side) -> None:
    side.queue("stuck", message_ttl=600_000)
    side.queue("leads-on", message_ttl=600_000, **to("parked"))
    side.queue("parked")
    side.queue("read", message_ttl=600_000)
    side.channel.queue_declare("mine", exclusive=True, arguments={"x-message-ttl": 600_000})
    other = side._connection.channel()
    other.basic_consume("read", lambda *_: None)
    assert patient.found(Code.DELAY_WITHOUT_OUTLET).keys() == {"stuck"}


def test_a_bound_that_drops_the_oldest(patient: Patient, side: Side, management: Management) -> None:
    side.queue("full", max_length=5)
    side.channel.queue_declare("passing", durable=True, auto_delete=True, arguments={"x-max-length": 5})
    side.queue("full-bytes")
    policy(management, "^full-bytes$", max_length_bytes=5000)
    side.queue("refusing", max_length=5, overflow="reject-publish")
    side.queue("passing-on", max_length=5, **to("parked"))
    side.queue("waiting", max_length=5, message_ttl=600_000, **to("parked"))
    side.queue("parked")
    assert patient.found(Code.OVERFLOW_DROPS).keys() == {"full", "full-bytes", "waiting"}


def test_a_bound_that_makes_a_copy_of_what_it_refuses(patient: Patient, side: Side, management: Management) -> None:
    side.queue("copying", max_length=5, overflow="reject-publish-dlx", **to("parked"))
    side.queue("by-policy", **to("parked"))
    policy(management, "^by-policy$", max_length_bytes=5000, overflow="reject-publish-dlx")
    side.queue("unbounded", overflow="reject-publish-dlx", **to("parked"))
    side.queue("refusing", max_length=5, overflow="reject-publish", **to("parked"))
    side.queue("without-dead-letters", max_length=5, overflow="reject-publish-dlx")
    side.queue("parked")
    assert patient.found(Code.OVERFLOW_COPIES).keys() == {"copying", "by-policy"}


def test_a_delay_queue_fed_with_expirations(patient: Patient, side: Side) -> None:
    for name, arguments in {"mixed": {}, "uniform": {"message_ttl": 20}}.items():
        side.queue(name, **arguments, **to("parked"))
    side.queue("parked")
    side.queue("read", **to("parked"))
    side.fill("read", [b"x"])
    for queue in ("mixed", "uniform"):
        side.channel.basic_publish("", queue, b"x", pika.BasicProperties(expiration="10"))
    side.wait(lambda: side.depth("parked") == 2)
    assert eventually(lambda: patient.found(Code.EXPIRATIONS_MIXED).keys() == {"mixed"})


def test_at_least_once_that_has_no_effect(patient: Patient, side: Side) -> None:
    side.queue("parked")
    strategy = {"dead_letter_strategy": "at-least-once", **to("parked")}
    side.queue("half", "quorum", **strategy)
    side.queue("whole", "quorum", overflow="reject-publish", **strategy)
    assert patient.found(Code.AT_LEAST_ONCE_INEFFECTIVE).keys() == {"half"}


def test_dead_lettering_that_is_not_confirmed(patient: Patient, side: Side, ladder: None) -> None:
    retry = {"dead_letter_exchange": "retry-exchange", "dead_letter_routing_key": "retry-routing-key"}
    side.queue("orders", "quorum", **retry)
    side.queue("safe", "quorum", **retry, dead_letter_strategy="at-least-once", overflow="reject-publish")
    found = patient.found(Code.DEAD_LETTER_AT_MOST_ONCE)
    assert "orders" in found
    assert "safe" not in found
    assert json.loads(shlex.split(found["orders"].fix)[-1])["dead-letter-strategy"] == "at-least-once"
    assert "'queue.delay.1', 'queue.delay.2', 'queue.delay.3'" in found


def test_dead_letters_that_nobody_takes(patient: Patient, side: Side) -> None:
    for name in ("piled", "ingested", "empty", "consumed"):
        side.queue(f"work-{name}", **to(name))
        side.queue(name)
        if name != "empty":
            side.fill(name, [b"x"])
    other = side._connection.channel()
    other.basic_consume("consumed", lambda *_: None)
    assert patient.found(Code.DEAD_LETTERS_PILE_UP, ingest_queues="ingested").keys() == {"piled"}


def test_origins_that_do_not_last(patient: Patient, side: Side, ladder: None, broker_release: str) -> None:
    retry = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}
    side.channel.queue_declare("lasting", durable=True, arguments=retry)
    side.channel.queue_declare("own", exclusive=True, durable=True, arguments=retry)
    side.channel.queue_declare("auto", auto_delete=True, durable=True, arguments=retry)
    side.channel.queue_declare("not-ours", auto_delete=True, durable=True)
    assert patient.found(Code.ORIGIN_NOT_LASTING).keys() == {"own", "auto"}


def test_a_policy_of_higher_priority_is_the_one_that_counts(
    patient: Patient, side: Side, management: Management
) -> None:
    side.queue("work")
    policy(management, "^work$", priority=1, dead_letter_exchange="gone")
    assert "work" in patient.found(Code.DEAD_LETTER_EXCHANGE_MISSING)
    policy(management, ".*", priority=2, max_length=3, overflow="reject-publish")
    assert patient.found(Code.DEAD_LETTER_EXCHANGE_MISSING) == {}


def test_a_virtual_host_of_many_queues_is_looked_at_whole(patient: Patient, side: Side) -> None:
    for number in range(501):
        side.queue(f"lost-{number}", dead_letter_exchange="gone")
    assert len(patient.found(Code.DEAD_LETTER_EXCHANGE_MISSING)) == 501
