"""Checks of real queues: what failed too often moves, the rest stays in its place, and each is looked at once."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import rawamqp
from broker_client import Side
from oracle import changes, moved
from rawamqp import Message, Peer

from dlqbatch.errors import SettingsError, TopologyMissing
from dlqbatch.jobs import RunOptions, run
from dlqbatch.settings import load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scripts.servers.management import Management

TARGET = "permanent_failure_queue"
UNLIMITED = {"classic": {}, "quorum": {"x-queue-type": "quorum", "x-delivery-limit": -1}}
KINDS = pytest.mark.parametrize("kind", ["classic", "quorum"])
pytestmark = pytest.mark.usefixtures("on_every_broker")


@pytest.fixture
def peer(broker_url: str) -> Iterator[Peer]:
    with Peer(broker_url) as opened:
        yield opened


@pytest.fixture
def check(broker_url: str, management: Management) -> Callable[..., dict[str, Any]]:
    host, port = management._address

    def checked(
        *queues: str, dry_run: bool = False, stopped: Callable[[], bool] = lambda: False, **options: Any
    ) -> Any:
        given = {"broker_url": broker_url, "management_url": f"http://{host}:{port}", "check_queues": ",".join(queues)}
        settings = load(
            given | options, {"DLQBATCH_CONFIG": "/dev/null", "DLQBATCH_DATABASE_URL": "sqlite:////dev/null"}
        )
        run_options = RunOptions(dry_run=dry_run, stopped=stopped)
        report = run("check", settings, run_options).as_dict()
        counts = dict(report["counts"])  # type: ignore[call-overload]
        assert counts.pop("got") == sum(counts.values()), report
        return report

    return checked


def a_queue(peer: Peer, name: str, kind: str, release: str) -> str:
    arguments: dict[str, str | int] = {"x-queue-type": kind}
    if kind == "quorum" and release == "4.3":
        arguments["x-delivery-limit"] = -1
    peer.queue(name, arguments)
    return name


def dead(queue: str, number: int, count: int, headers: list[tuple[bytes, bytes]] | None = None) -> Message:
    deaths = rawamqp.array(_death(count)) if count else None
    entries = [(b"n", rawamqp.number(number)), *(headers or [])]
    if deaths is not None:
        entries.append((b"x-death", deaths))
    properties = rawamqp.properties(entries, correlation_id=b"%d" % number, delivery_mode=1, priority=3)
    return Message("", queue.encode(), properties, b"%08d" % number)


def _death(count: int) -> bytes:
    return rawamqp.table(
        [
            (b"count", rawamqp.number(count)),
            (b"reason", rawamqp.text("rejected")),
            (b"queue", rawamqp.text("work")),
            (b"time", rawamqp.timestamp(1_700_000_000)),
            (b"exchange", rawamqp.text("orders")),
            (b"routing-keys", rawamqp.array(rawamqp.text("order.placed"))),
        ]
    )


def numbers(peer: Peer, queue: str) -> list[int]:
    return [int(seen.body) for seen in peer.read(queue)]


@KINDS
def test_of_counts_1_9_9_9_9_four_move_and_one_stays(
    peer: Peer, check: Callable[..., Any], kind: str, broker_release: str
) -> None:
    a_queue(peer, "dlq.a", kind, broker_release)
    peer.publish(dead("dlq.a", number, count) for number, count in enumerate([1, 9, 9, 9, 9]))
    report = check("dlq.a")
    assert (report["outcome"], report["stopped_by"]) == ("ok", "empty"), report
    assert report["counts"] | {"got": 5, "moved": 4, "left": 1} == report["counts"]
    assert report["reasons"] == {"x-death": 4, "within-limit": 1}
    assert report["queues"]["dlq.a"] == {"target": TARGET, "got": 5, "moved": 4, "within_limit": 1, "left": 0}
    peer.wait_for(lambda: peer.depth("dlq.a") == 1, "what stays to be back")
    assert numbers(peer, "dlq.a") == [0]
    assert numbers(peer, TARGET) == [1, 2, 3, 4]


@KINDS
def test_a_thousand_that_stay_keep_their_order_and_the_others_have_theirs(
    peer: Peer, check: Callable[..., Any], kind: str, broker_release: str
) -> None:
    a_queue(peer, "dlq.a", kind, broker_release)
    peer.publish(dead("dlq.a", number, 4 if number % 3 == 0 else number % 4) for number in range(3_000))
    report = check("dlq.a")
    assert report["reasons"] == {"x-death": 1_000, "within-limit": 2_000}
    peer.wait_for(lambda: peer.depth("dlq.a") == 2_000, "what stays to be back")
    assert numbers(peer, "dlq.a") == [number for number in range(3_000) if number % 3]
    assert numbers(peer, TARGET) == [number for number in range(3_000) if number % 3 == 0]


@KINDS
def test_what_moves_arrives_as_it_was_and_tells_its_history(
    peer: Peer, check: Callable[..., Any], kind: str, broker_release: str
) -> None:
    a_queue(peer, "dlq.a", kind, broker_release)
    a_queue(peer, "copy", kind, broker_release)
    odd = [
        (b"", rawamqp.binary(b"\xff\0")),
        (b"half", b"d" + (b"\x3f\xe8" + b"\0" * 6)),
        (b"big", rawamqp.number(2**62)),
    ]
    message = dead("dlq.a", 7, 9, odd)
    peer.publish([message, message._replace(key=b"copy")])
    [before] = peer.read("copy")
    assert check("dlq.a")["counts"]["moved"] == 1
    [after] = peer.read(TARGET)
    assert changes(before, after, b"guest") + moved(before, after, b"guest") == []


def test_of_deaths_and_own_retries_the_larger_counts_and_is_named(peer: Peer, check: Callable[..., Any]) -> None:
    peer.queue("dlq.a")
    retries = [(b"dlqbatch-id", rawamqp.text("i")), (b"dlqbatch-retries", rawamqp.number(5))]
    peer.publish([dead("dlq.a", 0, 2, retries), dead("dlq.a", 1, 6, retries), dead("dlq.a", 2, 5), dead("dlq.a", 3, 0)])
    report = check("dlq.a", check_max_deaths=4)
    assert report["reasons"] == {"retries": 1, "x-death": 2, "within-limit": 1}


def test_what_is_published_meanwhile_is_not_looked_at(peer: Peer, check: Callable[..., Any], broker_url: str) -> None:
    peer.queue("dlq.a")
    peer.publish(dead("dlq.a", number, 1) for number in range(2_000))
    later = itertools.count(2_000)
    with Peer(broker_url) as publisher:

        def publishing() -> bool:
            publisher.publish([dead("dlq.a", next(later), 9)])
            return False

        report = check("dlq.a", stopped=publishing)
    assert report["counts"]["got"] == 2_000
    assert report["counts"]["moved"] == 0
    published = next(later) - 2_000
    assert published > 0
    peer.wait_for(lambda: peer.depth("dlq.a") == 2_000 + published, "what stays to be back")


def test_a_wildcard_has_a_target_for_each_queue_of_the_queues_type(
    peer: Peer, check: Callable[..., Any], management: Management, broker_release: str
) -> None:
    a_queue(peer, "dlq.orders", "classic", broker_release)
    a_queue(peer, "dlq.users", "quorum", broker_release)
    a_queue(peer, "dlq.quiet", "classic", broker_release)
    peer.publish(dead(queue, 1, 9) for queue in ("dlq.orders", "dlq.users", "dlq.users"))
    report = check("dlq.*", check_target="dead.*")
    assert report["counts"]["moved"] == 3
    assert {name: told["moved"] for name, told in report["queues"].items()} == {"dlq.orders": 1, "dlq.users": 2}
    types = {queue["name"]: queue["arguments"]["x-queue-type"] for queue in management.queues()}
    assert (types["dead.orders"], types["dead.users"]) == ("classic", "quorum")
    assert "dead.quiet" not in types
    assert (peer.depth("dead.orders"), peer.depth("dead.users")) == (1, 2)


def test_six_hundred_queues_are_found_and_checked(peer: Peer, check: Callable[..., Any], broker_url: str) -> None:
    side = Side(broker_url)
    try:
        for number in range(600):
            side.channel.queue_declare(f"dlq.{number}", durable=True)
    finally:
        side.close()
    peer.publish(dead(f"dlq.{number}", number, 9 if number % 2 else 1) for number in range(0, 600, 30))
    peer.publish([dead("dlq.599", 599, 9)])
    report = check("dlq.*", check_target="dead.*")
    assert report["outcome"] == "ok"
    assert report["counts"]["got"] == 21
    assert report["counts"]["moved"] == 1
    assert numbers(peer, "dead.599") == [599]


@pytest.mark.parametrize(
    ("queues", "target"),
    [
        (["dlq.a"], "dlq.a"),
        (["dlq.*"], "dlq.dead"),
        (["dlq.*"], "dlq.dead.*"),
        (["*.a"], "dead.*.a"),
        (["dlq.*", "dead.*"], "dead.*"),
        (["dlq.a"], "dead.*"),
    ],
)
def test_a_target_that_is_a_source_or_cannot_be_made_is_refused_and_nothing_moves(
    peer: Peer, check: Callable[..., Any], queues: list[str], target: str
) -> None:
    peer.queue("dlq.a")
    peer.queue("dead.a")
    peer.publish([dead("dlq.a", 1, 9)])
    with pytest.raises(SettingsError, match="target"):
        check(*queues, check_target=target)
    assert peer.depth("dlq.a") == 1


def test_a_dry_run_shows_what_would_move_and_moves_nothing(
    peer: Peer, check: Callable[..., Any], management: Management
) -> None:
    peer.queue("dlq.a")
    peer.publish(dead("dlq.a", number, count) for number, count in enumerate([9, 1, 7]))
    report = check("dlq.a", dry_run=True)
    assert report["counts"]["moved"] == 2
    assert [(line["queue"], line["key"], line["reason"]) for line in report["preview"]] == [
        ("dlq.a", TARGET, "9 by x-death"),
        ("dlq.a", TARGET, "7 by x-death"),
    ]
    assert TARGET not in {queue["name"] for queue in management.queues()}
    peer.wait_for(lambda: peer.depth("dlq.a") == 3, "all to be back")
    assert numbers(peer, "dlq.a") == [0, 1, 2]


def test_a_queue_that_is_named_and_not_there_is_an_error(check: Callable[..., Any]) -> None:
    with pytest.raises(TopologyMissing, match=r"dlq\.nowhere"):
        check("dlq.nowhere")


def test_a_wildcard_that_matches_nothing_is_said(check: Callable[..., Any]) -> None:
    report = check("nothing.*")
    assert (report["outcome"], report["counts"]["got"]) == ("ok", 0)
    assert report["warnings"] == ["'nothing.*' matches no queue"]


@pytest.mark.parametrize("by", ["argument", "policy"])
def test_a_quorum_queue_with_a_delivery_limit_is_refused_unless_told(
    peer: Peer, check: Callable[..., Any], management: Management, by: str
) -> None:
    peer.queue("dlq.a", {"x-queue-type": "quorum"} | ({"x-delivery-limit": 5} if by == "argument" else {}))
    if by == "policy":
        vhost = management.vhost
        management.put(f"policies/{vhost}/limit", {"pattern": "dlq", "definition": {"delivery-limit": 5}})
        known = lambda: management.get(f"queues/{vhost}/dlq.a").get("effective_policy_definition")  # noqa: E731
        peer.wait_for(lambda: bool(known()), "the policy to be seen")
    peer.publish([dead("dlq.a", 0, 9), dead("dlq.a", 1, 1)])
    with pytest.raises(SettingsError, match=r"'dlq.a' is not checked.* of 5 deliveries"):
        check("dlq.a")
    assert peer.depth("dlq.a") == 2
    report = check("dlq.a", allow_delivery_cost="true")
    assert report["counts"]["moved"] == 1
    assert any("of 5 deliveries" in warning for warning in report["warnings"])


def test_a_quorum_queue_without_a_limit_is_refused_only_where_the_broker_sets_one(
    peer: Peer, check: Callable[..., Any], broker_release: str
) -> None:
    peer.queue("dlq.a", {"x-queue-type": "quorum"})
    if broker_release == "4.3":
        with pytest.raises(SettingsError, match="20 deliveries"):
            check("dlq.a")
    else:
        assert check("dlq.a")["outcome"] == "ok"


def test_without_the_management_api_a_quorum_queue_is_refused_for_nobody_knows(
    peer: Peer, check: Callable[..., Any]
) -> None:
    peer.queue("dlq.a", {"x-queue-type": "quorum"})
    with pytest.raises(SettingsError, match="not known"):
        check("dlq.a", management_url="http://127.0.0.1:1")


def test_a_bound_leaves_the_rest_unseen_and_says_so(peer: Peer, check: Callable[..., Any]) -> None:
    peer.queue("dlq.a")
    peer.publish(dead("dlq.a", number, 9) for number in range(10))
    report = check("dlq.a", max_messages=4)
    assert (report["outcome"], report["stopped_by"], report["counts"]["moved"]) == ("ok", "messages", 4)
    assert report["warnings"][0].startswith("6 message(s) were not looked at")


def test_a_full_target_leaves_them_and_the_run_is_partial(peer: Peer, check: Callable[..., Any]) -> None:
    peer.queue("dlq.a")
    peer.queue(TARGET, {"x-max-length": 2, "x-overflow": "reject-publish"})
    peer.publish(dead("dlq.a", number, 9) for number in range(5))
    report = check("dlq.a")
    assert report["outcome"] == "partial"
    assert report["counts"]["moved"] >= 2
    assert report["reasons"]["not-confirmed"] == report["counts"]["left"] > 0
    peer.wait_for(lambda: peer.depth("dlq.a") + peer.depth(TARGET) == 5, "all to be somewhere, once")


def test_a_target_deleted_meanwhile_is_declared_again(peer: Peer, check: Callable[..., Any], broker_url: str) -> None:
    peer.queue("dlq.a")
    peer.publish(dead("dlq.a", number, 9) for number in range(3_000))
    side = Side(broker_url)
    lost: list[int] = []

    def deleting() -> bool:
        if not lost and side.exists(TARGET) and side.depth(TARGET):
            lost.append(len(side.empty(TARGET)))
            lost.append(int(side.channel.queue_delete(TARGET).method.message_count))
        return False

    try:
        report = check("dlq.a", stopped=deleting)
    finally:
        side.close()
    assert lost
    assert (report["outcome"], report["counts"]["moved"]) == ("ok", 3_000)
    assert peer.depth(TARGET) == 3_000 - sum(lost)


@pytest.mark.slow
@KINDS
def test_of_20_000_each_is_looked_at_once(
    peer: Peer, check: Callable[..., Any], kind: str, broker_release: str
) -> None:
    a_queue(peer, "dlq.a", kind, broker_release)
    for start in range(0, 20_000, 5_000):
        peer.publish(dead("dlq.a", number, 9 if number % 10 < 3 else 2) for number in range(start, start + 5_000))
    report = check("dlq.a", max_seconds=300)
    assert (report["outcome"], report["stopped_by"]) == ("ok", "empty"), report
    assert report["reasons"] == {"x-death": 6_000, "within-limit": 14_000}
    peer.wait_for(lambda: peer.depth("dlq.a") == 14_000, "what stays to be back")
    assert numbers(peer, "dlq.a") == [number for number in range(20_000) if number % 10 >= 3]
    assert sorted(numbers(peer, TARGET)) == [number for number in range(20_000) if number % 10 < 3]
