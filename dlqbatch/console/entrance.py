"""The page of the login, and the ways through it: the printed token, an OIDC provider, and the way out."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from starlette.responses import RedirectResponse, Response

from dlqbatch.console.gate import Refused
from dlqbatch.console.logins import SESSION

if TYPE_CHECKING:
    from dlqbatch.console.app import Console
    from dlqbatch.console.gate import Call
    from dlqbatch.console.rights import Person

_HOME: Final = "/"


def show(call: Call) -> Response:
    """The login; with the token of the printed address in the address it is done at once."""
    token = call.one("token")
    if token:
        return _by_token(call, token)
    if call.person is not None:
        return call.to(safe_place(call.one("next")))
    logins = call.console.logins
    return call.page(
        "login.html",
        next_place=safe_place(call.one("next")),
        takes_token=logins.local is not None,
        has_oidc=logins.has_oidc,
        by_proxy=logins.proxy_secret is not None,
        wrong=False,
    )


def enter(call: Call) -> Response:
    return _by_token(call, call.one("token"))


def leave(call: Call) -> Response:
    """The cookie counts no more, here and in any copy of it."""
    console = call.console
    console.logins.sessions.end(call.request.cookies.get(console.cookie))
    call.note("done")
    response = call.to("/login")
    response.delete_cookie(console.cookie, path=console.prefix or "/")
    return response


def _by_token(call: Call, token: str) -> Response:
    person = call.console.logins.by_local_token(token)
    if person is None:
        call.note("refused", "the token is wrong")
        raise Refused(
            HTTPStatus.FORBIDDEN, "this token is not the one that the console printed when it was started; look there"
        )
    call.person = person
    call.note("done")
    return let_in(call.console, person, safe_place(call.one("next")))


def let_in(console: Console, person: Person, place: str) -> Response:
    response = RedirectResponse(console.href(place), HTTPStatus.SEE_OTHER)
    response.set_cookie(
        console.cookie,
        console.logins.sessions.issue(person),
        max_age=int(SESSION.total_seconds()),
        path=console.prefix or "/",
        httponly=True,
        secure=console.is_secure,
        samesite="lax",
    )
    return response


def safe_place(place: str) -> str:
    """A page of ours; anything else, such as //elsewhere.example, becomes the first page."""
    is_ours = place.startswith("/") and not place.startswith(("//", "/\\", "/login")) and place.isprintable()
    return place if is_ours and "\\" not in place else _HOME
