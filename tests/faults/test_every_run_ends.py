"""Whatever falls silent, every run ends by itself within its bounds, says for what it waited, gives back what it held.

The broker is a real one behind a link that knows its frames; it stops at a point, and closes nothing.

| | accepts, says nothing | after the login | at a message | in a frame | the database |
|---|---|---|---|---|---|
| drain, ingest | here | here | here | here | test_silent_database.py |
| check | here | here | here | here | its log of runs alone: there |
| lifecycle | here | here | at a confirm: here | here | test_silent_database.py |
| replay apply | here | here | at a confirm: here | here | test_replay_faults.py |
| topology, doctor | here | here | take no messages | | the doctor's: test_doctor_database.py |
| retain, monitor | ask no broker | | | | test_silent_database.py |
| a function | test_lambda.py | test_lambda.py | test_lambda.py | | its patience is the statement's |
| schedule | test_schedule.py | test_depth.py | | | test_schedule.py |

S3, SNS, webhooks, Secrets Manager and the management API have time-outs of their own, tested beside each.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from dead_rows import NOW, add, store_at
from frame_link import FrameLink, Point
from lifecycle_rows import ORIGIN, connect, due, number
from program import HANGS_AFTER, RETRY_QUEUE, Client, Program, client, eventually
from rawamqp import Message, Peer, properties, text
from replay_rows import fill as fill_for_replay

if TYPE_CHECKING:
    from collections.abc import Iterator

UNHEALTHY, PARTIAL, UNREACHABLE = 1, 3, 4
BOUNDS = {"max_seconds": "15", "settle_seconds": "1", "connect_timeout_seconds": "5"}
"""Enough for a busy machine to come to the point."""
MESSAGES, ROWS = 40, 20
HUNG = "the run did not end within its bounds"
"""Said by the watchdog, which ends each run a minute after its last bound: nobody here needs another clock."""
SOURCES = (RETRY_QUEUE, "dlq.silent", "kept.silent")
NEVER, LOGIN = None, Point("declare", 1, "before")
FIRST, HALF = Point("delivery", 2, "before"), Point("delivery", 2, "within")
CONFIRM = Point("confirm", 1, "within")
"""Within: half of the frame arrives."""


class Case(NamedTuple):
    command: tuple[str, ...]
    point: Point | None
    code: int
    says: str
    or_else: tuple[int, str] | None = None
    """The other right ending, where it depends on which of two questions the broker is asked first."""

    def is_right(self, code: int, said: str) -> bool:
        endings = [(self.code, self.says), *([self.or_else] if self.or_else else [])]
        return any(code == expected and words in said for expected, words in endings)


DRAIN, INGEST, CHECK = ("drain",), ("ingest", "dlq.silent"), ("check", "kept.silent")
LIFECYCLE, REPLAY = ("lifecycle",), ("replay", "apply", "HASH", "--wait", "0")
APPLY, PLAN, DOCTOR = ("topology", "apply", "--yes"), ("topology", "plan"), ("doctor",)
GROUPS = {
    "accepts-and-says-nothing": [
        Case(command, NEVER, UNREACHABLE, "no connection to the broker")
        for command in (DRAIN, INGEST, CHECK, LIFECYCLE, REPLAY, APPLY, PLAN, DOCTOR)
    ],
    "silent-after-the-login": [
        # It sends all of its declarations before it waits for an answer.
        Case(DRAIN, LOGIN, UNREACHABLE, "no answer to the declarations of the topology"),
        *(
            Case(command, LOGIN, UNREACHABLE, "no answer to queue_declare")
            for command in (INGEST, CHECK, APPLY, PLAN, DOCTOR)
        ),
        # They ask for origins, and one that does not answer must not stop the others.
        # Where the management API is too slow to be asked, the broker itself is asked before anything is claimed.
        Case(LIFECYCLE, LOGIN, PARTIAL, '"origin-check-failed"', or_else=(UNREACHABLE, "no answer to channel.open")),
        Case(REPLAY, LOGIN, UNHEALTHY, "cannot be checked"),
    ],
    "silent-at-a-message": [
        # Each queue by one of them: who comes second would find it empty.
        Case(DRAIN, FIRST, PARTIAL, "was not read to its end"),
        Case(INGEST, HALF, PARTIAL, "was not read to its end"),
        Case(CHECK, HALF, PARTIAL, "was not read to its end"),
        Case(LIFECYCLE, CONFIRM, PARTIAL, '"not-confirmed"'),
        Case(REPLAY, CONFIRM, PARTIAL, '"not-confirmed"'),
    ],
}


class Scene:
    def __init__(self, url: str, management_url: str, database_url: str, team: Client) -> None:
        self.url, self.team = url, team
        self.program = Program(
            {
                "broker_url": url,
                "management_url": management_url,
                "database_url": database_url,
                "log_level": "error",
                **BOUNDS,
            }
        )
        self.engine = store_at(database_url)
        self.store = connect(database_url)
        self.store.execute("INSERT INTO dlq_event_config VALUES (1, 'orders.created', 3)")
        assert self.program.run("topology", "apply", "--yes").code == 0
        team.channel.queue_declare(ORIGIN, durable=True)
        for queue in SOURCES:
            team.channel.queue_declare(queue, durable=True)
            with Peer(url) as peer:
                peer.publish(
                    Message(
                        "",
                        queue.encode(),
                        properties([(b"dlqbatch-id", text(f"{queue}-{each}"))], delivery_mode=2),
                        b"%d" % each,
                    )
                    for each in range(MESSAGES)
                )

    def plan(self) -> str:
        planned = self.program.run("replay", "plan", "--event", "orders.replayed", "--json")
        assert planned.code == 0, planned.said
        return str(planned.told["hash"])


@pytest.fixture
def scene(broker_url: str, management: Any, database_url: str) -> Iterator[Scene]:
    host, port = management._address
    with client(broker_url) as team:
        scene = Scene(broker_url, f"http://{host}:{port}", database_url, team)
        with scene.store:
            yield scene


@contextlib.contextmanager
def silent(url: str, point: Point | None) -> Iterator[FrameLink]:
    with FrameLink(url, point) as link:
        link.act = link.silence
        if point is None:
            link.silence()
        yield link


@pytest.mark.slow
@pytest.mark.parametrize("cases", GROUPS.values(), ids=GROUPS)
def test_every_job_ends_although_its_broker_falls_silent(scene: Scene, cases: list[Case]) -> None:
    long_ago = NOW.replace(year=2020)
    fill_for_replay(scene.engine, range(1000, 1000 + ROWS), key="orders.replayed", next_retry_at=NOW.replace(year=2040))
    add(scene.engine, *(due(each) for each in range(ROWS)), at=long_ago)
    plan = scene.plan()
    problems = []
    with contextlib.ExitStack() as stack:
        running = []
        for case in cases:
            link = stack.enter_context(silent(scene.url, case.point))
            words = [plan if word == "HASH" else word for word in case.command]
            run = scene.program.but(broker_url=link.url).start(*words, "--json")
            running.append((case, link, run))
            # One after the other, so that they do not take the time from one another in which they start.
            assert case.point is None or eventually(
                lambda link=link, run=run: link.struck.is_set() or run.poll() is not None
            )
        for case, link, run in running:
            out, err = run.communicate(timeout=HANGS_AFTER)
            said = out + err
            is_right = case.is_right(run.returncode, said) and HUNG not in err
            if not is_right or (case.point is not None and not link.struck.is_set()):
                problems.append((case, run.returncode, said[:900]))
    assert not problems, "\n".join(map(str, problems))
    for queue in SOURCES:
        scene.team.await_depth(queue, MESSAGES)
    # What may have been sent waits for the end of its lease, under the same number; nothing else is held.
    unsent = number(scene.store, "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NULL AND closed_at IS NULL")
    assert number(scene.store, "SELECT count(*) FROM dlq_messages WHERE status = 'processing'") == unsent
    # What an ingest has committed and could not acknowledge is a row already; the next one finds that out.
    waiting = "status IN ('pending', 'processing') AND source_queue <> 'dlq.silent'"
    assert number(scene.store, f"SELECT count(*) FROM dlq_messages WHERE {waiting}") == 2 * ROWS
