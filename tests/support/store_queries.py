"""Everything that a job or a person asks the dead store, each by a name, over the rows that `many_rows` makes."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import func, select

from dlqbatch.actions import queries as actions
from dlqbatch.console.messages import _counted as counted
from dlqbatch.groups.inbox import inbox, of_group
from dlqbatch.lifecycle.leases import due, take_over
from dlqbatch.messages.actions import MessageActions
from dlqbatch.messages.composition import composition
from dlqbatch.messages.queries import find, get, linked_by_edits
from dlqbatch.messages.search import fields_with
from dlqbatch.monitor import run_list
from dlqbatch.monitor.alerts import Alerts
from dlqbatch.monitor.measure import arrivals_by_hour, measure
from dlqbatch.replay.freeze import Selection, freeze
from dlqbatch.replay.plan_status import status_of
from dlqbatch.retain.rows import Keep, Retention
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import Filters, Place
from dlqbatch.store.states import Status
from dlqbatch.store.tables import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Connection, Engine

GROUP: Final = f"{8:016x}"
"""A large group; half of all messages are of an eighth of the groups."""
SMALL_GROUP: Final = f"{900:016x}"
KEEP: Final = Keep(timedelta(days=30), timedelta(days=90), timedelta(days=365))
GRACE: Final = timedelta(days=2)
_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "status": {"statuses": (Status.FAILED,)},
    "error type": {"error_type": "com.example.Error3"},
    "error type without its package": {"error_type": "Error3"},
    "group": {"group": GROUP},
    "small group": {"group": SMALL_GROUP},
    "beginning of a group": {"group": GROUP[:-1]},
    "event": {"event": "orders.created.3.3"},
    "pattern of events": {"event": "orders.created.3.#"},
    "origin": {"origin": "queue-30"},
    "exchange as origin": {"origin": "orders"},
    "source": {"source": "publisher-3"},
    "source that is nowhere": {"source": "publisher-99"},
    "tag": {"tag": "vip"},
    "tag that is nowhere": {"tag": "nobody"},
    "last hour": {"since": "1h"},
    "a day three weeks ago": {"since": "21d", "until": "20d"},
    "field of one message": {"field": "order=P-700"},
    "field of 1 % of the messages": {"field": "customer=C-7"},
    "field that is nowhere": {"field": "order=nobody"},
    "200 values of a field": {"field_lists": [("order", [f"P-{n}" for n in range(1, 201)])]},
    "message id": {"field": "message_id=order-700"},
    "100 ids": {"ids": [str(n) for n in range(1, 101)]},
    "action": {"action": "A-1"},
    "edited": {"is_edit": True},
    "not edited": {"is_edit": False},
    "not a status": {"unwanted": "status=resolved"},
    "not an event": {"unwanted": "event=orders.created.3.#"},
    "not a field": {"unwanted": "field=customer=C-7"},
    "text": {"text": "order 700"},
    "text that is nowhere": {"text": "nowhere"},
    "status and event": {"statuses": (Status.MANUAL,), "event": "orders.created.3.3"},
    "status and origin": {"statuses": (Status.MANUAL,), "origin": "queue-30"},
    "status, origin and error type": {
        "statuses": (Status.FAILED, Status.MANUAL),
        "origin": "queue-30",
        "error_type": "Error3",
    },
    "status and small group": {"statuses": (Status.PENDING,), "group": SMALL_GROUP},
    "status and source that never meet": {"statuses": (Status.FAILED,), "source": "publisher-99"},
    "event and group that never meet": {"event": "orders.created.3.3", "group": GROUP},
    "origin and event that never meet": {"origin": "queue-39", "event": "orders.created.5.0"},
    "status and field of 1 %": {"statuses": (Status.MANUAL,), "field": "customer=C-7"},
    "event and field of 1 %": {"event": "orders.created.3.3", "field": "customer=C-7"},
    "status and tag": {"statuses": (Status.MANUAL,), "tag": "vip"},
    "group since yesterday": {"group": GROUP, "since": "yesterday"},
    "origin, not an error type": {"origin": "queue-30", "unwanted": "error type=Error3"},
}
"""The words of each filter, alone and together with others."""
_OF_GROUPS: Final = (
    *("status", "error type", "group", "small group", "beginning of a group", "event", "pattern of events", "origin"),
    *("exchange as origin", "source", "tag", "last hour", "a day three weeks ago", "field of one message"),
    *("field of 1 % of the messages", "message id", "100 ids", "action", "edited", "not edited", "not a status"),
    *("not an event", "text", "text that is nowhere", "status and event", "status and origin"),
    "status and field of 1 %",
)
_COUNTED: Final = (
    *("status and event", "event", "origin", "group", "tag", "source", "field of 1 % of the messages", "last hour"),
    *("status and origin", "not an event", "not edited"),
)


def queries(engine: Engine, now: datetime) -> dict[str, Callable[[], Any]]:
    """By a name, a call that asks the store; no call changes anything."""
    with reading(engine) as connection:
        number = connection.scalar(select(func.max(MESSAGES.c.id))) or 0
    middle = int(number) // 2
    deep = Place(_of(engine, lambda c: c.scalar(select(MESSAGES.c.created_at).where(MESSAGES.c.id == middle))), middle)
    store = MessageActions(engine)
    parsed = {name: Filters.parse(**words, now=now) for name, words in _OPTIONS.items()}

    def ask(query: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        return lambda: _of(engine, lambda connection: query(connection, *arguments))

    found: dict[str, Callable[[], Any]] = {
        "list": ask(find, Filters()),
        "list, far behind": ask(find, Filters(), 50, deep),
    }
    for name, filters in parsed.items():
        found[f"list by {name}"] = ask(find, filters)
    for name in ("status", "event", "origin", "field of 1 % of the messages", "tag", "not an event"):
        found[f"list by {name}, far behind"] = ask(find, parsed[name], 50, deep)
    found["names near a wrong one"] = lambda: store.near(Filters.parse(event="order.created", error_type="Eror3"))
    found["values that are not found"] = lambda: store.values_not_found(parsed["200 values of a field"])
    found["search by a field's value"] = lambda: fields_with(engine, "P-700")
    for name in _COUNTED:
        found[f"count of {name}"] = ask(counted, parsed[name])
    found["groups"] = lambda: store.groups(Filters())
    found["groups by queue"] = lambda: inbox(engine, Filters(), now=now)
    for name in _OF_GROUPS:
        found[f"groups by queue of {name}"] = lambda name=name: inbox(engine, parsed[name], now=now)
    found["one group"] = lambda: of_group(engine, GROUP, now)
    found["what a group is made of"] = ask(composition, GROUP, now)
    found["figures of status and monitor"] = ask(measure, now, KEEP.before(now - GRACE))
    found["arrivals of 24 hours"] = ask(arrivals_by_hour, now)
    found["groups for the first time"] = Alerts(engine).new_groups
    found["largest group"] = Alerts(engine).largest_group
    found["due batch"] = lambda: due(engine, 256, now)
    found["ended leases"] = lambda: take_over(engine, "benchmark", now - timedelta(days=1))
    found["one message"] = ask(get, middle)
    found["messages of the same work"] = ask(linked_by_edits, middle)
    found["journal"] = store.journal
    found["journal of a message"] = lambda: store.journal(middle)
    found["journal since yesterday"] = lambda: store.journal(since=now - timedelta(days=1))
    found["journal of a person"] = lambda: store.journal(actor="ann")
    found["actions"] = lambda: actions.recent(engine)
    found["actions of a person"] = lambda: actions.recent(engine, actor="ann")
    found["one action"] = lambda: actions.show(engine, "A-1")
    found["runs"] = ask(run_list.recent, None, 50)
    found["status of a plan"] = ask(status_of, 3)
    found["plan of a group"] = lambda: _plan(engine, Filters.parse(group=SMALL_GROUP), now)
    for status, before in KEEP.before(now).items():
        found[f"retain's next {status}"] = lambda s=status, b=before: Retention(engine).due(s, b, 1_000)
    return found


def _of(engine: Engine, query: Callable[[Connection], Any]) -> Any:
    with reading(engine, is_snapshot=True) as connection:
        return query(connection)


def _plan(engine: Engine, filters: Filters, now: datetime) -> None:
    freeze(engine, Selection(filters), actor="benchmark", reason="benchmark", now=now, dry_run=True)
