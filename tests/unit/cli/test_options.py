"""A parameter of a command may be made of several options; the filters of dead messages are the largest example."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from dlqbatch.cli.commands import application
from dlqbatch.cli.options import Commands, FilterOptions, MadeBy
from dlqbatch.store.filters import Filters

FILTERS = {
    "action",
    *("statuses", "ids", "error_type", "group", "event", "origin", "source", "tag", "text", "field", "field_files"),
    *("since", "until", "is_edit", "unwanted"),
}
RECEIVED: list[Any] = []


def pair(first: Annotated[int, typer.Option()] = 1, second: Annotated[int, typer.Option()] = 2) -> tuple[int, int]:
    return first, second


def nested(pair: Annotated[tuple[int, int], MadeBy(pair)], third: Annotated[int, typer.Option()] = 3) -> list[int]:
    return [*pair, third]


def show(
    name: str, *, filters: FilterOptions, numbers: Annotated[list[int], MadeBy(nested)], dry_run: bool = False
) -> None:
    """Show it."""
    RECEIVED.append((name, filters, numbers, dry_run))


def run(*words: str) -> Any:
    app = Commands(add_completion=False)
    assert app.command()(show) is show
    get_command(app)(list(words), standalone_mode=False)
    return RECEIVED.pop()


def test_a_command_receives_what_is_made_of_its_options() -> None:
    name, filters, numbers, dry_run = run("x", "--origin", "orders", "--since", "2030-06-01", "--second", "7")
    assert (name, numbers, dry_run) == ("x", [1, 7, 3], False)
    assert filters == Filters(origins=("orders",), since=datetime(2030, 6, 1, tzinfo=UTC))


def test_the_options_stand_where_the_parameter_stands() -> None:
    app = Commands(add_completion=False)
    app.command()(show)
    names = [each.name for each in get_command(app).params]
    assert [name for name in names if name not in FILTERS] == ["name", "first", "second", "third", "dry_run"]


@pytest.mark.parametrize(
    "path", ["messages list", "messages groups", "messages discard", "messages restore", "replay plan"]
)
def test_the_commands_that_filter_have_the_same_filters(path: str) -> None:
    command: Any = get_command(application())
    for word in path.split():
        command = command.commands[word]
    assert {each.name for each in command.params} >= FILTERS
