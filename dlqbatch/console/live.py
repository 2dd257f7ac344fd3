"""What is live: one reader for the whole process looks at database and broker, however many pages are open.

A topic is what a page listens to: `now`, or `plan:HASH` with what kind of person looks at it. While anybody listens to
it, the reader reads it every few seconds, makes its parts of the page once, and hands the same text to everybody.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from dlqbatch import logs
from dlqbatch.console.queue_watch import QueueWatch
from dlqbatch.errors import DlqbatchError

if TYPE_CHECKING:
    from dlqbatch.console.app import Console

log = logs.get(__name__)

_INTERVAL: Final = 2.0
_LONGEST_SHARE: Final = 10.0
"""After a read of one second the reader rests for ten: it never keeps the database busy."""
_STREAM_SECONDS: Final = 300.0
"""Then a page connects again, and its login is looked at again."""
_ASKS_AGAIN: Final = 5_000
"""Milliseconds after which a page asks again where it gets no stream."""
_MOST_STREAMS: Final = 2_000
_SILENCE: Final = 15.0
"""Seconds after which a comment keeps proxies from closing the stream."""
_LOOKED_AT_EVERY: Final = 4.0

Parts = dict[str, str]
"""The parts of a page by the name in its `data-live`."""


@dataclass(slots=True)
class _Topic:
    read: Callable[[], Parts]
    last: str = ""
    listeners: set[asyncio.Event] = field(default_factory=set)


class Live:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._topics: dict[str, _Topic] = {}
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._streams = 0
        self._looking = Lock()
        self._looked_at = 0.0
        self.watch = QueueWatch(console.settings)
        self.reads = 0
        """How often a topic was read, for tests and the journal of the process."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for topic in self._topics.values():
            for listener in topic.listeners:
                listener.set()
        await run_in_threadpool(self.watch.close)

    def look_at_queues(self, *, wait: bool) -> None:
        """Look at the broker if the last look is old; without `wait` only if nobody else does at this moment."""
        if not self.watch.is_named or time.monotonic() - self._looked_at < _LOOKED_AT_EVERY:
            return
        if not self._looking.acquire(blocking=wait):
            return
        try:
            if time.monotonic() - self._looked_at >= _LOOKED_AT_EVERY:
                self.watch.look()
                self._looked_at = time.monotonic()
        finally:
            self._looking.release()

    def stream(self, name: str, read: Callable[[], Parts]) -> Response:
        if self._streams >= _MOST_STREAMS:
            return Response("Too many pages are open.\n", 503, media_type="text/plain", headers={"Retry-After": "30"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        if self._task is None:
            # Nothing runs between two requests of a cloud function: the page asks again when this one has ended.
            once = f"retry: {_ASKS_AGAIN}\n\ndata: {self._text(_Topic(read))}\n\n"
            return Response(once, media_type="text/event-stream", headers=headers)
        return StreamingResponse(self._events(name, read), media_type="text/event-stream", headers=headers)

    async def _events(self, name: str, read: Callable[[], Parts]) -> AsyncIterator[str]:
        topic = self._topics.setdefault(name, _Topic(read))
        changed = asyncio.Event()
        topic.listeners.add(changed)
        self._streams += 1
        self._wake.set()
        ends = time.monotonic() + _STREAM_SECONDS
        sent = ""
        try:
            yield "retry: 3000\n\n"
            while time.monotonic() < ends and (self._task is None or not self._task.done()):
                if topic.last != sent:
                    sent = topic.last
                    yield f"data: {sent}\n\n"
                try:
                    await asyncio.wait_for(changed.wait(), _SILENCE)
                except TimeoutError:
                    yield ": still here\n\n"
                changed.clear()
        finally:
            self._streams -= 1
            topic.listeners.discard(changed)
            if not topic.listeners:
                self._topics.pop(name, None)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            if not self._topics:
                await self._wake.wait()
            began = time.monotonic()
            for topic in list(self._topics.values()):
                text = await run_in_threadpool(self._text, topic)
                if text != topic.last:
                    topic.last = text
                    for listener in topic.listeners:
                        listener.set()
            took = time.monotonic() - began
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), max(_INTERVAL, took * _LONGEST_SHARE))

    def _text(self, topic: _Topic) -> str:
        self.reads += 1
        try:
            self.look_at_queues(wait=False)
            return json.dumps({"parts": topic.read()})
        except DlqbatchError as error:
            return json.dumps({"problem": logs.masked(str(error))})
        except Exception as error:  # noqa: BLE001  (the pages that are open stay as they are; the next read may do)
            log.error("what is live could not be read", failure=error)  # noqa: TRY400  (ours takes it)
            return json.dumps({"problem": "the log of the console says what went wrong"})
