"""Ways to the broker and the database on which somebody could listen, or pose as the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.settings import Settings

_VERIFIED: Final = "verify-full"
# What libpq does when nobody has named a mode: it sends in clear if the server wants it so.
_USUAL: Final = "prefer"


def unprotected(settings: Settings, environment: Mapping[str, str]) -> tuple[Finding, ...]:
    """A finding for each way to a server that is in clear or not verified. What stays on this machine needs neither."""
    database = settings.database_url.get_secret_value()
    return (*_broker(settings), *_management(settings), *_database(database, environment))


def _broker(settings: Settings) -> Iterator[Finding]:
    for url in settings.broker_urls:
        parts = urlsplit(url)
        host = parts.hostname or "localhost"
        if is_local(host):
            continue
        if parts.scheme != "amqps":
            fix = f"export DLQBATCH_BROKER_URL=amqps://USER:PASSWORD@{_shown(host)}:5671{parts.path or '/'}"
            yield _in_clear("broker", f"{host}:{parts.port or 5672}", fix)
        elif not settings.tls_verify:
            fix = "export DLQBATCH_TLS_VERIFY=true DLQBATCH_TLS_CA_FILE=/path/to/ca.pem"
            what = "certificate and host name are not checked: whoever answers under that name gets the password"
            yield Finding(Code.BROKER_UNVERIFIED, f"{host}:{parts.port or 5671}", what, fix)


def _management(settings: Settings) -> Iterator[Finding]:
    """An address that is not in the settings follows from the broker's."""
    if settings.management_url is None:
        return
    parts = urlsplit(settings.management_url.get_secret_value())
    host = parts.hostname or "localhost"
    if parts.scheme == "http" and not is_local(host):
        fix = f"export DLQBATCH_MANAGEMENT_URL=https://{_shown(host)}:15671"
        yield _in_clear("management API", f"{host}:{parts.port or 80}", fix)


def _in_clear(server: str, where: str, fix: str) -> Finding:
    what = f"the password and every message go to the {server} in clear"
    return Finding(Code.BROKER_IN_CLEAR, where, what, fix)


def _database(url: str, environment: Mapping[str, str]) -> Iterator[Finding]:
    parts = urlsplit(url)
    if not parts.scheme.startswith("postgres"):
        return
    options = dict(parse_qsl(parts.query))
    hosts = [parts.hostname] if parts.hostname else []
    hosts += [host for host in options.get("host", "").split(",") if host]
    hosts = hosts or [environment.get("PGHOST", "")]
    mode = options.get("sslmode") or environment.get("PGSSLMODE") or _USUAL
    far = [host for host in hosts if not is_local(host)]
    if far and mode != _VERIFIED:
        login, at, place = parts.netloc.rpartition("@")
        address = f"{parts.scheme}://{'USER:PASSWORD@' if at or login else ''}{place}{parts.path}"
        fix = f"export DLQBATCH_DATABASE_URL='{address}?sslmode={_VERIFIED}&sslrootcert=/path/to/ca.pem'"
        what = (
            "the server's certificate is not checked, if there is one: whoever answers under that name gets the "
            "password and the messages"
        )
        yield Finding(Code.DATABASE_UNVERIFIED, f"{', '.join(far)} (sslmode={mode})", what, fix)


def is_local(host: str) -> bool:
    """A socket of this machine, or its loopback address; a name is not looked up."""
    if not host or host.startswith(("/", "@")) or f".{host.rstrip('.')}".endswith(".localhost"):
        return True
    with suppress(ValueError):
        return ip_address(host.strip("[]")).is_loopback
    return False


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
