"""How soon the guard of a replay stops the plan when a message kills its consumers, and what is sent beyond.

Usage: scripts/bench guard [--rounds N] [--messages N] [--seed N] [--json FILE] [--write [PAGE]]
In each turn a plan is applied in a process of its own, and one message of it, at a random place, kills whoever takes
it: the only consumer, each of three in turn, or one that is started again at once. Turns are played with classic and
with quorum queues, on the installed RabbitMQ and on 4.3, the two beside each other. The time is that from the first
crash to the commit by which the plan is stopped. Exit code 1 if a plan was not stopped, or went beyond its step.
--write puts the figures into docs/replay.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate, product, repeat, takewhile
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from jobs import PREFIX, database, version_of
from page import machine, put, sentence, table

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
from dying_workers import KINDS, Workers
from program import HANGS_AFTER, Program, client
from ready_store import make_tables
from replay_rows import ORIGIN, fill
from sqlalchemy import func, select

from dlqbatch.replay.canary_and_rate import FIRST_STEP, GROWTH
from dlqbatch.store.engine import create_engine_for, reading
from dlqbatch.store.tables import ATTEMPTS, PLAN_ITEMS, PLANS
from scripts import services
from scripts.servers.management import Management

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parent.parent
QUEUE_TYPES: Final = ("classic", "quorum")
FAILED: Final = 1
PAGE: Final = ROOT / "docs" / "replay.md"
SECONDS: Final = 5.0
"""What is promised."""
ONE_UPGRADE: Final = threading.Lock()
"""Alembic keeps its context in a module."""


class Turn(NamedTuple):
    seconds: float
    """From the first crash to the stop."""
    crashes: int
    """Until the apply had ended."""
    place: int
    """Of the poison in the plan, from 1."""
    after: int
    """Messages whose confirm came after the first crash."""
    beyond: int
    """Messages of steps behind that of the poison."""


class Broker(NamedTuple):
    version: str
    server: str
    """Its AMQP address without a virtual host."""
    api: str


@contextmanager
def brokers() -> Iterator[tuple[list[Broker], str]]:
    """Both releases and a server of databases: those that the variables name, else private ones."""
    with ExitStack() as stack:
        names = ("BROKER_URL", "MANAGEMENT_URL", "BROKER43_URL", "MANAGEMENT43_URL", "DATABASE_URL")
        found = {name: os.environ[PREFIX + name] for name in names if PREFIX + name in os.environ}
        if len(found) < len(names):
            found = stack.enter_context(services.private_servers(rabbitmq=True, rabbitmq43=True, postgres=True))
        both = []
        for url, api in (("BROKER_URL", "MANAGEMENT_URL"), ("BROKER43_URL", "MANAGEMENT43_URL")):
            version = str(Management(found[api]).get("overview")["rabbitmq_version"])
            both.append(Broker(version, found[url].rpartition("/")[0], found[api]))
        yield both, found["DATABASE_URL"]


@contextmanager
def virtual_host(broker: Broker) -> Iterator[str]:
    management = Management(broker.api, vhost=f"bench-{secrets.token_hex(6)}")
    management.make_vhost()
    try:
        yield f"{broker.server}/{management.vhost}"
    finally:
        management.drop_vhost()


def told(program: Program, *words: str) -> tuple[int, Any]:
    """Exit code and answer of a command of `replay`, in a process of its own."""
    process = program.start("replay", *words, "--json")
    out, err = process.communicate(timeout=HANGS_AFTER)
    if not out:
        raise SystemExit(f"replay {' '.join(words)}: {err}")
    return process.returncode, json.loads(out)


def play(broker: Broker, database_server: str, queue_type: str, kind: str, messages: int, poison: int) -> Turn:
    first = 10 ** len(str(messages))
    with virtual_host(broker) as broker_url, database(database_server) as database_url:
        with ONE_UPGRADE:
            make_tables(database_url)
        settings = {"broker_url": broker_url, "database_url": database_url, "management_url": broker.api}
        if queue_type == "classic":
            # The figures of a quorum queue are up to 5 s old, however often the broker collects them.
            settings["statistics_delay"] = "2s"
        program = Program(settings)
        engine = create_engine_for(database_url, connect_timeout=30)
        ids = fill(engine, range(first, first + messages))
        with client(broker_url) as team:
            team.channel.queue_declare(ORIGIN, durable=True, arguments={"x-queue-type": queue_type})
        plan = str(told(program, "plan", "--all")[1]["hash"])
        workers = Workers(broker_url, ORIGIN, b"%d" % (first + poison), **KINDS[kind])
        try:
            code, applied = told(program, "apply", plan)
        finally:
            workers.stop()
        if (code, applied["plan"]["state"]) != (FAILED, "stopped") or not workers.crashed_at:
            raise SystemExit(f"the plan was not stopped: {applied}")
        crash = min(workers.crashed_at)
        with reading(engine) as connection:
            stopped = connection.scalar(select(PLANS.c.state_since))
            poisoned = select(PLAN_ITEMS.c.place).where(PLAN_ITEMS.c.message_id == ids[poison]).scalar_subquery()
            up_to_it = select(func.count()).select_from(PLAN_ITEMS).where(PLAN_ITEMS.c.place <= poisoned)
            place = int(connection.scalar(up_to_it) or 0)
            after = connection.scalar(select(func.count()).select_from(ATTEMPTS).where(ATTEMPTS.c.sent_at > crash))
        engine.dispose()
    assert stopped is not None
    step = FIRST_STEP
    while step < place:
        step *= GROWTH
    return Turn(
        (stopped - crash).total_seconds(),
        len(workers.crashed_at),
        place,
        int(after or 0),
        max(applied["plan"]["sent"] - step, 0),
    )


def play_all(broker: Broker, server: str, options: argparse.Namespace) -> dict[str, list[Turn]]:
    release = ".".join(broker.version.split(".")[:2])
    chance = random.Random(f"{options.seed} {release}")
    # In a step behind which others wait. They go in the order of their numbers, but for the very first ones.
    steps = list(takewhile(lambda step: step < options.messages, accumulate(repeat(GROWTH), mul, initial=FIRST_STEP)))
    places = steps[-1] - FIRST_STEP
    found: dict[str, list[Turn]] = {}
    for _ in range(options.rounds):
        for queue_type, kind in product(QUEUE_TYPES, KINDS):
            turn = play(broker, server, queue_type, kind, options.messages, chance.randrange(places))
            title = f"{release}, {queue_type}, {kind}"
            print(f"{title}: {turn}", flush=True)
            found.setdefault(title, []).append(turn)
    return found


def figures(turns: list[Turn]) -> dict[str, Any]:
    seconds = [each.seconds for each in turns]
    return {
        "turns": len(turns),
        "seconds": {"median": round(statistics.median(seconds), 2), "worst": round(max(seconds), 2)},
        "crashes": {
            "median": statistics.median(each.crashes for each in turns),
            "worst": max(t.crashes for t in turns),
        },
        "sent_after": {"median": statistics.median(t.after for t in turns), "worst": max(t.after for t in turns)},
        "sent_beyond_the_step": max(each.beyond for each in turns),
        "places": [each.place for each in turns],
    }


def shown(result: dict[str, Any]) -> list[str]:
    rows = []
    for title, each in result["cases"].items():
        seconds, crashes, after = each["seconds"], each["crashes"], each["sent_after"]
        rows.append(
            (
                *title.split(", "),
                f"{seconds['median']:.1f} s",
                f"{seconds['worst']:.1f} s",
                f"{crashes['worst']:.0f}",
                f"{after['worst']:.0f}",
                f"{each['sent_beyond_the_step']}",
            )
        )
    head = (
        "RabbitMQ",
        "queue",
        "its consumers die",
        "median",
        "worst",
        "crashes",
        "sent after the first",
        "of later steps",
    )
    what = (
        f"{result['rounds']} turns of each, with the poison at a random place of a plan of {result['messages']} "
        "messages. The time is that from the first crash to the stop; the other figures are the most of any turn: "
        "crashes until the apply had ended, messages of the same step that were confirmed after the first crash, and "
        f"those of later steps. {sentence(result['machine'])}."
    )
    return [what, "", *table(head, rows)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=600)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "benchmarks" / "guard.json")
    parser.add_argument("--write", type=Path, nargs="?", const=PAGE, help="put the figures into this page (%(const)s)")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    with brokers() as (both, server), ThreadPoolExecutor(len(both)) as together:
        running = [together.submit(play_all, broker, server, options) for broker in both]
        cases = {title: turns for each in running for title, turns in each.result().items()}
        about = machine(rabbitmq=" and ".join(each.version for each in both), postgresql=version_of(server))
    result: dict[str, Any] = {
        "benchmark": "guard",
        "seed": options.seed,
        "rounds": options.rounds,
        "messages": options.messages,
        "machine": about,
        "cases": {title: figures(turns) for title, turns in cases.items()},
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    lines = shown(result)
    print("\n".join(lines))
    if options.write:
        put("guard", lines, options.write)
    worst = max(each["seconds"]["worst"] for each in result["cases"].values())
    if worst > SECONDS:
        print(f"slower than {SECONDS:.0f} s: {worst:.1f} s", file=sys.stderr)
    return 1 if any(each["sent_beyond_the_step"] for each in result["cases"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
