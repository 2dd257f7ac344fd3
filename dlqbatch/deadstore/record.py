"""Rows of the dead store as values."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal

from sqlalchemy import func

from dlqbatch.deadstore.tables import MESSAGES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from sqlalchemy import ColumnElement

    from dlqbatch.policy.lifecycle import Status
    from dlqbatch.policy.strategy import Strategy


Outcome = Literal["failed", "succeeded", "abandoned"]
"""Of an attempt."""


@dataclass(frozen=True, slots=True)
class Record:
    """A dead message without its body and properties, which may be large: `messages.content` has those."""

    id: int
    identity: str
    digest: bytes
    had_id: bool
    parent: str | None
    source_queue: str
    exchange: str
    routing_key: str
    message_id: str | None
    origin_queue: str | None
    origin_exchange: str | None
    origin_key: str | None
    event: str | None
    reason: str | None
    error_type: str | None
    error_message: str | None
    error_stack: str | None
    fingerprint: str
    retry_count: int
    dlq_retry_count: int
    first_failed_at: datetime
    last_failed_at: datetime
    status: Status
    status_since: datetime
    strategy: Strategy | None
    lock_owner: str | None
    lock_token: str | None
    locked_at: datetime | None
    lease_until: datetime | None
    next_retry_at: datetime | None
    priority: int
    tags: list[str]
    source: str | None
    system_state: Mapping[str, Any]
    plan_id: int | None
    possible_duplicate: bool
    created_at: datetime
    updated_at: datetime
    body_size: int


SUMMARY: Final[tuple[ColumnElement[Any], ...]] = tuple(
    func.length(MESSAGES.c.body) if field.name == "body_size" else MESSAGES.c[field.name] for field in fields(Record)
)
"""What a query selects to make a Record of each row."""


@dataclass(frozen=True, slots=True)
class Attempt:
    number: int
    strategy: Strategy | None
    worker: str
    created_at: datetime
    sent_at: datetime | None
    closed_at: datetime | None
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Transition:
    from_status: Status | None
    to_status: Status
    at: datetime
    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class Content:
    """The exact bytes as delivered."""

    body: bytes
    properties: bytes


@dataclass(frozen=True, slots=True)
class Detail:
    record: Record
    content: Content
    attempts: tuple[Attempt, ...]
    transitions: tuple[Transition, ...]
