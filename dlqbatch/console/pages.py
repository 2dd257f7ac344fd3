"""How pages are made: the templates, what they may call, and what a browser is told about every answer."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from dlqbatch import __version__
from dlqbatch.console import drawing
from dlqbatch.console.rights import Role
from dlqbatch.logs import masked, plain
from dlqbatch.store.states import Status

if TYPE_CHECKING:
    from dlqbatch.console.app import Console
    from dlqbatch.console.gate import Call

_FOLDER: Final = Path(__file__).parent
_STATIC: Final = _FOLDER / "static"
_KINDS: Final = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
UNKNOWN: Final = "\N{EN DASH}"
_MINUTE, _HOUR, _DAY = 60, 3_600, 86_400
_NOTICE: Final = "dlqbatch-notice"
_LONGEST_NOTICE: Final = 600
_SAID: Final = re.compile(r"(<time [^>]*>)[^<]*")

NAV: Final = [
    ("/plans", "Replays"),
    ("/actions", "Actions"),
    ("/events", "Events"),
    ("/rules", "Rules"),
    ("/runs", "Runs"),
    ("/alerts", "Alerts"),
    ("/doctor", "Doctor"),
    ("/journal", "Journal"),
    ("/settings", "Settings"),
]
"""The pages beside Now and Messages, with the words that lead to them."""

HEADERS: Final = {
    # Everything comes from here and nothing is inline: what a message holds cannot become a script or a style.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}


class Pages:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._files = {file.name: file for file in sorted(_STATIC.iterdir()) if file.suffix in _KINDS}
        self._version = hashlib.sha256(b"".join(file.read_bytes() for file in self._files.values())).hexdigest()[:12]
        self._environment = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters |= {
            "shown": _shown,
            "lines": _lines,
            "n": number,
            "when": when,
            "size": size,
            "span": span,
        }
        self._environment.filters |= {"parts": parts, "words": words}
        self._environment.globals |= {
            "href": console.href,
            "asset": lambda name: console.href(f"/static/{self._version}/{name}"),
            "bar": drawing.bar,
            "sparkline": drawing.sparkline,
            "way": drawing.way,
            "Role": Role,
            "version": __version__,
            "database": console.database,
            "scope": console.scope,
            "nav": NAV,
        }

    def response(self, call: Call, template: str, status: int = 200, **values: Any) -> Response:
        response = Response(self.text(call, template, **values), status, media_type="text/html")
        if _NOTICE in call.request.cookies:
            response.delete_cookie(_NOTICE, path=self._console.prefix or "/")
        return response

    def text(self, call: Call, template: str, **values: Any) -> str:
        notice = _notice(call.request.cookies.get(_NOTICE))
        may = {role.word: call.person is not None and call.person.role >= role for role in Role}
        path = call.request.url.path.removeprefix(self._console.prefix)
        return self._environment.get_template(template).render(
            person=call.person, may=may, here=path, notice=notice, now=datetime.now(UTC), **values
        )

    def part(self, template: str, **values: Any) -> str:
        """A part of a page for those who have it open: the same for everybody who may look."""
        text = self._environment.get_template(template).render(now=datetime.now(UTC), **values)
        # The script writes how long ago it was; without that a part changes only when there is something new.
        return _SAID.sub(r"\1", text)

    def keep_notice(self, response: Response, notice: str, action: str | None) -> None:
        """The next page shows what was done, once."""
        content = {"text": notice[:_LONGEST_NOTICE], "action": action or ""}
        kept = urlsafe_b64encode(json.dumps(content).encode()).decode()
        response.set_cookie(
            _NOTICE, kept, max_age=60, path=self._console.prefix or "/", httponly=True, samesite="strict"
        )

    def static(self, request: Request) -> Response:
        file = self._files.get(request.path_params["name"])
        if file is None:
            return Response("There is no such file.\n", 404, media_type="text/plain")
        kept = "public, max-age=31536000, immutable"
        return FileResponse(file, media_type=_KINDS[file.suffix], headers={"Cache-Control": kept})


def _notice(cookie: str | None) -> dict[str, str]:
    """What the page before has done, and the action that can be undone; whoever forges the cookie fools himself."""
    try:
        found = json.loads(urlsafe_b64decode(cookie)) if cookie else {}
        return {name: str(found[name]) for name in ("text", "action")} if found else {}
    except (ValueError, KeyError, TypeError):
        return {}


@pass_context
def _shown(context: Context, value: object, most: int = 300) -> str:
    """The filter of the templates; on a page that shows a message unmasked nothing is hidden."""
    if value is not None and context.get("is_revealed"):
        return plain(str(value), most)
    return shown(value, most)


@pass_context
def _lines(context: Context, text: str | None, most: int = 200) -> list[str]:
    found = (text or "").splitlines()
    left = [f"… and {len(found) - most:,} lines more"] if len(found) > most else []
    return [*(_shown(context, line, 1_000) for line in found[:most]), *left]


def shown(value: object, most: int = 300) -> str:
    """A value of a message on one line: without control characters and secrets, and cut."""
    return "" if value is None else plain(masked(str(value)), most)


def parts(counts: Mapping[Status, int]) -> list[tuple[str, float]]:
    """Counts by state as the parts of a bar."""
    return [(f"s-{status.value}", counts[status]) for status in Status if counts.get(status)]


def words(counts: Mapping[Status, int]) -> str:
    return ", ".join(f"{counts[status]:,} {status.value}" for status in Status if counts.get(status))


def number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:,.1f}" if value % 1 else f"{value:,.0f}"


def size(length: int | None) -> str:
    if length is None:
        return UNKNOWN
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if length >= 1 << power:
            return f"{length / (1 << power):,.1f} {unit}"
    return f"{length:,} B"


def span(seconds: float) -> str:
    """A duration with about two digits."""
    seconds = abs(seconds)
    if seconds < 2 * _MINUTE:
        return f"{seconds:.0f} s"
    if seconds < 2 * _HOUR:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{seconds / _HOUR:.0f} h" if seconds < 2 * _DAY else f"{seconds / _DAY:.0f} d"


def when(at: datetime | str | None) -> Markup:
    """A time as people say it; the exact one is in the title, where a script adds the reader's own zone."""
    if not at:
        return Markup("{}").format(UNKNOWN)
    found = datetime.fromisoformat(at) if isinstance(at, str) else at
    seconds = (datetime.now(UTC) - found).total_seconds()
    exact = found.astimezone(UTC)
    said = f"in {span(seconds)}" if seconds < 0 else f"{span(seconds)} ago"
    return Markup('<time datetime="{}" title="{:%Y-%m-%d %H:%M:%S} UTC">{}</time>').format(
        exact.isoformat(timespec="seconds"), exact, said
    )
