"""What `doctor` says of a real broker itself, of our rights there, of our own topologies and of the policy."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest
from broker_client import Side
from diagnosis import Patient
from ready_store import make_tables

from dlqbatch.broker.management import Api
from dlqbatch.doctor.findings import Code
from dlqbatch.doctor.job import Surveyor
from dlqbatch.drain.event_config import event_config
from dlqbatch.settings import load
from dlqbatch.topology.declare import apply_topology
from dlqbatch.topology.model import CHANGING
from scripts.servers.management import Management, quoted
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RETRY = {"dead_letter_exchange": "retry-exchange", "dead_letter_routing_key": "retry-routing-key"}
BACK = r"^dlqbatch\.return\..*$"
ENOUGH = {
    "configure": BACK,
    "write": r"^(route-delay|dlq-exchange|dlqbatch\.return\..*|orders)$",
    "read": r"^(retry-queue(-\d+)?|dlq-queue|dlqbatch\.return\..*)$",
}


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


@pytest.fixture
def user(management: Management, broker_url: str) -> Iterator[str]:
    """A login of its own; the address of the broker for it."""
    name = f"user-{management.vhost}"
    management.put(f"users/{quoted(name)}", {"password": "p", "tags": "management"})
    yield broker_url.replace("guest:guest@", f"{name}:p@")
    management.delete(f"users/{quoted(name)}")


def permit(management: Management, url: str, **rights: str) -> None:
    name = url.partition("://")[2].partition(":")[0]
    management.put(f"permissions/{quoted(management.vhost)}/{quoted(name)}", ENOUGH | rights)


@pytest.mark.usefixtures("on_every_broker")
def test_rights_that_a_run_needs(patient: Patient, user: str, management: Management, side: Side, ladder: None) -> None:
    permit(management, user)
    assert patient.found(Code.PERMISSION_MISSING, broker_url=user) == {}
    side.fill("retry-queue", [b"x"])
    permit(management, user, write="^dlq-exchange$", read="^retry-queue$")
    [found] = patient.found(Code.PERMISSION_MISSING, broker_url=user).values()
    [other] = {one.what for one in patient.findings(broker_url=user) if one.code is found.code} - {found.what}
    assert "may not read queue 'dlq-queue', queue 'retry-queue-1'" in other + found.what
    assert "may not write exchange 'route-delay'" in other + found.what
    # It asked, and took or published nothing.
    assert side.depth("retry-queue") == 1
    assert [message.redelivered for message in side.empty("retry-queue")] == [False]
    assert all(side.depth(queue) == 0 for queue in ("queue.delay.1", "dlq-queue"))


@pytest.mark.usefixtures("on_every_broker")
def test_the_right_to_make_ways_back_is_told_where_an_administrator_asks(
    patient: Patient, user: str, management: Management, ladder: None
) -> None:
    permit(management, user, configure="^$")
    assert patient.found(Code.RETURN_PERMISSION_MISSING, broker_url=user) == {}
    host, port = management._address
    administrator = {"broker_url": user, "management_url": f"http://guest:guest@{host}:{port}"}
    [found] = patient.found(Code.RETURN_PERMISSION_MISSING, **administrator).values()
    assert "may not configure the exchanges dlqbatch.return.*, nor write to the default exchange" in found.what
    permit(management, user)
    assert patient.found(Code.RETURN_PERMISSION_MISSING, **administrator) == {}


def test_a_management_api_that_does_not_answer_leaves_what_amqp_tells(
    patient: Patient, user: str, management: Management, ladder: None
) -> None:
    permit(management, user, write="^$")
    silent = patient.found(Code.MANAGEMENT_SILENT, broker_url=user, management_url="http://127.0.0.1:9")
    assert "rabbitmq-plugins enable rabbitmq_management" in silent["http://127.0.0.1:9"].fix
    told = {one.code for one in patient.findings(broker_url=user, management_url="http://127.0.0.1:9")}
    assert Code.PERMISSION_MISSING in told
    assert patient.found(Code.MANAGEMENT_SILENT, broker_url=user) == {}
    name = f"user-{management.vhost}"
    management.put(f"users/{quoted(name)}", {"password": "p", "tags": ""})
    [refused] = patient.found(Code.MANAGEMENT_SILENT, broker_url=user).values()
    assert refused.fix == f"rabbitmqctl set_user_tags {name} management"


def test_an_old_broker_is_told_from_a_new_one(patient: Patient, management43: Management, broker43_url: str) -> None:
    new = Patient(broker43_url, management43, str(patient.settings["database_url"]))
    assert new.found(Code.OLD_BROKER) == {}
    version = Management.get(management43, "overview")["rabbitmq_version"]
    assert tuple(map(int, version.split(".")[:2])) >= (3, 13)
    assert "RabbitMQ 3.10" in patient.found(Code.OLD_BROKER)["broker"].what


@pytest.mark.slow
def test_an_alarm_in_effect(work_folder: Path, sqlite_url: str) -> None:
    with RabbitNode(work_folder / "rabbitmq").start() as node:
        patient = Patient(node.url, Management(node.management_url), sqlite_url)
        assert patient.found(Code.ALARM) == {}
        node.set_memory_limit(0.000001)
        assert "memory alarm" in patient.found(Code.ALARM)["broker"].what


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_how_far_the_brokers_clock_is_off(broker_url: str, management: Management, hours: int) -> None:
    host, port = management._address

    def clock() -> datetime:
        return datetime.now(UTC) - timedelta(hours=hours)

    reader = Surveyor(Api(broker_url, f"http://{host}:{port}"), clock=clock)
    assert reader.map() is not None
    assert reader.skew is not None
    assert abs(reader.skew - hours * 3600) < 5


def test_a_topology_of_ours_in_part(patient: Patient, side: Side) -> None:
    assert patient.found(Code.TOPOLOGY_NOT_APPLIED).keys() == {"topology 'ladder'"}
    settings = load(patient.settings, {"DLQBATCH_CONFIG": "/dev/null"})
    apply_topology(settings)
    assert patient.found(Code.TOPOLOGY_NOT_APPLIED) == {}
    assert patient.found(Code.TOPOLOGY_INCOMPLETE) == {}
    side.channel.queue_unbind("queue.delay.2", "route-delay", "binding.#.2")
    assert (
        "route-delay --binding.#.2--> queue.delay.2"
        in patient.found(Code.TOPOLOGY_INCOMPLETE)["topology 'ladder'"].what
    )
    side.channel.queue_delete("queue.delay.2")
    assert "not on the broker: 'queue.delay.2'" in patient.found(Code.TOPOLOGY_INCOMPLETE)["topology 'ladder'"].what
    told = {one.code for one in patient.findings(management_url="http://127.0.0.1:9")}
    assert Code.TOPOLOGY_INCOMPLETE in told


def test_a_topology_of_ours_that_is_another_one_there(patient: Patient, side: Side) -> None:
    side.queue("retry-queue", max_length=10)
    side.channel.exchange_declare("dlq-exchange", "fanout", durable=True)
    side.queue(
        "queue.delay.1", message_ttl=5, dead_letter_exchange="retry-exchange-1", dead_letter_routing_key="retry.#.1"
    )
    side.channel.queue_declare("dlq-queue", durable=True)
    found = patient.found(Code.TOPOLOGY_DIFFERS)
    assert found.keys() == {"retry-queue", "dlq-exchange", "queue.delay.1"}
    assert "x-max-length is 10, the settings want none" in found["retry-queue"].what
    assert found["queue.delay.1"].fix == "dlqbatch topology apply --change-ttl"
    same = patient.found(Code.TOPOLOGY_DIFFERS, tier_ttls="5,15000,20000")
    assert same.keys() == {"retry-queue", "dlq-exchange"}


def test_a_change_of_delays_that_was_cut_off(patient: Patient, side: Side) -> None:
    assert patient.found(Code.DELAY_CHANGE_UNFINISHED) == {}
    side.queue(CHANGING)
    assert len(patient.found(Code.DELAY_CHANGE_UNFINISHED)) == 1
    side.channel.basic_consume(CHANGING, lambda *_: None)
    assert patient.found(Code.DELAY_CHANGE_UNFINISHED) == {}


def test_queues_that_ingest_is_to_take_from(patient: Patient, side: Side) -> None:
    side.queue("dlq.here")
    found = patient.found(Code.INGEST_QUEUE_MISSING, ingest_queues="dlq.here,dlq.gone,dlq.*")
    assert found.keys() == {"dlq.gone"}
    unmatched = patient.found(Code.INGEST_WILDCARD_UNMATCHED, ingest_queues="dlq.*,dead.*")
    assert ["'dead.*'" in one.what for one in unmatched.values()] == [True]


def test_events_and_bindings_that_miss_each_other(patient: Patient, side: Side, ladder: None) -> None:
    make_tables(str(patient.settings["database_url"]))
    store = event_config(load(patient.settings, {"DLQBATCH_CONFIG": "/dev/null"}))
    for name in ("orders.created", "payment.#", "direct-key", "orders.*.late", "nobody"):
        store.set(name, 3)
    side.queue("orders", **RETRY)
    for key in ("orders.created", "orders.lost", "payment.*.failed"):
        side.channel.queue_bind("orders", "amq.topic", key)
    side.channel.queue_bind("orders", "amq.direct", "direct-key")
    side.channel.queue_bind("orders", "amq.direct", "direct-lost")
    side.queue("other")
    side.channel.queue_bind("other", "amq.topic", "other.key")
    assert patient.found(Code.EVENT_WITHOUT_BINDING).keys() == {"orders.*.late", "nobody"}
    missed = [one for one in patient.findings() if one.code is Code.BINDING_WITHOUT_EVENT]
    assert [one.fix for one in missed] == ["dlqbatch events set direct-lost 3", "dlqbatch events set orders.lost 3"]
    store.set("#", 3)
    assert patient.found(Code.BINDING_WITHOUT_EVENT) == {}
    # Through a fanout exchange any key may come.
    side.channel.queue_bind("orders", "amq.fanout", "")
    assert patient.found(Code.EVENT_WITHOUT_BINDING) == {}


def test_a_policy_without_a_single_event(patient: Patient, ladder: None) -> None:
    make_tables(str(patient.settings["database_url"]))
    assert len(patient.found(Code.POLICY_EMPTY)) == 1
    assert patient.found(Code.POLICY_EMPTY, allow_empty_policy="true") == {}
    event_config(load(patient.settings, {"DLQBATCH_CONFIG": "/dev/null"})).set("orders.created", None)
    assert patient.found(Code.POLICY_EMPTY) == {}
