"""Changing the delay of a queue without losing, doubling or stranding what waits in it.

A queue's TTL cannot be changed: it has to be emptied, deleted and declared anew. Meanwhile a relay, a queue that has
the new delay already, stands in for it:

    1  declare the relay, and move the bindings to it         what is new waits in the relay
    2  wait until the old queue is empty, and delete it       at most the old delay
    3  declare it anew, and move the bindings back            what is new waits where it belongs
    4  wait until the relay is empty, and delete it           at most the new delay

Which step is next can be read off what is there, so that whoever was killed can be followed by somebody else.
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
"""Seconds for a run that has looked for the mark just before it was made, and declares now."""
_LOOK_EVERY: Final = 0.2
_QUIET: Final = 12.0
"""Seconds that a quorum queue has to be empty by every count: the counts of what it holds for its dead-letter exchange
are statistics, renewed every five seconds."""
_API_RESTARTS_WITHIN: Final = 60.0
"""Seconds in which the management API may be restarted; a longer wait would keep every run from declaring."""


class ChangeUnderWay(DlqbatchError):
    """Somebody else is changing a delay on this virtual host at this moment."""

    def __init__(self) -> None:
        super().__init__(
            "somebody else is changing a delay on this virtual host just now; wait until that is done. If it was cut "
            "off, `dlqbatch topology apply --change-ttl` ends it. Nothing was changed."
        )


class ChangeNotSafe(DlqbatchError):
    """Whether a quorum queue is empty only the management API can tell."""

    exit_code = 2

    def __init__(self, queue: str, why: str) -> None:
        super().__init__(
            f"the delay of the quorum queue '{queue}' can only be changed where the management API says that it is "
            f"empty: {why}. Set dlqbatch.management-url. Nothing was changed."
        )


class ChangeCutOff(DlqbatchError):
    """The management API tells no more whether a quorum queue is empty."""

    exit_code = 4

    def __init__(self, queue: str, seconds: float) -> None:
        super().__init__(
            f"the change of a delay was cut off: for {seconds:g} s the management API has not told how much '{queue}' "
            "holds. No message is lost, and no run declares anything. When the API answers again "
            "(dlqbatch.management-url), run the same command again: it goes on where it was."
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A delay queue as it is to be."""

    queue: Queue
    bindings: tuple[Binding, ...]
    """All that leads into it."""
    is_quorum: bool
    entered_directly: bool
    """Drains publish into it through the default exchange as well, which nobody can unbind."""


class Step(Enum):
    EMPTYING = "waits for the old queue to be empty"
    RETURNING = "waits for the relay to be empty"
    DONE = "done"


@dataclass(slots=True)
class _Change:
    wanted: Wanted
    calm_at: float
    """When nobody publishes to the queue any more without a binding; on the monotonic clock."""
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
    """Changes delays, any number at once; only one such change may be at work on a virtual host."""

    connection: Connection
    messages: Callable[[str], int | None]
    """All that a queue holds, by the management API; None if nobody knows."""
    calm_after: float
    """Seconds after which every run that had begun before has ended."""
    report: Callable[[str, str], None] = lambda _queue, _step: None
    """The queue, and which step it has come to."""
    quiet: float = _QUIET
    grace: float = _GRACE
    restarts_within: float = _API_RESTARTS_WITHIN

    def change(self, queues: Sequence[Wanted]) -> None:
        """Blocks for the old and the new delay of the slowest; may be cut at any point and called again."""
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
        """The queue stays when we are cut off, the consumer does not: so one may follow, but never two at once."""
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
            change.step = Step.DONE  # nothing to empty: it is declared with all the others
            return
        else:
            self._declare(change.queue)
            is_new = True
        if not relay_is_there:
            self._declare(change.relay)
        change.step = Step.RETURNING if is_new else Step.EMPTYING
        self._turn(change)
        self.report(change.queue.name, change.step.value)

    def _go_on(self, change: _Change) -> None:
        # Again and again: whoever declared the topology just now has bound what must not be bound.
        self._turn(change)
        if change.step is Step.EMPTYING:
            if self._replace_if_empty(change):
                change.step, change.empty_since = Step.RETURNING, None
                self.report(change.queue.name, change.step.value)
        elif self._delete_if_empty(change, change.relay.name):
            change.step = Step.DONE
            self.report(change.queue.name, change.step.value)

    def _turn(self, change: _Change) -> None:
        """Lead what is new to where it has to wait; in one write, so that hardly anything comes in between."""
        old, new = change.queue.name, change.relay.name
        if change.step is Step.RETURNING:
            old, new = new, old
        self._send(_turn(change.wanted.bindings, old, new))

    def _replace_if_empty(self, change: _Change) -> bool:
        """Delete it, declare it anew and move the bindings back in one go, or none of it."""
        queue = change.queue
        if not self._looks_empty(change, queue.name):
            return False
        anew = spec.Queue.Declare(queue=queue.name, durable=True, nowait=True, arguments=dict(queue.arguments))
        back = _turn(change.wanted.bindings, change.relay.name, queue.name)
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
        """Send all without waiting in between, as pika would: what is published meanwhile has nowhere to go."""
        refusals: list[BaseException] = []
        answers: list[object] = []
        channel = self.connection.open_channel()
        channel.add_on_close_callback(lambda _, error: refusals.append(error))
        # The one method here that cannot be sent without asking for an answer, which pika would call unexpected.
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
        """Whether it may be deleted. A classic queue the broker checks itself; a quorum queue has to be watched."""
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


def _turn(bindings: Sequence[Binding], old: str, new: str) -> list[Method]:
    methods: list[Method] = []
    for one in bindings:
        methods.append(spec.Queue.Unbind(queue=old, exchange=one.exchange, routing_key=one.key, arguments={}))
        methods.append(
            spec.Queue.Bind(queue=new, exchange=one.exchange, routing_key=one.key, nowait=True, arguments={})
        )
    return methods


def _delete(change: _Change, queue: str) -> Method:
    # A quorum queue knows no "if empty": asking for it would close the connection.
    return spec.Queue.Delete(queue=queue, if_empty=not change.wanted.is_quorum, nowait=True)


def _ignore(*_: object) -> None:
    """The callback for the mark, where nothing is published, and for answers that say nothing."""
