"""The help page of a command: examples, exit codes, then its options, with those of every command at the end.

Typer's own pages divide each option into five columns, and leave 22 of 80 characters for what it means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from rich.text import Text

_LAST: Final = ("as_json", "help", "config", "settings")
"""The parameters at the end of every page, in this order."""
_WIDEST: Final = 100
_LONGEST_NAME: Final = 26
"""The characters of the column of names; a longer name has a line of its own."""
_LARGEST_ID: Final = 2**63 - 1
_METAVARS: Final = {"int": "N", "float": "N", "str": "TEXT", "Path": "FILE"}


class Page(TyperCommand):
    """A command with our help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (Typer's own prints as well)
        _print(self, ctx)


class Contents(TyperGroup):
    """A group of commands with our help page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  (Typer's own prints as well)
        _print(self, ctx)


def paragraphs(command: Any) -> list[str]:
    """The paragraphs of a command's docstring, without the examples."""
    return [" ".join(each.split()) for each in _parts(command) if not _is_example(each)]


def examples(command: Any) -> list[str]:
    """The command lines in a command's docstring."""
    return [line.strip() for each in _parts(command) if _is_example(each) for line in each.splitlines()]


def parameters(command: Any, context: Any) -> list[Any]:
    """The arguments and options of a command, with those of every command at the end."""
    shown = [each for each in command.get_params(context) if not getattr(each, "hidden", False)]
    return sorted(shown, key=lambda each: _LAST.index(each.name) if each.name in _LAST else -1)


def is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def usage(command: Any, context: Any, path: str) -> str:
    pieces = ["[OPTIONS]"]
    for each in command.get_params(context):
        if is_argument(each):
            name = _metavar(each) + ("..." if each.nargs != 1 else "")
            pieces.append(name if each.required else f"[{name}]")
    return " ".join([path, *pieces, *(["COMMAND"] if hasattr(command, "commands") else [])])


def name_of(parameter: Any) -> str:
    """An option as it is typed, such as `-c, --config FILE`, or the name of an argument."""
    if is_argument(parameter):
        return _metavar(parameter)
    names = ", ".join(sorted(parameter.opts, key=lambda each: each.startswith("--")))
    if parameter.secondary_opts:
        names += f" / {', '.join(parameter.secondary_opts)}"
    return names if parameter.is_flag else f"{names} {_metavar(parameter)}"


def meaning_of(parameter: Any) -> str:
    choices = parameter.type_descriptor.choices if getattr(parameter, "type_descriptor", None) else None
    text = parameter.help or ""
    if choices:
        text += f" One of: {', '.join(str(each.value) for each in choices)}."
    extra = []
    default = None if parameter.required or parameter.name == "help" else parameter.default
    if getattr(parameter, "is_flag", False):
        if parameter.secondary_opts and default is not None:
            extra.append(f"default {parameter.opts[0] if default else parameter.secondary_opts[0]}")
    elif default not in (None, (), []):
        extra.append(f"default {getattr(default, 'value', default)}")
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if least is not None and most is None:
        extra.append(f"at least {least}")
    elif least is not None and most != _LARGEST_ID:
        extra.append(f"{least} to {most}")
    if parameter.required and not is_argument(parameter):
        extra.append("required")
    return f"{text} ({', '.join(extra)})" if extra else text


def _metavar(parameter: Any) -> str:
    if parameter.metavar:
        return str(parameter.metavar)
    if is_argument(parameter) or parameter.type_descriptor.choices:
        return str(parameter.name).upper()
    return _METAVARS.get(parameter.bare_type().removeprefix("list[").rstrip("]"), "TEXT")


def _parts(command: Any) -> list[str]:
    return [each for each in (command.help or "").split("\n\n") if each.strip()]


def _is_example(paragraph: str) -> bool:
    return paragraph.startswith("dlqbatch ")


def _print(command: Any, context: Any) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for line in _lines(command, context, min(console.width, _WIDEST)):
        console.print(line, soft_wrap=True)


def _lines(command: Any, context: Any, width: int) -> Iterator[Text]:
    from rich.text import Text

    yield Text.assemble(("Usage: ", "bold"), usage(command, context, context.command_path))
    for each in paragraphs(command):
        yield Text("")
        yield from map(Text, _wrapped(each, width, 2))
    if shown := examples(command):
        yield from _heading("Examples" if len(shown) > 1 else "Example")
        yield from (Text(f"  {each}", style="green") for each in shown)
    for title, commands in _panels(command).items():
        yield from _heading(title)
        longest = max(len(name) for name in getattr(command, "commands", ()))
        for name, inner in commands:
            yield from _entry(name, paragraphs(inner)[0], longest, width)
    path = context.command_path.partition(" ")[2]
    if codes := EXIT_CODES_OF.get(path):
        yield from _heading("Exit codes")
        for code, meaning in codes.items():
            yield from _entry(str(code), meaning, 1, width)
    yield from _parameters(command, context, width)
    for each in (command.epilog or "").splitlines():
        yield Text("")
        yield from map(Text, _wrapped(each, width, 0))


def _parameters(command: Any, context: Any, width: int) -> Iterator[Text]:
    listed = parameters(command, context)
    for title, chosen in (("Arguments", True), ("Options", False)):
        rows = [(name_of(each), meaning_of(each)) for each in listed if is_argument(each) is chosen]
        if rows:
            yield from _heading(title)
            longest = max((len(name) for name, _ in rows if len(name) <= _LONGEST_NAME), default=_LONGEST_NAME)
            for name, meaning in rows:
                yield from _entry(name, meaning, longest, width)


def _panels(command: Any) -> dict[str, list[tuple[str, Any]]]:
    panels: dict[str, list[tuple[str, Any]]] = {}
    for name, inner in getattr(command, "commands", {}).items():
        panels.setdefault(getattr(inner, "rich_help_panel", None) or "Commands", []).append((name, inner))
    return panels


def _heading(title: str) -> Sequence[Text]:
    from rich.text import Text

    return Text(""), Text(f"{title}:", style="bold")


def _entry(name: str, meaning: str, longest: int, width: int) -> Iterator[Text]:
    from rich.text import Text

    first, *rest = _wrapped(meaning, width, longest + 4) or [""]
    if len(name) > longest:
        yield Text(f"  {name}", style="cyan")
        yield Text(first)
    else:
        yield Text.assemble((f"  {name:<{longest}}", "cyan"), first[longest + 2 :])
    yield from map(Text, rest)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    margin = " " * indent
    return wrap(
        text, width, initial_indent=margin, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


EXIT_CODES: Final = {
    0: "done",
    1: "failed: the broker refused, or what was named is not there",
    2: "usage, a setting, the policy or the topology is wrong, or the database lacks our tables "
    "(`dlqbatch db upgrade`) or gives its role no right; nothing was moved",
    3: "partial: something was left in its place, and the report says why",
    4: "the broker, its management API, the database or a secret cannot be reached",
    130: "interrupted by Ctrl-C; any other signal N that ends it at once is 128 + N",
    141: "nobody read the output to its end",
}
EXIT_CODES_OF: Final[dict[str, dict[int, str]]] = {
    "drain": {0: "everything taken was moved", 3: "something was left, or the connection was lost on the way"},
    "ingest": {
        0: "everything taken is stored, or there was nothing",
        1: "with --head: nothing was taken",
        2: "none of the queues is there, with --head one is a stream, or no database is named",
        3: "a part is stored, the rest is back in its queue",
    },
    "check": {
        0: "everything was looked at, or a bound came first",
        2: "no queue is named, one is not there, is a stream or has a delivery limit, or the target cannot be",
        3: "a part was left or could not be read",
    },
    "peek": {
        0: "messages are shown",
        1: "nothing is there that is wanted, or the broker ended the look",
        2: "the queue is not there, or the look would harm its messages; nothing was taken",
    },
    "lifecycle": {3: "something was left that needs a look"},
    "retain": {2: "no database is named", 3: "something could not be copied or deleted"},
    "monitor": {3: "a receiver has not taken an alert yet, or the file for Prometheus could not be written"},
    "schedule": {
        0: "ended by a signal, in order",
        1: "the health address is taken, a run had to be killed at the end, or the clock stood still",
        2: "nothing is to be scheduled",
        130: "ended at once, by a second signal; 143 after SIGTERM",
    },
    "messages list": {1: "there are none"},
    "messages search": {1: "nothing is found"},
    "messages groups": {1: "there are none"},
    "messages show": {1: "there is no such message"},
    "messages journal": {1: "there is nothing"},
    "messages discard": {1: "none was changed", 3: "some were changed and some were not"},
    "messages restore": {1: "none was changed", 3: "some were changed and some were not"},
    "messages edit": {1: "nothing was changed"},
    "messages replay": {1: "none can be sent", 3: "some were left"},
    "replay plan": {1: "there is nothing to replay"},
    "replay apply": {
        0: "the plan is done",
        1: "it was stopped, or something is not well: then nothing was moved",
        2: "there is no such plan, it is over, or it needs a second person",
        3: "some of it waits: apply it again",
    },
    "replay release": {
        1: "something is not well: then nothing was released",
        2: "there is no such plan, it is over, stopped or released, or it needs a second person",
    },
    "replay run": {
        0: "every released plan went on, or waits for what it has sent; or there is none",
        1: "one was stopped",
        3: "one cannot go on, and the report says why",
    },
    "replay approve": {2: "there is no such plan, it is begun or over, or you made it"},
    "replay status": {1: "there are no plans", 2: "there is no such plan"},
    "replay abort": {
        2: "there is no such plan, or it is over",
        3: "a run that was killed had begun to send some of it",
    },
    "archive list": {1: "there are none", 3: "something is damaged or unfinished"},
    "archive show": {1: "there is none"},
    "archive restore": {1: "none came back", 3: "some came back and some did not"},
    "doctor": {1: "something serious was found"},
    "upgrade-check": {
        0: "nothing has to be done",
        1: "the upgrade would fail, or stop jobs, until something is done",
        3: "there are steps to take, such as `dlqbatch db upgrade`",
        4: "the broker or the database cannot be reached",
    },
    "topology plan": {0: "there is nothing to do", 3: "there is something to do"},
    "topology apply": {2: "something differs, and nothing was changed"},
    "topology delete": {1: "something is in the way", 3: "some of it is gone, and something is in the way"},
    "events remove": {1: "the table does not hold it"},
    "events test": {1: "the policy does not name it"},
    "rules set": {2: "the pattern is refused, and nothing was changed"},
    "rules remove": {1: "there is no such rule"},
    "rules test": {1: "no rule knows it, so that it is manual"},
    "demo": {1: "a message did not go the way it should"},
}
"""Exit codes that mean something special for one command; any other code means what it means for every command."""
