"""Where the database work of a replay runs while its messages are sent."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from sqlalchemy import Engine

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Inline(Executor):
    """An executor that does at once what is submitted, for a store that lets only one write at a time."""

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (it is raised to whoever asks for the result, as a thread's is)
            future.set_exception(error)
        return future


def executor_for(engine: Engine) -> Executor:
    """Where the database work runs while messages are sent; SQLite has one lock for all writers."""
    return Inline() if engine.dialect.name == "sqlite" else ThreadPoolExecutor(2)
