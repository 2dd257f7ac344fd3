"""One run of one plan: its origins are looked at, its messages are sent, and its queues are watched meanwhile."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import Final

from sqlalchemy import Engine

from dlqbatch import logs
from dlqbatch.amqp.retry_headers import Origin
from dlqbatch.broker.access import access_to, connect
from dlqbatch.broker.connection import Connection, NoAnswer, PublishingBlocked
from dlqbatch.broker.return_exchanges import Origins
from dlqbatch.broker.session import Session
from dlqbatch.broker.traced import TracedMessages
from dlqbatch.broker.transfer import Bounds
from dlqbatch.errors import ChannelRefused, DlqbatchError, so_far
from dlqbatch.jobs import Report, RunOptions
from dlqbatch.jobs import run as run_job
from dlqbatch.lifecycle.job import breaker_limits, observation
from dlqbatch.lifecycle.resend import Resend
from dlqbatch.replay import plan as plans
from dlqbatch.replay.batches import ApplyOptions
from dlqbatch.replay.executor import executor_for
from dlqbatch.replay.items import LEASE, PlanItems
from dlqbatch.replay.plan import Applied
from dlqbatch.replay.run import Replay
from dlqbatch.replay.watch import Watch
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import keeping
from dlqbatch.store.reservation import REPLAYED_AS
from dlqbatch.topology.declare import trust_of

_log = logs.get(__name__)

_ADVICE: Final = (
    "Look at the log of its consumers. If one message kills them, `dlqbatch ingest {queue} --head` takes it out of the "
    "queue and holds it"
)
_NO_BOUND: Final = 1 << 62
_FOR_EVER: Final = 10 * 365 * 86_400.0
_OBSERVES_FOR: Final = 20.0  # seconds that one look at the queues may take


class Unhealthy(DlqbatchError):
    """An origin or the broker cannot take the messages; nothing was moved, and the plan stays as it was."""

    exit_code = 1

    def __init__(self, problems: tuple[str, ...]) -> None:
        self.problems = problems
        super().__init__(
            "\n".join((*problems, "nothing was moved; the plan stays, apply it again when that is put right"))
        )


def send_plan(
    settings: Settings,
    run_options: RunOptions,
    engine: Engine,
    plan: Applied,
    options: ApplyOptions,
    *,
    actor: str,
    live: Callable[[str], None] = lambda _: None,
    stop_at: float = math.inf,
    idle: float | None = None,
) -> Report:
    """Send what may go of a plan that is being applied, until `stop_at` on the monotonic clock."""
    options = replace(options, confirm_timeout=settings.settle_seconds + settings.blocked_timeout_seconds)
    clock = StoreClock(engine)
    items = PlanItems(
        engine,
        plan.plan_id,
        actor=actor,
        worker=worker_name(),
        lease=LEASE,
        reason=f"{REPLAYED_AS}{plan.hash}",
        to_queue=plan.to_queue,
        counted_from=plan.counted_from,
        limits=breaker_limits(settings),
        is_in_order=plan.is_in_order,
    )
    size = plans.finish(engine, plan.plan_id, clock()).waiting

    def stop(why: str, queue: str) -> bool:
        # When all is sent there is nothing to stop, but its outcomes are waited for.
        return plans.stop(engine, plan.plan_id, why, clock(), queue) or items.control().state == "done"

    watch = Watch(settings, tuple(plan.origins), stop, lambda queue: _ADVICE.format(queue=quote(queue)))
    with executor_for(engine) as executor:
        run = Replay(
            items,
            options,
            clock,
            partial(_sending, settings, min(stop_at, time.monotonic() + _FOR_EVER), items, run_options.traced),
            executor,
            run_options.stopped,
            run_options.progress,
            size,
            _Looking(settings, run_options, engine, stop_at, settle=options.settle),
            lambda: watch.harm,
            live,
            stop_at,
            idle,
        )
        with watch.running() if options.guard else nullcontext():
            return run.run()


def worker_name() -> str:
    return f"replay {socket.gethostname()} {os.getpid()}"


def check_health(connection: Connection, ways: Origins, origins: Iterable[Origin]) -> None:
    """Unhealthy unless the broker takes publishes, and each origin is there and takes ours."""
    problems: list[str] = []
    if not _takes_publishes(connection):
        raise Unhealthy(("the broker takes no publishes: a memory or disk alarm",))
    for origin in origins:
        ways.prepare(origin)
        if ways.is_gone(origin):
            problems.append(
                f"'{origin.name}' is not on the broker: declare it, or plan again with --to-queue, or without it"
            )
        elif ways.is_unclear(origin):
            problems.append(f"'{origin.name}' cannot be checked; the log says why")
    if problems:
        raise Unhealthy(tuple(problems))


def _takes_publishes(connection: Connection) -> bool:
    """Whether a publish is answered: a broker with an alarm blocks it, permitted or not."""
    try:
        with connection.scratch() as scratch:
            scratch.try_publish("")
    except (NoAnswer, PublishingBlocked):
        return False
    except ChannelRefused:
        return True
    return True


def judge(settings: Settings, connection: Connection) -> Resend:
    """The decisions of an apply by this process, without asking the broker."""
    trust = trust_of(settings, connection)
    return Resend(Origins(connection, touch=False), trust, b"", 0, settings.return_via == "queue")


@contextmanager
def connected(settings: Settings, bounds: Bounds | None = None) -> Iterator[Connection]:
    if bounds is not None:
        # A step may begin in the last moment, in which nobody could connect.
        bounds = replace(bounds, stop_at=bounds.stop_at + bounds.give_up_after, give_up_after=0.0)
    connection = connect(access_to(settings, "dlqbatch replay", bounds))
    try:
        yield connection
    finally:
        connection.close()


class _Looking:
    """Finds out what became of sent messages, with a drain and an ingest of its own before each look."""

    def __init__(
        self, settings: Settings, run_options: RunOptions, engine: Engine, stop_at: float, *, settle: bool
    ) -> None:
        self._settings, self._run_options, self._engine, self._stop_at = settings, run_options, engine, stop_at
        self._jobs = ["drain", "ingest"] if settle else []

    def __call__(self) -> None:
        for job in list(self._jobs):
            try:
                run_job(job, self._settings, replace(self._run_options.now(), progress=RunOptions().progress))
            except DlqbatchError as error:
                # It will not be better in three seconds; what that job would find is not known then.
                self._jobs.remove(job)
                _log.warning(f"{job} cannot run beside the replay, so somebody else has to run it", why=so_far(error))
        stop_at = min(time.monotonic() + _OBSERVES_FOR, self._stop_at)
        bounds = Bounds(stop_at, self._settings.settle_seconds, _NO_BOUND, self._run_options.stopped)
        with connected(self._settings, bounds) as connection:
            observation(self._settings, connection, self._engine, bounds).resolve(StoreClock(self._engine)())


@contextmanager
def _sending(
    settings: Settings,
    stop_at: float,
    items: PlanItems,
    traced: TracedMessages | None,
    stopped: Callable[[], bool],
    progress: Callable[[int, int], None],
) -> Iterator[tuple[Session, Resend]]:
    """Connect for one step."""
    bounds = Bounds(stop_at, settings.settle_seconds, _NO_BOUND, stopped, progress, traced=traced)
    with connected(settings, bounds) as connection, keeping(items.engine):
        origins = Origins(connection)
        session = Session(connection, origins, bounds)
        trust = trust_of(settings, connection)
        yield (
            session,
            Resend(origins, trust, session.login, session.properties_limit, settings.return_via == "queue"),
        )
