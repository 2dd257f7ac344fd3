"""What is done beside the sending: by threads, or at once where the store lets only one write at a time."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class AtOnce(Executor):
    """Whoever submits something waits for it."""

    def submit(self, fn: Callable[_Given, _Result], /, *args: _Given.args, **kwargs: _Given.kwargs) -> Future[_Result]:
        future: Future[_Result] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  (it is raised to whoever asks for the result, as a thread's is)
            future.set_exception(error)
        return future
