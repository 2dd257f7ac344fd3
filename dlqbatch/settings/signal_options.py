"""Options of what a run pushes to OpenTelemetry."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator

from dlqbatch.settings.values import Options, lower, number_option, option


def collector_address(value: str) -> str:
    try:
        parts = urlsplit(value)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or not value.isprintable() or " " in value:
        raise ValueError("is no address of a collector, such as http://127.0.0.1:4318")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("has a password, a ? or a # in it; a token goes into OTEL_EXPORTER_OTLP_HEADERS")
    return value.rstrip("/")


class SignalOptions(Options):
    """Part of `Settings`."""

    otlp_endpoint: Annotated[str, AfterValidator(collector_address)] | None = option(
        None,
        "The OpenTelemetry collector that each run pushes metrics and spans to when it ends; needs `dlqbatch[otlp]`.",
        "an http:// or https:// address without a password, such as http://127.0.0.1:4318",
    )
    otlp_protocol: Annotated[Literal["http", "grpc"], BeforeValidator(lower)] = option(
        "http", "How that collector is spoken to: protobuf over HTTP (port 4318), or gRPC (port 4317).", "http or grpc"
    )
    otlp_spans: int = number_option(
        200,
        "The most messages of a run that get a span, of those with a sampled `traceparent`; 0: none.",
        least=0,
        most=10_000,
    )
