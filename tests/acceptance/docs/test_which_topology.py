"""The commands of docs/which-topology.md, pasted into a broker where a queue exists already."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import pytest
from pasted_commands import Shell
from pika.exceptions import ChannelClosedByBroker
from program import ROOT, Program, client, eventually

from scripts import services
from scripts.servers.management import Management, quoted
from scripts.servers.rabbitmq import RabbitNode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from program import Client

PAGE = (ROOT / "docs" / "which-topology.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
BY_RABBITMQCTL, BY_CURL = (text for kind, text in BLOCKS if kind == "sh")
LADDER, PER_QUEUE, PIPELINE, NATIVE = (text for kind, text in BLOCKS if text.startswith("dlqbatch "))
(REFUSAL,) = (text for _, text in BLOCKS if text.startswith("PRECONDITION_FAILED"))
(DELETION,) = re.findall(r"`(rabbitmqctl delete_queue .*?)`", PAGE)
ARGUMENTS = {"x-dead-letter-exchange": "retry-exchange", "x-dead-letter-routing-key": "retry-routing-key"}


@pytest.fixture(scope="module")
def node() -> Iterator[RabbitNode]:
    with services.work_folder(volatile=True) as folder, RabbitNode(folder / "rabbitmq").start() as started:
        yield started


@pytest.fixture
def management(node: RabbitNode) -> Iterator[Management]:
    """Its default virtual host, the only one that the lines of the page mean, and empty for each test."""
    found = Management(node.management_url)
    yield found
    found.drop_vhost()
    found.make_vhost()


@pytest.fixture
def program(node: RabbitNode, management: Management, sqlite_url: str) -> Program:
    assert not management.queues()
    settings = {"broker_url": node.url, "management_url": node.management_url, "database_url": sqlite_url}
    return Program(settings)


@pytest.fixture
def team(node: RabbitNode, program: Program) -> Iterator[Client]:
    dlqbatch(program, LADDER)
    for words in ("db upgrade", "events set # 3"):
        assert program.run(*words.split()).code == 0
    with client(node.url) as connected:
        connected.channel.queue_declare("orders", durable=True)
        yield connected


def dlqbatch(program: Program, line: str) -> None:
    done = program.run(*shlex.split(line)[1:])
    assert done.code == 0, done.said


def what_is_rejected_is_delayed(team: Client, program: Program) -> None:
    team.fail("orders", "orders", b"17", exchange="")
    done = program.run("drain", "--json")
    assert (done.code, done.told["counts"]["delayed"]) == (0, 1), done.said


def test_a_queue_that_exists_is_led_to_the_ladder_by_a_policy(
    node: RabbitNode, management: Management, program: Program, team: Client
) -> None:
    channel = team.channel
    with pytest.raises(ChannelClosedByBroker) as refused:
        channel.queue_declare("orders", durable=True, arguments=ARGUMENTS)
    assert (refused.value.reply_code, refused.value.reply_text) == (406, " ".join(REFUSAL.split()))
    team.channel = team._connection.channel()

    for line in BY_RABBITMQCTL.splitlines():
        node.control(*shlex.split(line)[1:])
    what_is_rejected_is_delayed(team, program)
    team.channel.queue_declare("orders", durable=True)  # its declaration stays as it is
    assert management.queue("orders")["arguments"] == {}

    management.delete("policies/%2F/to-dlqbatch")
    Shell(management, program, team.depth).paste(BY_CURL.strip())
    what_is_rejected_is_delayed(team, program)
    assert eventually(lambda: management.queue("orders").get("policy") == "to-dlqbatch")
    found = program.run("doctor", "--json").told
    assert not [one for one in found["findings"] if one["severity"] == "serious" and "orders" in str(one)], found


def test_an_argument_goes_before_a_policy_option_by_option(management: Management, team: Client) -> None:
    team.make_origin("theirs-dead", "theirs")
    team.channel.queue_declare("theirs", durable=True, arguments={"x-dead-letter-exchange": "theirs"})
    (definition,) = re.findall(r"'(\{.*?\})'$", BY_RABBITMQCTL, re.MULTILINE)
    assert set(ARGUMENTS.values()) < set(re.findall(r'"([\w-]+)"', definition))
    policy = {name.removeprefix("x-"): value for name, value in ARGUMENTS.items()}
    management.put("policies/%2F/theirs", {"pattern": "^theirs$", "apply-to": "queues", "definition": policy})
    assert eventually(lambda: management.queue("theirs").get("policy") == "theirs")
    team.publish("", "theirs")
    team.reject_all("theirs")
    team.await_depth("theirs-dead", 1)
    assert team.contents("theirs-dead")[0].routing_key == "retry-routing-key"


def test_the_other_kinds_want_a_queue_of_their_own(
    node: RabbitNode, management: Management, program: Program, team: Client
) -> None:
    dlqbatch(program, PER_QUEUE)
    dlqbatch(program, PIPELINE)
    policy = {name.removeprefix("x-"): value for name, value in ARGUMENTS.items()}
    management.put("policies/%2F/orders", {"pattern": "^orders$", "apply-to": "queues", "definition": policy})
    per_queue = ("per-queue", "--queue", "orders", "--exchange", "shop")
    planned = program.run("topology", "plan", *per_queue)
    assert (planned.code, "! queue    orders  (different)" in planned.out) == (3, True), planned.said
    assert program.run("topology", "apply", *per_queue).code == 2

    team.publish("", "orders")
    with pytest.raises(Exception, match="returned non-zero exit status"):
        node.control(*shlex.split(DELETION)[1:])  # it holds a message
    team.reject_all("orders")
    node.control(*shlex.split(DELETION)[1:])
    assert program.run("topology", "apply", *per_queue).code == 0
    assert management.queue("orders")["arguments"]["x-dead-letter-exchange"] == "shop.retry"


def test_a_queue_that_exists_has_its_retries_delayed_by_the_broker(
    broker43_url: str, management43: Management, sqlite_url: str
) -> None:
    host, port = management43._address
    settings = {"broker_url": broker43_url, "management_url": f"http://{host}:{port}", "database_url": sqlite_url}
    program = Program(settings)
    with client(broker43_url) as team:
        team.channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
        dlqbatch(program, NATIVE)
        dlqbatch(program, f"{PIPELINE.strip()} --quorum --delayed-retry-min 10s")
        policies = management43.get(f"policies/{quoted(management43.vhost)}")
        assert {one["name"]: one["definition"]["delayed-retry-min"] for one in policies} == {
            "dlqbatch.native.orders": 1_000,
            "dlqbatch.native.settlement.requested": 10_000,
        }
        team.channel.queue_delete("orders")
        team.channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "classic"})
        done = program.run(*shlex.split(NATIVE)[1:])
        assert done.code == 2, done.said
        assert "only a quorum queue delays retries" in done.said
