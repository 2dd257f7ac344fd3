"""The page Now says whether it is getting worse, what is undecided, what is under way, and what is stuck."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from datetime import datetime
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import select
from starlette.responses import Response

from dlqbatch import logs
from dlqbatch.console.drawing import Station, way
from dlqbatch.console.queue_watch import QueueNow
from dlqbatch.errors import DlqbatchError
from dlqbatch.groups.inbox import Inbox, inbox
from dlqbatch.monitor.alert_rules import Notice
from dlqbatch.monitor.alerts import active
from dlqbatch.monitor.measure import arrivals_by_hour, measure
from dlqbatch.monitor.metrics import Metrics
from dlqbatch.replay.plan_status import PlanStatus, status_of
from dlqbatch.store.counts import Whose, whose
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters
from dlqbatch.store.scopes import own
from dlqbatch.store.states import Status
from dlqbatch.store.tables import PLANS
from dlqbatch.topology.declare import kinds_of
from dlqbatch.topology.kinds import Drained, Ladder

if TYPE_CHECKING:
    from markupsafe import Markup

    from dlqbatch.console.app import Console
    from dlqbatch.console.gate import Call
    from dlqbatch.console.live import Parts

log = logs.get(__name__)

GROUPS: Final = 25
_PLANS: Final = 8
_FRESH: Final = 2.0
_STALE: Final = 20.0
_UNDER_WAY: Final = ("planned", "applying", "stopped")


@dataclass(frozen=True, slots=True)
class Row:
    """A queue that messages go to, as the broker shows it."""

    name: str
    queue: QueueNow | None
    trouble: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The dead store at one time, read once for everybody who looks."""

    at: datetime
    metrics: Metrics
    hours: tuple[int, ...]
    groups: Inbox
    plans: tuple[PlanStatus, ...]
    alerts: tuple[Notice, ...]
    whose: Whose

    @property
    def undecided(self) -> int:
        return self.metrics.states[Status.MANUAL] + self.metrics.states[Status.FAILED]

    @property
    def origins(self) -> tuple[str, ...]:
        """The queues that its groups failed in, and those of retries that are not proven."""
        failed = [line.queue for line in self.groups.lines if line.queue]
        return tuple(dict.fromkeys([*failed, *(each.place for each in self.metrics.unproven)]))


class Snapshots:
    """One reader at a time; everybody else gets the last one, unless it is old."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: tuple[float, Snapshot] | None = None

    def get(self, console: Console) -> Snapshot:
        last = self._last
        age = math.inf if last is None else time.monotonic() - last[0]
        if last is None or age >= _STALE:
            return self._renewed(console)
        if age >= _FRESH and not self._lock.locked():
            # Nobody waits for the database while there is an answer that is not old.
            Thread(target=self._renew, args=(console,), name="snapshot", daemon=True).start()
        return last[1]

    def _renewed(self, console: Console) -> Snapshot:
        with self._lock:
            last = self._last
            if last is None or time.monotonic() - last[0] >= _FRESH:
                last = self._last = (time.monotonic(), _read(console))
            return last[1]

    def _renew(self, console: Console) -> None:
        try:
            self._renewed(console)
        except DlqbatchError as error:
            log.warning("what fails could not be read", why=str(error))

    def forget(self) -> None:
        """Something was decided: the next page reads the database again."""
        self._last = None


def _read(console: Console) -> Snapshot:
    now = console.clock()
    found = inbox(console.engine, Filters(), GROUPS, now)
    with reading(console.engine) as connection:
        open_plans = (
            select(PLANS.c.id)
            .where(own(connection, PLANS.c.scope_id), PLANS.c.state.in_(_UNDER_WAY))
            .order_by(PLANS.c.created_at.desc())
        )
        return Snapshot(
            now,
            measure(connection, now),
            tuple(arrivals_by_hour(connection, now)),
            found,
            tuple(status_of(connection, plan) for plan in connection.scalars(open_plans.limit(_PLANS)).all()),
            active(connection),
            whose(connection),
        )


def show(call: Call) -> Response:
    console = call.console
    found = console.snapshots.get(console)
    # A page without script still shows the queues; a broker that is slow holds nobody up.
    console.live.look_at_queues(wait=console.live.watch.last is None)
    return call.page("now.html", **_values(console, found))


def live(call: Call) -> Response:
    console = call.console

    def parts() -> Parts:
        values = _values(console, console.snapshots.get(console))
        return {name: console.pages.part(f"_now_{name}.html", **values) for name in PARTS}

    return console.live.stream("now", parts)


PARTS: Final = ("head", "fails", "way", "queues", "jobs")


def _values(console: Console, found: Snapshot) -> dict[str, Any]:
    watch = console.live.watch
    look = watch.last
    rows = [
        Row(name, look.queues.get(name) if look is not None else None, watch.trouble_of(name)) for name in found.origins
    ]
    return {
        "snap": found,
        "metrics": found.metrics,
        "look": look,
        "rows": rows,
        "ways": _ways(console, look.depths if look is not None else {}, sum(found.metrics.states.values())),
    }


def _ways(console: Console, depths: dict[str, int], stored: int) -> list[tuple[str, Markup]]:
    """A drawing for each topology: where failures arrive and wait, where they come back to, and where they end."""
    drawn = []
    for kind in kinds_of(console.settings):
        dead, drawing = kind.dead_letter_queues[0], dict[str, tuple[int, int, Station]]()
        edges: list[tuple[str, str]] = []
        name, bottom = dead, 0
        titles = ["dead letters", "dead"]
        if isinstance(kind, Drained):
            name = kind.retry_queue
            delays, later = kind.delay_queues, [each.queue for each in kind.sources if not each.first_stage]
            ttls = tuple(kind.delays.values()) if isinstance(kind, Ladder) else (kind.ttl,)
            titles = ["failed", "waits", "comes back", "tried again"] if later else ["failed", "waits", "tried again"]
            bottom = max(len(delays), 1)
            origin = Station("the origin" if kind.home is None else kind.home, "a consumer tries it again")
            drawing = {name: (0, 0, Station(name, "failures arrive", depths.get(name)))}
            for tier, (queue, ttl) in enumerate(zip(delays, ttls, strict=False)):
                drawing[queue] = (1, tier, Station(queue, f"{ttl / 1000:g} s", depths.get(queue)))
                edges.append((name, queue))
            for tier, queue in enumerate(later):
                drawing[queue] = (2, tier, Station(queue, "back to the origin", depths.get(queue)))
                edges += [(delays[tier], queue), (queue, "")]
            # The delays that are no tiers lead to the queue of the first one.
            edges += [(queue, later[0]) for queue in delays[len(later) :] if later]
            drawing[""] = (len(titles) - 1, 0, origin)
            edges += [] if later else [(queue, "") for queue in delays or (name,)]
            edges.append((name, dead))
        at = 1 if isinstance(kind, Drained) else 0
        drawing[dead] = (at, bottom, Station(dead, "retries used up", depths.get(dead)))
        drawing["store"] = (at + 1, bottom, Station("dead store", "dlq_messages", stored, is_store=True))
        edges.append((dead, "store"))
        drawn.append((name, way(drawing, edges, titles, f"The way of a message through {name}")))
    return drawn
