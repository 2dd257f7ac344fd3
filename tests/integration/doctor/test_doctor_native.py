"""What `doctor` says of retries that the broker should delay and does not: each way of using them wrongly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side
from diagnosis import Patient
from pasted_commands import Shell
from program import Program, eventually

from dlqbatch.doctor.findings import Code
from dlqbatch.settings import load
from dlqbatch.topology import job as topology_job
from scripts.servers.management import Management, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.settings import Settings

NATIVE = {
    "ladder": "false",
    "topology.orders.kind": "native",
    "topology.orders.queue": "orders",
    "topology.orders.delayed-retry-min": "1s",
    "topology.orders.delayed-retry-max": "5s",
}
CODES = {code for code in Code if code.startswith("native-")}


@pytest.fixture
def patient(broker43_url: str, management43: Management, sqlite_url: str) -> Patient:
    return made(broker43_url, management43, sqlite_url)


def made(broker_url: str, management: Management, database_url: str) -> Patient:
    patient = Patient(broker_url, management, database_url)
    patient.settings |= NATIVE
    return patient


@pytest.fixture
def side(broker43_url: str) -> Iterator[Side]:
    opened = Side(broker43_url)
    yield opened
    opened.close()


def settings(patient: Patient) -> Settings:
    return load(patient.settings, {"DLQBATCH_CONFIG": "/dev/null"})


def apply(patient: Patient) -> None:
    chosen = settings(patient)
    topology_job.apply(chosen, topology_job.choose(chosen, ()))


def found(patient: Patient) -> dict[Code, str]:
    return {one.code: one.what for one in patient.findings() if one.code in CODES}


def policy(api: Management, definition: dict[str, Any], priority: int = 5, kind: str = "policies") -> None:
    body = {"pattern": "^ord", "apply-to": "queues", "priority": priority, "definition": definition}
    api.put(f"{kind}/{quoted(api.vhost)}/theirs", body)


def paste(patient: Patient, api: Management, side: Side, code: Code) -> None:
    fixes = [one.fix for one in patient.findings() if one.code is code]
    assert len(fixes) == 1
    Shell(api, Program({name: str(value) for name, value in patient.settings.items()}), side.depth).paste(fixes[0])


def test_nothing_is_said_of_a_queue_whose_retries_are_delayed(patient: Patient, side: Side) -> None:
    side.queue("orders", "quorum")
    apply(patient)
    assert found(patient) == {}


def test_the_policy_that_is_missing_and_the_queue_that_is_not_there(patient: Patient, side: Side) -> None:
    assert found(patient).keys() == {Code.NATIVE_QUEUE_MISSING}
    side.queue("orders", "quorum")
    assert found(patient).keys() == {Code.NATIVE_POLICY_MISSING}
    apply(patient)
    side.channel.queue_delete("orders")
    side.queue("orders")
    (said,) = found(patient).items()
    assert said[0] is Code.NATIVE_NOT_QUORUM
    assert "only a quorum queue delays retries" in said[1]


@pytest.mark.parametrize(
    ("definition", "priority", "kind", "said"),
    [
        ({"max-length": 100}, 5, "policies", "delayed-retry-type is disabled, wanted is failed"),
        ({"max-length": 100}, 1, "policies", "only one policy applies to a queue"),
        ({"delivery-limit": 20}, 5, "policies", "delivery-limit is 20, wanted is 3"),
        ({"delayed-retry-type": "disabled"}, 5, "policies", "delayed-retry-type is disabled"),
        ({"delivery-limit": 1}, 0, "operator-policies", "delivery-limit is 1, wanted is 3"),
        ({"delayed-retry-max": 2_000}, 0, "operator-policies", "delayed-retry-max is 2000, wanted is 5000"),
    ],
)
def test_a_policy_of_others_that_decides_otherwise(
    patient: Patient,
    side: Side,
    management43: Management,
    definition: dict[str, Any],
    priority: int,
    kind: str,
    said: str,
) -> None:
    side.queue("orders", "quorum")
    apply(patient)
    policy(management43, definition, priority, kind)
    assert said in found(patient)[Code.NATIVE_POLICY_DIFFERS]
    paste(patient, management43, side, Code.NATIVE_POLICY_DIFFERS)
    assert found(patient) == {}
    if "max-length" in definition:
        policies = management43.get(f"policies/{quoted(management43.vhost)}")
        assert max(policies, key=lambda one: one["priority"])["definition"]["max-length"] == 100


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"delivery_limit": 2}, "delivery-limit is 2, wanted is 3"),
        ({"dead_letter_strategy": "at-most-once"}, "dead-letter-strategy is at-most-once, wanted is at-least-once"),
        ({"overflow": "drop-head"}, "overflow is drop-head, wanted is reject-publish"),
        ({"dead_letter_exchange": "amq.fanout"}, "dead-letter-exchange is amq.fanout, wanted is dlq-exchange"),
    ],
)
def test_an_argument_that_decides_otherwise(
    patient: Patient, side: Side, management43: Management, arguments: dict[str, Any], said: str
) -> None:
    apply(patient)
    side.queue("orders", "quorum", **arguments)
    assert said in found(patient)[Code.NATIVE_POLICY_DIFFERS]
    paste(patient, management43, side, Code.NATIVE_POLICY_DIFFERS)
    assert found(patient) == {}


def test_messages_that_expire_before_their_last_retry(patient: Patient, side: Side) -> None:
    apply(patient)
    side.queue("orders", "quorum", message_ttl=6_000)
    assert "delayed by 6000 ms together" in found(patient)[Code.NATIVE_TTL_SHORT]
    side.channel.queue_delete("orders")
    side.queue("orders", "quorum", message_ttl=6_001)
    assert found(patient) == {}


def test_consumers_that_reject_without_requeue(patient: Patient, side: Side) -> None:
    side.queue("orders", "quorum")
    apply(patient)
    side.fill("orders", [b"%d" % number for number in range(12)])
    for _ in range(12):
        method, _, _ = side.channel.basic_get("orders")
        side.channel.basic_reject(method.delivery_tag, requeue=False)
    assert eventually(lambda: Code.NATIVE_NEVER_RETRIED in found(patient))
    assert "12 of 12 deliveries were rejected without requeue" in found(patient)[Code.NATIVE_NEVER_RETRIED]


def test_consumers_that_nack_are_named_by_the_delivery_limit(patient: Patient, side: Side) -> None:
    side.queue("orders", "quorum")
    apply(patient)
    (note,) = (one for one in patient.findings() if one.code is Code.NACK_NEVER_COUNTS)
    assert "'orders'" in note.where


def test_a_broker_that_delays_no_retries(broker_url: str, management: Management, sqlite_url: str) -> None:
    old = made(broker_url, management, sqlite_url)
    assert found(old).keys() == {Code.NATIVE_UNSUPPORTED}
