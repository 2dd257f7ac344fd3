"""The headers with which a worker hands a failure over (docs/failure-contract.md).

This module needs no framework and no connection; those of the frameworks publish with it.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

RETRY: Final = ("retry-exchange", "retry-routing-key")
"""Exchange and routing key of what is retried by the ladder."""
DEAD: Final = ("dlq-exchange", "dlq-routing-key")
"""Exchange and routing key of what is not retried, but stored."""

_LEFT_OUT: Final = ("x-death", "x-first-death-", "x-last-death-", "CC")
_LONGEST_MESSAGE, _LONGEST_STACK, _LONGEST_RETRY_AFTER = 4_096, 32_768, 64


def failure_headers(
    received: Mapping[str, Any] | None,
    delivery: tuple[str, str, str],
    error: BaseException,
    stack: str | None = None,
) -> dict[str, Any]:
    """The headers of a message that failed with this error; `received` are those that it had.

    `delivery` is the queue that was consumed, and exchange and routing key of the delivery. `stack` is for an error
    whose traceback was left in another process.
    """
    queue, exchange, key = delivery
    kept = {name: value for name, value in (received or {}).items() if not name.startswith(_LEFT_OUT)}
    trace = stack if stack is not None else "".join(traceback.format_exception(error))
    asked = _retry_after(error)
    if asked:
        kept["dlqbatch-retry-after"] = asked
    return kept | {
        "dlqbatch-failed-queue": queue,
        "dlqbatch-failed-exchange": exchange,
        "dlqbatch-failed-key": key,
        "MT-Fault-ExceptionType": type(error).__qualname__,
        "MT-Fault-Message": _as_text(error)[:_LONGEST_MESSAGE],
        "MT-Fault-StackTrace": trace[-_LONGEST_STACK:],
        "MT-Fault-Timestamp": datetime.now(UTC).isoformat(),
    }


def _retry_after(error: BaseException) -> str:
    """How long the error asks to wait: by its `retry_after`, or by the HTTP answer that it holds; empty if it does not.

    requests and httpx keep the answer in `response`; aiohttp and urllib keep its headers in the error itself.
    """
    try:
        asked = getattr(error, "retry_after", None)
        for holder in (getattr(error, "response", None), error):
            if asked is None:
                asked = (getattr(holder, "headers", None) or {}).get("Retry-After")
        if isinstance(asked, timedelta):
            asked = asked.total_seconds()
        return "" if asked is None else str(asked)[:_LONGEST_RETRY_AFTER]
    except Exception:  # noqa: BLE001  (whatever a library puts there, the failure is handed over)
        return ""


def _as_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (an error that cannot be printed is a failure all the same)
        return ""
