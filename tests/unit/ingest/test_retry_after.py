"""How long a failure asks to wait: from the worker's error into the headers, and from there to the dead store."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING

import messages
import pytest

from dlqbatch.amqp.delivery import open_envelope
from dlqbatch.amqp.retry_headers import Journey
from dlqbatch.amqp.stamp import stamp
from dlqbatch.integrations.failure_contract import failure_headers

if TYPE_CHECKING:
    from collections.abc import Mapping

HEADER = b"dlqbatch-retry-after"


class Broken:
    @property
    def headers(self) -> Mapping[str, str]:
        raise RuntimeError("it holds no answer")


@pytest.mark.parametrize(
    ("attribute", "value", "asked"),
    [
        ("retry_after", 30, "30"),
        ("retry_after", timedelta(minutes=1), "60.0"),
        ("retry_after", "Wed, 11 Feb 2026 12:01:00 GMT", "Wed, 11 Feb 2026 12:01:00 GMT"),
        ("response", SimpleNamespace(headers={"Retry-After": "7"}), "7"),
        ("headers", {"Retry-After": "8"}, "8"),
        ("retry_after", "9" * 100, "9" * 64),
        ("response", SimpleNamespace(headers={}), None),
        ("response", None, None),
        ("headers", [("Retry-After", "8")], None),
        ("response", Broken(), None),
        ("args", ("no answer",), None),
    ],
)
def test_the_error_of_a_worker_says_how_long_to_wait(attribute: str, value: object, asked: str | None) -> None:
    error = RuntimeError("429")
    setattr(error, attribute, value)
    assert failure_headers(None, ("q", "", "q"), error).get(HEADER.decode()) == asked


def test_it_goes_with_a_dead_letter_and_with_no_other_message() -> None:
    envelope = open_envelope("e", "k", False, 0, messages.with_headers((HEADER, messages.text("30"))))
    dead_at = int(datetime(2026, 2, 11, tzinfo=UTC).timestamp())
    journey = Journey(id="1", retries=1, trips=1)
    delayed = stamp(envelope, journey, login=None, limit=10_000, digest=None)
    dead = stamp(envelope, journey, login=None, limit=10_000, digest=None, reason="exhausted", dead_at=dead_at)
    unknown = stamp(
        envelope, journey._replace(retries=None), login=None, limit=10_000, digest=None, reason="malformed", dead_at=1
    )
    names = [[name for name, _ in messages.headers_of(data or b"")].count(HEADER) for data in (delayed, dead, unknown)]
    assert names == [0, 1, 1]
