"""Retries that the broker delays by a policy of ours: set, compared, exported, refused and deleted on a real broker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side

from dlqbatch.broker.access import vhost_of
from dlqbatch.errors import BrokerUnreachable
from dlqbatch.settings import Settings, load
from dlqbatch.topology import job as topology_job
from dlqbatch.topology.kinds import Native, Pipeline
from dlqbatch.topology.plan import DIFFERENT, NOT_KNOWN, REFUSED, SAME, TO_CREATE, Item
from dlqbatch.topology.policies import PolicyRefused
from scripts.servers.management import Management, ManagementError, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "dlqbatch.native.orders"
ORDERS = Native("orders", delayed_retry_min=1_000, delayed_retry_max=30_000, dlq_queue_type="classic")
IN_EFFECT = {
    "delayed-retry-type": "failed",
    "delayed-retry-min": 1_000,
    "delayed-retry-max": 30_000,
    "delivery-limit": 3,
    "dead-letter-exchange": "dlq-exchange",
    "dead-letter-routing-key": "dlq-routing-key",
    "dead-letter-strategy": "at-least-once",
    "overflow": "reject-publish",
}


def settings_for(broker_url: str, management: Management, database_url: str, **more: object) -> Settings:
    api = "http://guest:guest@{}:{}".format(*management._address)
    given = {"broker_url": broker_url, "management_url": api, "database_url": database_url, "ladder": "false", **more}
    return load(given, {"DLQBATCH_CONFIG": "/dev/null"})


@pytest.fixture
def settings(broker43_url: str, management43: Management, sqlite_url: str) -> Settings:
    return settings_for(broker43_url, management43, sqlite_url)


@pytest.fixture
def side(broker43_url: str) -> Iterator[Side]:
    opened = Side(broker43_url)
    yield opened
    opened.close()


def put_policy(api: Management, name: str, definition: dict[str, object], kind: str = "policies", **more: Any) -> None:
    body = {"pattern": "^orders$", "apply-to": "queues", "priority": 0, "definition": definition, **more}
    api.put(f"{kind}/{quoted(api.vhost)}/{name}", body)


def policies(api: Management) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in api.get(f"policies/{quoted(api.vhost)}")}


def planned(settings: Settings, native: Native = ORDERS) -> Item:
    (item,) = (one for one in topology_job.plan(settings, (native,)).plan.items if one.kind == "policy")
    return item


def test_the_policy_is_set_once_and_follows_the_settings(
    settings: Settings, side: Side, management43: Management
) -> None:
    side.queue("orders", "quorum", max_length=1_000)
    assert planned(settings).state == TO_CREATE
    assert topology_job.apply(settings, (ORDERS,)).is_done
    made = policies(management43)
    assert made.keys() == {NAME}
    assert made[NAME]["definition"] == IN_EFFECT
    assert (made[NAME]["pattern"], made[NAME]["apply-to"]) == ("^orders$", "quorum_queues")
    assert side.exists("dlq-queue")
    assert topology_job.plan(settings, (ORDERS,)).is_done
    longer = Native("orders", 2_000, 30_000, dlq_queue_type="classic")
    changed = planned(settings, longer)
    assert (changed.state, [tuple(each) for each in changed.differences]) == (
        DIFFERENT,
        [("delayed-retry-min", "1000", "2000")],
    )
    topology_job.apply(settings, (longer,))
    assert policies(management43)[NAME]["definition"] == {**IN_EFFECT, "delayed-retry-min": 2_000}


def test_a_pipeline_gets_the_policy_for_its_own_queue(settings: Settings, management43: Management) -> None:
    step = Pipeline("settle", "settlements", queue_type="quorum", delayed_retry_min=1_000)
    topology_job.apply(settings, (step,))
    (policy,) = policies(management43).values()
    limits = {"delayed-retry-min": 1_000, "delayed-retry-max": 300_000, "delivery-limit": 3}
    assert policy["definition"] == {"delayed-retry-type": "failed", **limits}
    assert topology_job.plan(settings, (step,)).is_done
    gone = topology_job.delete(settings, (step,))
    assert [one.name for one in gone if one.kind == "policy" and one.is_gone] == ["dlqbatch.native.settlements"]
    assert policies(management43) == {}


def test_it_may_be_set_before_the_workers_declare_their_queue(settings: Settings, management43: Management) -> None:
    topology_job.apply(settings, (ORDERS,))
    assert policies(management43).keys() == {NAME}


def test_what_is_exported_is_what_apply_makes(settings: Settings, management43: Management) -> None:
    management43.post(f"definitions/{quoted(management43.vhost)}", topology_job.export(settings, (ORDERS,), None))
    assert topology_job.plan(settings, (ORDERS,)).is_done
    with pytest.raises(PolicyRefused, match=r"only RabbitMQ 4\.3\.1 or later"):
        topology_job.export(settings, (ORDERS,), (4, 3, 0))


def refused(settings: Settings, api: Management, side: Side) -> str:
    """What is said of it; nothing may have been made."""
    before = policies(api)
    assert planned(settings).state == REFUSED
    with pytest.raises(PolicyRefused) as caught:
        topology_job.apply(settings, (ORDERS,))
    assert policies(api) == before
    assert not side.exists("dlq-queue")
    return caught.value.why


def test_a_classic_queue_is_refused(settings: Settings, side: Side, management43: Management) -> None:
    side.queue("orders", "classic")
    assert "only a quorum queue delays retries" in refused(settings, management43, side)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dead_letter_exchange": "retry-exchange"}, "dead-letter-exchange"),
        ({"delivery_limit": 2}, "delivery-limit"),
        ({"overflow": "drop-head"}, "overflow"),
        ({"dead_letter_strategy": "at-most-once"}, "dead-letter-strategy"),
    ],
)
def test_an_argument_that_goes_before_a_policy_is_refused(
    settings: Settings, side: Side, management43: Management, arguments: dict[str, Any], named: str
) -> None:
    side.queue("orders", "quorum", **arguments)
    assert refused(settings, management43, side).startswith(f"{named} of queue 'orders' is set by its declaration")


@pytest.mark.parametrize("priority", [0, 1, 7])
def test_the_policy_of_somebody_else_is_neither_replaced_nor_put_out_of_effect(
    settings: Settings, side: Side, management43: Management, priority: int
) -> None:
    side.queue("orders", "quorum")
    put_policy(management43, "ha", {"max-length": 500}, pattern=".*", priority=priority)
    why = refused(settings, management43, side)
    assert f"policy 'ha' (priority {priority}) is for queue 'orders' too" in why
    assert '"max-length": 500, "delayed-retry-type": "failed"' in why


def test_an_operator_policy_that_switches_it_off_or_limits_it_is_refused(
    settings: Settings, side: Side, management43: Management
) -> None:
    side.queue("orders", "quorum")
    put_policy(management43, "limits", {"delayed-retry-max": 500}, kind="operator-policies")
    assert refused(settings, management43, side).startswith("delayed-retry-max of queue 'orders'")


def test_a_policy_that_has_our_name_and_is_not_ours_is_left(
    settings: Settings, side: Side, management43: Management
) -> None:
    side.queue("orders", "quorum")
    put_policy(management43, NAME, {"max-length": 500})
    assert "dlqbatch has not made the policy that has this name" in refused(settings, management43, side)
    (removal,) = (one for one in topology_job.delete(settings, (ORDERS,)) if one.kind == "policy")
    assert "may be somebody else's" in removal.why
    assert policies(management43)[NAME]["definition"] == {"max-length": 500}


def test_a_policy_of_others_with_the_same_effect_is_enough(
    settings: Settings, side: Side, management43: Management
) -> None:
    side.queue("orders", "quorum")
    put_policy(management43, "theirs", {**IN_EFFECT, "max-length": 500})
    assert planned(settings).state == SAME
    topology_job.apply(settings, (ORDERS,))
    assert policies(management43).keys() == {"theirs"}
    # Of two with one priority the broker may take either.
    put_policy(management43, "tie", {"max-length": 5})
    assert planned(settings).state == REFUSED


def test_it_is_deleted_when_nobody_uses_its_queue(settings: Settings, side: Side, management43: Management) -> None:
    side.queue("orders", "quorum")
    topology_job.apply(settings, (ORDERS,))
    tag = side.channel.basic_consume("orders", lambda *_: None)
    assert any(one.why == "queue 'orders': has 1 consumer(s)" for one in topology_job.delete(settings, (ORDERS,)))
    assert policies(management43).keys() == {NAME}
    side.channel.basic_cancel(tag)
    side.wait(lambda: not side.channel.queue_declare("orders", passive=True).method.consumer_count)
    removed = topology_job.delete(settings, (ORDERS,))
    assert {(one.kind, one.name) for one in removed if one.is_gone} == {
        ("policy", NAME),
        ("queue", "dlq-queue"),
        ("exchange", "dlq-exchange"),
    }
    assert policies(management43) == {}
    assert side.exists("orders")


def test_without_the_management_api_nothing_is_made(settings: Settings, side: Side, broker43_url: str) -> None:
    deaf = load(
        {"broker_url": broker43_url, "management_url": "http://127.0.0.1:9", "ladder": "false"},
        {"DLQBATCH_CONFIG": "/dev/null"},
    )
    assert planned(deaf).state == NOT_KNOWN
    with pytest.raises(BrokerUnreachable, match="only the management API knows policies"):
        topology_job.apply(deaf, (ORDERS,))
    assert not side.exists("dlq-queue")


def test_no_policy_is_set_on_another_broker(
    settings: Settings, side: Side, broker43_url: str, management: Management, sqlite_url: str
) -> None:
    management.put(f"vhosts/{quoted(vhost_of(broker43_url))}")
    try:
        astray = settings_for(broker43_url, management, sqlite_url)
        with pytest.raises(BrokerUnreachable, match="is of another broker"):
            topology_job.apply(astray, (ORDERS,))
        assert not side.exists("dlq-queue")
    finally:
        management.delete(f"vhosts/{quoted(vhost_of(broker43_url))}")


def test_a_user_who_may_not_set_policies_is_told_the_tag(
    broker43_url: str, management43: Management, sqlite_url: str
) -> None:
    user = f"user-{management43.vhost}"
    management43.put(f"users/{quoted(user)}", {"password": "p", "tags": "monitoring"})
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    management43.put(f"permissions/{quoted(management43.vhost)}/{quoted(user)}", rights)
    try:
        host, port = management43._address
        api = f"http://{quoted(user)}:p@{host}:{port}"
        there = settings_for(broker43_url, management43, sqlite_url, management_url=api)
        with pytest.raises((PolicyRefused, BrokerUnreachable), match="policymaker"):
            topology_job.apply(there, (ORDERS,))
        assert policies(management43) == {}
    finally:
        management43.delete(f"users/{quoted(user)}")


def test_a_broker_that_cannot_delay_retries_refuses(broker_url: str, management: Management, sqlite_url: str) -> None:
    settings = settings_for(broker_url, management, sqlite_url)
    item = planned(settings)
    assert (item.state, item.differences[0].wanted) == (REFUSED, "RabbitMQ 4.3.1 or later")
    with pytest.raises(PolicyRefused, match="a ladder delays on every broker"):
        topology_job.apply(settings, (ORDERS,))
    with pytest.raises(PolicyRefused):
        topology_job.export(settings, (ORDERS,), None)
    assert policies(management) == {}
    with pytest.raises(ManagementError):
        put_policy(management, NAME, IN_EFFECT)
