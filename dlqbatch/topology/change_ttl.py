"""`topology apply --change-ttl`: change the TTL of a delay queue without losing or doubling a message.

The TTL of a queue cannot be changed: the queue has to be emptied, deleted and declared again. Meanwhile a relay queue
with the new TTL takes its place:

    1  declare the relay, and move the bindings to it         new messages wait in the relay
    2  wait until the old queue is empty, and delete it       at most the old delay
    3  declare it with the new TTL, move the bindings back    new messages wait in the queue again
    4  wait until the relay is empty, and delete it           at most the new delay

The next step follows from what is on the broker, so that any process can go on with a change that was cut off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from pika import spec
from pika.amqp_object import Method
from pika.exceptions import ChannelClosedByBroker

from dlqbatch.broker.connection import Connection, Scratch, describe
from dlqbatch.broker.refusals import NO_PERMISSION, PRECONDITION_FAILED, mismatch
from dlqbatch.errors import BrokerLost, ChannelRefused, DlqbatchError
from dlqbatch.topology.model import CHANGING, TTL, Binding, Queue, relay_of

_GRACE: Final = 2.0
"""Seconds for a run that looked for the mark just before it was made, and may still declare."""
_LOOK_EVERY: Final = 0.2
_QUIET: Final = 12.0
"""Seconds that a quorum queue has to be empty by every count. How many messages it holds for its dead-letter exchange
is a statistic, which is renewed every five seconds."""
_API_RESTARTS_WITHIN: Final = 60.0
"""Seconds without the management API after which a change is cut off; until it ends no run declares anything."""


class ChangeUnderWay(DlqbatchError):
    """Somebody else is changing a delay on this virtual host at this moment."""

    def __init__(self) -> None:
        super().__init__(
            "somebody else is changing a delay on this virtual host just now; wait until that is done. If it was cut "
            "off, `dlqbatch topology apply --change-ttl` ends it. Nothing was changed."
        )


class ChangeNotSafe(DlqbatchError):
    """Only the management API can tell whether a quorum queue is empty, and it does not answer."""

    exit_code = 2

    def __init__(self, queue: str, why: str) -> None:
        super().__init__(
            f"the delay of the quorum queue '{queue}' can only be changed where the management API says that it is "
            f"empty: {why}. Set dlqbatch.management-url. Nothing was changed."
        )


class ChangeCutOff(DlqbatchError):
    """The management API stopped telling whether a quorum queue is empty."""

    exit_code = 4

    def __init__(self, queue: str, seconds: float) -> None:
        super().__init__(
            f"the change of a delay was cut off: for {seconds:g} s the management API has not told how much '{queue}' "
            "holds. No message is lost, and no run declares anything. When the API answers again "
            "(dlqbatch.management-url), run the same command again: it goes on where it was."
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A delay queue with the TTL that the settings want."""

    queue: Queue
    bindings: tuple[Binding, ...]
    """Every binding that leads into it."""
    is_quorum: bool
    entered_directly: bool
    """Drains also publish to it by the default exchange, which nobody can unbind."""


class Step(Enum):
    EMPTYING = "waits for the old queue to be empty"
    RETURNING = "waits for the relay to be empty"
    DONE = "done"


@dataclass(slots=True)
class _Change:
    wanted: Wanted
    calm_at: float
    """When nobody publishes to it by the default exchange any more; on the monotonic clock."""
    step: Step = Step.EMPTYING
    empty_since: float | None = None
    unknown_since: float | None = None

    @property
    def queue(self) -> Queue:
        return self.wanted.queue

    @property
    def relay(self) -> Queue:
        return replace(self.queue, name=relay_of(self.queue.name))


@dataclass(frozen=True, slots=True)
class Delays:
    """Changes any number of delays at once; only one process may do so on a virtual host."""

    connection: Connection
    messages: Callable[[str], int | None]
    """How many messages a queue holds by the management API; None if that is not known."""
    calm_after: float
    """Seconds after which every run that began before the change has ended."""
    report: Callable[[str, str], None] = lambda _queue, _step: None
    """Called with the queue and the step that it has reached."""
    quiet: float = _QUIET
    grace: float = _GRACE
    restarts_within: float = _API_RESTARTS_WITHIN

    def change(self, queues: Sequence[Wanted]) -> None:
        """Block for the longest old and the longest new delay; may be killed at any point and called again."""
        mark = Scratch(self.connection)
        try:
            self._mark(mark)
            calm_at = time.monotonic() + self.calm_after
            self.connection.pause(self.grace)
            changes = [_Change(one, calm_at if one.entered_directly else 0.0) for one in queues]
            for change in changes:
                self._begin(change)
            while under_way := [change for change in changes if change.step is not Step.DONE]:
                for change in under_way:
                    self._go_on(change)
                self.connection.pause(_LOOK_EVERY)
            mark.call("queue_delete", queue=CHANGING)
        finally:
            mark.close()

    @staticmethod
    def _mark(mark: Scratch) -> None:
        """A queue that outlives this process, and an exclusive consumer that does not: no two changes at once."""
        mark.call("queue_declare", queue=CHANGING, durable=True)
        try:
            mark.call("basic_consume", queue=CHANGING, on_message_callback=_ignore, exclusive=True)
        except ChannelRefused as refused:
            if refused.code != NO_PERMISSION:
                raise
            raise ChangeUnderWay from refused

    def _begin(self, change: _Change) -> None:
        relay_is_there = self._is_there(change.relay.name)
        if self._is_there(change.queue.name):
            is_new = self._is_as_wanted(change.queue)
            if is_new and not relay_is_there:
                change.step = Step.DONE
                return
        elif not relay_is_there:
            change.step = Step.DONE  # there is nothing to empty; it is declared with the rest of the topology
            return
        else:
            self._declare(change.queue)
            is_new = True
        if not relay_is_there:
            self._declare(change.relay)
        change.step = Step.RETURNING if is_new else Step.EMPTYING
        self._move_bindings(change)
        self.report(change.queue.name, change.step.value)

    def _go_on(self, change: _Change) -> None:
        # Every time, because a run that declares the topology meanwhile makes the old bindings again.
        self._move_bindings(change)
        if change.step is Step.EMPTYING:
            if self._replace_if_empty(change):
                change.step, change.empty_since = Step.RETURNING, None
                self.report(change.queue.name, change.step.value)
        elif self._delete_if_empty(change, change.relay.name):
            change.step = Step.DONE
            self.report(change.queue.name, change.step.value)

    def _move_bindings(self, change: _Change) -> None:
        """Move the bindings to the queue in which new messages have to wait."""
        old, new = change.queue.name, change.relay.name
        if change.step is Step.RETURNING:
            old, new = new, old
        self._send(_unbind_and_bind(change.wanted.bindings, old, new))

    def _replace_if_empty(self, change: _Change) -> bool:
        """Delete it, declare it again and move the bindings back, all or nothing."""
        queue = change.queue
        if not self._looks_empty(change, queue.name):
            return False
        anew = spec.Queue.Declare(queue=queue.name, durable=True, nowait=True, arguments=dict(queue.arguments))
        back = _unbind_and_bind(change.wanted.bindings, change.relay.name, queue.name)
        return self._send_if_empty([_delete(change, queue.name), anew, *back])

    def _delete_if_empty(self, change: _Change, queue: str) -> bool:
        return self._looks_empty(change, queue) and self._send_if_empty([_delete(change, queue)])

    def _send_if_empty(self, methods: Sequence[Method]) -> bool:
        try:
            self._send(methods)
        except ChannelRefused as refused:
            if refused.code != PRECONDITION_FAILED:
                raise
            return False
        return True

    def _send(self, methods: Sequence[Method]) -> None:
        """Send all methods in one write: pika would wait after each, with messages unroutable meanwhile."""
        refusals: list[BaseException] = []
        answers: list[object] = []
        channel = self.connection.open_channel()
        channel.add_on_close_callback(lambda _, error: refusals.append(error))
        # AMQP has no nowait for unbind, and pika closes the channel at an answer that it does not expect.
        channel.callbacks.add(channel.channel_number, spec.Queue.UnbindOk, _ignore, one_shot=False)
        for method in methods:
            channel._send_method(method)  # noqa: SLF001  (its public methods wait for one another)
        channel.basic_qos(callback=answers.append)
        self.connection.wait(lambda: answers or refusals, "a change of bindings")
        if not refusals:
            channel.close()
            return
        error = refusals[0]
        if isinstance(error, ChannelClosedByBroker):
            raise ChannelRefused(error.reply_code, error.reply_text)
        raise BrokerLost(describe(error)) from error

    def _looks_empty(self, change: _Change, queue: str) -> bool:
        """Whether it may be deleted. The broker itself refuses to delete a classic queue that holds a message."""
        with self.connection.scratch() as scratch:
            ready = scratch.ready(queue)
        if not change.wanted.is_quorum:
            return ready == 0
        now = time.monotonic()
        is_calm = now >= change.calm_at
        held = self.messages(queue) if is_calm and not ready else ready
        change.empty_since = (change.empty_since or now) if is_calm and held == 0 else None
        change.unknown_since = (change.unknown_since or now) if held is None else None
        if change.unknown_since is not None and now - change.unknown_since >= self.restarts_within:
            raise ChangeCutOff(queue, self.restarts_within)
        return change.empty_since is not None and now - change.empty_since >= self.quiet

    def _is_there(self, queue: str) -> bool:
        with self.connection.scratch() as scratch:
            return scratch.is_there("queue", queue)

    def _is_as_wanted(self, queue: Queue) -> bool:
        try:
            self._declare(queue)
        except ChannelRefused as refused:
            differs = mismatch(refused)
            if differs is None or differs.argument != TTL:
                raise differs or refused from refused
            return False
        return True

    def _declare(self, queue: Queue) -> None:
        with self.connection.scratch() as scratch:
            scratch.call("queue_declare", queue=queue.name, durable=True, arguments=dict(queue.arguments))


def _unbind_and_bind(bindings: Sequence[Binding], old: str, new: str) -> list[Method]:
    methods: list[Method] = []
    for one in bindings:
        methods.append(spec.Queue.Unbind(queue=old, exchange=one.exchange, routing_key=one.key, arguments={}))
        methods.append(
            spec.Queue.Bind(queue=new, exchange=one.exchange, routing_key=one.key, nowait=True, arguments={})
        )
    return methods


def _delete(change: _Change, queue: str) -> Method:
    # For a quorum queue if_empty would close the connection.
    return spec.Queue.Delete(queue=queue, if_empty=not change.wanted.is_quorum, nowait=True)


def _ignore(*_: object) -> None:
    """The callback of the consumer of the mark, and for answers to unbind."""
