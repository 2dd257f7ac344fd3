"""One run as OpenTelemetry has it: metrics as deltas of this run, and spans that are linked to those of the publishers.

They are pushed once, by the official exporters, in two seconds at most. Nothing that happens there changes the outcome
of a run: what was not taken is a line in the log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from threading import Thread
from typing import Any, Final, Self
from urllib.parse import unquote

from dlqbatch import __version__, logs
from dlqbatch.broker.traced import TracedMessage, TracedMessages
from dlqbatch.errors import SettingsError
from dlqbatch.otlp.figures import RUN_SECONDS, figures
from dlqbatch.settings import Settings

try:
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as MetricsByGrpc
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as SpansByGrpc
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as MetricsByHttp
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as SpansByHttp
    from opentelemetry.sdk.metrics import Counter, Histogram, MeterProvider
    from opentelemetry.sdk.metrics.export import AggregationTemporality, InMemoryMetricReader, MetricExportResult
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Link, Span, SpanContext, SpanKind, StatusCode, TraceFlags, use_span
    from opentelemetry.trace.propagation import set_span_in_context
except ImportError:
    raise SettingsError(
        "dlqbatch.otlp-endpoint needs OpenTelemetry, which is not installed: pip install 'dlqbatch[otlp]', or in a "
        "checkout: pip install -r requirements-otlp.txt"
    ) from None

SECONDS: Final = 2.0
"""How long a push may take, with all of its tries."""
_SCOPE: Final = "dlqbatch"
_LIBRARY: Final = "opentelemetry"
_DELTA: Final[dict[type, AggregationTemporality]] = {
    Counter: AggregationTemporality.DELTA,
    Histogram: AggregationTemporality.DELTA,
}
_FAILED: Final = "failed"

log = logs.get(__name__)


class Telemetry:
    """Made when a run begins; `push` ends it."""

    def __init__(self, settings: Settings, job: str) -> None:
        self._job = job
        self._endpoint, self._is_grpc = str(settings.otlp_endpoint), settings.otlp_protocol == "grpc"
        self.traced = TracedMessages(settings.otlp_spans)
        resource = _resource(settings)
        self._reader = InMemoryMetricReader(preferred_temporality=_DELTA)
        meters = MeterProvider([self._reader], resource, shutdown_on_exit=False)
        self._meter = meters.get_meter(_SCOPE, __version__)
        self._seconds = self._meter.create_histogram(
            "dlqbatch.run",
            unit="s",
            description="How long runs took.",
            explicit_bucket_boundaries_advisory=RUN_SECONDS,
        )
        self._ended = _Ended()
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracers.add_span_processor(self._ended)
        self._tracer = tracers.get_tracer(_SCOPE, __version__)
        self._span = self._tracer.start_span(f"dlqbatch {job}", attributes={"dlqbatch.job": job, **_run_id()})

    def push(self, report: Mapping[str, Any]) -> None:
        """Send metrics and spans of the run that ends with this report; it never raises."""
        tries: list[str] = []
        thread = Thread(target=self._push, args=(report, tries), name="otlp", daemon=True)
        with _Quiet() as said:
            thread.start()
            thread.join(SECONDS)
            why = f"no answer within {SECONDS:.0f} s" if thread.is_alive() else next(iter((*said.texts, *tries)), None)
        if thread.is_alive() or tries:
            log.warning(
                "the collector has not taken the metrics and spans of this run", collector=self._endpoint, why=why
            )

    def _push(self, report: Mapping[str, Any], failures: list[str]) -> None:
        try:
            self._record(report)
            metrics, spans = self._exporters()
            # Spans last: a collector may take metrics alone.
            measured = self._reader.get_metrics_data()
            if measured is not None and metrics.export(measured) is not MetricExportResult.SUCCESS:
                failures.append("it refused the metrics")
            elif self._ended.spans and spans.export(self._ended.spans) is not SpanExportResult.SUCCESS:
                failures.append("it refused the spans")
        except Exception as error:  # noqa: BLE001  (a run is not judged by how it is measured)
            failures.append(f"{type(error).__name__}: {error}")

    def _record(self, report: Mapping[str, Any]) -> None:
        found = figures(self._job, report)
        for counter in found.counters:
            self._meter.create_counter(counter.name).add(counter.value, counter.attributes)
        for gauge in found.gauges:
            self._meter.create_gauge(gauge.name).set(gauge.value, gauge.attributes)
        if found.seconds is not None:
            with use_span(self._span):  # the exemplar of the histogram is this run
                self._seconds.record(found.seconds, {"job": self._job})
        for message in self.traced.messages:
            self._add_span(message)
        outcome = str(report["outcome"])
        self._span.set_attribute("dlqbatch.outcome", outcome)
        if outcome == _FAILED:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()

    def _add_span(self, message: TracedMessage) -> None:
        """A span beneath that of the run; its publisher's span is linked, since a retry is no part of that work."""
        context = message.context
        published = SpanContext(context.trace, context.span, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        span: Span = self._tracer.start_span(
            f"{self._job} {message.queue}",
            set_span_in_context(self._span),
            SpanKind.CONSUMER,
            {
                "messaging.system": "rabbitmq",
                "messaging.operation.type": "process",
                "messaging.operation.name": self._job,
                "messaging.destination.name": message.queue,
                "dlqbatch.decision": message.counts_as,
                **({} if message.reason is None else {"dlqbatch.reason": message.reason}),
            },
            [Link(published)],
            message.taken_at,
        )
        span.end(message.settled_at)

    def _exporters(self) -> tuple[MetricsByGrpc | MetricsByHttp, SpansByGrpc | SpansByHttp]:
        # Headers, certificates and compression come from the variables of OpenTelemetry.
        if self._is_grpc:
            return (
                MetricsByGrpc(endpoint=self._endpoint, timeout=SECONDS, preferred_temporality=_DELTA),
                SpansByGrpc(endpoint=self._endpoint, timeout=SECONDS),
            )
        return (
            MetricsByHttp(f"{self._endpoint}/v1/metrics", timeout=SECONDS, preferred_temporality=_DELTA),
            SpansByHttp(f"{self._endpoint}/v1/traces", timeout=SECONDS),
        )


def _resource(settings: Settings) -> Resource:
    """What all runs of a deployment are: the same instance, so that a collector can add their deltas up."""
    ours = {
        "service.name": _SCOPE,
        "service.version": __version__,
        "service.instance.id": settings.scope or _SCOPE,
    }
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go before ours.
    return Resource(ours).merge(OTELResourceDetector().detect())


def _run_id() -> dict[str, str]:
    return {f"dlqbatch.{name}": str(value) for name, value in logs.origin().items() if name != "version"}


class _Ended(SpanProcessor):
    """Keeps spans until they are pushed."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Quiet(logging.Handler):
    """Keeps what the SDK would log of each try; one line of ours says it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Self:
        for pair in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(","):
            logs.hide([unquote(pair.partition("=")[2].strip())])
        library = logging.getLogger(_LIBRARY)
        library.propagate = False
        library.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        # A push that was given up may still log.
        logging.getLogger(_LIBRARY).removeHandler(self)
        logging.getLogger(_LIBRARY).addHandler(logging.NullHandler())
