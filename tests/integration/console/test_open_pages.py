"""Many open pages are one reader's work, and neither they nor many requests leave anything behind."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

from console_client import as_role, made, opened, person
from cutting_link import CuttingLink
from dead_rows import add, row
from program import eventually

from dlqbatch.console.app import application
from dlqbatch.console.rights import Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from dlqbatch.console.app import Console

    Message = MutableMapping[str, Any]

PAGES = 1_000
READS = 3
READ_PAGES = (
    "/",
    "/messages",
    "/messages/1",
    f"/groups/{'0' * 16}",
    "/plans",
    "/actions",
    "/runs",
    "/journal",
    "/login",
)


class Tab:
    """A page that listens to what is live, as the server sees it."""

    def __init__(self, console: Console, app: Callable[..., Awaitable[None]]) -> None:
        cookie = f"{console.cookie}={console.logins.sessions.issue(person(Role.READER))}"
        headers = [(b"host", b"127.0.0.1:8422"), (b"cookie", cookie.encode())]
        scope = {"type": "http", "method": "GET", "path": "/live/now", "headers": headers, "query_string": b""}
        scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8422), "scheme": "http", "http_version": "1.1"}
        scope |= {"root_path": "", "raw_path": b"/live/now", "asgi": {"version": "3.0", "spec_version": "2.3"}}
        self.has_data, self._leaves = asyncio.Event(), asyncio.Event()
        self._task = asyncio.create_task(app(scope, self._receive, self._send))  # type: ignore[arg-type]
        self._asked = False

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if b"data: " in message.get("body", b""):
            self.has_data.set()

    async def close(self) -> None:
        self._leaves.set()
        await self._task


async def show(console: Console, pages: int, reads: int = 0) -> None:
    """Open so many pages until each shows something and the reader has read so often, and close them."""
    app = application(console)
    async with app.router.lifespan_context(app):
        tabs = [Tab(console, app) for _ in range(pages)]
        for tab in tabs:
            await tab.has_data.wait()
        while console.live.reads < reads:  # noqa: ASYNC110  (the reader tells nobody)
            await asyncio.sleep(0.05)
        for tab in tabs:
            await tab.close()


def transactions(link: CuttingLink, pages: int) -> int:
    console = made(link.url)
    before = link.commits
    asyncio.run(show(console, pages, READS))
    return link.commits - before


def test_a_thousand_open_pages_ask_the_database_no_more_than_one(database_url: str) -> None:
    with CuttingLink(database_url) as link:
        add(made(link.url).engine, *(row() for _ in range(3)))
        one, many = transactions(link, 1), transactions(link, PAGES)
    # The reader works as often as time allows, so the two need not be equal: on a slow machine some reads more, of a
    # few transactions each.
    assert one > 0
    assert many < one + PAGES / 10


def test_pages_that_were_open_and_requests_that_were_answered_leave_nothing_behind(sqlite_url: str) -> None:
    console = made(sqlite_url)
    add(console.engine, *(row() for _ in range(3)))
    listening = made(sqlite_url)
    with opened(console) as browser, asyncio.Runner() as loop:
        as_role(browser, console, Role.READER)

        def turn() -> Counter[str]:
            loop.run(show(listening, 50))
            for _ in range(4):
                for page in READ_PAGES:
                    assert browser.get(page).status_code in {200, 303}
            gc.collect()
            return Counter(type(each).__name__ for each in gc.get_objects())

        last = turn()

        def is_flat() -> bool:
            """What is made once, and late, such as a cache, is there after some turns."""
            nonlocal last
            before, last = last, turn()
            return (last - before).total() < 20

        assert eventually(is_flat)
