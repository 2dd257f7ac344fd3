"""A collector on loopback: it takes what is pushed by HTTP or gRPC, and reads it by the official definitions."""

from __future__ import annotations

import contextlib
import gzip
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import TYPE_CHECKING, Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import (
    MetricsServiceServicer,
    add_MetricsServiceServicer_to_server,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass
class Collector:
    endpoint: str
    metrics_requests: list[Any] = field(default_factory=list)
    trace_requests: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def take_metrics(self, request: Any, headers: Mapping[str, str]) -> None:
        self.metrics_requests.append(request)
        self.headers.append({name.lower(): value for name, value in headers.items()})

    @property
    def resource(self) -> dict[str, str]:
        """What the pushes say of where they come from, the same in all of them."""
        requests = [one.resource_metrics for one in self.metrics_requests]
        requests += [one.resource_spans for one in self.trace_requests]
        found = [attributes(each.resource) for request in requests for each in request]
        assert all(one == found[0] for one in found)
        return found[0]

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            metric.name: metric
            for request in self.metrics_requests
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.trace_requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def attributes(holder: Any) -> dict[str, str]:
    """The attributes of a span, a point or a resource, as text."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in holder.attributes}


def sums(metric: Any) -> dict[tuple[str, ...], float]:
    """The value of each point, by the values of its attributes in the order of their names."""
    points = getattr(metric, metric.WhichOneof("data")).data_points
    return {
        tuple(value for _, value in sorted(attributes(point).items())): point.as_int or point.as_double
        for point in points
    }


@contextlib.contextmanager
def http_collector(status: int = 200) -> Iterator[Collector]:
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.headers["content-type"] == "application/x-protobuf"
            if self.path == "/v1/metrics":
                collector.take_metrics(ExportMetricsServiceRequest.FromString(body), dict(self.headers))
            elif self.path == "/v1/traces":
                collector.trace_requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(status if self.path in {"/v1/metrics", "/v1/traces"} else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector("")

    class Metrics(MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  (the name it has there)
            collector.take_metrics(request, dict(context.invocation_metadata()))
            return ExportMetricsServiceResponse()

    class Traces(TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  (the name it has there)
            collector.trace_requests.append(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_MetricsServiceServicer_to_server(Metrics(), server)
    add_TraceServiceServicer_to_server(Traces(), server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
