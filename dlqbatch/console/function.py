"""The console as a cloud function: a request of a function URL or an HTTP API (format 2.0) in, its answer out.

A function lives for one answer at a time: what is live is asked for again every few seconds, in place of a stream.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from starlette.types import ASGIApp, Message

from dlqbatch import logs
from dlqbatch.aws.secrets import fetch
from dlqbatch.console import audit
from dlqbatch.console.app import Console, application
from dlqbatch.console.logins import logins_of
from dlqbatch.console.rights import Role
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.settings import Settings, load, mask_secrets
from dlqbatch.store.access import store_for

_EVERYWHERE: Final = "0.0.0.0:443"
_TEXT: Final = ("text/", "application/json", "image/svg+xml")
Answer = dict[str, object]


def answer(event: Mapping[str, Any], app: Callable[[], ASGIApp] | None = None) -> Answer:
    """The answer to one request; what keeps the console from starting is in the log, and the caller gets a 503."""
    if not isinstance(event, dict) or "http" not in event.get("requestContext", {}):
        raise DlqbatchError("the event is no request of a function URL or an HTTP API, of which this function is one")
    try:
        console = (app or _application)()
    except DlqbatchError as error:
        logs.get(__name__).error("the console does not start", problem=str(error))
        return _response(503, [(b"content-type", b"text/plain")], b"The console does not start; its log says why.\n")
    return asyncio.run(_run(console, event))


@cache
def _application() -> ASGIApp:
    """Made once for as long as the platform keeps this process; a start that failed is tried again."""
    logs.configure()
    settings = load(secrets=fetch)
    mask_secrets(settings)
    logs.configure(settings.log_level, settings.log_format)
    audit.to_stderr()
    return application(console_of(settings))


def console_of(settings: Settings) -> Console:
    """A console that everybody may reach, and so takes a login, whatever its address in the settings is."""
    settings = settings.model_copy(update={"console_address": _EVERYWHERE})
    logins = logins_of(settings, "", Role.READER)
    if settings.console_secret is None and (logins.has_oidc or logins.proxy_secret is not None):
        raise SettingsError(
            "as a function the console runs in several processes, which need the same dlqbatch.console-secret "
            "(DLQBATCH_CONSOLE_SECRET): it signs the cookies"
        )
    return Console(settings, store_for(settings), logins)


async def _run(app: ASGIApp, event: Mapping[str, Any]) -> Answer:
    body = event.get("body") or ""
    content = base64.b64decode(body) if event.get("isBase64Encoded") else body.encode()
    parts: list[bytes] = []
    begun: dict[str, Any] = {}
    was_read = False

    async def receive() -> Message:
        nonlocal was_read
        if was_read:
            return {"type": "http.disconnect"}
        was_read = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            begun.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope_of(event), receive, send)
    return _response(begun["status"], begun["headers"], b"".join(parts))


def scope_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """The request as the application takes it. The stage of an HTTP API stands in the path, and is no part of it."""
    context = event["requestContext"]
    http, stage = context["http"], context.get("stage", "$default")
    path = event.get("rawPath") or "/"
    if stage != "$default" and (path == f"/{stage}" or path.startswith(f"/{stage}/")):
        path = path[len(stage) + 1 :] or "/"
    headers = [(name.lower(), value) for name, value in event.get("headers", {}).items() if name.lower() != "cookie"]
    headers += [("cookie", "; ".join(event["cookies"]))] if event.get("cookies") else []
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": http["method"],
        "scheme": "https",
        "path": path,
        "raw_path": path.encode(),
        "query_string": event.get("rawQueryString", "").encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers],
        "client": (http.get("sourceIp", "unknown"), 0),
        "server": (context.get("domainName", ""), 443),
    }


def _response(status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Answer:
    """Cookies stand apart, and what is no text is base64."""
    told: dict[str, str] = {}
    cookies = []
    for name, value in ((one.decode("latin-1"), other.decode("latin-1")) for one, other in headers):
        if name.lower() == "set-cookie":
            cookies.append(value)
        else:
            told[name] = f"{told[name]}, {value}" if name in told else value
    is_text = told.get("content-type", "").startswith(_TEXT)
    return {
        "statusCode": status,
        "headers": told,
        "cookies": cookies,
        "body": body.decode() if is_text else base64.b64encode(body).decode(),
        "isBase64Encoded": not is_text,
    }
