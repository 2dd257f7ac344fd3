"""`dlqbatch peek`: look at the head of a live queue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from dlqbatch.cli import timeline
from dlqbatch.cli.options import AsJson, Full, Revealing, Settings
from dlqbatch.cli.printing import NOTHING, print_json, print_lines, remark
from dlqbatch.logs import plain

if TYPE_CHECKING:  # it needs the broker, which a help page does not
    from dlqbatch.peek.run import Look, Seen

_MOST = 1_000


def peek(
    queue: Annotated[str, typer.Argument(help="The queue, which may be one that consumers take from, or a stream.")],
    *,
    settings: Settings,
    number: Annotated[
        int, typer.Option("--count", min=1, max=_MOST, metavar="N", help="Look at so many at the head.")
    ] = 10,
    event: Annotated[
        list[str] | None,
        typer.Option("--event", metavar="EVENT", help="Show this event, or pattern (orders.#). Repeatable."),
    ] = None,
    error_type: Annotated[
        list[str] | None,
        typer.Option("--error-type", metavar="TYPE", help="Failed with this type, as list has it. Repeatable."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option("--source", metavar="APP", help="Published by this program (app_id). Repeatable."),
    ] = None,
    header: Annotated[
        list[str] | None,
        typer.Option("--header", metavar="NAME=VALUE", help="With this value of a header. Repeatable."),
    ] = None,
    field: Annotated[
        list[str] | None,
        typer.Option("--field", metavar="NAME=VALUE", help="With this value of a field. Repeatable."),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", help="This text in the body or a header, as they are shown. Repeatable."),
    ] = None,
    allow_delivery_cost: Annotated[
        bool,
        typer.Option("--allow-delivery-cost", help="Look although it can cost the messages a delivery of their limit."),
    ] = False,
    full: Full = False,
    by: Revealing = None,
    as_json: AsJson = False,
) -> None:
    """Show what is at the head of a live queue, and leave it there in its order; it says what the look costs.

    While it looks, consumers do not see what it holds. Secrets are masked. --reveal is an action of its own in the dead
    store (`dlqbatch actions list`).

    dlqbatch peek orders
    dlqbatch peek orders --count 500 --event "orders.#" --text P-000087
    """
    from dlqbatch.cli.run import on_signal
    from dlqbatch.peek.rules import Wanted
    from dlqbatch.peek.run import peek as look_into

    wanted = Wanted(
        events=tuple(event or ()),
        error_types=tuple(error_type or ()),
        sources=tuple(source or ()),
        headers=tuple(_pair(word, "--header") for word in header or ()),
        fields=tuple(_pair(word, "--field") for word in field or ()),
        texts=tuple(text or ()),
    )
    if by is not None:
        from dlqbatch.peek.reveal import write_down
        from dlqbatch.store.access import StoreClock, store_for

        engine = store_for(settings)
        write_down(engine, by, queue, number, StoreClock(engine)())
    look = look_into(
        settings,
        queue,
        number,
        wanted,
        allows_cost=allow_delivery_cost,
        is_revealed=by is not None,
        stopped=on_signal(),
    )
    if as_json:
        print_json(look.as_dict())
    else:
        print_lines(_lines(look, full=full))
    for note in look.notes:
        remark(note)
    raise typer.Exit(0 if look.messages else NOTHING)


def _pair(word: str, option: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise typer.BadParameter("write NAME=VALUE", param_hint=option)
    return name, value


def _lines(look: Look, *, full: bool) -> Iterator[str]:
    of = f"{look.ready:,} ready, " if look.kind != "stream" else ""
    about = f"{of}{look.consumers:,} consumer(s), type {look.kind}"
    yield plain(f"{look.queue}: {about}; looked at {look.looked_at:,}, {len(look.messages):,} shown")
    for each in look.messages:
        yield from chain(("",), _message(each, full=full))


def _message(each: Seen, *, full: bool) -> Iterator[str]:
    content = each.content
    yield f"Message {each.place} from the head"
    facts = {name: ("no", "yes")[value] if isinstance(value, bool) else value for name, value in each.facts.items()}
    yield from timeline.facts(facts, full=full)
    for title, values in (("Properties", content.readable.properties), ("Headers", content.readable.headers)):
        yield from chain(("", title), timeline.values(values, full=full)) if values else ()
    yield from ("", f"Body ({each.body_size:,} bytes, {content.form}{content.packing})")
    yield from timeline.text(content.body_lines(), full=full)
