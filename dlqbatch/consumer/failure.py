"""What is recorded of a handler's exception, in the thread of the handler: its text is foreign code as well."""

from __future__ import annotations

import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

from dlqbatch.consumer.message import Context
from dlqbatch.ingest.dialects import Failure


def failure_of(handler: Callable[[bytes, Context], object], body: bytes, context: Context) -> Failure | None:
    """Why the handler failed, None if it did not; never raises, whatever the handler does."""
    try:
        made = handler(body, context)
        if isinstance(made, (Awaitable, Generator, AsyncGenerator)):
            # Wrapped in something that is no coroutine itself: nothing of it has run.
            raise TypeError(f"the handler returned {type(made).__name__}, which nobody waits for")  # noqa: TRY301  (recorded as any other failure)
    except BaseException as error:  # noqa: BLE001  (a handler that calls sys.exit() has failed like any other)
        return failure_from(error)
    return None


def failure_from(error: BaseException) -> Failure:
    kind = _text_of(lambda: _name(type(error)), "?")
    stack = _text_of(lambda: "".join(traceback.format_exception(error)), "")
    return Failure(kind, _text_of(lambda: str(error), f"<{kind}>"), stack)


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text_of(write: Callable[[], str], otherwise: str) -> str:
    try:
        # Half a character could not be written as UTF-8.
        return write().encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001  (an exception whose own text fails must not end the worker)
        return otherwise
