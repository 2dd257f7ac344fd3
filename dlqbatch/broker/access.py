"""How the broker is reached: its addresses, its certificates, and connecting to the first host that answers."""

from __future__ import annotations

import json
import math
import re
import ssl
import time
from base64 import urlsafe_b64decode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import SplitResult, unquote, urlsplit

from pika import ConnectionParameters, PlainCredentials, SSLOptions
from pika.credentials import ExternalCredentials
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from dlqbatch import logs
from dlqbatch.broker.connection import Connection
from dlqbatch.errors import BrokerUnreachable, LoginRefused, SettingsError

if TYPE_CHECKING:
    # A worker needs no settings, and a drain that finds nothing no HTTP.
    from dlqbatch.broker.management import Api
    from dlqbatch.broker.transfer import Bounds
    from dlqbatch.settings import Settings

_log = logs.get(__name__)

_TOKEN: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Access:
    """Where the broker is and how to speak to it."""

    urls: Sequence[str]
    connect_timeout: float = 10.0
    heartbeat: int = 20
    blocked_timeout: float = 20.0
    tls_ca_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    tls_verify: bool = True
    external: bool = False
    """Whether the client's certificate is the login (SASL EXTERNAL), and not user and password."""
    token_file: str | None = None
    """The file with the OAuth 2 token that is the password; read for every connection."""
    name: str = "dlqbatch"
    end_at: float = math.inf
    """When the connection has to be closed at the latest, on the monotonic clock."""


def access_to(settings: Settings, name: str, bounds: Bounds | None = None) -> Access:
    """How the settings reach the broker; with the bounds of a run, nothing is waited for after its end."""
    timeout = settings.connect_timeout_seconds
    return Access(
        urls=settings.broker_urls,
        connect_timeout=timeout if bounds is None else max(min(timeout, bounds.stop_at - time.monotonic()), 0.1),
        end_at=math.inf if bounds is None else bounds.end_at,
        heartbeat=settings.heartbeat_seconds,
        blocked_timeout=settings.blocked_timeout_seconds,
        name=name,
        **_login_options(settings),
    )


def management_api(settings: Settings, *, quickly: bool = False) -> Api:
    """The management API at its own address, else at the host of the first broker address.

    `quickly`: for a run that can do without an answer, and must not wait long for one.
    """
    # HTTP and the headers of e-mail, which most runs of a drain never need.
    from dlqbatch.broker.management import ANSWERS_WITHIN, QUICKLY, Api  # noqa: PLC0415  (loads HTTP)

    url = settings.management_url.get_secret_value() if settings.management_url else None
    timeout = QUICKLY if quickly else ANSWERS_WITHIN
    return Api(settings.broker_urls[0], url, timeout=timeout, **_login_options(settings))


def _login_options(settings: Settings) -> dict[str, Any]:
    files = {name: getattr(settings, name) for name in ("tls_ca_file", "tls_cert_file", "tls_key_file")}
    paths = {name: path and str(path) for name, path in (files | {"token_file": settings.broker_token_file}).items()}
    return paths | {"tls_verify": settings.tls_verify, "external": settings.broker_auth == "external"}


def broker_parameters(settings: Settings, name: str) -> list[ConnectionParameters]:
    """Parameters for a plain client of pika, such as the demo's consumers."""
    access = access_to(settings, name)
    return [parameters(url, access, access.connect_timeout) for url in access.urls]


def connect(access: Access) -> Connection:
    """The first of the hosts that answers, tried in turn until the time is up."""
    deadline = time.monotonic() + access.connect_timeout
    attempts = Retrying(
        stop=stop_before_delay(access.connect_timeout),
        wait=wait_random_exponential(multiplier=0.2, max=2),
        retry=retry_if_exception(
            lambda error: isinstance(error, BrokerUnreachable) and not isinstance(error, LoginRefused)
        ),
        before_sleep=_log_first_failure,
        reraise=True,
    )
    return attempts(connect_once, access, deadline)


def _log_first_failure(attempt: RetryCallState) -> None:
    """Only the first: the error of the last attempt is raised to the caller, which logs it."""
    error = attempt.outcome.exception() if attempt.outcome is not None else None
    if attempt.attempt_number == 1 and isinstance(error, BrokerUnreachable):
        _log.info("the broker cannot be reached yet, trying again", where=error.where, why=error.why)


def connect_once(access: Access, deadline: float) -> Connection:
    """The first of the hosts that answers, each tried once."""
    failures: list[BrokerUnreachable] = []
    for tried, url in enumerate(access.urls):
        # A host that takes the connection and stays silent must leave time for the next hosts.
        part = (deadline - time.monotonic()) / (len(access.urls) - tried)
        try:
            return Connection(parameters(url, access, max(part, 0.5)), access.end_at)
        except LoginRefused as error:
            expired = _expired(access.token_file) if access.token_file else ""
            failures.append(LoginRefused(error.where, error.why + expired))
        except BrokerUnreachable as error:
            failures.append(error)
    raise _all_of(failures)


def _all_of(failures: Sequence[BrokerUnreachable]) -> BrokerUnreachable:
    """A single error with what each address said; it is LoginRefused if any address refused the login."""
    if not failures:
        return BrokerUnreachable("?", "no broker URL is set")
    if len(failures) == 1:
        return failures[0]
    kind = LoginRefused if any(isinstance(failure, LoginRefused) for failure in failures) else BrokerUnreachable
    why = "; ".join(f"{failure.where}: {failure.why}" for failure in failures)
    return kind(f"any of {len(failures)} addresses", why)


def vhost_of(url: str) -> str:
    """The virtual host that an amqp:// address names."""
    return unquote(urlsplit(url).path[1:]) or "/"


def parameters(url: str, access: Access, seconds: float) -> ConnectionParameters:
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    tls = None
    if parts.scheme == "amqps":
        files = access.tls_ca_file, access.tls_cert_file, access.tls_key_file
        tls = SSLOptions(tls_context(*files, verify=access.tls_verify), host)
    return ConnectionParameters(
        host=host,
        port=parts.port or (5671 if tls else 5672),
        virtual_host=vhost_of(url),
        credentials=_credentials(parts, access, host),
        heartbeat=access.heartbeat,
        blocked_connection_timeout=access.blocked_timeout,
        socket_timeout=seconds,
        stack_timeout=seconds,
        ssl_options=tls,
        client_properties={"connection_name": access.name, "product": "dlqbatch"},
    )


def _credentials(parts: SplitResult, access: Access, host: str) -> PlainCredentials | ExternalCredentials:
    if access.external:
        return ExternalCredentials()
    if access.token_file:
        return PlainCredentials("", token_in(access.token_file, host))  # the token says who it is
    return PlainCredentials(unquote(parts.username or "guest"), unquote(parts.password or "guest"))


def token_in(file: str, where: str) -> str:
    """The token of a file that another program renews; BrokerUnreachable if none is there at this moment."""
    try:
        token = Path(file).read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no text"  # the error of a text repeats it
        raise BrokerUnreachable(where, f"the token file {file} cannot be read: {why}") from None
    if not _TOKEN.fullmatch(token):
        raise BrokerUnreachable(where, f"the token file {file} is to hold a token and nothing else")
    return token


def _expired(file: str) -> str:
    """That its token has expired, as far as it can be read: a JSON Web Token says when."""
    with suppress(BrokerUnreachable, LookupError, TypeError, ValueError, OverflowError):
        claims = json.loads(urlsafe_b64decode(token_in(file, "").split(".")[1] + "=="))
        end = datetime.fromtimestamp(claims["exp"], UTC)
        if end <= datetime.now(UTC):
            return f"; the token in {file} expired at {end:%Y-%m-%d %H:%M:%S} UTC: is it still renewed?"
    return ""


def tls_context(ca_file: str | None, cert_file: str | None, key_file: str | None, *, verify: bool) -> ssl.SSLContext:
    """SettingsError names the file that cannot be used."""
    try:
        made = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise SettingsError(f"tls_ca_file {ca_file} cannot be used: {_tls_problem(error)}.") from error
    if not verify:
        made.check_hostname, made.verify_mode = False, ssl.CERT_NONE
    if cert_file:
        files = f"tls_cert_file {cert_file}" + (f" with tls_key_file {key_file}" if key_file else "")

        def ask() -> NoReturn:
            # Without this OpenSSL prompts at the terminal, and a run from cron waits for ever.
            raise SettingsError(f"{files} cannot be used: the key is encrypted; give it without a passphrase.")

        try:
            made.load_cert_chain(cert_file, key_file, password=ask)
        except OSError as error:
            raise SettingsError(f"{files} cannot be used: {_tls_problem(error)}.") from error
    return made


def _tls_problem(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        if error.reason == "KEY_VALUES_MISMATCH":
            return "the key is not that of the certificate"
        return "it holds no certificate or key in PEM form" if error.reason in (None, "NO_START_LINE") else error.reason
    return error.strerror or str(error)
