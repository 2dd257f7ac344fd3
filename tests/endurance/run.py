"""Mixed load with a fault every few seconds on one `dlqbatch schedule`, then every message is looked for.

`scripts/endurance` runs it; it starts a broker and a database of its own and ends with 1 if anything was lost, changed,
doubled beyond what the faults explain, or has grown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import psycopg
from endurance import accounts, gauges, page, traffic
from endurance.faults import Saboteur
from endurance.traffic import Books, Publisher, Worker, await_end
from endurance.world import EXPECTED_ALERTS, World
from program import HANGS_AFTER

from scripts import services

FAULT_EVERY = (2.0, 5.0)
RESTART_EVERY = 90.0
SAMPLES = 1.0
TOLD_EVERY = 10.0
UNDER_WAY = 4_000
JOBS = ("drain", "ingest", "lifecycle", "check", "monitor", "retain")
_LONGER = 90.0
_QUIET_WITHIN = HANGS_AFTER


@dataclass
class Course:
    """What was seen while it ran."""

    samples: list[gauges.Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    told_at: float = 0.0


def endure(seconds: float, seed: int, *, restarts: bool) -> dict[str, Any]:
    random = Random(seed)
    with services.work_folder() as folder, World(folder) as world:
        books = Books()
        parties = [Worker(f"worker {number}", world.node.url, books) for number in range(world.workers)]
        publisher = Publisher(world.node.url, books, seed, UNDER_WAY, lambda: books.under_way - _kept(world))
        saboteur = Saboteur(world, random, RESTART_EVERY if restarts else None)
        for party in (*parties, publisher):
            party.start()
        course = Course()
        began = time.monotonic()
        strike_at = random.uniform(*FAULT_EVERY)
        well_before = 0
        while world.is_alive() and ((now := time.monotonic() - began) < seconds or _lacks(world, now, seconds)):
            # On a busy machine faults wait until something has ended well in between: else nothing but faults is seen.
            well = sum(entry.get("outcome") == "ok" for entry in world.told())
            if now >= strike_at and well > well_before:
                well_before = well
                saboteur.strike(now)
                strike_at = time.monotonic() - began + random.uniform(*FAULT_EVERY)
            _observe(world, books, course, saboteur, now)
            time.sleep(SAMPLES)
        at_the_end = time.monotonic() - began
        if not world.is_alive():
            course.problems.append("`dlqbatch schedule` ended by itself")
        await_end([publisher])
        rate = len(books.done) / at_the_end
        _await_quiet(world, books, course)
        result = _judge(world, books, course, saboteur, parties, publisher)
    return result | {
        "seconds": round(at_the_end, 1),
        "seed": seed,
        "published_per_second": round(rate, 1),
        "versions": _versions(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _lacks(world: World, now: float, seconds: float) -> bool:
    """On a busy machine a short run goes on until each job has run and each alert has had its run_options."""
    ran = {entry["job"] for entry in world.told()}
    return now < seconds + _LONGER and (len(ran) < len(JOBS) or not _fired(world) >= EXPECTED_ALERTS)


_last_kept: list[tuple[float, int]] = []


def _kept(world: World) -> int:
    """Messages that wait for a person: they are under way no more. Asked once a second."""
    now = time.monotonic()
    if not _last_kept or now - _last_kept[-1][0] > 1.0:
        try:
            with psycopg.connect(world.database, autocommit=True) as connection:
                asking = "SELECT count(*) FROM dlq_messages WHERE status IN ('manual', 'failed', 'archived')"
                found = connection.execute(asking).fetchone()
            _last_kept[:] = [(now, int(found[0]) if found else 0)]
        except psycopg.OperationalError:
            _last_kept[:] = [(now, _last_kept[-1][1] if _last_kept else 0)]
    return _last_kept[-1][1]


def _observe(world: World, books: Books, course: Course, saboteur: Saboteur, now: float) -> None:
    course.samples.append(gauges.look(world, now))
    if now - course.told_at >= TOLD_EVERY:
        course.told_at = now
        values = course.samples[-1].values
        done = len(books.done) - books.waiting
        shown = ", ".join(f"{name} {values[name]:g}" for name in ("connections", "channels", "locks") if name in values)
        faults = sum(saboteur.done.values())
        memory = values.get("memory", 0) / gauges.MEBIBYTE
        _say(f"{now:6.0f} s: published {len(books.done)}, done {done}, faults {faults}, {memory:.1f} MiB, {shown}")


def _await_quiet(world: World, books: Books, course: Course) -> None:
    """Nothing is published and nothing breaks any more: whatever is on its way arrives, and the rest is at rest."""
    _say("quiet: what is on its way arrives")
    world.end_alarm()
    deadline = time.monotonic() + _QUIET_WITHIN
    before = None
    still = 0
    while time.monotonic() < deadline and still < 5:
        _last_kept.clear()
        with psycopg.connect(world.database, autocommit=True) as connection:
            asking = "SELECT status, count(*) FROM dlq_messages WHERE status <> 'resolved' GROUP BY status"
            states = dict(connection.execute(asking).fetchall())
        depths = sum(one.get("messages", 0) for one in world.management.queues())
        now = (books.waiting, states, depths)
        on_the_way = states.get("processing", 0) + states.get("pending", 0) + depths - traffic.PARKED_MESSAGES
        still = still + 1 if now == before and not on_the_way else 0
        before = now
        time.sleep(1.0)
    if still < 5:
        course.problems.append(f"not at rest after {_QUIET_WITHIN:g} s: {before}")


def _judge(
    world: World,
    books: Books,
    course: Course,
    saboteur: Saboteur,
    workers: list[Worker],
    publisher: Publisher,
) -> dict[str, Any]:
    problems = course.problems
    problems += [f"{party.name}: {party.problem}" for party in (*workers, publisher) if party.problem]
    odd = gauges.odd_rows(world)
    problems += [f"{number} row(s) {name}" for name, number in odd.items()]
    grown = {name: gauges.growth(course.samples, name) for name in gauges.ALLOWED}
    problems += [
        f"{name} grew from {one.first:.0f} to {one.last:.0f} in the second half"
        for name, one in grown.items()
        if not one.is_kept
    ]
    code = world.end() if world.is_alive() else None
    if code not in {0, None}:
        problems.append(f"`dlqbatch schedule` ended with {code}")
    await_end([*workers])
    rest = _rest(world)
    problems += [f"{number} {name} left at the end" for name, number in rest.items() if number]
    fired, standing_twice = _alerts(world)
    problems += [f"alert {name} has not fired" for name in sorted(EXPECTED_ALERTS - fired)]
    problems += [f"alert {name} stands twice" for name in standing_twice]
    wrong = [entry for entry in world.told() if not _adds_up(entry)]
    problems += [f"a report does not add up: {entry}" for entry in wrong[:3]]
    account = accounts.settle(world, books)
    problems += [f"lost: {len(account.lost)}, such as {account.lost[:5]}"] if account.lost else []
    problems += [f"changed: {account.changed[:3]}"] if account.changed else []
    if not account.is_even and not (account.lost or account.changed):
        problems.append(f"of the messages that a check left alone {account.parked} are there")
    if account.doubled > saboteur.may_double:
        problems.append(f"doubled {account.doubled}, and the faults explain {saboteur.may_double}")
    runs = Counter(entry["job"] for entry in world.told())
    return {
        "problems": problems,
        "messages": {
            "published": account.published,
            "publishes that nobody answered": account.unknown,
            "done by a worker": account.done,
            "in queues at the end": account.in_queues,
            "in the dead store at the end": account.in_rows,
            "lost": len(account.lost),
            "changed": len(account.changed),
            "doubled": account.doubled,
            "doubles that the faults explain": saboteur.may_double,
        },
        "faults": dict(sorted(saboteur.done.items())),
        "runs": dict(sorted(runs.items())),
        "alerts": sorted(fired),
        "gauges": {
            name: {"first": one.first, "last": one.last, "most": one.most, "allowed": one.allowed}
            for name, one in grown.items()
        },
    }


def _rest(world: World) -> dict[str, int]:
    """What is held by nobody any more must be gone; the broker tells of a connection's end a little late."""
    deadline = time.monotonic() + 15
    while True:
        sample = gauges.look(world, 0.0).values
        left = {name: int(sample.get(name, 0)) for name in ("connections", "sessions", "temporary_files")}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def _alerts(world: World) -> tuple[set[str], list[str]]:
    """Those that the webhook heard of, and those that stand more than once."""
    with psycopg.connect(world.database, autocommit=True) as connection:
        asking = "SELECT name FROM dlq_alerts WHERE resolved_at IS NULL GROUP BY name, subject HAVING count(*) > 1"
        twice = [name for (name,) in connection.execute(asking)]
    return _fired(world), twice


def _fired(world: World) -> set[str]:
    notices = [notice for payload in list(world.alerts) for notice in payload["alerts"]]
    return {notice["name"] for notice in notices if notice["state"] == "fired"}


_SUMS = frozenset({"drain", "ingest", "check"})


def _adds_up(entry: dict[str, Any]) -> bool:
    counts = entry["counts"]
    if entry["job"] not in _SUMS or "got" not in counts:
        return True
    return bool(counts["got"] == sum(number for name, number in counts.items() if name != "got"))


def _versions() -> dict[str, str]:
    return {"Python": platform.python_version(), "cores": str(os.cpu_count())}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load and faults (default: %(default)g)")
    parser.add_argument("--seed", type=int, help="repeats the faults and the messages of an earlier run")
    parser.add_argument("--no-restarts", action="store_true", help="never restart the broker")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--write", action="store_true", help="into docs/endurance.json and docs/reliability.md")
    options = parser.parse_args(arguments)
    # Told to end, it ends its servers and its scheduler first.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    seed = options.seed if options.seed is not None else int.from_bytes(os.urandom(4), "big")
    _say(f"{options.minutes:g} min, seed {seed}")
    result = endure(options.minutes * 60, seed, restarts=not options.no_restarts)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    text = page.table(result)
    sys.stdout.write(text)
    if options.write:
        page.keep(result)
    for problem in result["problems"]:
        _say(f"endurance: {problem}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
