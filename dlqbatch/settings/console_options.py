"""The options of `dlqbatch console`, and of commands that ask a console elsewhere: where it is, and the token."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Secret

from dlqbatch.settings.schedule_options import OFF, address
from dlqbatch.settings.values import Options, option, printable, readable, words

_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*")
_HEADER: Final = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,60}")
_SHORTEST_SECRET: Final = 16
_SHORTEST_KEY: Final = 24
"""Bytes of a key that signs, as Standard Webhooks wants it."""


class SecretText(Secret[str]):
    """A password or a key: nothing of it is ever shown."""

    def _display(self) -> str:
        return "***"


def listening_address(value: str) -> str:
    if value.lower() == OFF:
        raise ValueError("is off, but the console has to listen somewhere")
    return address(value)


def prefix(value: str) -> str:
    found = "/" + value.strip("/") if value.strip("/") else ""
    if not _PREFIX.fullmatch(found):
        raise ValueError("is no path such as /dlqbatch")
    return found


def web_address(value: str) -> str:
    parts = urlsplit(value)
    if (
        not value.isprintable()
        or parts.scheme not in {"http", "https"}
        or not parts.hostname
        or parts.username
        or parts.query
        or parts.fragment
    ):
        raise ValueError("is no address such as https://dlq.example.org")
    return value.rstrip("/")


def trace_address(value: str) -> str:
    if "{trace}" not in value:
        raise ValueError("does not hold {trace}, in whose place the id of the trace is put")
    web_address(value.partition("?")[0].replace("{trace}", "x"))
    return value


def header(value: str) -> str:
    if not _HEADER.fullmatch(value):
        raise ValueError("is no name of an HTTP header")
    return value


def secret(value: SecretText) -> SecretText:
    if not value.get_secret_value().isprintable():
        raise ValueError("holds a control character or half a character (it is not shown here)")
    return value


def signing_secret(value: SecretText) -> SecretText:
    try:
        size = len(base64.b64decode(value.get_secret_value().removeprefix("whsec_"), validate=True))
    except ValueError:
        size = 0
    if size < _SHORTEST_KEY:
        raise ValueError(f"is not whsec_ and at least {_SHORTEST_KEY} bytes as base64 (it is not shown here)")
    return value


def long_enough(value: SecretText) -> SecretText:
    secret(value)
    if len(value.get_secret_value()) < _SHORTEST_SECRET:
        raise ValueError(f"has less than {_SHORTEST_SECRET} characters (it is not shown here)")
    return value


Text = Annotated[str, AfterValidator(printable)]
Names = Annotated[tuple[Text, ...], BeforeValidator(words)]
Header = Annotated[str, AfterValidator(header)]
Key = Annotated[SecretText, AfterValidator(long_enough)]
_NAMES: Final = "names with commas between them; * is everybody who has logged in"
_KEY: Final = "at least 16 characters"


class ConsoleOptions(Options):
    """Part of `Settings`."""

    console_address: Annotated[str, AfterValidator(listening_address)] = option(
        "127.0.0.1:8422",
        "Where `console` listens. Anywhere but on this machine alone it needs OIDC, a proxy or API tokens.",
        "a host and a port, such as 127.0.0.1:8422 or [::1]:8422",
    )
    console_path: Annotated[str, AfterValidator(prefix)] = option(
        "", "The path under which `console` is reached, if a proxy gives it one.", "a path such as /dlqbatch"
    )
    console_url: Annotated[str, AfterValidator(web_address)] | None = option(
        None,
        "The address of the console as people see it, with its path: alerts link to it, and OIDC returns to it.",
        "an http:// or https:// address",
    )
    trace_url: Annotated[str, AfterValidator(trace_address)] | None = option(
        None,
        "Where a trace is looked at; `{trace}` stands for its id, and the console makes a link of it.",
        "an address with {trace} in it",
    )
    console_oidc_issuer: Annotated[str, AfterValidator(web_address)] | None = option(
        None, "The OIDC provider that people log in at.", "an https:// address"
    )
    console_oidc_client_id: Text | None = option(None, "The console's name at the OIDC provider.", "a client id")
    console_oidc_client_secret: Annotated[SecretText, AfterValidator(secret)] | None = option(
        None, "The console's password at the OIDC provider.", "a client secret"
    )
    console_oidc_scope: Text = option("openid profile email", "What the OIDC provider is asked for.", "scopes")
    console_oidc_name_claim: Text = option("email", "The claim that names a person, for the journal.", "a claim's name")
    console_oidc_groups_claim: Text = option(
        "groups", "The claim with the groups or roles of a person.", "a claim's name"
    )
    console_proxy_secret: Key | None = option(
        None,
        "What a trusted proxy sends in `X-Dlqbatch-Proxy-Secret`; with it the proxy's header names the person.",
        _KEY,
    )
    console_proxy_user_header: Header = option(
        "X-Forwarded-User", "The header in which a trusted proxy names the person.", "a header's name"
    )
    console_proxy_groups_header: Header = option(
        "X-Forwarded-Groups",
        "The header in which a trusted proxy names the groups, with commas between them.",
        "a header's name",
    )
    console_tokens: Annotated[Path, AfterValidator(readable)] | None = option(
        None,
        "The file with the tokens of the API: `dlqbatch console --new-token NAME` prints a line for it.",
        "the path of a readable file",
    )
    console_secret: Key | None = option(
        None,
        "The key that signs logins. Without it each start makes one, and everybody logs in again; consoles beside each "
        "other need the same.",
        _KEY,
    )
    console_readers: Names = option((), "People and groups that may look.", _NAMES)
    console_operators: Names = option((), "People and groups that may decide about messages.", _NAMES)
    console_admins: Names = option((), "People and groups that may change events and rules too.", _NAMES)
    console_revealers: Names = option((), "People and groups that may see masked content.", _NAMES)
    remote: Annotated[str, AfterValidator(web_address)] | None = option(
        None,
        "The console that commands are sent to (`--remote`); they need neither broker nor database then.",
        "an https:// address; http:// for this machine alone",
    )
    remote_token: Annotated[SecretText, AfterValidator(secret)] | None = option(
        None,
        "The token for that console, which `dlqbatch console --new-token NAME` prints. Never on a command line.",
        "a token",
    )
