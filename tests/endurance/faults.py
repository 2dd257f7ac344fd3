"""What goes wrong every few seconds, chosen by a seed: each is a function of the world, and says what it may double."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import psutil
import psycopg
from endurance.traffic import PREFETCH

from scripts.servers.management import ManagementError

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from endurance.world import World

WINDOW = 512
"""Messages that one run of dlqbatch may have under way."""
DEAD_LETTERING = 32
"""Messages that a quorum queue's own dead-lettering may have under way."""


def kill_a_run(world: World, random: Random) -> int:
    runs = world.runs()
    if not runs:
        return 0
    with suppress(psutil.NoSuchProcess):
        random.choice(runs).send_signal(signal.SIGKILL)
    return WINDOW


def close_a_connection(world: World, random: Random) -> int:
    found = world.connections()
    if not found:
        return 0
    with suppress(ManagementError, OSError):
        world.management.delete(f"connections/{quote(random.choice(found)['name'], safe='')}")
    return WINDOW


def end_a_session(world: World, random: Random) -> int:
    """One of PostgreSQL's, as an administrator does."""
    with psycopg.connect(world.database, autocommit=True) as connection:
        asking = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        found = [pid for (pid,) in connection.execute(asking)]
        if not found:
            return 0
        connection.execute("SELECT pg_terminate_backend(%s)", (random.choice(found),))
    return WINDOW


def raise_the_alarm(world: World, _: Random) -> int:
    """The broker is out of memory for a second. Nobody waits: on a busy machine its tool takes long to start."""
    if world.alarm is not None and world.alarm.poll() is None:
        return 0
    change = "vm_memory_monitor:set_vm_memory_high_watermark"
    command = [world.node.sbin / "rabbitmqctl", "-q", "-n", world.node.name, "eval"]
    raised = f"{change}(0.000001), timer:sleep(1000), {change}(0.6)."
    quiet = subprocess.DEVNULL
    world.alarm = subprocess.Popen(
        [*command, raised], env=world.node.environment, stdin=quiet, stdout=quiet, stderr=quiet
    )
    return 0


def restart_the_broker(world: World, _: Random) -> int:
    """In order. What workers were done with and had not acknowledged comes again."""
    at_work = len(world.runs())
    world.end_alarm()
    world.node.restart()
    return (at_work + 1) * WINDOW + world.workers * PREFETCH + world.dead_lettering * DEAD_LETTERING


QUICK: tuple[Callable[[World, Random], int], ...] = (
    kill_a_run,
    close_a_connection,
    end_a_session,
    raise_the_alarm,
)
WEIGHTS = (4, 3, 3, 1)


class Saboteur:
    def __init__(self, world: World, random: Random, restart_every: float | None) -> None:
        """`restart_every` in seconds; None: the broker is never restarted."""
        self.done: Counter[str] = Counter()
        self.may_double = 0
        self._world, self._random = world, random
        self._restart_every = restart_every
        self._restarted_at = 0.0
        self._first = list(QUICK)
        random.shuffle(self._first)

    def strike(self, now: float) -> str:
        """`now` in seconds since the beginning."""
        if self._restart_every is not None and now - self._restarted_at >= self._restart_every:
            self._restarted_at = now
            chosen: Callable[[World, Random], int] = restart_the_broker
        elif self._first:
            chosen = self._first.pop()
        else:
            chosen = self._random.choices(QUICK, WEIGHTS)[0]
        name = chosen.__name__
        self.may_double += chosen(self._world, self._random)
        self.done[name] += 1
        return name.replace("_", " ")


def rss_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
