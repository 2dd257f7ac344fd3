"""Options that several commands share, and parameters of commands that are made of several options.

A command with the parameter `filters: FilterOptions`, say, has a dozen options and receives one Filters object. The
annotation names the function that makes the object, and the parameters of this function are the options.
"""

from __future__ import annotations

import getpass
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias, get_args

import typer
from typer.models import CommandFunctionType

from dlqbatch import logs
from dlqbatch import settings as configuration
from dlqbatch.cli.help_pages import Page
from dlqbatch.cli.reach import Reach, StatedActor
from dlqbatch.settings.sources import Spelled
from dlqbatch.store.states import Status

if TYPE_CHECKING:  # it needs SQLAlchemy, which a help page does not
    from dlqbatch.messages.shown import Reveal
    from dlqbatch.store.filters import Filters


class MadeBy(NamedTuple):
    """Marks the annotation of a parameter whose value this function makes; the function's parameters are options."""

    function: Callable[..., Any]


class Commands(typer.Typer):
    """A group of commands with our help pages; their parameters may be made of several options."""

    def __init__(self, **rest: Any) -> None:
        super().__init__(no_args_is_help=True, **rest)

    def command(self, name: str | None = None, **rest: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        register = super().command(name, cls=Page, **rest)

        def add(function: CommandFunctionType) -> CommandFunctionType:
            register(_with_single_options(function))
            return function

        return add


def _with_single_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it, with one parameter for each option."""

    @wraps(command)
    def run(**options: object) -> None:
        _call(command, options)

    single = _single_options(command)
    run.__signature__ = Signature(list(single.values()))  # type: ignore[attr-defined]  # what `signature` reads first
    run.__annotations__ = {name: option.annotation for name, option in single.items()}
    return run


def _single_options(function: Callable[..., Any]) -> dict[str, Parameter]:
    options: dict[str, Parameter] = {}
    for name, (parameter, maker) in _parameters(function).items():
        options |= {name: parameter.replace(kind=Parameter.KEYWORD_ONLY)} if maker is None else _single_options(maker)
    return options


def _call(function: Callable[..., Any], options: Mapping[str, object]) -> Any:
    makers = {name: maker for name, (_, maker) in _parameters(function).items()}
    return function(**{name: _call(maker, options) if maker else options[name] for name, maker in makers.items()})


def _parameters(function: Callable[..., Any]) -> dict[str, tuple[Parameter, Callable[..., Any] | None]]:
    """Every parameter, and the function that makes its value if there is one."""
    function.__annotations__.pop("return", None)  # its module may be loaded only for type checks
    return {
        name: (each, next((mark.function for mark in get_args(each.annotation) if isinstance(mark, MadeBy)), None))
        for name, each in signature(function, eval_str=True).parameters.items()
    }


AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Show what would happen; move and change nothing.")]
ConfigFile: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The properties file, instead of DLQBATCH_CONFIG's."),
]
SettingPairs: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="OPTION=VALUE", help="Any setting of docs/settings.md. Repeatable."),
]
Prometheus: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--prometheus", metavar="FILE", help="Also write the metrics there, for the textfile collector of Prometheus."
    ),
]
Limit: TypeAlias = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="At most so many.")]
After: TypeAlias = Annotated[
    str | None, typer.Option("--after", metavar="NEXT", help="The next page: what this one named as its next.")
]
ROW_ID: Final = typer.Argument(metavar="ID", min=1, max=2**63 - 1, help="The number of a message, as list shows it.")
RowId: TypeAlias = Annotated[int, ROW_ID]
RowIds: TypeAlias = Annotated[list[int], ROW_ID]
Expect: TypeAlias = Annotated[
    int | None,
    typer.Option("--expect", min=0, metavar="N", help="Do it only if a filter matches so many messages."),
]
Full: TypeAlias = Annotated[bool, typer.Option("--full", help="The whole body, stack and headers, however long.")]
JournalReason: TypeAlias = Annotated[str, typer.Option("--reason", help="Why; it goes into the journal.")]


def overrides(pairs: list[str] | None, flags: Mapping[str, object] | None = None) -> dict[str, object]:
    """The settings that the command line states; an option of their own wins over --set."""
    settings: dict[str, object] = {}
    for pair in pairs or ():
        option, equals, value = pair.partition("=")
        if not equals:
            # It may be an address with its password, so that the error does not repeat it.
            raise typer.BadParameter("it takes OPTION=VALUE, such as -s queue_type=quorum", param_hint="--set")
        name = option.strip().replace("-", "_")
        settings[Spelled(name, f"-s {name}")] = value
    of_flags = {option: value for option, value in (flags or {}).items() if value is not None}
    return {option: value for option, value in settings.items() if option not in of_flags} | of_flags


def load_settings(
    pairs: list[str] | None,
    config: Path | None,
    flags: Mapping[str, object] | None = None,
    *,
    may_be_remote: bool = False,
) -> configuration.Settings:
    """Read the settings of a command that is no run of a job, and log their warnings."""
    from dlqbatch.cli.run import settings_from

    loaded = settings_from(overrides(pairs, flags), config, may_be_remote=may_be_remote)
    for warning in loaded.warnings:
        logs.get(__name__).warning("settings", problem=warning)
    return loaded


NoRemote: TypeAlias = Annotated[str | None, typer.Option("--remote", metavar="URL", hidden=True)]
"""The option --remote of a command that does not go by it, and says so."""
Remote: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--remote",
        metavar="URL",
        help="Ask the console there, with the token of DLQBATCH_REMOTE_TOKEN_FILE; neither broker nor database is "
        "needed then.",
    ),
]


def _settings(
    settings: SettingPairs = None, config: ConfigFile = None, remote: NoRemote = None
) -> configuration.Settings:
    return load_settings(settings, config, {"remote": remote})


def _reach(settings: SettingPairs = None, config: ConfigFile = None, remote: Remote = None) -> Reach:
    return Reach(load_settings(settings, config, {"remote": remote}, may_be_remote=True))


ScopeName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--scope",
        metavar="NAME",
        help="The deployment whose messages these are, where several share the database; all to look at every one.",
    ),
]


def _scoped_settings(
    settings: SettingPairs = None, config: ConfigFile = None, scope: ScopeName = None, remote: NoRemote = None
) -> configuration.Settings:
    return load_settings(settings, config, {"scope": scope, "remote": remote})


def _scoped_reach(
    settings: SettingPairs = None, config: ConfigFile = None, scope: ScopeName = None, remote: Remote = None
) -> Reach:
    return Reach(load_settings(settings, config, {"scope": scope, "remote": remote}, may_be_remote=True))


def this_user(
    actor: Annotated[
        str | None,
        typer.Option("--actor", metavar="NAME", help="Who the journal says it was; else the user who runs this."),
    ] = None,
) -> str:
    if actor is not None:
        return StatedActor(actor)
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise typer.BadParameter("this user has no name here; give one", param_hint="--actor") from None


def _revealing(
    reveal: Annotated[
        bool, typer.Option("--reveal", help="Show secrets too. It takes the right to, and a --reason.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option("--reason", help="Why they are shown; it goes into the journal.")
    ] = None,
    actor: Annotated[
        str | None, typer.Option("--actor", metavar="NAME", help="Who the journal says has seen them.")
    ] = None,
) -> Reveal | None:
    if not reveal:
        return None
    if not reason:
        raise typer.BadParameter("say why with --reason: it goes into the journal", param_hint="--reveal")
    from dlqbatch.messages.shown import Reveal

    return Reveal(this_user(actor), reason)


_LARGEST_LIST: Final = 32 * 1024 * 1024


def _field_list(word: str) -> tuple[str, list[str]]:
    """The name of a field and the values of a file, one in each line; `-` is stdin."""
    name, equals, file = word.partition("=")
    if not equals or Path(word).exists():
        name, file = "", word
    try:
        with sys.stdin.buffer if file == "-" else Path(file).open("rb") as stream:
            data = stream.read(_LARGEST_LIST + 1)
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be read: {error.strerror}", param_hint="--field-file") from error
    if len(data) > _LARGEST_LIST:
        raise typer.BadParameter(f"{file} is larger than 32 MiB", param_hint="--field-file")
    if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        raise typer.BadParameter(f"{file} is UTF-16; save it as UTF-8", param_hint="--field-file")
    lines = [line.strip() for line in data.decode("utf-8-sig", "surrogateescape").splitlines()]
    values = [line for line in lines if line]
    if not name and values:
        name = values.pop(0)
    if not name or not values:
        raise typer.BadParameter(f"{file} holds no values, one in each line", param_hint="--field-file")
    return name, values


def _filters(since: Sequence[str], until: Sequence[str]) -> MadeBy:
    """The options that filter dead messages; `since` and `until` are the names of the options for the time."""
    kinds: dict[str, Any] = {
        "statuses": Annotated[
            list[Status] | None, typer.Option("--status", metavar="STATE", help="In this state. Repeatable.")
        ]
    }
    for name, option in {
        "ids": typer.Option("--id", metavar="ID", help="With this number, as list shows it. Repeatable."),
        "error_type": typer.Option(
            "--error-type", metavar="TYPE", help="Failed with this type, with or without its package. Repeatable."
        ),
        "group": typer.Option("--group", metavar="GROUP", help="Of this group, or how it begins. Repeatable."),
        "event": typer.Option("--event", metavar="EVENT", help="Of this event, or pattern (orders.#). Repeatable."),
        "origin": typer.Option(
            "--origin", metavar="QUEUE", help="Failed in this queue, pattern, or behind this exchange. Repeatable."
        ),
        "source": typer.Option("--source", metavar="APP", help="Published by this program (app_id). Repeatable."),
        "tag": typer.Option("--tag", metavar="TAG", help="With this tag. Repeatable."),
        "field": typer.Option(
            "--field", metavar="NAME=VALUE", help="With this value of a field (docs/messages.md). Repeatable."
        ),
        "field_files": typer.Option(
            "--field-file",
            metavar="[NAME=]FILE",
            help="With one of the values in FILE, one in each line; without NAME its first line is the name.",
        ),
        "text": typer.Option("--text", help="This text anywhere in the failure, the reason or an id. Repeatable."),
        "action": typer.Option(
            "--action", metavar="A-n", help="Changed by this action; of an edit, what it made. Repeatable."
        ),
        "unwanted": typer.Option(
            "--not", metavar="FILTER=VALUE", help="Not these, such as event=orders.# or group=dba6. Repeatable."
        ),
    }.items():
        kinds[name] = Annotated[list[str] | None, option]
    for name, option in {
        "since": typer.Option(
            *since, metavar="TIME", help="Ingested then or later: 2h, yesterday, or a date, which is its first instant."
        ),
        "until": typer.Option(
            *until, metavar="TIME", help="Ingested then or earlier; yesterday or a date is its last instant."
        ),
    }.items():
        kinds[name] = Annotated[str | None, option]
    kinds["is_edit"] = Annotated[
        bool | None, typer.Option("--edits/--no-edits", help="Made by an edit, or not; without it both.")
    ]

    def make(**options: Any) -> Filters:
        from dlqbatch.store.filters import Filters

        lists = [_field_list(word) for word in options.pop("field_files") or ()]
        return Filters.parse(**options, field_lists=lists)

    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=kind) for name, kind in kinds.items()]
    make.__signature__ = Signature(options)  # type: ignore[attr-defined]  # what `signature` reads first
    return MadeBy(make)


Settings: TypeAlias = Annotated[configuration.Settings, MadeBy(_settings)]
Reached: TypeAlias = Annotated[Reach, MadeBy(_reach)]
ScopedReach: TypeAlias = Annotated[Reach, MadeBy(_scoped_reach)]
"""For commands that find messages without a connection to the broker, which knows the scope."""
Actor: TypeAlias = Annotated[str, MadeBy(this_user)]
Revealing: TypeAlias = Annotated["Reveal | None", MadeBy(_revealing)]
ScopedSettings: TypeAlias = Annotated[configuration.Settings, MadeBy(_scoped_settings)]
"""For commands that find messages without a connection to the broker, which knows the scope."""
FilterOptions: TypeAlias = Annotated["Filters", _filters(("--since", "--start-date"), ("--until", "--end-date"))]
ReplayFilters: TypeAlias = Annotated["Filters", _filters(("--since", "--start-date"), ("--until", "--end-date"))]
