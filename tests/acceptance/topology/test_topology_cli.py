"""`dlqbatch topology` as people use it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from program import eventually

from scripts.servers.management import quoted

if TYPE_CHECKING:
    from program import Client, Finished, Program

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


def test_what_was_created_and_what_was_there_is_told_row_by_row(topologist: Program) -> None:
    assert topologist.run("topology", "apply", "ladder").code == 0
    first = rows(topologist.run("topology", "apply", *DESCRIBED))
    assert first["queue", "created.delay"] == "created"
    assert {done for (_, name), done in first.items() if "created" in name} == {"created"}
    again = rows(topologist.run("topology", "apply", *DESCRIBED))
    assert again.keys() == first.keys()
    assert set(again.values()) == {"the same"}
    changed = rows(topologist.run("topology", "apply", *DESCRIBED[:-1], "50", "--change-ttl"))
    assert {name for name, done in changed.items() if done == "changed"} == {("queue", "created.delay")}
    # Nobody looked, so that nothing is said of it.
    assert "the same" not in topologist.run("topology", "apply", *DESCRIBED, "--dry-run").out


def test_a_binding_is_said_to_be_declared_where_nobody_can_tell_whether_it_was_there(program: Program) -> None:
    found = rows(program.run("topology", "apply", "ladder"))
    assert {done for (kind, _), done in found.items() if kind == "binding"} == {"declared"}
    assert {done for (kind, _), done in found.items() if kind != "binding"} == {"the same"}


def rows(done: Finished) -> dict[tuple[str, str], str]:
    """What is told of each part, by its kind and its name or, of a binding, its queue."""
    assert done.code == 0, done.said
    lines = [re.split(r" {2,}", line) for line in done.out.splitlines() if not line.startswith("kind ")]
    return {(one[0], one[3] if one[0] == "binding" else one[1]): one[-1] for one in lines}


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


def test_an_exchange_that_others_dead_letter_to_is_in_the_way(
    topologist: Program, team: Client, management: Management
) -> None:
    assert topologist.run("topology", "apply", "ladder").code == 0
    team.make_origin("orders-queue")
    team.channel.queue_declare("payments", durable=True)
    policy = {"pattern": "^payments$", "apply-to": "queues", "definition": {"dead-letter-exchange": "dlq-exchange"}}
    management.put(f"policies/{quoted(management.vhost)}/by-policy", policy)
    assert eventually(lambda: management.queue("payments").get("policy") == "by-policy")
    refused = topologist.run("topology", "delete", "ladder", "--yes", "--with-messages", "--json")
    assert refused.code == 1, refused.said
    reasons = {row["name"]: row["why"] for row in refused.told if row["kind"] == "exchange" and row["why"]}
    assert reasons.keys() == {"retry-exchange", "dlq-exchange"}
    assert "'orders-queue' would lose what it dead-letters" in reasons["retry-exchange"]
    assert team.exists("retry-queue")
    for queue in ("orders-queue", "payments"):
        team.channel.queue_delete(queue)
    done = topologist.run("topology", "delete", "ladder", "--yes", "--with-messages")
    assert done.code == 0, done.said


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
