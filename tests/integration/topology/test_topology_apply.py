"""Plan, apply, export and delete, read back from a real broker."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side

from dlqbatch.errors import TopologyMismatch
from dlqbatch.settings import Settings, load
from dlqbatch.topology import job as topology_job
from dlqbatch.topology.change_ttl import Delays, Step
from dlqbatch.topology.kinds import Kind, Ladder, PerQueue, Pipeline, whole
from dlqbatch.topology.plan import DIFFERENT, NOT_KNOWN, TO_CREATE
from scripts.servers.management import Management
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SET = PerQueue("created", "shop", ttl=30_000, dlq_queue_type="classic")
KINDS: tuple[Kind, ...] = (Ladder(), SET, Pipeline("settle", "settlements"))
AT_LEAST_ONCE = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


@pytest.fixture
def side(broker_url: str) -> Iterator[Side]:
    side = Side(broker_url)
    yield side
    side.close()


@pytest.fixture
def settings(broker_url: str, management: Management, sqlite_url: str) -> Settings:
    api = "http://guest:guest@{}:{}".format(*management._address)
    given = {"broker_url": broker_url, "management_url": api, "database_url": sqlite_url}
    return load(given, {"DLQBATCH_CONFIG": "/dev/null"})


@pytest.fixture
def deaf(settings: Settings) -> Settings:
    """A broker whose management API does not answer."""
    return asking(settings, "http://127.0.0.1:9")


def as_declared(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the type that RabbitMQ 4 writes down where nobody has named one."""
    return {name: value for name, value in arguments.items() if (name, value) != ("x-queue-type", "classic")}


def state(management: Management) -> tuple[dict[str, Any], dict[str, str], set[tuple[str, str, str]]]:
    return (
        {queue["name"]: as_declared(queue["arguments"]) for queue in management.queues()},
        {exchange["name"]: exchange["type"] for exchange in management.exchanges()},
        {(one["source"], one["routing_key"], one["destination"]) for one in management.bindings()},
    )


@pytest.mark.usefixtures("on_every_broker")
def test_a_per_queue_set_is_on_the_broker_what_the_original_declares(
    settings: Settings, management: Management
) -> None:
    assert topology_job.apply(settings, (SET,)).is_done
    queues, exchanges, bindings = state(management)
    assert queues == {
        "created": {"x-dead-letter-exchange": "shop.retry", "x-dead-letter-routing-key": "created.retry"},
        "created.retry": {"x-dead-letter-exchange": "shop", "x-dead-letter-routing-key": "created"},
        "created.delay": {
            "x-dead-letter-exchange": "shop",
            "x-dead-letter-routing-key": "created",
            "x-message-ttl": 30_000,
        },
        "dlq-queue": {},
    }
    assert exchanges == {"shop": "topic", "shop.retry": "topic", "dlq-exchange": "topic"}
    assert bindings == {
        ("shop", "created", "created"),
        ("shop", "created.delay", "created.delay"),
        ("shop.retry", "created.retry", "created.retry"),
        ("dlq-exchange", "dlq-routing-key", "dlq-queue"),
        ("dlq-exchange", "dlq-exchange", "dlq-queue"),
    }


@pytest.mark.usefixtures("on_every_broker")
def test_a_quorum_pipeline_is_on_the_broker_what_the_original_declares(
    settings: Settings, management: Management
) -> None:
    topology_job.apply(settings, (Pipeline("settle", "settlements", queue_type="quorum"),))
    queues, exchanges, bindings = state(management)
    main = {"x-dead-letter-exchange": "dlq.settle", "x-message-ttl": 300_000, "x-delivery-limit": 3, **AT_LEAST_ONCE}
    assert queues["settlements"] == main
    assert queues["dlq.settle"]["x-queue-type"] == "quorum"
    assert exchanges == {"settle": "fanout", "dlq.settle": "fanout"}
    assert bindings == {("settle", "", "settlements"), ("dlq.settle", "", "dlq.settle")}


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("api", ["settings", "deaf"])
def test_applied_twice_nothing_changes_and_the_plan_has_nothing_to_do(
    request: pytest.FixtureRequest, management: Management, api: str
) -> None:
    settings = request.getfixturevalue(api)
    before = topology_job.plan(settings, KINDS)
    assert {item.state for item in before.plan.items} == {TO_CREATE}
    assert not before.is_done
    assert state(management) == ({}, {}, set())
    topology_job.apply(settings, KINDS)
    after = state(management)
    assert topology_job.apply(settings, KINDS).is_done
    assert state(management) == after
    plan = topology_job.plan(settings, KINDS)
    assert plan.is_done
    unknown = {item.kind for item in plan.plan.of(NOT_KNOWN)}
    assert unknown == ({"binding"} if api == "deaf" else set())


@pytest.mark.usefixtures("on_every_broker")
def test_the_plan_names_every_argument_that_differs_and_without_the_api_the_first(
    settings: Settings, deaf: Settings, side: Side, management: Management
) -> None:
    topology_job.apply(settings, KINDS)
    side.channel.queue_delete("created.delay")
    side.channel.queue_declare("created.delay", durable=True, arguments={"x-message-ttl": 5, "x-max-length": 7})
    before = state(management)
    (item,) = topology_job.plan(settings, KINDS).plan.of(DIFFERENT)
    assert {each.argument: (each.found, each.wanted) for each in item.differences} == {
        "x-dead-letter-exchange": ("none", "shop"),
        "x-dead-letter-routing-key": ("none", "created"),
        "x-max-length": ("7", "none"),
        "x-message-ttl": ("5", "30000"),
    }
    (item,) = topology_job.plan(deaf, KINDS).plan.of(DIFFERENT)
    assert len(item.differences) == 1
    with pytest.raises(TopologyMismatch, match=r"created\.delay"):
        topology_job.apply(settings, KINDS, change_ttl=True)
    assert state(management) == before


def test_a_binding_that_is_missing_is_planned_and_made(settings: Settings, side: Side, management: Management) -> None:
    topology_job.apply(settings, KINDS)
    complete = state(management)
    side.channel.queue_unbind("created", "shop", "created")
    (item,) = topology_job.plan(settings, KINDS).plan.of(TO_CREATE)
    assert item.name == "shop --created--> created"
    topology_job.apply(settings, KINDS)
    assert state(management) == complete


def test_an_exchange_of_another_type_is_different(settings: Settings, side: Side) -> None:
    side.channel.exchange_declare("shop", "fanout", durable=True)
    (item,) = topology_job.plan(settings, (SET,)).plan.of(DIFFERENT)
    assert (item.kind, item.name) == ("exchange", "shop")
    assert item.differences[0][1:] == ("fanout", "topic")


# --- change a delay


@contextmanager
def answering(answer: Callable[[str], tuple[int, Any]]) -> Iterator[str]:
    """The address of a management API that answers each path as it is told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, told = answer(self.path.removeprefix("/api/"))
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asking(settings: Settings, url: str) -> Settings:
    return settings.model_copy(update={"management_url": type(settings.broker_url)(url)})


@pytest.mark.usefixtures("on_every_broker")
def test_a_management_api_that_fails_once_does_not_keep_a_delay_from_being_changed(
    settings: Settings, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (settings.model_copy(update={"queue_type": "quorum", "tier_ttls": (ttl,)}) for ttl in (50, 60))
    topology_job.apply(old, topology_job.choose(old, ("ladder",)))
    # It is watched for less long, as it is certain that nobody publishes.
    monkeypatch.setattr(topology_job, "Delays", partial(Delays, quiet=0.5, grace=0.1))
    monkeypatch.setattr(topology_job, "_ASKS_AGAIN_AFTER", 0.1)
    fails: list[str] = []

    def answer(path: str) -> tuple[int, Any]:
        return (503, fails.pop()) if fails else (200, management.get(path))

    def fail(_queue: str, step: str) -> None:
        if step != Step.DONE.value:
            fails.append(step)

    with answering(answer) as url:
        there = asking(new, url)
        assert topology_job.apply(there, topology_job.choose(there, ("ladder",)), change_ttl=True, report=fail).is_done
    assert not fails
    assert management.queue("queue.delay.1")["arguments"]["x-message-ttl"] == 60


# --- export


@pytest.mark.usefixtures("on_every_broker")
def test_what_is_exported_and_imported_is_what_is_applied(settings: Settings, management: Management) -> None:
    told = topology_job.export(settings, KINDS, None)
    management.post(f"definitions/{management.vhost}", told)
    assert topology_job.plan(settings, KINDS).is_done
    imported = state(management)
    topology_job.apply(settings, KINDS)
    assert state(management) == imported


@pytest.mark.slow
def test_rabbitmqctl_imports_what_is_exported(work_folder: Path, settings: Settings) -> None:
    with RabbitNode(work_folder / "node").start() as node:
        url = type(settings.broker_url)(node.url)
        there = settings.model_copy(
            update={"broker_url": url, "management_url": type(settings.broker_url)(node.management_url)}
        )
        file = work_folder / "definitions.json"
        file.write_text(json.dumps(topology_job.export(there, KINDS, None)))
        node.control("import_definitions", str(file))
        assert topology_job.plan(there, KINDS).is_done
        assert set(state(Management(node.management_url))[0]) == {queue.name for queue in whole(KINDS).queues}


def test_for_a_broker_of_another_version_it_is_exported_without_asking_any() -> None:
    nowhere = load({"broker_url": "amqp://127.0.0.1:9/v", "queue_type": "quorum"}, {"DLQBATCH_CONFIG": "/dev/null"})
    limits = {}
    for version in ((3, 13), (4, 1)):
        told: Any = topology_job.export(nowhere, (Ladder(queue_type="quorum"),), version)
        (queue,) = [one for one in told["queues"] if one["name"] == "retry-queue"]
        limits[version] = queue["arguments"].get("x-delivery-limit")
        assert queue["vhost"] == "v"
    assert limits == {(3, 13): None, (4, 1): -1}


# --- delete


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_what_was_applied_is_deleted_and_what_the_ladder_shares_stays(
    settings: Settings, management: Management, queue_type: str
) -> None:
    topology_job.apply(settings, (Ladder(),))
    before = state(management)
    mine = PerQueue("created", "shop", queue_type=queue_type, dlq_queue_type="classic")
    topology_job.apply(settings, (mine,))
    complete = state(management)
    foreseen = topology_job.delete(settings, (mine,), dry_run=True)
    assert {one.name for one in foreseen} == {"created", "created.retry", "created.delay", "shop", "shop.retry"}
    assert not any(one.is_gone or one.why for one in foreseen)
    assert state(management) == complete
    assert all(one.is_gone for one in topology_job.delete(settings, (mine,)))
    assert state(management) == before


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_message_keeps_the_whole_topology_unless_it_is_to_go_too(
    settings: Settings, side: Side, management: Management, queue_type: str
) -> None:
    mine = PerQueue("created", "shop", queue_type=queue_type, ttl=3_600_000)
    topology_job.apply(settings, (mine,))
    before = state(management)
    side.fill("created.delay", [b"waits"])
    refused = topology_job.delete(settings, (mine,))
    assert [(one.name, one.why) for one in refused if one.why] == [("created.delay", "holds 1 message(s)")]
    assert state(management) == before
    topology_job.delete(settings, (mine,), with_messages=True)
    assert "created.delay" not in state(management)[0]


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_where_nobody_can_tell_whether_a_queue_is_empty_nothing_goes_unless_all_of_it_may(
    deaf: Settings, management: Management, queue_type: str
) -> None:
    mine = PerQueue("created", "shop", queue_type=queue_type, ttl=3_600_000)
    topology_job.apply(deaf, (mine,))
    before = state(management)
    refused = {one.name: one.why for one in topology_job.delete(deaf, (mine,)) if one.kind == "queue"}
    assert refused.keys() == {"created", "created.retry", "created.delay"}
    for why in refused.values():
        assert "only the management API can tell" in why
        assert "does not answer" in why
        assert "--with-messages" in why
    assert state(management) == before
    assert all(one.is_gone for one in topology_job.delete(deaf, (mine,), with_messages=True))
    assert "created" not in state(management)[0]


def test_a_queue_whose_count_never_comes_is_not_deleted(
    settings: Settings, management: Management, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlqbatch.topology.remove._COUNTED_WITHIN", 0.2)
    topology_job.apply(settings, (SET,))
    with answering(lambda _: (200, {"name": "of a broker that keeps no statistics"})) as url:
        refused = [one for one in topology_job.delete(asking(settings, url), (SET,)) if one.kind == "queue"]
    assert all("it does not say how many messages" in one.why for one in refused)
    assert len(refused) == len(management.queues()) - 1  # the ladder shares dlq-queue


def test_what_arrives_while_counts_are_waited_for_is_seen(
    settings: Settings, side: Side, management: Management
) -> None:
    mine = PerQueue("created", "shop", queue_type="quorum")
    topology_job.apply(settings, (mine,))

    def answer(path: str) -> tuple[int, Any]:
        if path.endswith("/created.delay") and side.depth("created") == 0:
            side.fill("created", [b"just now"])
            return 200, {}
        return 200, {"messages": 0}

    with answering(answer) as url:
        refused = topology_job.delete(asking(settings, url), (mine,))
    assert [(one.name, one.why) for one in refused if one.why] == [("created", "holds 1 message(s)")]
    assert management.queue("created.delay")


@pytest.mark.usefixtures("on_every_broker")
@pytest.mark.parametrize("queue_type", ["classic", "quorum"])
def test_a_message_that_somebody_has_out_keeps_its_queue(
    settings: Settings, deaf: Settings, side: Side, management: Management, queue_type: str
) -> None:
    mine = PerQueue("created", "shop", queue_type=queue_type)
    topology_job.apply(settings, (mine,))
    side.fill("created.retry", [b"is out"])
    assert side.channel.basic_get("created.retry")[0]
    side.wait(lambda: management.queue("created.retry").get("messages_unacknowledged") == 1)
    assert side.depth("created.retry") == 0
    refused = topology_job.delete(settings, (mine,))
    # On a quorum queue whoever has a message counts as a consumer of it.
    why = "has 1 consumer(s)" if queue_type == "quorum" else "holds 1 message(s)"
    assert [(one.name, one.why) for one in refused if one.why] == [("created.retry", why)]
    assert all(one.why for one in topology_job.delete(deaf, (mine,)) if one.kind == "queue")
    side.channel.basic_recover(requeue=True)
    side.wait(lambda: side.depth("created.retry") == 1)


@pytest.mark.usefixtures("on_every_broker")
def test_a_message_that_a_quorum_queue_cannot_hand_on_keeps_its_queue(
    settings: Settings, deaf: Settings, side: Side, management: Management
) -> None:
    mine = PerQueue("created", "shop", ttl=1, queue_type="quorum")
    topology_job.apply(settings, (mine,))
    side.channel.queue_unbind("created", "shop", "created")
    side.channel.basic_publish("", "created.delay", b"held")
    side.wait(lambda: management.queue("created.delay").get("messages_dlx") == 1)
    assert side.depth("created.delay") == 0
    refused = topology_job.delete(settings, (mine,))
    assert [(one.name, one.why) for one in refused if one.why] == [("created.delay", "holds 1 message(s)")]
    assert all(one.why for one in topology_job.delete(deaf, (mine,)) if one.kind == "queue")
    assert side.exists("created.delay")


def test_what_is_consumed_or_differs_or_is_bound_by_others_stays(
    settings: Settings, side: Side, management: Management
) -> None:
    topology_job.apply(settings, (SET,))
    side.channel.basic_consume("created", lambda *_: None)
    side.wait(lambda: topology_job.delete(settings, (SET,), dry_run=True)[0].why == "has 1 consumer(s)")
    side.close()
    fresh = Side(str(settings.broker_url.get_secret_value()))
    fresh.channel.queue_delete("created.delay")
    fresh.channel.queue_declare("created.delay", durable=True)
    reasons = {one.name: one.why for one in topology_job.delete(settings, (SET,)) if one.why}
    assert reasons == {"created.delay": "is not as described, so it may be somebody else's"}
    fresh.channel.queue_delete("created.delay")
    fresh.channel.queue_declare("audit", durable=True)
    fresh.channel.queue_bind("audit", "shop", "#")
    done = {one.name: one.is_gone for one in topology_job.delete(settings, (SET,))}
    assert done == {"created": True, "created.retry": True, "shop": False, "shop.retry": True}
    fresh.close()
    assert "shop" in state(management)[1]


def test_ways_back_to_queues_that_are_gone_go_too(settings: Settings, side: Side, management: Management) -> None:
    topology_job.apply(settings, (SET,))
    for queue in ("created", "other", "gone"):
        side.channel.queue_declare(queue, durable=True, passive=queue == "created")
        side.channel.exchange_declare(f"dlqbatch.return.{queue}", "fanout", durable=True)
        side.channel.queue_bind(queue, f"dlqbatch.return.{queue}")
    side.channel.queue_delete("gone")
    topology_job.delete(settings, (SET,))
    assert [name for name in state(management)[1] if name.startswith("dlqbatch.")] == ["dlqbatch.return.other"]
