"""A connection to the broker that can be waited on: every wait has an end, and pika's errors become ours."""

from __future__ import annotations

import math
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from pika import ConnectionParameters, PlainCredentials, SSLOptions
from pika.adapters.select_connection import IOLoop
from pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    ChannelClosed,
    ChannelClosedByBroker,
    ConnectionClosed,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)
from tenacity import Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

from dlqbatch import logs
from dlqbatch.broker import trust
from dlqbatch.broker.wire import Wire
from dlqbatch.errors import BrokerLost, BrokerUnreachable, ChannelRefused, LoginRefused, readable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pika.channel import Channel
    from tenacity import RetryCallState

_log = logs.get(__name__)

_TICK: Final = 0.01
"""Seconds after which a wait looks up even if nothing happens."""
_ANSWER_WITHIN: Final = 15.0
"""Seconds that a synchronous method may take."""
_LAST_TURNS: Final = 10
"""Of the loop, for pika to close the socket of a connection that is given up."""


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
    name: str = "dlqbatch"
    end_at: float = math.inf
    """On the monotonic clock: when whoever uses the connection has to be done with it, closing included."""


class NoAnswer(BrokerLost):
    """A method was not answered in time; the connection may live on."""


def connect(access: Access) -> Connection:
    """The first of the hosts that answers, tried in turn until the time is up."""
    deadline = time.monotonic() + access.connect_timeout
    attempts = Retrying(
        stop=stop_before_delay(access.connect_timeout),
        wait=wait_random_exponential(multiplier=0.2, max=2),
        retry=retry_if_exception(
            lambda error: isinstance(error, BrokerUnreachable) and not isinstance(error, LoginRefused)
        ),
        before_sleep=_tell_once,
        reraise=True,
    )
    return attempts(_connect_to_any, access, deadline)


def _tell_once(attempt: RetryCallState) -> None:
    """Of the first attempt; the last one's error is for the caller to tell."""
    error = attempt.outcome.exception() if attempt.outcome is not None else None
    if attempt.attempt_number == 1 and isinstance(error, BrokerUnreachable):
        _log.info("the broker cannot be reached yet, trying again", where=error.where, why=error.why)


def _connect_to_any(access: Access, deadline: float) -> Connection:
    failures: list[BrokerUnreachable] = []
    for tried, url in enumerate(access.urls):
        # One host that takes the connection and stays silent must leave time for the others.
        part = (deadline - time.monotonic()) / (len(access.urls) - tried)
        try:
            return Connection(parameters(url, access, max(part, 0.5)), access.end_at)
        except BrokerUnreachable as error:
            failures.append(error)
    raise all_of(failures)


def all_of(failures: Sequence[BrokerUnreachable]) -> BrokerUnreachable:
    """What each address said; a refused login among them stays one: a node that is down changes nothing about it."""
    if not failures:
        return BrokerUnreachable("?", "no broker URL is set")
    if len(failures) == 1:
        return failures[0]
    kind = LoginRefused if any(isinstance(failure, LoginRefused) for failure in failures) else BrokerUnreachable
    why = "; ".join(f"{failure.where}: {failure.why}" for failure in failures)
    return kind(f"any of {len(failures)} addresses", why)


def parameters(url: str, access: Access, seconds: float) -> ConnectionParameters:
    parts = urlsplit(url)
    host = parts.hostname or "localhost"
    tls = None
    if parts.scheme == "amqps":
        files = access.tls_ca_file, access.tls_cert_file, access.tls_key_file
        tls = SSLOptions(trust.context(*files, verify=access.tls_verify), host)
    return ConnectionParameters(
        host=host,
        port=parts.port or (5671 if tls else 5672),
        virtual_host=unquote(parts.path[1:]) or "/",
        credentials=PlainCredentials(unquote(parts.username or "guest"), unquote(parts.password or "guest")),
        heartbeat=access.heartbeat,
        blocked_connection_timeout=access.blocked_timeout,
        socket_timeout=seconds,
        stack_timeout=seconds,
        ssl_options=tls,
        client_properties={"connection_name": access.name, "product": "dlqbatch"},
    )


class Connection:
    def __init__(
        self, parameters: ConnectionParameters, end_at: float = math.inf, *, is_expendable: bool = False
    ) -> None:
        """`end_at`, on the monotonic clock, bounds every wait, however long it might take by itself, and the close."""
        self._end_at = end_at
        self.lost_as: type[BrokerLost] = NoAnswer if is_expendable else BrokerLost
        self._loop = IOLoop()
        self._opened: list[object] = []
        self._lost: list[BaseException] = []
        self._parameters = parameters
        self._where = f"{parameters.host}:{parameters.port}, virtual host '{parameters.virtual_host}'"
        self.login: bytes = parameters.credentials.username.encode()
        self._is_disposed = False
        self._goes_on = False
        self.blocked = False
        """The broker has stopped taking publishes: a memory or disk alarm."""
        self.wire = Wire(
            parameters,
            on_open_callback=self._opened.append,
            on_open_error_callback=lambda _, error: self._lost.append(error),
            on_close_callback=lambda _, error: self._lost.append(error),
            custom_ioloop=self._loop,
        )
        self._loop.activate_poller()
        self._tick()
        deadline = time.monotonic() + float(parameters.stack_timeout or _ANSWER_WITHIN)
        while not self._opened:
            if self._lost or time.monotonic() > deadline:
                raise self._unreachable(self._lost[0] if self._lost else TimeoutError("no answer in time"))
            self._poll()
        self.wire.add_on_connection_blocked_callback(lambda *_: self._set_blocked(to=True))
        self.wire.add_on_connection_unblocked_callback(lambda *_: self._set_blocked(to=False))

    @property
    def frame_max(self) -> int:
        return int(self.wire.params.frame_max)

    @property
    def version(self) -> tuple[int, ...]:
        """The broker's, as far as it is numbers; empty if it does not tell."""
        properties: dict[str, Any] = self.wire.server_properties or {}
        numbers = str(properties.get("version", "")).split(".")[:3]
        return tuple(int(number) for number in numbers if number.isdigit())

    @property
    def is_lost(self) -> bool:
        return bool(self._lost)

    @property
    def is_closing(self) -> bool:
        return bool(self._lost) or not self.wire.is_open

    def step(self) -> None:
        """Let happen what is due; return after one event or a tick."""
        self.check()
        self._poll()
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong."""
        if self.wire.failure is not None:
            raise self.wire.failure
        if self._lost:
            raise self._gone()

    @contextmanager
    def goes_on(self) -> Iterator[None]:
        """Inside it, whoever waits for something else lets happen here what is due."""
        self._goes_on = True
        try:
            yield
        finally:
            self._goes_on = False

    def fileno(self) -> int | None:
        """What to look at meanwhile: when there is something to read, `go_on` has something to do. None: not now."""
        return self.wire.fileno() if self._goes_on and not self.is_closing else None

    def go_on(self) -> None:
        """As `step`, but what has gone wrong is for `check` to tell."""
        self._goes_on = False
        self._poll()
        self._goes_on = True

    def end_by(self, end_at: float) -> None:
        """Sooner than was said before; never later."""
        self._end_at = min(self._end_at, end_at)

    def wait(self, until: Callable[[], object], what: str, seconds: float = _ANSWER_WITHIN) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now > self._end_at:
                raise NoAnswer(f"no answer to {what} before the time of the run was over")
            if now > deadline:
                raise NoAnswer(f"no answer to {what} within {seconds:.0f} s")
            self.step()

    def open_channel(self) -> Channel:
        if self._lost:
            raise self._gone()
        opened: list[Channel] = []
        try:
            self.wire.channel(on_open_callback=opened.append)
        except AMQPError as error:
            raise BrokerLost(describe(error)) from error
        self.wait(lambda: opened, "channel.open")
        return opened[0]

    @contextmanager
    def scratch(self) -> Iterator[Scratch]:
        """A channel for methods that may be refused; the working channels never see the refusal."""
        scratch = Scratch(self)
        try:
            yield scratch
        finally:
            scratch.close()

    @contextmanager
    def asking(self, name: str) -> Iterator[Scratch]:
        """As `scratch`, to ask about one queue or exchange; NoAnswer if that costs the connection it is asked on.

        RabbitMQ 4.3 closes a whole connection where the text of a refusal is too long for its frame and not all ASCII.
        The text holds that name and the virtual host's, so that such names are asked about on a connection beside.
        """
        if name.isascii() and str(self._parameters.virtual_host).isascii():
            with self.scratch() as scratch:
                yield scratch
            return
        try:
            beside = Connection(self._parameters, self._end_at, is_expendable=True)
        except BrokerUnreachable as error:
            raise NoAnswer(error.why) from error
        with closing(beside), beside.scratch() as scratch:
            yield scratch

    def close(self, seconds: float = 5.0) -> None:
        """Close politely, or at least quickly; a loss at this point changes nothing any more."""
        if self._is_disposed:
            return
        deadline = min(time.monotonic() + seconds, self._end_at)
        with suppress(AMQPError):
            self.wire.close()
        while not self._lost and time.monotonic() < deadline:
            self._poll()
        self._dispose()

    def _dispose(self) -> None:
        self._is_disposed = True
        if not self._lost:
            self.wire.abort()
        for _ in range(_LAST_TURNS):
            if self._lost:
                break
            self._poll()
        self._loop.deactivate_poller()
        self._loop.close()

    def _poll(self) -> None:
        self._loop.poll()
        self._loop.process_timeouts()

    def _tick(self) -> None:
        self._loop.call_later(_TICK, self._tick)

    def _set_blocked(self, *, to: bool) -> None:
        self.blocked = to

    def _gone(self) -> BrokerLost:
        return self.lost_as(describe(self._lost[0]))

    def _unreachable(self, error: BaseException) -> BrokerUnreachable:
        refused = isinstance(error, _REFUSALS) and _CLOSED in str(error)
        self._dispose()
        return (LoginRefused if refused else BrokerUnreachable)(self._where, describe(error))


class Scratch:
    """Synchronous methods on a channel of their own, reopened after a refusal."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Channel | None = None
        self._refusals: list[BaseException] = []

    def call(self, method: str, **arguments: Any) -> Any:
        """The broker's answer to a pika channel method, or ChannelRefused."""
        answers: list[Any] = []
        channel = self._open()
        getattr(channel, method)(**arguments, callback=answers.append)
        self._connection.wait(lambda: answers or self._refusals, method)
        if self._refusals:
            raise self._refused()
        return answers[0].method

    def call_later(self, method: str, **arguments: Any) -> None:
        """Send a method that is only answered when it is refused; the next `call` raises what was refused."""
        if self._refusals:
            raise self._refused()
        getattr(self._open(), method)(**arguments)

    def provoke(self, method: str, **arguments: Any) -> ChannelRefused:
        """Send what the broker is certain to refuse, and return how it does."""
        getattr(self._open(), method)(**arguments)
        self._connection.wait(lambda: self._refusals, method)
        return self._refused()

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None and channel.is_open and not self._connection.is_lost:
            channel.close()

    def _open(self) -> Channel:
        if self._channel is None:
            self._refusals = []
            self._channel = self._connection.open_channel()
            self._channel.add_on_close_callback(lambda _, error: self._refusals.append(error))
        return self._channel

    def _refused(self) -> ChannelRefused:
        error, self._channel = self._refusals[0], None
        if isinstance(error, ChannelClosedByBroker):
            return ChannelRefused(error.reply_code, error.reply_text)
        raise self._connection.lost_as(describe(error)) from error


_REFUSALS: Final = (ProbableAuthenticationError, ProbableAccessDeniedError)
_CLOSED: Final = "ConnectionClosedByBroker"
"""What pika only guesses to be a refusal is one if the broker gave a reason; a dead host closes without one."""


def describe(error: BaseException) -> str:
    """What pika's exceptions wrap, in words; never what was sent, so never a password."""
    if isinstance(error, _REFUSALS) and _CLOSED in str(error):
        words = str(error.args[0]).partition(_CLOSED)[2].strip(": ")
        if isinstance(error, ProbableAuthenticationError):
            return f"the login was refused; user or password is wrong, or the user may not log in from here: {words}"
        return f"the virtual host does not exist, or the user may not enter it: {words}"
    if isinstance(error, (ConnectionClosed, ChannelClosed)):
        return f"{readable(error.reply_text)} ({error.reply_code})"
    inner = getattr(error, "exceptions", None) or error.args
    if isinstance(error, AMQPConnectionError) or hasattr(error, "exceptions") or hasattr(error, "exception"):
        inner = [getattr(error, "exception", None), *inner]
        for cause in reversed([cause for cause in inner if isinstance(cause, BaseException)]):
            return describe(cause)
    return str(error) or type(error).__name__
