"""What may stand between a retry and its success: each situation with what is true of it, and what may be claimed.

A claim is `sent`, `acknowledged`, `resolved`, `failed` (it came back) or `manual`. `expected` is what the last one has
to be when the time is over; the stage finds out whether any claim before it was false.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from outcomes.stage import Play
    from outcomes.workers import Hands

CLASSIC, QUORUM = "classic", "quorum"
OLD, NEW = "3.10", "4.3"
SENT, ACKNOWLEDGED, RESOLVED, FAILED, MANUAL = "sent", "acknowledged", "resolved", "failed", "manual"
LETTERS: Final = {"dead_letter_exchange": "retry-exchange", "dead_letter_routing_key": "retry-routing-key"}


@dataclass(frozen=True)
class Situation:
    name: str
    title: str
    arrange: Callable[[Play], None]
    """Declares what there is, before the message is sent."""
    expected: tuple[str, ...]
    when_sent: Callable[[Play], None] | None = None
    """What somebody does as soon as the broker has the message."""
    kinds: tuple[str, ...] = (CLASSIC, QUORUM)
    releases: tuple[str, ...] = (OLD, NEW)
    without: tuple[tuple[str, str], ...] = ()
    """Kinds of queues and releases that do not have it."""
    deployment: str = "main"
    remark: str = ""
    """A limit that is known: why a claim here may be more than what was seen."""
    may_be_false: bool = False
    """The broker cannot tell it from a success; `remark` says why."""

    def runs_on(self, kind: str, release: str) -> bool:
        return kind in self.kinds and release in self.releases and (kind, release) not in self.without


# --- What consumers do


def ack(hands: Hands) -> None:
    hands.ack()


def hold(hands: Hands) -> None:
    """Never settled."""


def hold_ours(hands: Hands) -> None:
    if not hands.is_ours:
        hands.ack()


def hold_ours_and_work(hands: Hands) -> None:
    if not hands.is_ours:
        hands.later(0.5, hands.ack)


def after(seconds: float) -> Callable[[Hands], None]:
    return lambda hands: hands.later(seconds, hands.ack)


def crash(hands: Hands) -> None:
    hands.crash()


def requeue(hands: Hands) -> None:
    hands.later(1, hands.requeue)


def delay_for_ever(hands: Hands) -> None:
    hands.requeue()


def requeue_once(hands: Hands) -> None:
    hands.requeue() if hands.times == 1 else hands.ack()


def reject(hands: Hands) -> None:
    hands.reject()


def reject_ours(hands: Hands) -> None:
    hands.reject() if hands.is_ours else hands.ack()


def refuse_ours(hands: Hands) -> None:
    """Counted by a delivery limit on every release."""
    hands.put_back() if hands.is_ours else hands.ack()


def ack_then_reject_a_copy(hands: Hands) -> None:
    """As an error handler does that publishes what failed, and acknowledges it."""
    hands.ack()
    if hands.is_ours:
        hands.later(2, lambda: hands.give_up("retry-exchange", "retry-routing-key"))


# --- What there is


def plain(
    act: Callable[[Hands], None] | None, /, queue: dict[str, Any] | None = None, **worker: Any
) -> Callable[[Play], None]:
    """One queue and one consumer, or none."""

    def arrange(play: Play) -> None:
        play.queue(**(LETTERS if queue is None else queue))
        if act is not None:
            play.worker(act, **worker)

    return arrange


def busy(
    *workers: tuple[Callable[[Hands], None], dict[str, Any]], backlog: int = 12, rate: float = 1.0, **queue: Any
) -> Callable[[Play], None]:
    """A queue that other messages come to all the time, so many a second."""

    def arrange(play: Play) -> None:
        play.queue(**LETTERS, **queue)
        play.others(backlog)
        for act, options in workers:
            play.worker(act, **options)
        play.traffic(rate)

    return arrange


def starved(play: Play) -> None:
    ranked = {"max_priority": 9} if play.kind == CLASSIC else {}
    play.queue(**LETTERS, **ranked)
    play.others(8, priority=9)
    play.worker(after(1.0))
    play.traffic(1.5, priority=9)


def hung_beside_a_live_one(play: Play) -> None:
    """The hung one is served first, and has room for one."""
    play.queue(**LETTERS)
    play.worker(hold_ours, arguments={"x-priority": 10})
    play.worker(ack, prefetch=5)


def two_queues(act: Callable[[Hands], None] | None) -> Callable[[Play], None]:
    def arrange(play: Play) -> None:
        play.exchange("topic")
        for name in ("mail", "audit"):
            play.queue(name, **LETTERS)
            play.bind(play.name_of(name), "orders.*")
        play.worker(ack, play.name_of("mail"))
        if act is not None:
            play.worker(act, play.name_of("audit"))
        play.truth.copies = 2

    return arrange


def alternate(act: Callable[[Hands], None] | None) -> Callable[[Play], None]:
    def arrange(play: Play) -> None:
        play.queue(**LETTERS)
        play.declare_exchange(play.name_of("alternate"), "fanout")
        play.bind(play.name_of(), "", play.name_of("alternate"))
        play.exchange("direct", **{"alternate-exchange": play.name_of("alternate")})
        if act is not None:
            play.worker(act)

    return arrange


def exchange_to_exchange(act: Callable[[Hands], None] | None) -> Callable[[Play], None]:
    def arrange(play: Play) -> None:
        play.queue(**LETTERS)
        play.exchange("topic")
        play.declare_exchange(play.name_of("second"), "direct")
        play.bind(play.name_of(), "orders.created", play.name_of("second"))
        play.bind_exchange(play.name_of("second"), "orders.#")
        if act is not None:
            play.worker(act)

    return arrange


def own_delay_loop(play: Play) -> None:
    play.queue("wait", message_ttl=4_000, dead_letter_exchange="", dead_letter_routing_key=play.name_of())
    play.queue(dead_letter_exchange="", dead_letter_routing_key=play.name_of("wait"))
    play.worker(reject)


def private_letters(play: Play) -> None:
    play.queue("letters")
    play.queue(dead_letter_exchange="", dead_letter_routing_key=play.name_of("letters"))
    play.worker(reject)


def rejected_beside_others(play: Play) -> None:
    play.queue()
    play.worker(reject_ours)
    play.traffic(1.0)


def poison(play: Play) -> None:
    """Others are acknowledged beside it, so that the counters alone do not tell."""
    play.queue(delivery_limit=5)
    play.worker(refuse_ours)
    play.traffic(1.0)


def audited_letters(play: Play) -> None:
    play.declare_exchange(play.name_of("exchange"), "fanout")
    play.queue("audit")
    play.bind(play.name_of("audit"), "")
    play.bind_exchange("retry-exchange", "")
    play.queue(dead_letter_exchange=play.name_of("exchange"), dead_letter_routing_key="retry-routing-key")
    play.worker(ack)


def held_up_letters(play: Play) -> None:
    play.queue("full", kind=CLASSIC, max_length=1, overflow="reject-publish")
    play.others(1, queue=play.name_of("full"))
    once = {"dead_letter_strategy": "at-least-once", "overflow": "reject-publish"}
    play.queue(dead_letter_exchange="", dead_letter_routing_key=play.name_of("full"), **once)
    play.worker(reject)


def short(play: Play) -> None:
    play.queue(max_length=2)


def is_dropped(play: Play) -> None:
    """The consumer that comes too late handles all that is left."""
    play.others(4)
    play.truth.note("dropped", play.name_of())
    play.worker(ack)
    play.start_workers()


def expires(play: Play) -> None:
    play.truth.note("expired", play.name_of())


def competing(play: Play) -> None:
    play.queue(**LETTERS, single_active_consumer=True)
    play.worker(ack)
    play.worker(ack)


# --- What somebody does meanwhile


def purge(play: Play) -> None:
    play.channel.queue_purge(play.name_of())
    play.truth.note("purged", play.name_of())


def delete(play: Play) -> None:
    play.channel.queue_delete(play.name_of())
    play.truth.note("deleted", play.name_of())


def replace(play: Play) -> None:
    delete(play)
    play.queue(**LETTERS)
    play.worker(ack)
    play.start_workers()


def unbind(play: Play) -> None:
    play.channel.queue_unbind(play.name_of(), play.name_of("exchange"), "orders.*")


def unbind_audit(play: Play) -> None:
    play.channel.queue_unbind(play.name_of("audit"), play.name_of("exchange"), "orders.*")


def move(play: Play) -> None:
    """As a shovel or the management UI's "Move messages" does."""
    play.queue("parked")
    method, properties, body = play.channel.basic_get(play.name_of())
    play.channel.basic_publish("", play.name_of("parked"), body, properties)
    play.truth.note("moved", play.name_of())
    play.channel.basic_ack(method.delivery_tag)


def behind_exchange(play: Play) -> None:
    play.queue(**LETTERS)
    play.exchange("topic")
    play.bind(play.name_of(), "orders.*")


TAKEN_BY_OTHERS = (
    "Whoever acknowledges a message is a consumer to the broker, also a shovel or 'Move messages' of the management UI."
)
COPIED = "A copy counts as a failed attempt if its headers say whose it is, else as a new message."
SAME_CHANNEL = (
    "A worker that hangs on one message and acknowledges later ones on the same channel cannot be told from one that "
    "works, as long as the queue never empties."
)
BINDINGS = "Only queues that are bound when a run looks are known."
DISCARDED = (
    "The broker discards it, and does not count rejections. Only a queue without other traffic shows that nothing was "
    "acknowledged."
)
BY_WINDOW = "Nobody sees what the consumer holds, and the observation window decides."

SITUATIONS: Final = (
    Situation("good", "a consumer acknowledges it at once", plain(ack), (RESOLVED,)),
    Situation(
        "good-no-letters",
        "the same in a queue without a dead-letter exchange",
        plain(ack, {}),
        (RESOLVED,),
    ),
    Situation("slow", "a consumer needs 20 s for it", plain(after(20)), (RESOLVED,)),
    Situation(
        "late-statistics",
        "a consumer acknowledges it after 6 s, before the statistics show it",
        plain(after(6)),
        (RESOLVED,),
    ),
    Situation("no-consumer", "nobody consumes", plain(None), (SENT,)),
    Situation("hung", "a consumer holds it and does nothing", plain(hold), (SENT,)),
    Situation("crash-loop", "it kills its consumer again and again", plain(crash), (SENT,)),
    Situation("requeue", "a consumer requeues it for ever", plain(requeue), (SENT,)),
    Situation("requeued-once", "a consumer requeues it once, then acknowledges it", plain(requeue_once), (RESOLVED,)),
    Situation(
        "delayed-retry",
        "the broker's delayed retry holds it back",
        plain(
            delay_for_ever,
            {**LETTERS, "delayed_retry_type": "all", "delayed_retry_min": 600_000, "delayed_retry_max": 600_000},
        ),
        (SENT,),
        kinds=(QUORUM,),
        releases=(NEW,),
    ),
    Situation(
        "starved", "messages of higher priority keep its consumer busy", starved, (SENT,), without=((QUORUM, OLD),)
    ),
    Situation(
        "backlog-1",
        "busy queue, one worker with prefetch 1",
        busy((after(0.8), {"prefetch": 1}), rate=1.3),
        (SENT, ACKNOWLEDGED, RESOLVED),
    ),
    Situation(
        "backlog-10",
        "busy queue, one worker with prefetch 10",
        busy((after(4.0), {"prefetch": 10}), rate=2.6),
        (SENT, ACKNOWLEDGED, RESOLVED),
    ),
    Situation(
        "backlog-parallel",
        "busy queue, three workers with prefetch 5",
        busy((after(1.0), {"prefetch": 5}), (after(1.3), {"prefetch": 5}), (after(0.7), {"prefetch": 5}), rate=15),
        (SENT, ACKNOWLEDGED, RESOLVED),
    ),
    Situation(
        "backlog-hung-thread",
        "busy queue, one thread of its worker hangs on it and others use the same channel",
        busy((hold_ours_and_work, {"prefetch": 10}), rate=2.0),
        (SENT, ACKNOWLEDGED, RESOLVED),
        remark=SAME_CHANNEL,
        may_be_false=True,
    ),
    Situation(
        "backlog-hung",
        "busy queue, its only worker hangs on it",
        busy((hold_ours, {"prefetch": 1}), rate=1.0),
        (SENT,),
    ),
    Situation("hung-beside-live", "a worker hangs on it beside one that works", hung_beside_a_live_one, (SENT,)),
    Situation(
        "hung-beside-busy",
        "a worker hangs on it beside one that is busy",
        busy((hold_ours, {"arguments": {"x-priority": 10}}), (after(0.5), {"prefetch": 2}), backlog=0, rate=2.0),
        (SENT,),
    ),
    Situation("single-active", "two consumers, one of them active", competing, (RESOLVED,)),
    Situation("auto-ack", "a consumer without acknowledgements", plain(ack, auto_ack=True), (RESOLVED,)),
    Situation("polling", "a worker takes it by `basic.get` and acknowledges it", plain(ack, polls=True), (RESOLVED,)),
    Situation("two-queues", "exchange with two queues, both acknowledge it", two_queues(ack), (RESOLVED,)),
    Situation("two-queues-one-idle", "exchange with two queues, one without a consumer", two_queues(None), (SENT,)),
    Situation("two-queues-one-hung", "exchange with two queues, one consumer hangs", two_queues(hold), (SENT,)),
    Situation("alternate", "alternate exchange, no consumer", alternate(None), (SENT,)),
    Situation(
        "alternate-good",
        "alternate exchange, acknowledged",
        alternate(ack),
        (RESOLVED,),
    ),
    Situation(
        "exchanges",
        "bound exchanges, no consumer",
        exchange_to_exchange(None),
        (SENT,),
    ),
    Situation(
        "exchanges-good",
        "bound exchanges, acknowledged",
        exchange_to_exchange(ack),
        (RESOLVED,),
    ),
    Situation(
        "unbound-one",
        "one of two queues is unbound after the send and has no consumer",
        two_queues(None),
        (SENT, RESOLVED),
        unbind_audit,
        remark=BINDINGS,
        may_be_false=True,
    ),
    Situation("unbound", "its queue is unbound while it holds it", behind_exchange, (SENT, MANUAL), unbind),
    Situation("deleted", "its queue is deleted with it", plain(None), (SENT, MANUAL), delete),
    Situation(
        "replaced",
        "its queue is deleted with it and declared again",
        plain(None),
        (SENT, MANUAL),
        replace,
    ),
    Situation("purged", "its queue is purged", plain(None), (SENT,), purge),
    Situation(
        "moved",
        "somebody moves it to a queue without a consumer",
        plain(None),
        (SENT, ACKNOWLEDGED, RESOLVED),
        move,
        remark=TAKEN_BY_OTHERS,
        may_be_false=True,
    ),
    Situation(
        "expired",
        "it expires, no dead-letter exchange",
        plain(None, {"message_ttl": 2_000}),
        (SENT, MANUAL),
        expires,
    ),
    Situation("dropped", "a full queue drops it", short, (SENT, MANUAL), is_dropped),
    Situation(
        "rejected-nowhere",
        "rejected, no dead-letter exchange",
        plain(reject, {}),
        (SENT, MANUAL),
    ),
    Situation(
        "rejected-nowhere-busy",
        "the same beside messages that are acknowledged",
        rejected_beside_others,
        (SENT, ACKNOWLEDGED, RESOLVED),
        remark=DISCARDED,
        may_be_false=True,
    ),
    Situation(
        "poison-nowhere",
        "a delivery limit drops it, no dead-letter exchange",
        poison,
        (SENT, MANUAL),
        kinds=(QUORUM,),
    ),
    Situation(
        "audited-letters",
        "acknowledged; its dead letters would also go to a queue of somebody else",
        audited_letters,
        (RESOLVED,),
    ),
    Situation(
        "rejected-private",
        "rejected into a dead-letter queue that no job reads",
        private_letters,
        (SENT, ACKNOWLEDGED),
    ),
    Situation("own-delay-loop", "rejected into a delay queue that leads back", own_delay_loop, (SENT,)),
    Situation("rejected", "rejected, and it comes back", plain(reject), (FAILED,)),
    Situation(
        "held-up-letters",
        "rejected, and at-least-once dead-lettering is blocked",
        held_up_letters,
        (SENT, ACKNOWLEDGED),
        kinds=(QUORUM,),
    ),
    Situation(
        "late-copy",
        "acknowledged, and published to the dead letters 2 s later",
        plain(ack_then_reject_a_copy),
        (FAILED, RESOLVED),
        remark=COPIED,
    ),
    Situation("no-ingest", "acknowledged, no ingest runs", plain(ack), (ACKNOWLEDGED,), deployment="no-ingest"),
    Situation("no-drain", "acknowledged, no drain runs", plain(ack), (ACKNOWLEDGED,), deployment="no-drain"),
    Situation("no-api", "acknowledged, no management API", plain(ack), (SENT, RESOLVED), deployment="no-api"),
    Situation("no-api-idle", "nobody consumes, no management API", plain(None), (SENT,), deployment="no-api"),
    Situation(
        "no-api-hung",
        "a consumer holds it, no management API",
        plain(hold),
        (SENT, RESOLVED),
        deployment="no-api",
        may_be_false=True,
        remark=BY_WINDOW,
    ),
    Situation(
        "other-api",
        "nobody consumes, management API of another broker",
        plain(None),
        (SENT,),
        deployment="other-api",
    ),
    Situation(
        "other-api-good",
        "acknowledged, management API of another broker",
        plain(ack),
        (SENT, RESOLVED),
        deployment="other-api",
    ),
)
