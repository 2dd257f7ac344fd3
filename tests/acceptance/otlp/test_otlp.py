"""Metrics and spans of a run, pushed to a collector that reads them by OpenTelemetry's own definitions."""

from __future__ import annotations

import json
import socket
import sys
from typing import TYPE_CHECKING

import pytest
from otlp_collector import attributes, grpc_collector, http_collector, sums
from program import RETRY_QUEUE, ROOT, Client, Program

if TYPE_CHECKING:
    pass

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
DELTA = 1
"""AGGREGATION_TEMPORALITY_DELTA in metrics.proto."""
NOT_TAKEN = "the collector has not taken the metrics and spans of this run"
COLLECTORS = {"http": http_collector, "grpc": grpc_collector}
# As if the extra were not there.
WITHOUT = """
import runpy, sys
sys.modules["opentelemetry"] = None
sys.argv = ["handler.py", *sys.argv[1:]]
runpy.run_path({handler!r}, run_name="__main__")
"""


@pytest.fixture(params=COLLECTORS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def failed(team: Client, *traces: str | None) -> None:
    """Messages that failed once, each with this `traceparent`."""
    team.make_origin("orders-queue")
    for trace in traces:
        headers = {"traceparent": trace} if trace else None
        team.fail("orders-queue", "orders.created", b"{}", headers=headers)


def test_a_run_pushes_its_figures_as_deltas_and_a_span_linked_to_each_sampled_publisher(
    team: Client, program: Program, protocol: str
) -> None:
    failed(team, SAMPLED, UNSAMPLED, None, "not a context")
    with COLLECTORS[protocol]() as collector:
        done = program.but(otlp_endpoint=collector.endpoint, otlp_protocol=protocol, scope="shop").run(
            "drain", "--json", OTEL_EXPORTER_OTLP_HEADERS="x-token=s3cret-of-the-collector"
        )
    assert done.code == 0, done.said
    assert NOT_TAKEN not in done.err
    assert done.told["counts"]["delayed"] == 4
    assert "s3cret-of-the-collector" not in done.said

    metrics = collector.metrics
    assert sums(metrics["dlqbatch.messages"]) == {("delayed", "drain"): 4}
    assert sums(metrics["dlqbatch.runs"]) == {("drain", "ok"): 1}
    assert metrics["dlqbatch.messages"].sum.aggregation_temporality == DELTA
    assert metrics["dlqbatch.messages"].sum.is_monotonic
    (taken,) = metrics["dlqbatch.run"].histogram.data_points
    assert metrics["dlqbatch.run"].histogram.aggregation_temporality == DELTA
    assert (metrics["dlqbatch.run"].unit, taken.count) == ("s", 1)
    assert taken.sum == pytest.approx(done.told["elapsed_seconds"], abs=0.01)
    assert sums(metrics["dlqbatch.queue_depth"]).keys() == {
        (name,) for name in done.told["queues"] if name.startswith(RETRY_QUEUE)
    }
    assert collector.headers[0]["x-token"] == "s3cret-of-the-collector"
    assert collector.resource["service.name"] == "dlqbatch"
    assert collector.resource["service.instance.id"] == "shop"

    spans = {span.name: span for span in collector.spans}
    assert spans.keys() == {"dlqbatch drain", f"drain {RETRY_QUEUE}"}
    run, message = spans["dlqbatch drain"], spans[f"drain {RETRY_QUEUE}"]
    assert len(collector.spans) == 2
    (link,) = message.links
    assert (link.trace_id.hex(), link.span_id.hex()) == (TRACE, SPAN)
    # It is no part of the publisher's trace.
    assert (message.trace_id, message.parent_span_id) == (run.trace_id, run.span_id)
    assert message.trace_id.hex() != TRACE
    assert run.start_time_unix_nano <= message.start_time_unix_nano <= message.end_time_unix_nano
    assert message.end_time_unix_nano <= run.end_time_unix_nano
    assert attributes(message)["dlqbatch.decision"] == "delayed"
    assert taken.exemplars[0].trace_id == run.trace_id
    logged = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
    assert attributes(run)["dlqbatch.run_id"] in {line.get("run_id") for line in logged}


def test_a_store_job_pushes_what_it_stored_and_measured(team: Client, program: Program) -> None:
    team.publish("dlq-exchange", "dlq-routing-key", b"{}", headers={"traceparent": SAMPLED})
    with http_collector() as collector:
        # A slash at the end is no part of the path, and no more spans are made than the setting says.
        pushing = program.but(otlp_endpoint=f"{collector.endpoint}/")
        assert pushing.but(otlp_spans="0").run("ingest").code == 0
        assert [span.name for span in collector.spans] == ["dlqbatch ingest"]
        done = pushing.run("monitor", "--json")
    assert done.code == 0, done.said
    assert sums(collector.metrics["dlqbatch.messages"]) == {("recorded", "ingest"): 1}
    assert sums(collector.metrics["dlqbatch.backlog"]) == {(): 1}
    assert sums(collector.metrics["dlqbatch.stored_messages"])["pending",] == 1


def test_a_run_that_fails_is_pushed_as_failed_and_a_dry_run_is_not(program: Program) -> None:
    with http_collector() as collector:
        pushing = program.but(otlp_endpoint=collector.endpoint)
        assert pushing.run("drain", "--dry-run").code == 0
        assert collector.metrics_requests == []
        assert pushing.but(broker_url="amqp://guest:guest@127.0.0.1:1/").run("drain").code == 4
    assert sums(collector.metrics["dlqbatch.runs"]) == {("drain", "failed"): 1}
    (run,) = collector.spans
    assert run.status.code == 2  # STATUS_CODE_ERROR in trace.proto


@pytest.mark.parametrize(
    ("protocol", "way"), [("http", "silent"), ("grpc", "silent"), ("http", "refuses"), ("grpc", "gone")]
)
def test_a_collector_that_does_not_take_it_changes_nothing_but_the_log(
    team: Client, program: Program, protocol: str, way: str
) -> None:
    failed(team, SAMPLED)
    with socket.socket() as silent, http_collector(status=400) as refusing:
        silent.bind(("127.0.0.1", 0))
        if way == "silent":
            silent.listen()
        address = refusing.endpoint if way == "refuses" else f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = program.but(otlp_endpoint=address, otlp_protocol=protocol).run("drain", "--json")
    # The silent one never answers: that the run has ended shows that it did not wait for it.
    assert done.code == 0, done.said
    assert (done.told["outcome"], done.told["counts"]["delayed"]) == ("ok", 1)
    (warned,) = (json.loads(line) for line in done.err.splitlines() if NOT_TAKEN in line)
    assert warned["level"] == "warning"
    assert warned["fields"]["why"]


def test_without_the_extra_it_says_what_to_install_before_anything_is_taken(team: Client, program: Program) -> None:
    failed(team, None)
    script = WITHOUT.format(handler=str(ROOT / "handler.py"))
    without = Program(program.but(otlp_endpoint="http://127.0.0.1:4318").settings, (sys.executable, "-c", script))
    done = without.run("drain")
    assert done.code == 2, done.said
    assert "pip install 'dlqbatch[otlp]'" in done.err
    assert team.depth(RETRY_QUEUE) == 1
