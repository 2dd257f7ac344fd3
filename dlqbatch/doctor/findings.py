"""Everything that `doctor` can find, each with its severity, in the order in which findings are shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Severity(StrEnum):
    SERIOUS = "serious"
    """Messages are lost, or do not move at all. `doctor` ends with 1."""
    WARNING = "warning"
    """Messages are lost, or stop moving, as soon as something else happens."""
    NOTE = "note"
    """Worth knowing; it may be intended."""


class Code(StrEnum):
    """Kinds of findings. They are shown in this order, so that no fix needs one that comes after it."""

    severity: Severity

    def __new__(cls, code: str, severity: Severity) -> Self:
        kind = str.__new__(cls, code)
        kind._value_ = code
        kind.severity = severity
        return kind

    ALARM = "alarm", Severity.SERIOUS
    DATABASE_UNREACHABLE = "database-unreachable", Severity.SERIOUS
    SCHEMA_OLD = "schema-old", Severity.SERIOUS
    SCHEMA_UNKNOWN = "schema-unknown", Severity.SERIOUS
    PERMISSION_MISSING = "permission-missing", Severity.SERIOUS
    TOPOLOGY_DIFFERS = "topology-differs", Severity.SERIOUS
    POLICY_EMPTY = "policy-empty", Severity.SERIOUS
    POLICY_UNREADABLE = "policy-unreadable", Severity.SERIOUS
    DEAD_LETTER_EXCHANGE_MISSING = "dead-letter-exchange-missing", Severity.SERIOUS
    DEAD_LETTER_KEY_UNROUTED = "dead-letter-key-unrouted", Severity.SERIOUS
    DEAD_LETTER_CYCLE = "dead-letter-cycle", Severity.SERIOUS
    DEAD_LETTERS_RETURN = "dead-letters-return", Severity.SERIOUS
    BINDING_NOT_OURS = "binding-not-ours", Severity.SERIOUS
    DEAD_LETTERS_EXPIRE = "dead-letters-expire", Severity.SERIOUS
    DEAD_LETTERS_LOST_IN_STREAM = "dead-letters-lost-in-stream", Severity.SERIOUS
    DELIVERY_LIMIT_DELETES = "delivery-limit-deletes", Severity.SERIOUS
    QUEUE_EXPIRES = "queue-expires", Severity.SERIOUS
    NATIVE_UNSUPPORTED = "native-unsupported", Severity.SERIOUS
    NATIVE_NOT_QUORUM = "native-not-quorum", Severity.SERIOUS
    NATIVE_POLICY_DIFFERS = "native-policy-differs", Severity.SERIOUS
    NATIVE_POLICY_MISSING = "native-policy-missing", Severity.SERIOUS
    INGEST_QUEUE_MISSING = "ingest-queue-missing", Severity.SERIOUS
    SINGLE_ACTIVE_CONSUMER = "single-active-consumer", Severity.SERIOUS

    AT_LEAST_ONCE_INEFFECTIVE = "at-least-once-ineffective", Severity.WARNING
    BINDING_WITHOUT_EVENT = "binding-without-event", Severity.WARNING
    BROKER_IN_CLEAR = "broker-in-clear", Severity.WARNING
    BROKER_UNVERIFIED = "broker-unverified", Severity.WARNING
    CLOCK_SKEW_BROKER = "clock-skew-broker", Severity.WARNING
    CLOCK_SKEW_DATABASE = "clock-skew-database", Severity.WARNING
    CONSUMER_ON_OURS = "consumer-on-ours", Severity.WARNING
    DATABASE_UNVERIFIED = "database-unverified", Severity.WARNING
    DEAD_LETTER_KEY_UNKNOWN = "dead-letter-key-unknown", Severity.WARNING
    DEAD_LETTERS_PILE_UP = "dead-letters-pile-up", Severity.WARNING
    DELAY_CHANGE_UNFINISHED = "delay-change-unfinished", Severity.WARNING
    DELAY_CUT_SHORT = "delay-cut-short", Severity.WARNING
    DELAY_WITHOUT_OUTLET = "delay-without-outlet", Severity.WARNING
    DELAYED_EXCHANGE = "delayed-exchange", Severity.WARNING
    DELAYED_RETRY_LONGER_THAN_WINDOW = "delayed-retry-longer-than-window", Severity.WARNING
    DELAYED_RETRY_ON_OURS = "delayed-retry-on-ours", Severity.WARNING
    DELIVERY_LIMIT_DEFAULT = "delivery-limit-default", Severity.WARNING
    DEPRECATED_IN_USE = "deprecated-in-use", Severity.WARNING
    EVENT_BLANKS = "event-blanks", Severity.WARNING
    EVENT_DUPLICATE = "event-duplicate", Severity.WARNING
    EVENT_NAMELESS = "event-nameless", Severity.WARNING
    EVENT_NEGATIVE = "event-negative", Severity.WARNING
    EXPIRATIONS_MIXED = "expirations-mixed", Severity.WARNING
    FAILING_WITHOUT_DEAD_LETTERS = "failing-without-dead-letters", Severity.WARNING
    INGEST_WILDCARD_UNMATCHED = "ingest-wildcard-unmatched", Severity.WARNING
    MANAGEMENT_SILENT = "management-silent", Severity.WARNING
    NATIVE_NEVER_RETRIED = "native-never-retried", Severity.WARNING
    NATIVE_QUEUE_MISSING = "native-queue-missing", Severity.WARNING
    NATIVE_TTL_SHORT = "native-ttl-short", Severity.WARNING
    OLD_BROKER = "old-broker", Severity.WARNING
    ORIGIN_NOT_LASTING = "origin-not-lasting", Severity.WARNING
    ORIGIN_ONLY_DELAYS = "origin-only-delays", Severity.WARNING
    OVERFLOW_COPIES = "overflow-copies", Severity.WARNING
    OVERFLOW_DROPS = "overflow-drops", Severity.WARNING
    QUEUE_MODE_ARGUMENT = "queue-mode-argument", Severity.WARNING
    REQUEUED_FOR_EVER = "requeued-for-ever", Severity.WARNING
    RETURN_PERMISSION_MISSING = "return-permission-missing", Severity.WARNING
    RETENTION_BEHIND = "retention-behind", Severity.WARNING
    RETURNS_OVERHEARD = "returns-overheard", Severity.WARNING
    RULE_BROKEN = "rule-broken", Severity.WARNING
    STUCK_DEAD_LETTERS = "stuck-dead-letters", Severity.WARNING
    TIER_LEFT_BEHIND = "tier-left-behind", Severity.WARNING
    TOPOLOGY_INCOMPLETE = "topology-incomplete", Severity.WARNING

    DEAD_LETTER_AT_MOST_ONCE = "dead-letter-at-most-once", Severity.NOTE
    DEFAULT_QUEUE_TYPE = "default-queue-type", Severity.NOTE
    DELAY_LEFT_BEHIND = "delay-left-behind", Severity.NOTE
    DELIVERY_LIMIT_UNSET = "delivery-limit-unset", Severity.NOTE
    EVENT_WITHOUT_BINDING = "event-without-binding", Severity.NOTE
    NACK_NEVER_COUNTS = "nack-never-counts", Severity.NOTE
    RETURN_EXCHANGE_LEFT = "return-exchange-left", Severity.NOTE
    SCHEMA_MISSING = "schema-missing", Severity.NOTE
    TOPOLOGY_NOT_APPLIED = "topology-not-applied", Severity.NOTE


@dataclass(frozen=True, slots=True)
class Finding:
    code: Code
    where: str
    """The queue, the event or the database that it is about."""
    what: str
    """What is wrong, and what follows from it."""
    fix: str
    """A command for a shell."""

    @property
    def severity(self) -> Severity:
        return self.code.severity

    def as_dict(self) -> dict[str, object]:
        about = {"where": self.where, "what": self.what, "fix": self.fix}
        return {"code": self.code.value, "severity": self.severity.value, **about}
