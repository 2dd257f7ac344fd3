"""`ingest QUEUE --head`: a message that kills its consumers leaves its queue, and is held until somebody undoes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from frame_link import FrameLink, Point
from program import DLQ, RETRY_QUEUE, Client, Program

if TYPE_CHECKING:
    from collections.abc import Iterator

ORIGIN, KEY = "payment-queue", "payment.card"
NOT_TAKEN, USAGE, PARTIAL = 1, 2, 3


class Scene:
    def __init__(self, program: Program, team: Client, store: psycopg.Connection[Any]) -> None:
        self.program, self.team, self.store = program, team, store

    def replay(self, *bodies: bytes) -> list[int]:
        """Payments that died; the dead store has sent them to their queue again."""
        self.team.fail(ORIGIN, KEY, *bodies)
        assert self.program.run("drain").code == 0
        assert self.program.run("ingest").code == 0
        by_body = {bytes(body): row_id for row_id, body in self.rows("id, body")}
        for number, body in enumerate(bodies, 1):
            done = self.program.run("messages", "replay", str(by_body[body]))
            assert done.code == 0, done.said
            self.team.await_depth(ORIGIN, number)
        return [by_body[body] for body in bodies]

    def head(self, *options: str) -> Any:
        return self.program.run("ingest", ORIGIN, "--head", "--json", *options)

    def waiting(self) -> list[bytes]:
        return [each.body for each in self.team.contents(ORIGIN)]

    def rows(self, columns: str = "id, status") -> list[tuple[Any, ...]]:
        return self.store.execute(f"SELECT {columns} FROM dlq_messages ORDER BY id".encode()).fetchall()


@pytest.fixture
def scene(program: Program, team: Client, database_url: str) -> Iterator[Scene]:
    team.make_origin(ORIGIN, key="payment.#")
    ingest = program.but(database_url=database_url)
    for words in (("db", "upgrade"), ("events", "set", "payment.#", "0")):
        assert ingest.run(*words).code == 0
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield Scene(ingest, team, connection)


@pytest.mark.usefixtures("on_every_broker")
def test_the_poison_of_a_replay_is_taken_out_held_and_sent_again_after_an_undo(scene: Scene) -> None:
    poison, other = scene.replay(b"poison", b"other")

    done = scene.head("--note", "61 lines", "--reason", "INC-4711", "--actor", "ann")

    assert done.code == 0, done.said
    assert (done.told["id"], done.told["attempt"], done.told["status"]) == (poison, 1, "manual")
    assert scene.waiting() == [b"other"]
    columns = "id, status, reason, error_type, source_queue, dlq_retry_count, moved_to"
    taken = (poison, "manual", "taken-from-head", "TakenFromHead", DLQ, 1, None)
    assert taken in scene.rows(columns), "the row that it was sent from, not a second one"
    assert {row_id for (row_id,) in scene.rows("id")} == {poison, other}
    outcomes = scene.store.execute("SELECT message_id, outcome FROM dlq_attempts").fetchall()
    assert dict(outcomes) == {poison: "failed", other: None}

    shown = scene.program.run("groups", "show", done.told["group"], "--json").told["groups"][0]["decisions"]
    assert (shown["held_by"], shown["held_why"], shown["note"]) == ("ann", "INC-4711", "61 lines")
    refused = scene.program.run("messages", "replay", str(poison))
    assert refused.code == NOT_TAKEN, "it is on hold"
    assert scene.waiting() == [b"other"]

    assert scene.program.run("undo", done.told["action"]).code == 0
    assert (poison, "manual") in scene.rows(), "nothing sends it by itself"
    sent = scene.program.run("messages", "replay", str(poison))
    assert sent.code == 0, sent.said
    assert scene.waiting() == [b"other", b"poison"]


def test_what_no_retry_has_sent_stays_in_its_place_unless_any_is_asked_for(scene: Scene) -> None:
    for body in (b'{"card_number": "4111111111111111", "order": 1}', b"second"):
        scene.team.publish("orders", KEY, body)

    refused = scene.head()
    assert refused.code == NOT_TAKEN, refused.said
    assert "--any takes it all the same" in refused.told["error"]["message"]
    shown = scene.program.run("ingest", ORIGIN, "--head", "--dry-run")
    assert shown.code == 0, shown.said
    assert "left there; --any takes it" in shown.out
    assert '"order": 1' in shown.out
    assert "4111111111111111" not in shown.out
    assert [body[:5] for body in scene.waiting()] == [b'{"car', b"secon"]
    assert scene.rows() == []
    assert scene.store.execute("SELECT count(*) FROM dlq_actions WHERE kind = 'take-head'").fetchone() == (0,)

    done = scene.head("--any")
    assert done.code == 0, done.said
    assert scene.waiting() == [b"second"]
    assert scene.rows("status, origin_queue, origin_key, event") == [("manual", ORIGIN, KEY, KEY)]
    assert scene.program.run("undo", done.told["action"]).code == 0
    assert scene.program.run("messages", "replay", str(done.told["id"])).code == 0
    assert [(each.body[:5], each.routing_key) for each in scene.team.contents(ORIGIN)] == [
        (b"secon", KEY),
        (b'{"car', KEY),
    ]


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_run_that_is_cut_before_its_acknowledgement_has_stored_it_and_the_next_knows(
    scene: Scene, broker_url: str, is_ours: bool
) -> None:
    if is_ours:
        scene.replay(b"poison")
    else:
        scene.team.publish("orders", KEY, b"poison")
    with FrameLink(broker_url, Point("ack", 1, "before")) as link:
        cut = scene.program.but(broker_url=link.url).run("ingest", ORIGIN, "--head", "--any", "--json")
        assert link.struck.is_set()
    assert cut.code == PARTIAL, cut.said
    assert "the same command takes it away" in cut.told["warning"]
    scene.team.await_depth(ORIGIN, 1)

    again = scene.head("--any")
    assert again.code == 0, again.said
    assert (again.told["id"], again.told["is_known"], again.told["group"]) == (
        cut.told["id"],
        True,
        cut.told["group"],
    )
    scene.team.await_depth(ORIGIN, 0)
    assert scene.rows() == [(cut.told["id"], "manual")]


def test_with_consumers_there_nothing_is_taken(scene: Scene) -> None:
    scene.replay(b"poison", b"other")
    scene.team.channel.basic_qos(prefetch_count=1)
    consumer = scene.team.channel.basic_consume(ORIGIN, lambda *_: None)
    done = scene.program.but(max_seconds="1", settle_seconds="60").run("ingest", ORIGIN, "--head", "--json")
    assert done.code == NOT_TAKEN, done.said
    assert "1 consumer(s)" in done.told["error"]["message"]
    scene.team.channel.basic_cancel(consumer)
    assert {status for _, status in scene.rows()} == {"processing"}


def test_a_queue_that_has_nothing_to_take_is_named(scene: Scene) -> None:
    empty = scene.head()
    assert (empty.code, "it is empty" in empty.said) == (NOT_TAKEN, True)
    for queue, why in ((RETRY_QUEUE, "belongs to dlqbatch itself"), ("nowhere", "has no such queue")):
        done = scene.program.run("ingest", queue, "--head")
        assert (done.code, why in done.said) == (USAGE, True), done.said
    for words in ((ORIGIN, "--any"), ("--head",), (ORIGIN, "--head", "--max-messages", "2")):
        assert scene.program.run("ingest", *words).code == USAGE, words


@pytest.mark.usefixtures("on_every_broker")
def test_a_quorum_queue_where_a_look_costs_gives_its_head_only_to_any(scene: Scene) -> None:
    queue = "payments.quorum"
    scene.team.channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    for body in (b"first", b"second"):
        scene.team.publish("", queue, body)
    scene.team.await_depth(queue, 2)
    for option in ((), ("--dry-run",)):
        refused = scene.program.run("ingest", queue, "--head", *option)
        assert (refused.code, "--any takes what is at its head" in refused.said) == (NOT_TAKEN, True), refused.said
    done = scene.program.run("ingest", queue, "--head", "--any")
    assert done.code == 0, done.said
    scene.team.await_depth(queue, 1)
    assert [bytes(body) for (body,) in scene.rows("body")] == [b"first"]
