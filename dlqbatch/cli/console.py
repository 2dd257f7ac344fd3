"""`dlqbatch console`: pages and an API for people who decide about dead messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final

import typer

from dlqbatch.cli.options import AsJson, ConfigFile, SettingPairs, load_settings, this_user
from dlqbatch.cli.printing import print_json, print_lines, remark
from dlqbatch.errors import SettingsError
from dlqbatch.settings import Settings

_EXTRA: Final = ("authlib", "httpx2", "jinja2", "joserfc", "starlette", "uvicorn")
_DAYS: Final = 90


class RoleName(StrEnum):
    READER = "reader"
    OPERATOR = "operator"
    ADMIN = "admin"


def console(
    settings: SettingPairs = None,
    config: ConfigFile = None,
    *,
    role: Annotated[
        RoleName, typer.Option("--role", help="What the printed address, or a new token, allows.")
    ] = RoleName.ADMIN,
    new_token: Annotated[
        str | None,
        typer.Option(
            "--new-token", metavar="NAME", help="Print a new token for the API and its line for the file of tokens."
        ),
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="How long a new token is good for.")] = _DAYS,
    reveal: Annotated[bool, typer.Option("--reveal", help="A new token may see masked content.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open the console in a browser: see what fails, decide, and see that it worked. It runs until a signal.

    On this machine alone it prints an address with a token; elsewhere it takes a login.

    dlqbatch console
    dlqbatch console --role reader
    dlqbatch console --new-token ci --role operator --days 30
    """
    serve = server()
    if new_token is None:
        serve(load_settings(settings, config), role, as_json=as_json)
        return
    from dlqbatch.console.logins import token_line
    from dlqbatch.console.rights import Role

    if not new_token.isprintable() or not new_token or set(new_token) & {" ", "#"}:
        raise typer.BadParameter("a name without blanks and without #", param_hint="--new-token")
    ends = datetime.now(UTC) + timedelta(days=days)
    token, line = token_line(new_token, Role[role.upper()], may_reveal=reveal, ends=ends)
    if as_json:
        print_json({"token": token, "line": line})
        return
    print_lines([line])
    remark(f"the line above belongs into the file that dlqbatch.console-tokens names. The token, shown once: {token}")


def server() -> Callable[..., None]:
    """What serves the console; SettingsError if its packages are not there."""
    try:
        from dlqbatch.console.rights import Role
        from dlqbatch.console.serve import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise SettingsError(
            f"the console needs the package '{error.name}', which is not installed. Nothing was started. Run "
            "`pip install 'dlqbatch[console]'`"
        ) from error

    def run(settings: Settings, role: RoleName, *, as_json: bool) -> None:
        serve(settings, this_user(None), Role[role.upper()], _print_at_once if as_json else _say)

    return run


def _print_at_once(started: dict[str, str]) -> None:
    """Whoever reads it through a pipe waits for the address."""
    print_json(started)
    sys.stdout.flush()


def _say(started: dict[str, str]) -> None:
    remark(f"the console listens at {started['address']}")
    if "open" in started:
        remark(f"open {started['open']}")
