"""What the options of a queue do to its messages: limits, TTLs, overflow; and what RabbitMQ 4 does to them."""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote
from typing import Final

from dlqbatch.broker.facts import QueueFacts, listed
from dlqbatch.broker.versions import DELAYS_RETRIES, LIMITS_DELIVERIES
from dlqbatch.doctor import commands
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.virtual_host import VirtualHost

_FEWEST_REDELIVERIES: Final = 10
"""Fewer redeliveries can come from a consumer that was restarted."""
_DELIVERIES_PER_REDELIVERY: Final = 10
_REQUEUED_A_SECOND: Final = 5.0
"""Fewer redeliveries a second can come from a consumer that waits after a failure."""


def examine(vhost: VirtualHost) -> Iterator[Finding]:
    for queue in vhost.shared_queues:
        yield from _delivery_limit(vhost, queue)
        yield from _expiry(vhost, queue)
        yield from _overflow(vhost, queue)
        yield from _failing_without_dead_letters(vhost, queue)
        yield from _at_least_once(vhost, queue)
        yield from _expirations_mixed(vhost, queue)
        yield from _dead_letters_pile_up(vhost, queue)
        yield from _requeued_for_ever(vhost, queue)
        yield from _stuck_dead_letters(vhost, queue)
        yield from _single_active_consumer(vhost, queue)
        yield from _refused_options(vhost, queue)
        if vhost.broker.version >= DELAYS_RETRIES:
            yield from _delayed_retry(vhost, queue)
    yield from _origin_not_lasting(vhost)
    yield from _at_most_once(vhost)
    if vhost.broker.version >= DELAYS_RETRIES:
        yield from _nack_never_counts(vhost)
    yield from _delayed_exchanges(vhost)


def _delivery_limit(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    broker = vhost.broker
    limit = queue.delivery_limit(broker.version)
    if limit is None:
        return
    has_exit = queue.dead_letter_exchange is not None
    if not has_exit and queue.name in vhost.holding:
        what = (
            f"a quorum queue of dead letters or retries that deletes a message after {limit} deliveries; on RabbitMQ "
            "4.3 a message that a delivery limit brought here has used up its own already"
        )
        yield Finding(Code.DELIVERY_LIMIT_DELETES, queue.name, what, _without_limit(vhost, queue))
    elif not queue.says_limit and queue.name not in vhost.delays:
        if has_exit:
            what = f"nobody has set a delivery limit, so after {limit} deliveries a message is dead-lettered"
            code = Code.DELIVERY_LIMIT_UNSET
        else:
            what = f"nobody has set a delivery limit, so after {limit} deliveries a message is deleted"
            code = Code.DELIVERY_LIMIT_DEFAULT
        kept = commands.set_policy(broker, queue, {"delivery-limit": limit})
        fix = kept if has_exit else _without_limit(vhost, queue)
        yield Finding(code, queue.name, what, fix)


def _without_limit(vhost: VirtualHost, queue: QueueFacts) -> str:
    """A policy with -1, unless the declaration or an operator policy has a limit; then a dead-letter exchange."""
    operator = {} if queue.operator is None else queue.operator.definition
    is_set_elsewhere = "x-delivery-limit" in queue.arguments or "delivery-limit" in operator
    if vhost.broker.version >= LIMITS_DELIVERIES and not is_set_elsewhere:
        return commands.set_policy(vhost.broker, queue, {"delivery-limit": -1})
    if queue.name in vhost.deployment.inner_queues:
        # A dead-letter exchange behind a queue of retries would bypass the ladder.
        return vhost.without_option(queue, "delivery-limit")
    return vhost.to_retry(queue)


def _expiry(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    expires = queue.number("expires")
    is_delay = queue.name in vhost.delays
    if expires is not None and (queue.name in vhost.holding or is_delay):
        what = f"the queue itself is deleted, with all it holds, when nobody has used it for {expires} ms"
        yield Finding(Code.QUEUE_EXPIRES, queue.name, what, vhost.without_option(queue, "expires"))
    if queue.ttl is None or queue.dead_letter_exchange is not None:
        return
    if queue.name in vhost.holding:
        what = f"a dead letter or a retry is deleted after {queue.ttl} ms: it has a TTL and no dead-letter exchange"
        yield Finding(Code.DEAD_LETTERS_EXPIRE, queue.name, what, vhost.without_option(queue, "message-ttl"))
    elif is_delay or (queue.consumers == 0 and not queue.delivered and queue.is_lasting):
        what = f"a message is deleted after {queue.ttl} ms: there is a TTL, no dead-letter exchange and no consumer"
        is_ours = queue.name in vhost.deployment.own_queues
        anew = f"{commands.delete_if_empty(vhost.broker, queue)} && {commands.APPLY}"
        yield Finding(Code.DELAY_WITHOUT_OUTLET, queue.name, what, anew if is_ours else vhost.to_retry(queue))


def _overflow(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    bound = queue.longest
    if bound is not None and queue.overflow == "reject-publish-dlx" and queue.dead_letter_exchange is not None:
        what = (
            f"{bound} with reject-publish-dlx: when it is full, what is sent or returned to it is refused and "
            "dead-lettered as well, so that the sender keeps it and each try makes one more of it"
        )
        yield Finding(Code.OVERFLOW_COPIES, queue.name, what, _reject_publish(vhost, queue))
    # A temporary queue may be meant to drop messages.
    if bound is None or queue.overflow != "drop-head" or not queue.is_lasting:
        return
    is_delay = queue.name in vhost.delays
    if queue.dead_letter_exchange is not None and not is_delay:
        return
    lost = "moved on before its time" if queue.dead_letter_exchange is not None else "deleted"
    what = f"{bound} without reject-publish: when it is full the oldest message is {lost}, and nobody is told"
    yield Finding(
        Code.OVERFLOW_DROPS,
        queue.name,
        what,
        _reject_publish(vhost, queue),
    )


def _reject_publish(vhost: VirtualHost, queue: QueueFacts) -> str:
    if "x-overflow" in queue.arguments:
        wanted = {"x-overflow": "reject-publish"}
        return vhost.declare_anew(queue, wanted)
    return commands.set_policy(vhost.broker, queue, {"overflow": "reject-publish"})


def _failing_without_dead_letters(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    if queue.dead_letter_exchange is not None or not queue.consumers or queue.name in vhost.holding:
        return
    again, delivered = queue.redelivered or 0, queue.delivered or 0
    if again < _FEWEST_REDELIVERIES or again * _DELIVERIES_PER_REDELIVERY < delivered:
        return
    what = (
        f"its consumers fail ({again} of {delivered} deliveries were repeated) and it has no dead-letter exchange: a "
        "message is either repeated for ever or gone when it is rejected"
    )
    yield Finding(Code.FAILING_WITHOUT_DEAD_LETTERS, queue.name, what, vhost.to_retry(queue))


def _requeued_for_ever(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    again, all_of_them = queue.redelivered_rate, queue.delivered_rate
    if not queue.consumers or again < _REQUEUED_A_SECOND or again * 2 < all_of_them or queue.name in vhost.holding:
        return
    better = "reject without requeue, and the ladder counts and waits"
    if queue.name in vhost.deployment.native_queues:
        better = "basic.reject with requeue is what the broker counts and delays"
    what = (
        f"{again:.0f} of {all_of_them:.0f} deliveries a second are repeated: a consumer gives back what fails and gets "
        f"it again at once. Nothing counts that; {better}"
    )
    fix = commands.list_consumers(vhost.broker)
    yield Finding(Code.REQUEUED_FOR_EVER, queue.name, what, fix)


def _stuck_dead_letters(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    if queue.stuck:
        what = (
            f"{queue.stuck} messages are neither ready nor with a consumer, and stay so: dead letters that nobody "
            "confirms, because they lead nowhere, their target is full, or (before RabbitMQ 4.3.3) for no reason"
        )
        columns = ("name", "messages", "messages_ready", "messages_unacknowledged", "policy")
        yield Finding(
            Code.STUCK_DEAD_LETTERS, queue.name, what, commands.rabbitmqctl(vhost.broker, "list_queues", *columns)
        )


def _single_active_consumer(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """Only a quorum queue refuses basic.get then; a classic queue allows it."""
    if queue.type != "quorum" or queue.arguments.get("x-single-active-consumer") is not True:
        return
    if queue.name in vhost.deployment.read:
        what = (
            "a quorum queue with a single active consumer refuses basic.get: ingest and check can take nothing from it"
        )
        option = "single-active-consumer"
        yield Finding(Code.SINGLE_ACTIVE_CONSUMER, queue.name, what, vhost.without_option(queue, option))


def _at_least_once(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    if queue.type != "quorum" or queue.text("dead-letter-strategy") != "at-least-once":
        return
    if queue.dead_letter_exchange is not None and queue.overflow != "reject-publish":
        what = "at-least-once dead-lettering is asked for, but works with overflow reject-publish only"
        fix = _reject_publish(vhost, queue)
        yield Finding(Code.AT_LEAST_ONCE_INEFFECTIVE, queue.name, what, fix)


def _expirations_mixed(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    """What leaves a queue that has no consumer, no TTL and no maximal length has expired by its own expiration."""
    if queue.dead_letter_exchange is None or queue.ttl is not None or queue.longest is not None:
        return
    if queue.name in vhost.holding or queue.consumers != 0 or queue.delivered or queue.messages is None:
        return
    gone = (queue.published or 0) - queue.messages
    if gone > 0:
        what = (
            f"it works as a delay queue ({gone} messages left it without a consumer), but each message brings its own "
            "expiration: one with a long time at the head holds up all behind it"
        )
        fix = commands.set_policy(vhost.broker, queue, {"message-ttl": 60_000})
        yield Finding(Code.EXPIRATIONS_MIXED, queue.name, what, fix)


def _dead_letters_pile_up(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    if queue.name not in vhost.ends or not queue.messages or queue.consumers or queue.delivered:
        return
    if queue.name in vhost.deployment.read or queue.name in vhost.old_tiers:
        return
    what = f"{queue.messages} dead letters, and nobody takes them: it has no consumer, and ingest does not name it"
    yield Finding(Code.DEAD_LETTERS_PILE_UP, queue.name, what, f"dlqbatch ingest {quote(queue.name)}")


def _origin_not_lasting(vhost: VirtualHost) -> Iterator[Finding]:
    for queue in vhost.there.queues.values():
        if queue.name in vhost.origins and not queue.is_lasting:
            kind = "exclusive" if queue.exclusive else "auto-delete" if queue.auto_delete else "not durable"
            what = f"its failures are retried, but it is {kind}: when it is gone, they become dead letters"
            durable = f"{queue.name}.durable"
            yield Finding(Code.ORIGIN_NOT_LASTING, queue.name, what, commands.make_queue(vhost.broker, durable))


def _at_most_once(vhost: VirtualHost) -> Iterator[Finding]:
    """One note for all classic queues, because it is the default of the broker."""
    classic, quorum = [], []
    for queue in vhost.shared_queues:
        if queue.dead_letter_exchange is None or queue.name not in vhost.origins | vhost.delays:
            continue
        if queue.type == "classic":
            classic.append(queue.name)
        elif queue.text("dead-letter-strategy") != "at-least-once":
            quorum.append(queue)
    if classic:
        what = "the broker's own hop to the dead-letter exchange is not confirmed; a crash at that moment loses it"
        yield Finding(
            Code.DEAD_LETTER_AT_MOST_ONCE,
            listed(classic),
            f"{what}. Only quorum queues can do better, under another name",
            "dlqbatch topology plan -s queue_type=quorum",
        )
    for queue in quorum:
        wanted = {"dead-letter-strategy": "at-least-once", "overflow": "reject-publish"}
        yield Finding(
            Code.DEAD_LETTER_AT_MOST_ONCE,
            queue.name,
            "the quorum queue's hop to its dead-letter exchange is not confirmed; a crash at that moment loses it",
            commands.set_policy(vhost.broker, queue, wanted),
        )


_DELAYED_EXCHANGE: Final = "x-delayed-message"
_DELAYED_RETRY: Final = ("delayed-retry-type", "delayed-retry-min", "delayed-retry-max")
_REFUSED_OPTIONS: Final = {"queue-mode": None, "queue-version": 1, "queue-master-locator": None}
"""The arguments of queues that RabbitMQ 4.3 refuses, each with the refused value; None: every value."""


def _refused_options(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    found = [
        name
        for name, refused in _REFUSED_OPTIONS.items()
        if (value := queue.arguments.get(f"x-{name}")) is not None and refused in {None, value}
    ]
    if found:
        words = listed(f"x-{name}" for name in found)
        what = f"declared with {words}: RabbitMQ 4.3 refuses such a declaration, so that its clients cannot start there"
        fix = vhost.declare_anew(queue, {}, *found)
        yield Finding(Code.QUEUE_MODE_ARGUMENT, queue.name, what, fix)


def _delayed_retry(vhost: VirtualHost, queue: QueueFacts) -> Iterator[Finding]:
    retry = queue.delayed_retry
    if retry is None or queue.type != "quorum":
        return
    kind, longest = retry
    if queue.name in vhost.deployment.read:
        what = (
            f"delayed retry ({kind}) hides for up to {longest} ms what a run leaves in it: the queue looks empty and "
            "is not, and nobody can take what is hidden"
        )
        fix = vhost.without_option(queue, *_DELAYED_RETRY)
        yield Finding(Code.DELAYED_RETRY_ON_OURS, queue.name, what, fix)
    elif longest > vhost.deployment.window_seconds * 1000:
        window = vhost.deployment.window_seconds
        what = (
            f"delayed retry holds a failure for up to {longest / 1000:g} s, and a retry is observed for {window:g} s: "
            "what became of it is not known for that long"
        )
        shorter = int(window * 1000)
        least = min(queue.number("delayed-retry-min") or shorter, shorter)
        wanted = dict(zip(_DELAYED_RETRY, (kind, least, shorter), strict=True))
        fix = commands.set_policy(vhost.broker, queue, wanted)
        if queue.name in vhost.deployment.native_queues:
            fix = f"{commands.APPLY}  # with its delayed-retry-max of at most {shorter} ms in the settings"
        yield Finding(Code.DELAYED_RETRY_LONGER_THAN_WINDOW, queue.name, what, fix)


def _nack_never_counts(vhost: VirtualHost) -> Iterator[Finding]:
    """One note for all queues, because the broker does not show how a consumer puts a message back."""
    limited = [
        queue.name
        for queue in vhost.shared_queues
        if queue.type == "quorum" and queue.says_limit and queue.delivery_limit(vhost.broker.version) is not None
    ]
    if limited:
        what = (
            "they have a delivery limit, and from RabbitMQ 4.3 on basic.nack with requeue does not count towards it: a "
            "consumer that gives back so repeats a message for ever. basic.reject counts"
        )
        fix = commands.list_consumers(vhost.broker)
        yield Finding(Code.NACK_NEVER_COUNTS, listed(limited), what, fix)


def _delayed_exchanges(vhost: VirtualHost) -> Iterator[Finding]:
    for exchange in vhost.there.exchanges.values():
        if exchange.type == _DELAYED_EXCHANGE:
            what = (
                "it needs the delayed-message plugin, which is archived and does not run on RabbitMQ 4.3; a ladder "
                "does the same with dead-lettering and a TTL"
            )
            yield Finding(Code.DELAYED_EXCHANGE, exchange.name, what, "dlqbatch topology plan")
