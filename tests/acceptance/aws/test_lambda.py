from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import rawamqp
from frame_link import FrameLink, Point
from lambda_runtime import Function, package
from program import RETRY_QUEUE, Client, client, eventually

from dlqbatch import __version__
from scripts.servers.management import Management
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator

EVENTS = Path(__file__).resolve().parents[2] / "events"
ORIGIN, DELAYED = "orders-queue", "queue.delay.1"
PASSWORD = "s3cret-word"
LADDER = 8
"""Queues that a run of the ladder declares."""

# What a deployment would set in its file; the rest comes from the function's variables.
PROPERTIES = """\
dlqbatch.events.orders.#=3
dlqbatch.tier-ttls=1h,2h,3h
dlqbatch.lambda-margin-seconds=2
dlqbatch.max-messages=100000
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return package(tmp_path, PROPERTIES)


@pytest.fixture
def settings(broker_url: str, database_url: str) -> dict[str, str]:
    """The function's variables: where the broker is, and a database that has the policy's table alone."""
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        connection.execute("CREATE TABLE dlq_event_config (id int PRIMARY KEY, name varchar(100), max_retries integer)")
        connection.execute("INSERT INTO dlq_event_config VALUES (1, 'payment.refused', 0)")
    return {"broker_url": broker_url, "database_url": database_url}


@pytest.fixture
def function(task: Path, settings: dict[str, str]) -> Iterator[Function]:
    with Function(task, settings) as started:
        yield started


def recorded(name: str) -> Any:
    return json.loads((EVENTS / f"{name}.json").read_text())


def in_state(name: str, state: str) -> Any:
    """A recorded alarm as it would be in another state."""
    text = (EVENTS / f"{name}.json").read_text()
    direct, in_message = '"value": "ALARM"', r"\"NewStateValue\": \"ALARM\""
    assert text.count(direct) + text.count(in_message) == 1
    return json.loads(
        text.replace(direct, f'"value": "{state}"').replace(in_message, rf"\"NewStateValue\": \"{state}\"")
    )


def fail(url: str, *bodies: bytes, key: bytes = b"orders.created") -> None:
    """As good as rejected by the consumer of ORIGIN."""
    properties = rawamqp.properties([rawamqp.death(ORIGIN, key)], delivery_mode=2)
    with rawamqp.Peer(url) as peer:
        peer.publish(rawamqp.Message("", RETRY_QUEUE.encode(), properties, body) for body in bodies)


def balanced(report: dict[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = report["counts"]
    assert counts["got"] == sum(number for name, number in counts.items() if name != "got")
    return counts


def lines_of(function: Function) -> list[dict[str, Any]]:
    return [json.loads(line) for line in function.logged()]


ALARMS = ("alarm-direct", "alarm-sns", "alarm-eventbridge")


def test_every_form_of_event_starts_one_run_in_a_container_that_stays(
    function: Function, broker_url: str, team: Client
) -> None:
    cold = function.send({}).report
    assert (cold["job"], cold["outcome"], cold["stopped_by"]) == ("drain", "ok", "empty")
    container = function.pid

    events = [{}, {"job": "drain", "max_messages": 5}, recorded("schedule"), *map(recorded, ALARMS)]
    for number, event in enumerate(events, 1):
        fail(broker_url, b"%d" % number)
        report = function.send(event).report
        assert (report["job"], report["outcome"]) == ("drain", "ok")
        assert balanced(report)["delayed"] == 1, event
        team.await_depth(DELAYED, number)
    assert function.pid == container

    # The table in PostgreSQL and the file beside handler.py are one policy.
    fail(broker_url, b"never again", key=b"payment.refused")
    assert function.send({}).report["reasons"] == {"retries-exhausted": 1}


@pytest.mark.parametrize("state", ["OK", "INSUFFICIENT_DATA"])
def test_an_alarm_that_is_over_does_nothing_and_says_so(
    function: Function, broker_url: str, team: Client, state: str
) -> None:
    function.send({})
    fail(broker_url, b"waits")
    for alarm in ALARMS:
        report = function.send(in_state(alarm, state)).report
        assert (report["outcome"], balanced(report)["got"]) == ("ok", 0)
        why = f"alarm 'dlqbatch-retry-queue-deep' is in state {state}, and only ALARM starts a run"
        assert report["warnings"] == [why]
        assert lines_of(function)[-1]["fields"]["why"] == why
    team.await_depth(RETRY_QUEUE, 1)


def test_near_its_time_out_a_run_stops_with_all_it_took_settled(
    function: Function, broker_url: str, team: Client
) -> None:
    warmed_up(function, broker_url)
    deep, margin = 40_000, 2.0
    fail(broker_url, *(b"%d" % number for number in range(deep)))
    team.await_depth(RETRY_QUEUE, deep)

    answer = function.send({}, seconds=margin + 3.0)
    assert answer.seconds_left > 0
    report = answer.report
    assert (report["outcome"], report["stopped_by"]) == ("ok", "time")
    counts = balanced(report)
    assert 0 < counts["got"] < deep
    assert counts["got"] == counts["delayed"]
    # Ready, and not with anybody: nothing is lost, doubled, or waits for the platform to end the container.
    team.await_depth(RETRY_QUEUE, deep - counts["got"])
    team.await_depth(DELAYED, 1 + counts["got"])
    rest = function.send({"max_messages": 1_000}).report
    assert (rest["stopped_by"], balanced(rest)["delayed"]) == ("messages", 1_000)
    team.await_depth(DELAYED, 1 + counts["got"] + 1_000)


def warmed_up(function: Function, broker_url: str) -> None:
    """All is loaded that a run with messages loads, which takes seconds on a busy machine; one is delayed by that."""
    function.send({})
    fail(broker_url, b"first")
    assert function.send({}).report["counts"]["delayed"] == 1


@pytest.mark.parametrize(
    "point", [Point("declare"), Point("delivery", 700)], ids=["while-it-declares", "while-it-drains"]
)
def test_a_broker_that_falls_silent_does_not_keep_a_run_beyond_its_time(
    task: Path, settings: dict[str, str], broker_url: str, team: Client, point: Point
) -> None:
    """Of more messages than are with a run at once, so that some are delayed when it falls silent."""
    deep, seconds, is_drained = 2_000, 12.0, point.name == "delivery"
    team.channel.queue_declare(RETRY_QUEUE, durable=True)
    with FrameLink(broker_url) as link:
        settings |= {"broker_url": link.url, "lambda_margin_seconds": "6"}
        with Function(task, settings) as function:
            if is_drained:
                warmed_up(function, broker_url)
            fail(broker_url, *(b"%d" % number for number in range(deep)))
            team.await_depth(RETRY_QUEUE, deep)
            link.point, link.act = point, link.silence
            answer = function.send({}, seconds)
            assert link.struck.is_set()
            assert answer.seconds_left > 0
            moved = left = 0
            if is_drained:
                report = answer.report
                assert (report["outcome"], report["stopped_by"]) == ("partial", "time")
                moved, left = balanced(report)["delayed"], balanced(report)["left"]
                assert moved > 0 < left
                assert [line["event"] for line in lines_of(function)][-1] == "run"
            else:
                assert answer.error["errorType"] == "NoAnswer"
                assert "before the time of the run was over" in answer.error["errorMessage"]
            link.cut()

    def delayed() -> int:
        """Without that of the first run; where nothing was moved the queue may not have been declared."""
        return team.depth(DELAYED) - 1 if is_drained else 0

    # What was not settled is back. There twice is what was published, and not yet settled for the broker: it drops
    # the acknowledgements that it has read and not come to, so these can be more than the run knows of.
    assert eventually(lambda: team.depth(RETRY_QUEUE) + delayed() >= deep)
    assert team.depth(RETRY_QUEUE) + delayed() <= deep + link.under_way
    assert moved == 0 or team.depth(RETRY_QUEUE) >= deep - moved - left


def test_an_event_that_nobody_knows_is_a_typed_error_and_the_container_lives_on(
    function: Function, broker_url: str, team: Client
) -> None:
    function.send({})
    fail(broker_url, b"waits")
    for event, words in (
        ({"detail-type": "EC2 Instance State-change Notification", "source": "aws.ec2"}, "EC2 Instance"),
        ({"job": "drian"}, "the jobs are: drain"),
        ({"job": ""}, "job is empty"),
        ({"max_mesages": 5}, "max_mesages"),
        ([], "not an object"),
    ):
        error = function.send(event).error
        assert error["errorType"] == "SettingsError"
        assert words in error["errorMessage"]
    team.await_depth(RETRY_QUEUE, 1)
    assert balanced(function.send({}).report)["delayed"] == 1


@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        ({"broker_url": f"amqp://guest:{PASSWORD}@127.0.0.1:1/"}, "BrokerUnreachable", "127.0.0.1:1"),
        ({"broker_url": f"amqp://guest:{PASSWORD}@127.0.0.1:no/"}, "SettingsError", "DLQBATCH_BROKER_URL"),
        ({"max_trips": f"amqp://guest:{PASSWORD}@h"}, "SettingsError", "DLQBATCH_MAX_TRIPS"),
        ({"database_url": f"postgresql://me:{PASSWORD}@127.0.0.1:1/d"}, "DatabaseUnreadable", "127.0.0.1:1"),
    ],
)
def test_what_cannot_run_is_posted_as_an_error_of_ours_without_a_secret(
    task: Path, settings: dict[str, str], team: Client, wrong: dict[str, str], kind: str, words: str
) -> None:
    team.channel.queue_declare(RETRY_QUEUE, durable=True)
    fail(settings["broker_url"], b"waits")
    with Function(task, {**settings, "connect_timeout_seconds": "0.5", **wrong}) as function:
        answer = function.send({})
        assert answer.error["errorType"] == kind
        assert words in answer.error["errorMessage"]
        logged = function.logged()
    # The X-Ray header and the log are copies that the platform keeps.
    assert PASSWORD not in "\n".join([answer.text, *answer.headers.values(), *logged])
    # The runtime itself logs what was raised, once.
    assert [line["errorType"] for line in map(json.loads, logged) if "errorType" in line] == [kind]
    team.await_depth(RETRY_QUEUE, 1)


class TextFunction(Function):
    """With the form of the platform's log that is the default, in which it prints an error as it is."""

    def _platform(self) -> dict[str, str]:
        return super()._platform() | {"AWS_LAMBDA_LOG_FORMAT": "Text"}


def test_nothing_hostile_reaches_the_log_of_the_platform(
    task: Path, settings: dict[str, str], broker_url: str, team: Client
) -> None:
    with TextFunction(task, settings) as function:
        for event in ({"detail-type": "\x1b]0;pwn\x07\x9b2J\u202e"}, {"job": "\x1b]0;pwn\x07\x9b2J\u202e"}):
            assert function.send(event).error["errorType"] == "SettingsError"
        logged = "\n".join(function.logged()).replace("\xa0", " ")  # the runtime's own indentation of a trace
    assert logged.count(r"\x1b]0;pwn\x07\x9b2J\u202e") >= 2
    assert [line for line in logged.split("\n") if not line.isprintable()] == []


def test_without_a_database_that_is_named_a_function_moves_nothing(
    task: Path, settings: dict[str, str], broker_url: str, team: Client
) -> None:
    team.channel.queue_declare(RETRY_QUEUE, durable=True)
    fail(broker_url, b"waits")
    with Function(task, {"broker_url": broker_url}) as function:
        error = function.send({}).error
    assert error["errorType"] == "SettingsError"
    assert "DLQBATCH_DATABASE_URL" in error["errorMessage"]
    team.await_depth(RETRY_QUEUE, 1)


def test_the_log_is_one_json_line_for_each_run_and_nothing_twice(function: Function, broker_url: str) -> None:
    for _ in range(2):
        function.send({})
        fail(broker_url, b"one")
    runs = [line for line in lines_of(function) if line["event"] == "run"]
    assert len(runs) == len(lines_of(function)) == 2
    for run in runs:
        assert (run["level"], run["fields"]["job"], run["fields"]["outcome"]) == ("info", "drain", "ok")
        assert run["fields"]["version"] == run["version"] == __version__
        assert run["pid"] == function.pid
    assert len({run["run_id"] for run in runs}) == len({run["aws_request_id"] for run in runs}) == 2


@pytest.fixture(scope="module")
def own_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitNode]:
    """A broker that nobody else uses: it counts declarations for all of its virtual hosts together."""
    from scripts import services  # noqa: PLC0415  (for the one test that needs it)

    with services.work_folder(volatile=True) as folder, RabbitNode(folder / "rabbitmq").start() as node:
        yield node


def test_a_warm_start_declares_nothing_again_as_the_broker_itself_counts(
    own_node: RabbitNode, task: Path, settings: dict[str, str]
) -> None:
    management = Management(own_node.management_url)

    def declared() -> int:
        return int(management.get("overview").get("churn_rates", {}).get("queue_declared", 0))

    with client(own_node.url) as team, Function(task, {**settings, "broker_url": own_node.url}) as function:
        function.send({})
        assert eventually(lambda: declared() == LADDER), declared()
        for number in range(3):
            fail(own_node.url, b"%d" % number)
            assert balanced(function.send(recorded("schedule")).report)["delayed"] == 1
        # The counts come late; the next one that comes tells what was before it.
        team.channel.queue_declare("the-last-one")
        assert eventually(lambda: declared() > LADDER)
        assert declared() == LADDER + 1
    # Another container is cold, and does declare.
    with Function(task, {**settings, "broker_url": own_node.url}) as other:
        other.send({})
        assert eventually(lambda: declared() == 2 * LADDER + 1), declared()
