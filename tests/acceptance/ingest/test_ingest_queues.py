"""Queues to ingest that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pika
import pytest
from program import DLQ

from dlqbatch import jobs
from dlqbatch.settings import load
from scripts.servers.management import quoted

if TYPE_CHECKING:
    from program import Client, Program

    from scripts.servers.management import Management

NO_FILE = {"DLQBATCH_CONFIG": "/dev/null"}


@pytest.fixture
def ingest(program: Program, database_url: str) -> Program:
    made = program.but(database_url=database_url)
    assert made.run("db", "upgrade").code == 0
    return made


def test_a_queue_that_is_missing_does_not_keep_the_others_from_being_read(ingest: Program, team: Client) -> None:
    for body in (b"1", b"2"):
        team.publish("", DLQ, body)
    team.await_depth(DLQ, 2)
    done = ingest.run("ingest", "gone.1", DLQ, "gone.2", "--json")
    assert (done.code, done.told["outcome"]) == (3, "partial"), done.said
    assert (done.told["counts"]["recorded"], done.told["stopped_by"]) == (2, "empty")
    told = [each for each in done.told["warnings"] if "not on the broker" in each]
    assert [each.split("'")[1] for each in told] == ["gone.1", "gone.2"]
    team.await_depth(DLQ, 0)
    # What was taken is certain all the same: a message like one of these is another message.
    team.publish("", DLQ, b"1")
    team.await_depth(DLQ, 1)
    assert ingest.run("ingest", "--json").told["counts"]["recorded"] == 1


def test_a_name_on_the_command_line_may_hold_a_comma_or_begin_with_a_blank(ingest: Program, team: Client) -> None:
    queues = ("dlq,orders", " dlq")
    for queue in queues:
        team.channel.queue_declare(queue, durable=True)
        team.publish("", queue)
        team.await_depth(queue, 1)
    for job, decision in (("check", "left"), ("ingest", "recorded")):
        done = ingest.run(job, *queues, "--json")
        assert (done.code, done.told["counts"]["got"], done.told["counts"][decision]) == (0, 2, 2), done.said


def test_what_says_nothing_is_named_by_the_queue_it_was_taken_from_and_found_by_its_correlation_id(
    ingest: Program, team: Client
) -> None:
    queues = ("billing.parking", "mail.error")
    for queue in queues:
        team.channel.queue_declare(queue, durable=True)
        team.channel.basic_publish("", queue, b"{}", pika.BasicProperties(correlation_id=f"c-{queue}"))
        team.await_depth(queue, 1)
    assert ingest.run("ingest", *queues).code == 0
    groups = ingest.run("messages", "groups", COLUMNS="200").out
    for queue in queues:
        assert f"not told; taken from '{queue}'" in groups
        # Who searches for the id that his framework has logged is told the filter, and it finds the message.
        wanted = ("--field", f"correlation_id=c-{queue}")
        assert " ".join(wanted) in ingest.run("messages", "search", f"c-{queue}", COLUMNS="200").err
        found = ingest.run("messages", "list", *wanted, COLUMNS="200").out
        assert found.count("not told; taken from") == found.count(f"taken from '{queue}'") == 1


def test_of_two_queues_none_waits_for_ever_when_a_run_may_take_less_than_both_hold(
    ingest: Program, team: Client
) -> None:
    """Each run begins with another one by chance: 30 times the same would be one in a thousand million."""
    for queue in ("dlq.a", "dlq.b"):
        team.channel.queue_declare(queue, durable=True)
        for number in range(30):
            team.publish("", queue, b"%d" % number)
        team.await_depth(queue, 30)
    settings = load({**ingest.settings, "ingest_queues": "dlq.a,dlq.b", "max_messages": "1"}, NO_FILE)
    for runs in range(1, 31):
        assert jobs.run("ingest", settings, jobs.RunOptions()).counts["recorded"] == 1
        if 0 < 30 - team.depth("dlq.a") < runs:
            break
    assert max(team.depth("dlq.a"), team.depth("dlq.b")) < 30


@pytest.fixture
def stream(ingest: Program, team: Client) -> None:
    """A stream with a message, and beside it a queue that is deeper."""
    team.channel.queue_declare("dlq.s", durable=True, arguments={"x-queue-type": "stream"})
    team.publish("", "dlq.s")
    team.channel.queue_declare("dlq.z", durable=True)
    for number in range(5):
        team.publish("", "dlq.z", b"%d" % number)
    team.await_depth("dlq.z", 5)


@pytest.mark.usefixtures("on_every_broker", "stream")
def test_a_stream_that_a_wildcard_matches_keeps_no_other_queue_from_being_read(
    ingest: Program, team: Client, management: Management
) -> None:
    api = "http://guest:guest@{}:{}".format(*management._address)
    done = ingest.but(management_url=api).run("ingest", "dlq.*", "--json")
    assert (done.code, done.told["outcome"]) == (0, "ok"), done.said
    assert (done.told["counts"]["recorded"], done.told["stopped_by"]) == (5, "empty")
    assert done.told["warnings"] == ["'dlq.s' is a stream and is left out"]
    team.await_depth("dlq.z", 0)


@pytest.mark.usefixtures("on_every_broker", "stream")
def test_a_stream_given_by_name_is_read_beside_the_queues(ingest: Program, team: Client) -> None:
    done = ingest.run("ingest", "dlq.s", "dlq.z", "--json")
    assert (done.code, done.told["counts"]["recorded"]) == (0, 6), done.said
    assert done.told["streams"] == {"dlq.s": {"read_to": None, "ends_at": 0, "missing": 0, "replaced": False}}
    team.await_depth("dlq.z", 0)
    assert ingest.run("ingest", "dlq.s", "dlq.z", "--json").told["counts"]["got"] == 0


def test_where_none_of_the_queues_is_there_the_settings_are_wrong(ingest: Program) -> None:
    for names in (("gone.1",), ("gone.1", "gone.2")):
        done = ingest.run("ingest", *names, "--json")
        assert (done.code, done.told["error"]["type"]) == (2, "TopologyMissing"), done.said
        assert "gone." in done.err


def test_a_queue_that_we_may_not_read_is_told_of_though_it_is_empty(
    ingest: Program, team: Client, management: Management
) -> None:
    name = f"blind-{management.vhost}"
    management.put(f"users/{quoted(name)}", {"password": "p", "tags": ""})
    rights = {"configure": "^$", "write": "^$", "read": "^dlq.open$"}
    management.put(f"permissions/{quoted(management.vhost)}/{quoted(name)}", rights)
    for queue in ("dlq.open", "dlq.closed"):
        team.channel.queue_declare(queue, durable=True)
    try:
        blind = ingest.but(broker_url=ingest.settings["broker_url"].replace("guest:guest@", f"{name}:p@"))
        done = blind.run("ingest", "dlq.open", "dlq.closed", "--json")
        assert (done.code, done.told["outcome"]) == (3, "partial"), done.said
        [told] = done.told["warnings"]
        assert "'dlq.closed' was not read" in told
        assert "`dlqbatch doctor` prints the command" in told
        assert blind.run("ingest", "dlq.open", "--json").told["outcome"] == "ok"
    finally:
        management.delete(f"users/{quoted(name)}")
