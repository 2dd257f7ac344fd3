from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from program import DLQ, FORKED, HANGS_AFTER, RETRY_QUEUE, ROOT, Client, Program, eventually

from dlqbatch.broker.connection import NoAnswer
from dlqbatch.errors import BrokerLost, BrokerUnreachable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

ORIGIN = "orders-queue"

# One container of the platform: warm after its first event. A line is an event and the milliseconds that are left.
CONTAINER = """
import json, sys
sys.path.insert(0, {root!r})
from handler import handler

class Context:
    def __init__(self, milliseconds):
        self.get_remaining_time_in_millis = lambda: milliseconds

for line in sys.stdin:
    event, milliseconds = json.loads(line)
    try:
        answer = handler(event, None if milliseconds is None else Context(milliseconds))
    except Exception as error:
        answer = {{"raised": type(error).__name__, "text": str(error)}}
    print(json.dumps(answer), flush=True)
"""


class Container:
    def __init__(self, program: Program) -> None:
        self._process = Program(program.settings, (FORKED, CONTAINER.format(root=str(ROOT)))).start()

    def send(self, event: object, milliseconds_left: int | None = 60_000) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([event, milliseconds_left]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def end(self) -> None:
        self._process.communicate(timeout=HANGS_AFTER)
        assert self._process.returncode == 0


@pytest.fixture
def container(program: Program) -> Iterator[Container]:
    started = Container(program)
    yield started
    started.end()


def alarm(state: str) -> list[dict[str, Any]]:
    """One CloudWatch alarm in its three wrappings."""
    direct = {
        "source": "aws.cloudwatch",
        "alarmArn": "arn",
        "alarmData": {"alarmName": "deep", "state": {"value": state}},
    }
    on_bus = {
        "detail-type": "CloudWatch Alarm State Change",
        "source": "aws.cloudwatch",
        "detail": {"alarmName": "deep", "state": {"value": state}},
    }
    notified = {"Records": [{"Sns": {"Message": json.dumps({"AlarmName": "deep", "NewStateValue": state})}}]}
    return [direct, on_bus, notified]


SCHEDULE = {"version": "0", "detail-type": "Scheduled Event", "source": "aws.events", "detail": {}}


@pytest.fixture
def failed(program: Program, team: Client) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", *(b"%d" % number for number in range(12)))


def test_every_event_that_starts_a_run_starts_one_and_the_report_comes_back(
    container: Container, team: Client, failed: None
) -> None:
    events = [{}, {"job": "drain", "max_messages": 1}, SCHEDULE, *alarm("ALARM"), {"job": "drain"}]
    reports = [container.send({"max_messages": 1})] + [container.send(event) for event in events]
    for report in reports:
        assert report["job"] == "drain"
        assert report["outcome"] == "ok"
        counts = report["counts"]
        assert counts["got"] == sum(number for name, number in counts.items() if name != "got")
        assert report["elapsed_seconds"] >= 0
    assert reports[0]["stopped_by"] == "messages"
    assert sum(report["counts"]["delayed"] for report in reports) == 12
    assert team.depth(RETRY_QUEUE) == 0


def test_max_messages_of_an_event_is_exact(container: Container, team: Client, failed: None) -> None:
    report = container.send({"job": "drain", "max_messages": 10})
    assert (report["counts"]["got"], report["stopped_by"]) == (10, "messages")
    assert team.depth(RETRY_QUEUE) == 2


def test_a_dry_run_by_event_moves_nothing(container: Container, team: Client, failed: None) -> None:
    report = container.send({"dry_run": True})
    assert (report["dry_run"], report["counts"]["delayed"]) == (True, 12)
    assert team.depth(RETRY_QUEUE) == 12


def test_an_alarm_that_is_over_does_nothing_and_says_so(container: Container, team: Client, failed: None) -> None:
    for event in alarm("OK") + alarm("INSUFFICIENT_DATA"):
        report = container.send(event)
        assert (report["outcome"], report["counts"]["got"]) == ("ok", 0)
        assert any("only ALARM starts a run" in warning for warning in report["warnings"])
    assert team.depth(RETRY_QUEUE) == 12


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"job": "drian"}, ["'drian'", "the jobs are: drain"]),
        ({"max_mesages": 5}, ["max_mesages", "job, dry_run, max_messages, max_bytes, max_seconds, allow_empty_policy"]),
        ({"job": "drain", "broker_url": "amqp://elsewhere/"}, ["broker_url", "a run of drain understands"]),
        ({"job": "drain", "check_max_deaths": 5}, ["unknown options: check_max_deaths"]),
        ({"job": "monitor", "max_messages": 5}, ["unknown options: max_messages", "understands: job, dry_run"]),
        ({"job": "drian", "max_messages": 5}, ["'drian'", "the jobs are: drain"]),
        ({"job": 5}, ["job"]),
        ({"max_messages": 0}, ["max_messages", "'0'", "a whole number of at least 1"]),
        ({"max_messages": True}, ["max_messages", "'true'"]),
        ({"dry_run": "yes"}, ["dry_run is not true or false"]),
        ({"job": "check", "check_queues": ""}, ["check_queues (event) is empty"]),
        ({"job": "check", "check_queues": []}, ["check_queues (event) is empty"]),
        ({"job": "check", "check_queues": [RETRY_QUEUE, ""]}, ["check_queues (event) names a queue of 0 bytes"]),
        ({"job": "check", "check_queues": [RETRY_QUEUE], "check_target": ""}, ["check_target (event) is empty"]),
        ([], ["list", "not an object"]),
        ("drain", ["str", "not an object"]),
        ({"detail-type": "EC2 Instance State-change Notification"}, ["EC2 Instance", "starts nothing here"]),
        ({"Records": [{"s3": {}}]}, ["holds no CloudWatch alarm"]),
        ({"alarmData": {"alarmName": "deep"}}, ["does not say the alarm's state"]),
    ],
)
def test_an_event_that_cannot_be_understood_raises_and_moves_nothing(
    container: Container, team: Client, failed: None, event: object, words: list[str]
) -> None:
    answer = container.send(event)
    assert answer["raised"] == "SettingsError"
    for word in words:
        assert word in answer["text"]
    assert team.depth(RETRY_QUEUE) == 12


EVIL = "\x1b]0;pwn\x07\x9b2J\u202e\x85x"
FAILING = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from dlqbatch import errors, jobs
def run(job, *_, **__):
    raise {{error}}
jobs.run = run
"""


@pytest.mark.parametrize(
    ("event", "error", "kind"),
    [
        ({"detail-type": EVIL}, "", "SettingsError"),
        ({EVIL: 1}, "", "SettingsError"),
        ({"job": EVIL}, "", "SettingsError"),
        ({}, f"errors.ChannelRefused(403, {EVIL!r} + ' amqp://me:s3cret-word@h')", "ChannelRefused"),
        ({}, f"RuntimeError({EVIL!r} + ' amqp://me:s3cret-word@h')", "DlqbatchError"),
    ],
)
def test_what_is_raised_has_a_text_that_can_be_printed_as_it_is(
    program: Program, event: object, error: str, kind: str
) -> None:
    script = FAILING.format(error=error) * bool(error) + CONTAINER.format(root=str(ROOT))
    started = Program(program.settings, (sys.executable, "-c", script)).start()
    out, logged = started.communicate(json.dumps([event, None]) + "\n", timeout=HANGS_AFTER)
    answer = json.loads(out)
    assert answer["raised"] == kind
    assert r"\x1b]0;pwn\x07\x9b2J\u202e" in answer["text"]
    for text in (answer["text"], logged):
        assert [line for line in text.split("\n") if not line.isprintable()] == []
        assert "s3cret-word" not in text


def test_with_little_time_left_a_run_ends_in_order_before_the_platform_ends_it(
    container: Container, team: Client, failed: None
) -> None:
    report = container.send({}, milliseconds_left=4_900)  # less than the margin of five seconds
    if "raised" in report:  # on a slow machine the time is over before anything began; the platform hears of it
        assert report["raised"] in {BrokerUnreachable.__name__, BrokerLost.__name__, NoAnswer.__name__}, report
        ways = (RETRY_QUEUE, "queue.delay.1", "retry-queue-1")
        assert eventually(lambda: sum(map(team.depth, ways)) == 12)
        return
    counts = report["counts"]
    # A slow machine may leave what was not confirmed in time, or not hear the broker's last word, and says so.
    assert report["outcome"] == ("partial" if counts["left"] or report.get("warnings") else "ok")
    # A fast one may have taken all twelve, and seen that there are no more, before it looks at the time.
    assert report["stopped_by"] == "time" or (report["stopped_by"] == "empty" and counts["got"] == 12)
    assert counts["got"] == counts["delayed"] + counts["left"]
    assert report["elapsed_seconds"] < 4.9
    team.await_depth(RETRY_QUEUE, 12 - counts["delayed"])


def test_a_run_that_could_not_begin_raises_so_that_the_platform_notices(program: Program) -> None:
    broken = Container(program.but(broker_url="amqp://guest:s3cret-word@127.0.0.1:1/", connect_timeout_seconds="0.3"))
    answer = broken.send({})
    broken.end()
    assert answer["raised"] == "BrokerUnreachable"
    assert "127.0.0.1:1" in answer["text"]
    assert "s3cret-word" not in answer["text"]


def bindings(management: Management) -> set[tuple[str, str, str]]:
    return {(one["source"], one["routing_key"], one["destination"]) for one in management.bindings()}


def test_a_warm_start_declares_nothing_again(container: Container, team: Client, management: Management) -> None:
    spare = ("dlq-exchange", "dlq-exchange", DLQ)  # no message of ours takes this one
    container.send({})
    assert spare in bindings(management)
    team.channel.queue_unbind(DLQ, "dlq-exchange", "dlq-exchange")

    assert container.send({})["outcome"] == "ok"
    assert spare not in bindings(management)


def test_what_was_deleted_between_two_warm_runs_is_declared_again(
    container: Container, team: Client, management: Management
) -> None:
    container.send({})
    before = bindings(management)
    for queue in (RETRY_QUEUE, "retry-queue-2"):
        team.channel.queue_delete(queue)
        assert container.send({})["outcome"] == "ok"
        assert bindings(management) == before
    for exchange in ("route-delay", "dlq-exchange"):
        team.channel.exchange_delete(exchange)
        assert container.send({})["outcome"] == "ok"
        assert bindings(management) == before
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", b"one")
    assert container.send({})["counts"]["delayed"] == 1


@pytest.mark.parametrize("exchange", ["retry-exchange", "retry-exchange-1"])
def test_an_exchange_that_only_the_broker_publishes_to_is_declared_again_too(
    container: Container, team: Client, failed: None, management: Management, exchange: str
) -> None:
    container.send({"max_messages": 1})
    before = bindings(management)
    team.await_depth("retry-queue-1", 1)
    team.channel.exchange_delete(exchange)
    assert container.send({})["outcome"] == "ok"
    # Without it the broker drops what leaves a delay queue, or an origin, without a word.
    assert before <= bindings(management)


def test_a_delay_queue_that_was_deleted_between_two_warm_runs_costs_no_message(
    container: Container, team: Client, failed: None
) -> None:
    container.send({"max_messages": 1})
    team.channel.queue_delete("queue.delay.1")
    report = container.send({})
    counts = report["counts"]
    # The first may have come back before its delay queue was deleted; then it is returned.
    assert counts["delayed"] + counts["left"] == 11
    team.await_depth(RETRY_QUEUE, counts["left"])
    assert container.send({})["counts"]["delayed"] == counts["left"]


def test_inside_lambda_the_database_has_to_be_named(broker_url: str, tmp_path: Path) -> None:
    script = f"import os; os.environ['AWS_LAMBDA_FUNCTION_NAME'] = 'x'\n{CONTAINER.format(root=str(ROOT))}"
    started = Program({"broker_url": broker_url}, (sys.executable, "-c", script)).start()
    out, _ = started.communicate(json.dumps([{}, None]) + "\n", timeout=HANGS_AFTER)
    answer = json.loads(out)
    assert answer["raised"] == "SettingsError"
    assert "DLQBATCH_DATABASE_URL" in answer["text"]
