"""`dlqbatch topology` as people use it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from program import Client, Program

    from scripts.servers.management import Management

DESCRIBED = ("per-queue", "--queue", "created", "--exchange", "shop", "--ttl", "30000")


@pytest.fixture
def topologist(program: Program, broker_addresses: tuple[str, str]) -> Program:
    return program.but(management_url=broker_addresses[1])


def test_a_plan_is_a_diff_and_its_exit_code_says_whether_there_is_something_to_do(
    topologist: Program, team: Client
) -> None:
    done = topologist.run("topology", "plan", *DESCRIBED)
    assert done.code == 3, done.said
    assert "+ queue    created.delay  (to create)" in done.out
    assert "  queue    dlq-queue  (the same)" in done.out
    assert not team.exists("created.delay")
    applied = topologist.run("topology", "apply", *DESCRIBED)
    assert applied.code == 0, applied.said
    assert "dlqbatch.topology.NAME.kind=per-queue, dlqbatch.topology.NAME.queue=created" in applied.err
    done = topologist.run("topology", "plan", *DESCRIBED)
    assert (done.code, "to create" in done.out) == (0, False)
    done = topologist.run("topology", "plan", *DESCRIBED[:-1], "5000")
    assert done.code == 3
    assert "! queue    created.delay  (different)\n    x-message-ttl: found 30000, wanted 5000\n" in done.out
    assert "--change-ttl" in done.err


def test_a_plan_as_json_holds_the_same(topologist: Program) -> None:
    done = topologist.run("topology", "plan", "ladder", "--json", "-s", "tier_ttls=50,50,60")
    assert done.code == 3
    differing = [item for item in done.told if item["state"] != "the same"]
    assert differing == [
        {
            "kind": "queue",
            "name": "queue.delay.3",
            "state": "different",
            "differences": [{"argument": "x-message-ttl", "found": "50", "wanted": "60"}],
        }
    ]


def test_a_delay_is_changed_only_when_that_is_asked_for(topologist: Program, management: Management) -> None:
    changed = topologist.but(tier_ttls="50,50,60")
    done = changed.run("topology", "apply")
    assert done.code == 2
    assert "x-message-ttl: found 50, wanted 60" in done.out
    assert management.queue("queue.delay.3")["arguments"]["x-message-ttl"] == 50
    assert changed.run("topology", "apply", "--change-ttl").code == 0
    assert management.queue("queue.delay.3")["arguments"]["x-message-ttl"] == 60
    assert changed.run("topology", "plan").code == 0


def test_the_mark_of_a_change_that_was_cut_off_is_told_of_with_what_ends_it(topologist: Program, team: Client) -> None:
    """All is as it should be, and yet no run declares anything."""
    assert topologist.run("topology", "apply").code == 0
    team.channel.queue_declare("dlqbatch.changing", durable=True)
    for command, code in ((["plan"], 3), (["apply"], 2), (["delete", "ladder", "--yes"], 1)):
        done = topologist.run("topology", *command)
        assert done.code == code, done.said
        assert "dlqbatch topology apply --change-ttl" in done.err
    assert topologist.run("topology", "apply", "--change-ttl").code == 0
    assert topologist.run("topology", "plan").code == 0


def test_what_another_argument_differs_in_is_an_error(topologist: Program) -> None:
    done = topologist.run("topology", "apply", "-s", "queue_type=quorum", "--change-ttl")
    assert done.code == 2
    assert "x-queue-type" in done.err


def test_an_export_is_definitions_and_needs_no_broker_for_a_version(topologist: Program) -> None:
    done = topologist.but(broker_url="amqp://127.0.0.1:9/shop").run(
        "topology", "export", "pipeline", "--exchange", "settle", "--quorum", "--broker-version", "4.1", "--json"
    )
    assert done.code == 0, done.said
    told = json.loads(done.out)
    limits = {queue["name"]: queue["arguments"]["x-delivery-limit"] for queue in told["queues"]}
    assert limits == {"settle": 3, "dlq.settle": -1}
    assert {queue["vhost"] for queue in told["queues"]} == {"shop"}


def test_deleting_wants_a_yes_and_empty_queues(topologist: Program, team: Client) -> None:
    assert topologist.run("topology", "apply", *DESCRIBED).code == 0
    assert topologist.run("topology", "delete", *DESCRIBED).code == 2
    assert topologist.run("topology", "delete", "--yes").code == 2
    looked = topologist.run("topology", "delete", *DESCRIBED, "--dry-run", "--json")
    assert looked.code == 0
    assert {row["name"] for row in looked.told} >= {"created", "created.retry", "created.delay", "shop.retry"}
    team.publish("shop", "created")
    refused = topologist.run("topology", "delete", *DESCRIBED, "--yes")
    assert refused.code == 1
    assert "holds 1 message(s)" in refused.out
    assert team.exists("created.delay")
    done = topologist.run("topology", "delete", *DESCRIBED, "--yes", "--with-messages")
    assert done.code == 0, done.said
    assert not team.exists("created")
    assert team.exists("dlq-queue")


def test_without_the_management_api_only_with_messages_deletes(topologist: Program, team: Client) -> None:
    deaf = topologist.but(management_url="http://127.0.0.1:9")
    described = (*DESCRIBED, "--quorum")
    assert deaf.run("topology", "apply", *described).code == 0
    refused = deaf.run("topology", "delete", *described, "--yes", "--json")
    assert refused.code == 1, refused.said
    reasons = {row["name"]: row["why"] for row in refused.told if row["kind"] == "queue"}
    assert all("only the management API can tell" in why for why in reasons.values())
    assert "created.delay" in reasons
    assert team.exists("created.delay")
    done = deaf.run("topology", "delete", *described, "--yes", "--with-messages")
    assert done.code == 0, done.said
    assert not team.exists("created.delay")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "pipelines"), "perhaps pipeline was meant"),
        (("apply", "--queue", "x"), "say which of them"),
        (("apply", "per-queue", "--queue", "x"), "a per-queue needs it"),
        (("apply", "per-queue", "--queue", "x", "--exchange", "e", "--type", "fanout"), "must be topic or direct"),
        (("apply", "pipeline", "--exchange", "e", "--no-delay"), "is no option of a pipeline"),
        (("export", "--broker-version", "four"), "such as 3.13"),
    ],
)
def test_wrong_usage_is_told_with_what_would_be_right(
    topologist: Program, arguments: tuple[str, ...], said: str
) -> None:
    done = topologist.run("topology", *arguments)
    assert done.code == 2
    assert said in " ".join(done.err.split())
