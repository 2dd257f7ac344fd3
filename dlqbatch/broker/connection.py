"""A connection to the broker that can be waited on: every wait has an end, and pika's errors become ours."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

from pika import ConnectionParameters
from pika.adapters.select_connection import IOLoop
from pika.channel import Channel
from pika.exceptions import (
    AMQPConnectionError,
    AMQPError,
    AuthenticationError,
    ChannelClosed,
    ChannelClosedByBroker,
    ConnectionClosed,
    ProbableAccessDeniedError,
    ProbableAuthenticationError,
)

from dlqbatch import logs
from dlqbatch.broker.wire import Wire
from dlqbatch.errors import BrokerLost, BrokerUnreachable, ChannelRefused, LoginRefused, readable

_log = logs.get(__name__)

_TICK: Final = 0.01
"""Seconds after which a wait checks its condition even if nothing happens."""
_ANSWER_WITHIN: Final = 15.0
"""Seconds that a synchronous method may take."""
BLOCKED: Final = "the broker has blocked publishing (memory or disk alarm)"
_LAST_TURNS: Final = 10
"""Turns of the loop in which pika may close the socket of a connection that is dropped."""


class NoAnswer(BrokerLost):
    """A method was not answered in time; the connection may live on."""


class PublishingBlocked(BrokerLost):
    """The broker reads no more from a connection that has published, until its memory or disk alarm is over."""

    def __init__(self) -> None:
        super().__init__(BLOCKED)


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
        user = getattr(parameters.credentials, "username", "")
        self.login: bytes | None = user.encode() or None
        """The user; None where the broker alone knows it, from a certificate or a token."""
        self._is_disposed = False
        self.answer_within = _ANSWER_WITHIN
        """Seconds that a synchronous method may take."""
        self.blocked = False
        """The broker has stopped taking publishes: a memory or disk alarm."""
        self.is_done = False
        """Nothing that was sent matters any more, so that closing need not wait for the broker's answer."""
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
    def address(self) -> str:
        return f"{self._parameters.host}:{self._parameters.port}"

    @property
    def frame_max(self) -> int:
        return int(self.wire.params.frame_max)

    @property
    def cluster(self) -> str:
        """The name of the broker's cluster; its address if the broker does not name it."""
        properties: dict[str, Any] = self.wire.server_properties or {}
        found = properties.get("cluster_name")
        return found if isinstance(found, str) and found else self.address

    @property
    def virtual_host(self) -> str:
        return str(self._parameters.virtual_host)

    @property
    def version(self) -> tuple[int, ...]:
        """The broker's version, as far as it is numbers; empty if the broker does not name it."""
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
        """Handle what has come and what is due; return after one event or a tick."""
        self.check()
        self._poll()
        self.check()

    def check(self) -> None:
        """Raise what has gone wrong since the last check."""
        if self.wire.failure is not None:
            raise self.wire.failure
        if self._lost:
            raise self._gone()

    def end_by(self, end_at: float) -> None:
        """Set an earlier end than before; a later end changes nothing."""
        self._end_at = min(self._end_at, end_at)

    def wait(self, until: Callable[[], object], what: str, seconds: float | None = None) -> None:
        seconds = self.answer_within if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now > self._end_at:
                raise NoAnswer(f"no answer to {what} before the time of the run was over{self._because}")
            if now > deadline:
                raise NoAnswer(f"no answer to {what} within {seconds:.0f} s{self._because}")
            self.step()

    def pause(self, seconds: float) -> None:
        """Let time pass in which the connection goes on living."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
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
    def scratch_for(self, name: str) -> Iterator[Scratch]:
        """A scratch channel for methods about this queue or exchange; NoAnswer if they cost the connection.

        RabbitMQ 4.3 closes the whole connection where the text of a refusal is too long for its frame and not all
        ASCII. The text holds this name and the virtual host's. So names that are not ASCII get a second connection.
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
        """Close, and wait a few seconds for the broker's answer; a lost connection changes nothing any more."""
        if self._is_disposed:
            return
        deadline = min(time.monotonic() + (0.0 if self.is_done else seconds), self._end_at)
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

    @property
    def _because(self) -> str:
        return f": {BLOCKED}" if self.blocked else ""

    def _gone(self) -> BrokerLost:
        return self.lost_as(f"{describe(self._lost[0])}{self._because}")

    def _unreachable(self, error: BaseException) -> BrokerUnreachable:
        refused = is_login_refused(error)
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
        getattr(self._open(), method)(**arguments, callback=answers.append)
        self._wait(lambda: answers, method)
        return answers[0].method

    def look(self, kind: str, name: str) -> Any:
        """Declare a queue or an exchange passively: nothing is made, and ChannelRefused says that it is not there."""
        return self.call(f"{kind}_declare", passive=True, **{kind: name})

    def is_there(self, kind: str, name: str) -> bool:
        try:
            self.look(kind, name)
        except ChannelRefused as refused:
            if refused.is_gone:
                return False
            raise
        return True

    def ready(self, queue: str) -> int:
        """Messages ready in the queue, by its own count and not by statistics."""
        return int(self.look("queue", queue).message_count)

    def call_later(self, method: str, **arguments: Any) -> None:
        """Send a method that is only answered when it is refused; `finish` or the next `call` raises the refusal."""
        if self._refusals:
            raise self._refused()
        getattr(self._open(), method)(**arguments)

    def finish(self, what: str) -> None:
        """Wait until the broker has done all that `call_later` sent, or raise ChannelRefused; `what` that was."""
        answers: list[Any] = []
        self._open().basic_qos(callback=answers.append)  # its answer comes after all of that
        self._wait(lambda: answers, what)

    def provoke(self, method: str, **arguments: Any) -> ChannelRefused:
        """Send what the broker is certain to refuse, and return how it does."""
        getattr(self._open(), method)(**arguments)
        self._connection.wait(lambda: self._refusals, method)
        return self._refused()

    def try_publish(self, exchange: str) -> None:
        """Publish in a transaction that is rolled back; ChannelRefused or PublishingBlocked if we may not publish.

        Nobody sees such a message, and a broker that would take it writes nothing into its log.
        """
        self.call("tx_select")
        answers: list[Any] = []
        channel = self._open()
        channel.basic_publish(exchange, "", b"")
        channel.tx_rollback(callback=answers.append)
        self._connection.wait(lambda: answers or self._refusals or self._connection.blocked, "tx.rollback")
        if self._connection.blocked:
            raise PublishingBlocked
        if self._refusals:
            raise self._refused()

    def _wait(self, until: Callable[[], object], what: str) -> None:
        self._connection.wait(lambda: until() or self._refusals, what)
        if self._refusals:
            raise self._refused()

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
        error, self._channel, self._refusals = self._refusals[0], None, []
        if isinstance(error, ChannelClosedByBroker):
            return ChannelRefused(error.reply_code, error.reply_text)
        raise self._connection.lost_as(describe(error)) from error


_REFUSALS: Final = (ProbableAuthenticationError, ProbableAccessDeniedError)
# pika only guesses that this is a refusal. It is a refusal if the broker sent a reason; a dead host sends none.
_CLOSED: Final = "ConnectionClosedByBroker"


def is_login_refused(error: BaseException) -> bool:
    return isinstance(error, AuthenticationError) or (isinstance(error, _REFUSALS) and _CLOSED in str(error))


def describe(error: BaseException) -> str:
    """Why a connection or a channel was closed; never what was sent, so never a password."""
    if isinstance(error, AuthenticationError):
        plugin = "; EXTERNAL takes the plugin rabbitmq_auth_mechanism_ssl" if str(error) == "EXTERNAL" else ""
        return f"the broker does not offer the SASL mechanism {error} (auth_mechanisms){plugin}"
    if is_login_refused(error):
        words = str(error.args[0]).partition(_CLOSED)[2].strip(": ")
        if isinstance(error, ProbableAuthenticationError):
            wrong = "no user has the certificate's name" if "EXTERNAL" in words else "user or password is wrong"
            return f"the login was refused; {wrong}, or the user may not log in from here: {words}"
        return f"the virtual host does not exist, or the user may not enter it: {words}"
    if isinstance(error, (ConnectionClosed, ChannelClosed)):
        return f"{readable(error.reply_text)} ({error.reply_code})"
    inner = getattr(error, "exceptions", None) or error.args
    if isinstance(error, AMQPConnectionError) or hasattr(error, "exceptions") or hasattr(error, "exception"):
        inner = [getattr(error, "exception", None), *inner]
        for cause in reversed([cause for cause in inner if isinstance(cause, BaseException)]):
            return describe(cause)
    return str(error) or type(error).__name__
