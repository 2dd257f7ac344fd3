"""What `doctor` can find: a closed set, each with its severity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Severity(StrEnum):
    SERIOUS = "serious"
    """Messages are lost, or do not move at all."""
    WARNING = "warning"
    """It bites as soon as something else happens."""
    NOTE = "note"
    """Worth knowing; it may well be meant."""


class Code(StrEnum):
    # In this order they are shown, so that a fix does not need one that comes after it.
    ALARM = "alarm"
    DATABASE_UNREACHABLE = "database-unreachable"
    SCHEMA_OLD = "schema-old"
    SCHEMA_UNKNOWN = "schema-unknown"
    PERMISSION_MISSING = "permission-missing"
    TOPOLOGY_DIFFERS = "topology-differs"
    POLICY_EMPTY = "policy-empty"
    POLICY_UNREADABLE = "policy-unreadable"
    DEAD_LETTER_EXCHANGE_MISSING = "dead-letter-exchange-missing"
    DEAD_LETTER_KEY_UNROUTED = "dead-letter-key-unrouted"
    DEAD_LETTER_CYCLE = "dead-letter-cycle"
    DEAD_LETTERS_EXPIRE = "dead-letters-expire"
    DELIVERY_LIMIT_DELETES = "delivery-limit-deletes"
    QUEUE_EXPIRES = "queue-expires"
    INGEST_QUEUE_MISSING = "ingest-queue-missing"

    AT_LEAST_ONCE_INEFFECTIVE = "at-least-once-ineffective"
    BINDING_WITHOUT_EVENT = "binding-without-event"
    CLOCK_SKEW_BROKER = "clock-skew-broker"
    CLOCK_SKEW_DATABASE = "clock-skew-database"
    DEAD_LETTERS_PILE_UP = "dead-letters-pile-up"
    DELAY_CHANGE_UNFINISHED = "delay-change-unfinished"
    DELAY_WITHOUT_OUTLET = "delay-without-outlet"
    DELIVERY_LIMIT_DEFAULT = "delivery-limit-default"
    EVENT_BLANKS = "event-blanks"
    EVENT_DUPLICATE = "event-duplicate"
    EVENT_NAMELESS = "event-nameless"
    EVENT_NEGATIVE = "event-negative"
    EXPIRATIONS_MIXED = "expirations-mixed"
    FAILING_WITHOUT_DEAD_LETTERS = "failing-without-dead-letters"
    INGEST_WILDCARD_UNMATCHED = "ingest-wildcard-unmatched"
    MANAGEMENT_SILENT = "management-silent"
    OLD_BROKER = "old-broker"
    ORIGIN_NOT_LASTING = "origin-not-lasting"
    OVERFLOW_COPIES = "overflow-copies"
    OVERFLOW_DROPS = "overflow-drops"
    RETURN_PERMISSION_MISSING = "return-permission-missing"
    RULE_BROKEN = "rule-broken"
    TOPOLOGY_INCOMPLETE = "topology-incomplete"

    DEAD_LETTER_AT_MOST_ONCE = "dead-letter-at-most-once"
    DELIVERY_LIMIT_UNSET = "delivery-limit-unset"
    EVENT_WITHOUT_BINDING = "event-without-binding"
    SCHEMA_MISSING = "schema-missing"
    TOPOLOGY_NOT_APPLIED = "topology-not-applied"

    @property
    def severity(self) -> Severity:
        if self in _SERIOUS:
            return Severity.SERIOUS
        return Severity.NOTE if self in _NOTES else Severity.WARNING


_SERIOUS: Final = frozenset(
    {
        Code.ALARM,
        Code.DATABASE_UNREACHABLE,
        Code.DEAD_LETTER_CYCLE,
        Code.DEAD_LETTER_EXCHANGE_MISSING,
        Code.DEAD_LETTER_KEY_UNROUTED,
        Code.DEAD_LETTERS_EXPIRE,
        Code.DELIVERY_LIMIT_DELETES,
        Code.INGEST_QUEUE_MISSING,
        Code.PERMISSION_MISSING,
        Code.POLICY_EMPTY,
        Code.POLICY_UNREADABLE,
        Code.QUEUE_EXPIRES,
        Code.SCHEMA_OLD,
        Code.SCHEMA_UNKNOWN,
        Code.TOPOLOGY_DIFFERS,
    }
)
_NOTES: Final = frozenset(
    {
        Code.DEAD_LETTER_AT_MOST_ONCE,
        Code.DELIVERY_LIMIT_UNSET,
        Code.EVENT_WITHOUT_BINDING,
        Code.SCHEMA_MISSING,
        Code.TOPOLOGY_NOT_APPLIED,
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    code: Code
    where: str
    """The queue, the event, the database it is about."""
    what: str
    """What is there, and what becomes of it."""
    fix: str
    """A command for a shell."""

    @property
    def severity(self) -> Severity:
        return self.code.severity

    def as_dict(self) -> dict[str, object]:
        return {
            "code": self.code.value,
            "severity": self.severity.value,
            "where": self.where,
            "what": self.what,
            "fix": self.fix,
        }


_ORDER: Final = tuple(Severity)
_CODES: Final = tuple(Code)


def rank(finding: Finding) -> tuple[int, int, str, str]:
    """The worst first."""
    return _ORDER.index(finding.severity), _CODES.index(finding.code), finding.where, finding.what
