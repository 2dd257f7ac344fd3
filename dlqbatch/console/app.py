"""The console as an ASGI application: its parts, the routes, and what every answer carries."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from itertools import groupby
from urllib.parse import urlsplit

from sqlalchemy import Engine
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dlqbatch.console.gate import Route, endpoint
from dlqbatch.console.live import Live
from dlqbatch.console.logins import Logins, host_of, is_loopback
from dlqbatch.console.now import Snapshots
from dlqbatch.console.oidc import Provider
from dlqbatch.console.operations import Diagnoses
from dlqbatch.console.pages import HEADERS, Pages
from dlqbatch.console.repeated import Repeated
from dlqbatch.console.routes import routes
from dlqbatch.messages.actions import MessageActions
from dlqbatch.settings import Settings
from dlqbatch.store.access import StoreClock
from dlqbatch.store.engine import keeping, reading, where
from dlqbatch.store.scopes import is_every, known_scopes, scope_of


class Console:
    """What every page uses: settings, database, who may enter, how pages are made, and what is live."""

    def __init__(self, settings: Settings, engine: Engine, logins: Logins) -> None:
        self.settings, self.engine, self.logins = settings, engine, logins
        self.prefix = settings.console_path or (urlsplit(settings.console_url).path if settings.console_url else "")
        self.url = settings.console_url
        address = settings.console_address
        self.cookie = f"dlqbatch-console-{address.rpartition(':')[2]}"
        self.hosts = _hosts(settings) if logins.local is not None else frozenset()
        self.clock = StoreClock(engine)
        self.messages = MessageActions(engine)
        self.database = where(engine.url)
        self.scope = _scope(engine)
        self.pages = Pages(self)
        self.live = Live(self)
        self.snapshots = Snapshots()
        self.diagnoses = Diagnoses()
        self.repeated = Repeated()
        self.provider = Provider(settings)

    def href(self, place: str) -> str:
        """The address of a page, with the path under which the console is reached."""
        return f"{self.prefix}{place}" if place.startswith("/") else place

    @property
    def is_secure(self) -> bool:
        return self.url is not None and self.url.startswith("https://")


def _scope(engine: Engine) -> str:
    """The deployment whose messages are shown; empty where there is only one that nobody has named."""
    with reading(engine) as connection:
        if is_every(connection):
            return "every deployment"
        mine = scope_of(connection)
    return next((name for name, scope_id in known_scopes(engine).items() if scope_id == mine), "")


def _hosts(settings: Settings) -> frozenset[str]:
    """The names by which a console on this machine may be called: another name is another page's trick."""
    own = {host_of(settings.console_address), "localhost", "127.0.0.1", "::1"}
    if settings.console_url is not None:
        own.add((urlsplit(settings.console_url).hostname or "").lower())
    return frozenset(own) if is_loopback(settings.console_address) else frozenset()


def application(console: Console) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        with keeping(console.engine):
            console.live.start()
            try:
                yield
            finally:
                await console.live.stop()

    found = []
    table: list[Route] = sorted(routes(), key=lambda route: ("{" in route.path, route.path))
    for path, of_path in groupby(table, key=lambda route: route.path):
        group = list(of_path)
        found.append(StarletteRoute(path, endpoint(console, group), methods=[route.method for route in group]))
    found.append(StarletteRoute("/static/{version}/{name}", console.pages.static))
    return Starlette(routes=found, lifespan=lifespan, middleware=[Middleware(partial(_Front, prefix=console.prefix))])


class _Front:
    """Takes the prefix off the path, whether a proxy has left it there or not, and adds headers to every answer."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if self._prefix and (path == self._prefix or path.startswith(f"{self._prefix}/")):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name for name, _ in message["headers"]}
                added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                if b"cache-control" not in there:
                    added.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *(pair for pair in added if pair[0] not in there)]
            await send(message)

        await self._app(scope, receive, send_with_headers)
