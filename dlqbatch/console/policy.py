"""The pages of the policy: which events are retried and how often, and which strategy a failure gets."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from dlqbatch.drain.died_rows import numbers_of, tried
from dlqbatch.drain.event_config import EventConfig, load_policy
from dlqbatch.drain.event_delays import EventDelays
from dlqbatch.drain.simulate import FATES
from dlqbatch.lifecycle.rule_rows import Rules
from dlqbatch.monitor.metrics import EventFigures
from dlqbatch.store.engine import reading
from dlqbatch.store.filters import NotUnderstood, parse_time
from dlqbatch.store.states import On, Strategy
from dlqbatch.topology.model import in_name

if TYPE_CHECKING:
    from dlqbatch.console.gate import Call

_LARGEST_POSITION: Final = 10


def events(call: Call) -> Response:
    console = call.console
    tested = call.one("key").strip()
    figures: dict[str, EventFigures] = {each.event: each for each in console.snapshots.get(console).metrics.events}
    return call.page(
        "events.html",
        rows=EventConfig(console.engine).read(),
        properties=console.settings.events,
        default=console.settings.default_max_retries,
        figures=figures,
        tested=tested,
        rule=load_policy(console.settings).explain(tested) if tested else None,
        delays={name: ", ".join(map(in_name, its)) for name, its in console.settings.event_delays.items()},
        delayed_by=EventDelays(console.settings.event_delays).find(tested) if tested else None,
        tiers=", ".join(map(in_name, console.settings.tier_ttls)),
    )


def try_events(call: Call) -> Response:
    """What would have become of what failed with other numbers of retries; nothing is changed."""
    console, since, text = call.console, call.one("since", "7d").strip(), call.one("numbers").strip()
    found = None
    if text:
        with reading(console.engine) as connection:
            wanted = numbers_of(line.strip() for line in text.splitlines() if line.strip())
            found = tried(connection, wanted, parse_time(since, console.clock()), console.settings)
    else:
        # What holds now is what somebody changes a number of.
        rows = {row.name: row.max_retries for row in EventConfig(console.engine).read() if row.name}
        numbers = {**console.settings.events, **rows}
        default = console.settings.default_max_retries
        text = "\n".join(f"{name}={default if each is None else max(each, 0)}" for name, each in numbers.items())
    words = [since, *(line.strip() for line in text.splitlines() if line.strip())]
    command = f"dlqbatch events simulate --since {' '.join(map(quote, words))}"
    return call.page("events_try.html", numbers=text, since=since, found=found, fates=FATES, command=command)


def set_event(call: Call) -> Response:
    name, text = call.one("name").strip(), call.one("max_retries").strip()
    row, action = EventConfig(call.console.engine).set(name, None if not text else _number(text), call.by)
    call.note("done", event=name, max_retries=row.max_retries, action=action)
    return call.to(
        "/events", f"{name}: {'the default number of' if row.max_retries is None else row.max_retries} retries."
    )


def remove_event(call: Call) -> Response:
    name = call.one("name").strip()
    number, action = EventConfig(call.console.engine).remove(name, call.by)
    call.note("done", event=name, rows=number, action=action)
    return call.to("/events", f"{name} is taken out." if number else f"The table does not hold {name}.")


def rules(call: Call) -> Response:
    found, broken = Rules(call.console.engine).read()
    error_type, text = call.one("type").strip(), call.one("text").strip()
    explained = Rules(call.console.engine).test(error_type or None, text or None) if error_type or text else None
    return call.page(
        "rules.html",
        rules=found,
        broken=broken,
        explained=explained,
        tested=(error_type, text),
        strategies=list(Strategy),
        places=list(On),
    )


def set_rule(call: Call) -> Response:
    name, pattern = call.one("name").strip(), call.one("pattern")
    try:
        on, strategy = On(call.one("on") or On.ANY), Strategy(call.one("strategy"))
    except ValueError:
        raise NotUnderstood("choose where the rule looks, and a strategy. Nothing was changed.") from None
    position = call.one("position").strip()
    wanted = _number(position) if position else None
    done = Rules(call.console.engine).set(
        name, on=on, pattern=pattern or None, strategy=strategy, position=wanted, by=call.by
    )
    call.note("done", rule=name, strategy=strategy, action=done.action)
    return call.to("/rules", f"The rule {name} is {'added' if done.is_new else 'changed'}.")


def remove_rule(call: Call) -> Response:
    name = call.one("name").strip()
    removed = Rules(call.console.engine).remove(name, by=call.by)
    call.note("done", rule=name, removed=removed is not None, action=removed and removed.action)
    return call.to("/rules", f"The rule {name} is removed." if removed else f"There is no rule {name}.")


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > _LARGEST_POSITION:
        raise NotUnderstood(f"'{text}' is no whole number of this size. Nothing was changed.")
    return int(text)
