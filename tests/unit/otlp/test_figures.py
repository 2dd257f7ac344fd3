from __future__ import annotations

from dlqbatch.otlp.figures import figures


def test_each_decision_and_reason_that_happened_is_a_counter() -> None:
    report = {
        "outcome": "partial",
        "counts": {"got": 5, "delayed": 3, "left": 2, "moved": 0},
        "reasons": {"unroutable": 2},
        "queues": {"retry-queue": {"found": 5, "left": 2}, "other": {"found": 4, "left": None}},
        "elapsed_seconds": 1.5,
    }
    found = figures("drain", report)
    assert [(one.name, one.value, dict(one.attributes)) for one in found.counters] == [
        ("dlqbatch.runs", 1, {"job": "drain", "outcome": "partial"}),
        ("dlqbatch.messages", 3, {"job": "drain", "decision": "delayed"}),
        ("dlqbatch.messages", 2, {"job": "drain", "decision": "left"}),
        ("dlqbatch.message_reasons", 2, {"job": "drain", "reason": "unroutable"}),
    ]
    assert [(one.name, one.value, dict(one.attributes)) for one in found.gauges] == [
        ("dlqbatch.queue_depth", 2, {"queue": "retry-queue"}),
        ("dlqbatch.queue_depth", 4, {"queue": "other"}),
    ]
    assert found.seconds == 1.5


def test_a_run_that_ended_with_an_error_is_counted_and_no_more() -> None:
    found = figures("drain", {"outcome": "failed"})
    assert [(one.name, one.value) for one in found.counters] == [("dlqbatch.runs", 1)]
    assert (found.gauges, found.seconds) == ((), None)


def test_a_monitor_has_its_single_numbers_by_the_names_of_prometheus_and_counts_no_messages() -> None:
    metrics = {"at": "2030-01-01T00:00:00Z", "backlog": 7, "resolution_rate": 0.5, "retry_success": None}
    report = {"outcome": "ok", "counts": {"got": 0, "recorded": 3}, "metrics": metrics | {"states": {"failed": 7}}}
    found = figures("monitor", report)
    assert [one.name for one in found.counters] == ["dlqbatch.runs"]
    assert {(one.name, one.value, *one.attributes.values()) for one in found.gauges} == {
        ("dlqbatch.backlog", 7),
        ("dlqbatch.resolution_ratio", 0.5),
        ("dlqbatch.stored_messages", 7, "failed"),
    }
