"""How the broker is reached."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from dlqbatch.broker.connection import Access, parameters

if TYPE_CHECKING:
    from pika import ConnectionParameters

    from dlqbatch.broker.management import Api
    from dlqbatch.broker.transfer import Bounds
    from dlqbatch.settings import Settings


def access_to(settings: Settings, name: str, bounds: Bounds | None = None) -> Access:
    """With the bounds of a run, connecting takes no longer than that may, and nothing is waited for after its end."""
    timeout = settings.connect_timeout_seconds
    return Access(
        urls=settings.broker_urls,
        connect_timeout=timeout if bounds is None else max(min(timeout, bounds.stop_at - time.monotonic()), 0.1),
        end_at=math.inf if bounds is None else bounds.end_at,
        heartbeat=settings.heartbeat_seconds,
        blocked_timeout=settings.blocked_timeout_seconds,
        tls_ca_file=_path(settings.tls_ca_file),
        tls_cert_file=_path(settings.tls_cert_file),
        tls_key_file=_path(settings.tls_key_file),
        tls_verify=settings.tls_verify,
        name=name,
    )


def broker_parameters(settings: Settings, name: str) -> list[ConnectionParameters]:
    """For a client of pika's own, such as the demo's consumers."""
    access = access_to(settings, name)
    return [parameters(url, access, access.connect_timeout) for url in access.urls]


def management_api(settings: Settings) -> Api:
    """Of the first broker address, unless it has one of its own."""
    from dlqbatch.broker.management import Api  # noqa: PLC0415  (HTTP and e-mail's headers, which a drain never needs)

    return Api(
        settings.broker_urls[0],
        settings.management_url.get_secret_value() if settings.management_url else None,
        tls_ca_file=_path(settings.tls_ca_file),
        tls_cert_file=_path(settings.tls_cert_file),
        tls_key_file=_path(settings.tls_key_file),
        tls_verify=settings.tls_verify,
    )


def _path(value: object) -> str | None:
    return None if value is None else str(value)
