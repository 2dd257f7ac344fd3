"""The one way of a request: who is it, may they, is it forged, and then the page or what went wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from dlqbatch import logs
from dlqbatch.console import audit, rights
from dlqbatch.console.addresses import filters_of
from dlqbatch.console.logins import host_of
from dlqbatch.console.repeated import KEY
from dlqbatch.console.rights import Person, Role
from dlqbatch.console.schema import Schema, checked
from dlqbatch.errors import DatabaseForbids, DatabaseUnreadable, DlqbatchError
from dlqbatch.groups.decisions import NoSuchGroup
from dlqbatch.messages.selection import NumberUnexpected
from dlqbatch.messages.shown import MayNotReveal
from dlqbatch.replay.plan import NoSuchPlan
from dlqbatch.store.action_log import By, NoSuchAction
from dlqbatch.store.filters import LARGEST_ID, Filters, NoSuchMessage, NotUnderstood

if TYPE_CHECKING:
    from dlqbatch.console.app import Console

log = logs.get(__name__)

API: Final = "/api/"
LARGEST_FORM: Final = 8 * 1024 * 1024
_MOST_FIELDS: Final = 20_000
_CLIENT: Final = "unknown"
_DIGITS: Final = 30


@dataclass(frozen=True, slots=True)
class Route:
    """One line of the route table, from which the server, the tests of rights and the API's document are made."""

    method: str
    path: str
    needs: Role | None
    """The role that it takes; None: nobody need be logged in."""
    answer: Callable[[Call], Response | dict[str, object]]
    what: str
    """What it does, for the audit and for the document of the API."""
    reveals: bool = False
    """It shows what is masked elsewhere, and takes the right to that."""
    shows_content: bool = False
    """Its answer holds content as it is stored."""
    takes: Schema | None = None
    """The JSON that a request to the API holds."""
    asks: tuple[str, ...] = ()
    """What an address of the API may ask for; `filter` stands for every filter."""
    is_question: bool = False
    """It is sent as POST because what it asks may be longer than an address, and changes nothing."""

    @property
    def changes(self) -> bool:
        return self.method not in {"GET", "HEAD"} and not self.is_question

    @property
    def is_api(self) -> bool:
        return self.path.startswith(API)


@dataclass(slots=True)
class Call:
    """One request that has passed the gate."""

    request: Request
    console: Console
    person: Person | None
    route: Route
    form: list[tuple[str, str]] = field(default_factory=list)
    content: Any = None
    """The JSON of a request to the API."""

    @property
    def actor(self) -> str:
        assert self.person is not None  # noqa: S101  (only routes that take a role ask for it)
        return self.person.name

    @property
    def is_verified(self) -> bool:
        return self.person is not None and self.person.is_verified

    @property
    def by(self) -> By:
        """Who decides what no form asks a reason for."""
        return By(self.actor, "decided in the console", self.is_verified)

    def path(self, name: str) -> str:
        return str(self.request.path_params[name])

    def query(self) -> list[tuple[str, str]]:
        if self.route.is_question:
            return asked_pairs(self.content)
        return parse_qsl(self.request.url.query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)

    def filters(self) -> Filters:
        return filters_of(self.query(), as_written=self.route.is_question)

    def one(self, name: str, default: str = "") -> str:
        """The last value of a field of the form, or of the address."""
        found = [value for key, value in (*self.query(), *self.form) if key == name]
        return found[-1] if found else default

    def all(self, name: str) -> list[str]:
        return [value for key, value in (*self.query(), *self.form) if key == name]

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        return self.console.pages.response(self, template, status, **values)

    def to(self, place: str, notice: str = "", action: str | None = None) -> Response:
        """Send the browser to another page of ours, which shows what was done."""
        response = RedirectResponse(self.console.href(place), status_code=HTTPStatus.SEE_OTHER)
        if notice:
            self.console.pages.keep_notice(response, notice, action)
        return response

    def number(self, name: str) -> int:
        text = self.path(name)
        if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
            raise NoSuchMessage(0)
        return int(text)

    @staticmethod
    def whole(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
            raise NotUnderstood(f"'{text[:40]}' is no whole number")
        return min(int(text), LARGEST_ID)

    def note(self, outcome: str, why: str = "", **about: object) -> None:
        audit.note(self.route.what, outcome, self.person, _client(self.request), why, about)


class Refused(DlqbatchError):
    """The person may not do this, or the request was forged."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        self.status = status
        # As a login that the database, or the broker, does not let in, and as one that lacks a right.
        self.exit_code = 4 if status == HTTPStatus.UNAUTHORIZED else 2
        super().__init__(why)


def endpoint(console: Console, routes: Sequence[Route]) -> Callable[[Request], Any]:
    """What Starlette calls for one path; the routes are those of its methods."""
    by_method = {route.method: route for route in routes}

    async def answer(request: Request) -> Response:
        route = by_method["GET" if request.method == "HEAD" else request.method]
        call = Call(request, console, None, route)
        try:
            call.person = await run_in_threadpool(_person, console, request)
            _admit(call)
            if request.method == "POST":
                await _read(call)
            done = await run_in_threadpool(_answer, call)
        except Exception as error:  # noqa: BLE001  (the last to see it: it becomes a page, and never a trace)
            done = await run_in_threadpool(_failure, call, error)
        if route.is_api:
            return _cached(request, done)
        return done

    return answer


def _answer(call: Call) -> Response:
    # What is revealed is never kept: it would lie in memory unmasked.
    keeps = call.route.is_api and call.route.changes and not call.route.shows_content
    if keeps and KEY in call.request.headers:
        found: Response | dict[str, object] = call.console.repeated.once(call, lambda: _api_answer(call))
    else:
        found = _answer_once_more(call)
    if isinstance(found, Response):
        return found
    status = HTTPStatus.CREATED if call.route.changes else HTTPStatus.OK
    return JSONResponse(found, status)


def _api_answer(call: Call) -> dict[str, object]:
    found = call.route.answer(call)
    assert isinstance(found, dict)  # noqa: S101  (what the API answers is JSON)
    return found


def _answer_once_more(call: Call) -> Response | dict[str, object]:
    """A page that only looks is made again if the connection was lost: a database that was restarted is there again."""
    try:
        return call.route.answer(call)
    except DatabaseUnreadable:
        if call.route.changes:
            raise
        call.console.engine.dispose()
        return call.route.answer(call)


def _person(console: Console, request: Request) -> Person | None:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return console.logins.tokens.person(token.strip())
    found = console.logins.by_proxy(request.headers) if console.logins.proxy_secret is not None else None
    return found or console.logins.sessions.person(request.cookies.get(console.cookie))


def _admit(call: Call) -> None:
    request, route, console = call.request, call.route, call.console
    host = request.headers.get("host", "").lower()
    if console.hosts and host_of(host if ":" in host.rpartition("]")[2] else f"{host}:80") not in console.hosts:
        raise Refused(
            HTTPStatus.MISDIRECTED_REQUEST, "the console has no such address; use the address that it has printed"
        )
    ambient = not request.headers.get("authorization")
    own = {host} | ({urlsplit(console.url).netloc.lower()} if console.url else set())
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if rights.is_forged(request.method, site=site, origin=origin, hosts=own, ambient=ambient):
        call.note("refused", "the request came from another page")
        raise Refused(HTTPStatus.FORBIDDEN, "this request did not come from a page of the console; nothing was done")
    why = rights.refusal(call.person, route.needs, reveals=route.reveals)
    if why:
        if route.changes or route.reveals:
            call.note("refused", why)
        raise Refused(
            HTTPStatus.UNAUTHORIZED if call.person is None else HTTPStatus.FORBIDDEN, f"{why}; nothing was done"
        )


async def _read(call: Call) -> None:
    """The form or the JSON of a request, with a bound on its size."""
    parts, size = [], 0
    async for part in call.request.stream():
        size += len(part)
        if size > LARGEST_FORM:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "the request is too large; nothing was done")
        parts.append(part)
    body = b"".join(parts)
    kind = call.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if call.route.is_api:
            call.content = json.loads(body) if body else {}
            if not isinstance(call.content, dict):
                raise NotUnderstood("the body is to be a JSON object; nothing was done")
            if call.route.is_question:
                checked(call.content, call.route.takes)
        elif kind == "application/x-www-form-urlencoded":
            call.form = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
    except (ValueError, RecursionError):
        raise NotUnderstood("the body of the request cannot be read; nothing was done") from None


def _failure(call: Call, error: Exception) -> Response:
    """What went wrong as a page, or as JSON for a program; a person who is not logged in gets the login."""
    status, title = _kind(error)
    why = str(error) if isinstance(error, DlqbatchError) else "the log of the console says what went wrong"
    if not isinstance(error, DlqbatchError):
        log.error("a page of the console failed", page=call.route.path, failure=error)
    if call.route.changes and not isinstance(error, Refused):
        call.note("failed", why)
    why = logs.masked(why)
    if call.route.is_api:
        headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
        return JSONResponse({"error": _told(error, why)}, status, headers)
    if status == HTTPStatus.UNAUTHORIZED and not call.route.changes:
        place = call.request.url.path.removeprefix(call.console.prefix) + (
            f"?{call.request.url.query}" if call.request.url.query else ""
        )
        return RedirectResponse(call.console.href(f"/login?next={quote(place)}"), HTTPStatus.SEE_OTHER)
    retries = status == HTTPStatus.SERVICE_UNAVAILABLE
    changes = call.route.changes
    return call.page("failure.html", status, title=title, why=why, retries=retries, changes=changes, about=_about(call))


def _about(call: Call) -> str:
    """The page of the plan, message, group or action that a decision was about; empty if there is none."""
    place = call.request.url.path.removeprefix(call.console.prefix)
    decided = re.fullmatch(r"(/(?:plans|messages|groups|actions)/[^/]+)/.+", place)
    return decided[1] if call.route.changes and decided else ""


def _told(error: Exception, why: str) -> dict[str, object]:
    """What a program needs to say the same as the command line, and to end with the same exit code."""
    told: dict[str, object] = {
        "type": type(error).__name__,
        "message": why,
        "exit_code": error.exit_code if isinstance(error, DlqbatchError) else 1,
    }
    if isinstance(error, NumberUnexpected):
        told |= {"split": error.split.as_dict(), "expected": error.expected}
    return told


def asked_pairs(content: dict[str, Any]) -> list[tuple[str, str]]:
    """What a question holds, as the address of the same page would have it."""
    asked = {**content.get("filter", {}), **{name: value for name, value in content.items() if name != "filter"}}
    return [
        (name, str(each)) for name, value in asked.items() for each in (value if isinstance(value, list) else [value])
    ]


def _kind(error: Exception) -> tuple[HTTPStatus, str]:
    """The status and the title of an error: by its class, else by the exit code that it has on the command line."""
    if isinstance(error, Refused):
        return error.status, "Not allowed" if error.status == HTTPStatus.FORBIDDEN else error.status.phrase
    by_class = next((found for kinds, found in _KINDS if isinstance(error, kinds)), None)
    if by_class is not None:
        return by_class
    if isinstance(error, DlqbatchError):
        return _CODES.get(error.exit_code, (HTTPStatus.CONFLICT, "Not in the present state"))
    return HTTPStatus.INTERNAL_SERVER_ERROR, "A mistake of the console"


_KINDS: Final = (
    ((NoSuchMessage, NoSuchPlan, NoSuchAction, NoSuchGroup), (HTTPStatus.NOT_FOUND, "Not there")),
    ((NotUnderstood,), (HTTPStatus.UNPROCESSABLE_ENTITY, "Not understood")),
    ((DatabaseForbids, MayNotReveal), (HTTPStatus.FORBIDDEN, "The database login may not do this")),
    ((DatabaseUnreadable,), (HTTPStatus.SERVICE_UNAVAILABLE, "The database is away")),
)
_CODES: Final = {
    2: (HTTPStatus.UNPROCESSABLE_ENTITY, "Not done"),
    4: (HTTPStatus.SERVICE_UNAVAILABLE, "Out of reach"),
}


def _client(request: Request) -> str:
    return request.client.host if request.client is not None else _CLIENT


def _cached(request: Request, response: Response) -> Response:
    """An answer of the API with its ETag; nothing but the status if the caller has it already."""
    if (
        request.method not in {"GET", "HEAD"}
        or response.status_code != HTTPStatus.OK
        or not isinstance(response, JSONResponse)
    ):
        return response
    from hashlib import sha256  # noqa: PLC0415  (for the API alone)

    tag = f'"{sha256(response.body).hexdigest()[:32]}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers={"ETag": tag})
    response.headers["ETag"] = tag
    return response
