"""What a queue's options do to its messages when nobody looks."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Final

from dlqbatch.policy.doctor import commands
from dlqbatch.policy.doctor.facts import listed
from dlqbatch.policy.doctor.finding import Code, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.policy.doctor.facts import QueueFacts
    from dlqbatch.policy.doctor.scene import Scene

UNLIMITED_SINCE: Final = (4, 0)
"""From here on a delivery limit of -1 is understood."""
_FEWEST: Final = 10
"""Redeliveries; fewer are a consumer that was restarted."""
_SHARE: Final = 10
"""At most every so many deliveries may be a redelivery."""


def examine(scene: Scene) -> Iterator[Finding]:
    for queue in scene.kept:
        yield from _delivery_limit(scene, queue)
        yield from _expiry(scene, queue)
        yield from _overflow(scene, queue)
        yield from _failing(scene, queue)
        yield from _at_least_once(scene, queue)
        yield from _mixed_expirations(queue, scene)
        yield from _piling_up(scene, queue)
    yield from _not_lasting(scene)
    yield from _at_most_once(scene)


def _delivery_limit(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    broker = scene.broker
    limit = queue.delivery_limit(broker.version)
    if limit is None:
        return
    has_exit = queue.dead_letter_exchange is not None
    if not has_exit and queue.name in scene.holding:
        what = (
            f"a quorum queue of dead letters or retries that deletes a message after {limit} deliveries; on RabbitMQ "
            "4.3 a message that a delivery limit brought here has used up its own already"
        )
        yield Finding(Code.DELIVERY_LIMIT_DELETES, queue.name, what, _without_limit(scene, queue))
    elif not queue.says_limit and queue.name not in scene.delays:
        if has_exit:
            what = f"nobody has set a delivery limit, so after {limit} deliveries a message is dead-lettered"
            code = Code.DELIVERY_LIMIT_UNSET
        else:
            what = f"nobody has set a delivery limit, so after {limit} deliveries a message is deleted"
            code = Code.DELIVERY_LIMIT_DEFAULT
        fix = _without_limit(scene, queue) if not has_exit else _with_limit(scene, queue, limit)
        yield Finding(code, queue.name, what, fix)


def _without_limit(scene: Scene, queue: QueueFacts) -> str:
    """A policy that says -1 counts where nothing but a policy says otherwise; else the message needs a way out."""
    operator = {} if queue.operator is None else queue.operator.definition
    is_said = "x-delivery-limit" in queue.arguments or "delivery-limit" in operator
    if scene.broker.version >= UNLIMITED_SINCE and not is_said:
        return commands.set_policy(scene.broker, queue, {"delivery-limit": -1})
    return _with_exit(scene, queue)


def _with_limit(scene: Scene, queue: QueueFacts, limit: int) -> str:
    return commands.set_policy(scene.broker, queue, {"delivery-limit": limit})


def _with_exit(scene: Scene, queue: QueueFacts) -> str:
    target = scene.dead_letter_queue
    if queue.name == target:
        target = f"{target}.rest"
    wanted = {"dead-letter-exchange": "", "dead-letter-routing-key": target}
    policy = commands.set_policy(scene.broker, queue, wanted)
    if target in scene.there.queues:
        return policy
    return f"{commands.make_queue(scene.broker, target)} && {policy}"


def _expiry(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    expires = queue.number("expires")
    is_delay = queue.name in scene.delays
    if expires is not None and (queue.name in scene.holding or is_delay):
        what = f"the queue itself is deleted, with all it holds, when nobody has used it for {expires} ms"
        yield Finding(Code.QUEUE_EXPIRES, queue.name, what, _undo(scene, queue, "expires"))
    if queue.ttl is None or queue.dead_letter_exchange is not None:
        return
    if queue.name in scene.holding:
        what = f"a dead letter or a retry is deleted after {queue.ttl} ms: it has a TTL and no dead-letter exchange"
        yield Finding(Code.DEAD_LETTERS_EXPIRE, queue.name, what, _undo(scene, queue, "message-ttl"))
    elif is_delay or (queue.consumers == 0 and not queue.delivered and queue.is_lasting):
        what = f"a message is deleted after {queue.ttl} ms: there is a TTL, no dead-letter exchange and no consumer"
        yield Finding(Code.DELAY_WITHOUT_OUTLET, queue.name, what, _with_exit(scene, queue))


def _undo(scene: Scene, queue: QueueFacts, option: str) -> str:
    return commands.without_option(scene.broker, queue, scene.routes.into(queue.name), option)


def _overflow(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    bound = queue.longest
    if bound is not None and queue.overflow == "reject-publish-dlx" and queue.dead_letter_exchange is not None:
        what = (
            f"{bound} with reject-publish-dlx: when it is full, what is sent or returned to it is refused and "
            "dead-lettered as well, so that the sender keeps it and each try makes one more of it"
        )
        yield Finding(Code.OVERFLOW_COPIES, queue.name, what, _reject_publish(scene, queue))
    # What is made for a moment may well be meant to forget.
    if bound is None or queue.overflow != "drop-head" or not queue.is_lasting:
        return
    is_delay = queue.name in scene.delays
    if queue.dead_letter_exchange is not None and not is_delay:
        return
    lost = "moved on before its time" if queue.dead_letter_exchange is not None else "deleted"
    what = f"{bound} without reject-publish: when it is full the oldest message is {lost}, and nobody is told"
    yield Finding(
        Code.OVERFLOW_DROPS,
        queue.name,
        what,
        _reject_publish(scene, queue),
    )


def _reject_publish(scene: Scene, queue: QueueFacts) -> str:
    if "x-overflow" in queue.arguments:
        wanted = {"x-overflow": "reject-publish"}
        return commands.declare_anew(scene.broker, queue, scene.routes.into(queue.name), wanted)
    return commands.set_policy(scene.broker, queue, {"overflow": "reject-publish"})


def _failing(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    if queue.dead_letter_exchange is not None or not queue.consumers or queue.name in scene.holding:
        return
    again, delivered = queue.redelivered or 0, queue.delivered or 0
    if again < _FEWEST or again * _SHARE < delivered:
        return
    what = (
        f"its consumers fail ({again} of {delivered} deliveries were repeated) and it has no dead-letter exchange: a "
        "message is either repeated for ever or gone when it is rejected"
    )
    yield Finding(Code.FAILING_WITHOUT_DEAD_LETTERS, queue.name, what, scene.to_retry(queue))


def _at_least_once(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    if queue.type != "quorum" or queue.text("dead-letter-strategy") != "at-least-once":
        return
    if queue.dead_letter_exchange is not None and queue.overflow != "reject-publish":
        what = "at-least-once dead-lettering is asked for, but works with overflow reject-publish only"
        fix = _reject_publish(scene, queue)
        yield Finding(Code.AT_LEAST_ONCE_INEFFECTIVE, queue.name, what, fix)


def _mixed_expirations(queue: QueueFacts, scene: Scene) -> Iterator[Finding]:
    """Without a consumer, a TTL of the queue or a bound there is one way out left: each message's own expiration."""
    if queue.dead_letter_exchange is None or queue.ttl is not None or queue.longest is not None:
        return
    if queue.name in scene.holding or queue.consumers != 0 or queue.delivered or queue.messages is None:
        return
    gone = (queue.published or 0) - queue.messages
    if gone > 0:
        what = (
            f"it works as a delay queue ({gone} messages left it without a consumer), but each message brings its own "
            "expiration: one with a long time at the head holds up all behind it"
        )
        fix = commands.set_policy(scene.broker, queue, {"message-ttl": 60_000})
        yield Finding(Code.EXPIRATIONS_MIXED, queue.name, what, fix)


def _piling_up(scene: Scene, queue: QueueFacts) -> Iterator[Finding]:
    if queue.name not in scene.ends or not queue.messages or queue.consumers or queue.delivered:
        return
    if queue.name in scene.deployment.read:
        return
    what = f"{queue.messages} dead letters, and nobody takes them: it has no consumer, and ingest does not name it"
    yield Finding(Code.DEAD_LETTERS_PILE_UP, queue.name, what, f"dlqbatch ingest {quote(queue.name)}")


def _not_lasting(scene: Scene) -> Iterator[Finding]:
    for queue in scene.there.queues.values():
        if queue.name in scene.origins and not queue.is_lasting:
            kind = "exclusive" if queue.exclusive else "auto-delete" if queue.auto_delete else "not durable"
            what = f"its failures are retried, but it is {kind}: when it is gone, they become dead letters"
            durable = f"{queue.name}.durable"
            yield Finding(Code.ORIGIN_NOT_LASTING, queue.name, what, commands.make_queue(scene.broker, durable))


def _at_most_once(scene: Scene) -> Iterator[Finding]:
    """One note for all of them: it is what the broker does unless told otherwise."""
    classic, quorum = [], []
    for queue in scene.kept:
        if queue.dead_letter_exchange is None or queue.name not in scene.origins | scene.delays:
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
            commands.set_policy(scene.broker, queue, wanted),
        )
