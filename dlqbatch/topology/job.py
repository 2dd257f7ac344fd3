"""`topology plan`, `apply`, `export` and `delete`: each takes the settings and returns what the command shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Final

from dlqbatch.broker.access import access_to, connect, management_api, vhost_of
from dlqbatch.broker.connection import Connection
from dlqbatch.broker.management import CheckedApi, Unanswered
from dlqbatch.broker.queue_types import quorum_queues
from dlqbatch.broker.versions import LIMITS_DELIVERIES
from dlqbatch.errors import BrokerUnreachable, SettingsError, TopologyMismatch
from dlqbatch.settings import Settings
from dlqbatch.settings.topologies import default_ladder, topologies
from dlqbatch.topology import declare, inspect
from dlqbatch.topology.change_ttl import ChangeNotSafe, ChangeUnderWay, Delays, Wanted
from dlqbatch.topology.declare import kinds_of, limits_deliveries, matched
from dlqbatch.topology.kinds import KINDS, Kind, Ladder, PerQueue, demonstration, whole
from dlqbatch.topology.model import DELIVERY_LIMIT, QUEUE_TYPE, Queue, Topology, relay_of
from dlqbatch.topology.plan import (
    DIFFERENT,
    NOT_KNOWN,
    REFUSED,
    SAME,
    Difference,
    Plan,
    compare,
    definitions,
    is_left_behind,
)
from dlqbatch.topology.policies import PolicyRefused, too_old
from dlqbatch.topology.remove import Removal, foresee, remove, return_exchanges

_ASKS_AGAIN_AFTER: Final = 5.0
"""Seconds between two questions to a management API that does not answer: each can block for fifteen."""
_MARGIN: Final = 5.0
"""Seconds that a run may take beyond its bounds, to begin and to end."""
_OLD_LIMIT: Final = Difference(DELIVERY_LIMIT, "none", "-1")


def choose(settings: Settings, what: Sequence[str]) -> tuple[Kind, ...]:
    """The topologies of these names or kinds; all of them if nothing is named."""
    kept = topologies(settings)
    if not what:
        return tuple(kept.values())
    found: dict[str, Kind] = {}
    for word in what:
        named = {
            name: kind
            for name, kind in kept.items()
            if word.replace("_", "-") == name or (word in KINDS and isinstance(kind, KINDS[word]))
        }
        if not named:
            known = [*KINDS, *kept]
            guess = get_close_matches(word, known, n=1)
            meant = f"; perhaps {guess[0]} was meant" if guess and guess[0] != word else ""
            raise SettingsError(
                f"the settings describe no topology '{word}'{meant}. They describe: {', '.join(kept) or 'none'}"
            )
        found |= named
    return tuple(found.values())


@dataclass(frozen=True, slots=True)
class Applied:
    plan: Plan
    """What was to do before anything was done."""
    delays: tuple[str, ...] = ()
    """The delay queues whose TTL differs, or whose change was cut off."""
    left_behind: tuple[str, ...] = ()
    """The queues of delays that the settings have no more, as far as the management API shows them."""
    is_marked: bool = False
    """A change of a delay is under way, or was cut off: no run declares anything."""
    is_done: bool = True


def plan(settings: Settings, kinds: Sequence[Kind]) -> Applied:
    """What `apply` would do; nothing is changed."""
    with _connection(settings) as connection:
        reader = inspect.Reader(management_api(settings))
        found, _ = _plan(connection, reader, kinds)
        to_change = _delays(connection, found, kinds, kinds)
        is_marked = declare.changing(connection)
        is_done = found.is_done and not to_change and not is_marked
        return Applied(found, to_change, _left_behind(reader, kinds), is_marked, is_done=is_done)


def apply(
    settings: Settings,
    kinds: Sequence[Kind],
    *,
    change_ttl: bool = False,
    with_demonstration: bool = False,
    report: Callable[[str, str], None] = lambda _queue, _step: None,
) -> Applied:
    """Declare what is missing. If a delay differs, change it with `change_ttl`, and do nothing without."""
    with _connection(settings) as connection:
        reader = inspect.Reader(management_api(settings))
        found, wanted = _plan(connection, reader, kinds)
        # A change that was cut off may concern another topology of ours; it has to be finished as well.
        concerned = tuple(dict.fromkeys((*kinds, *kinds_of(settings))))
        to_change = _delays(connection, found, kinds, concerned)
        for item in found.of(DIFFERENT):
            if item.kind != "policy" and item.name not in to_change:
                first = item.differences[0]
                raise TopologyMismatch(item.kind, item.name, first.argument, first.found, first.wanted)
        if wanted.policies:
            _make_sure_of(reader, connection)
            _refuse_policies(found)
        is_marked = declare.changing(connection)
        if (to_change or is_marked) and not change_ttl:
            return Applied(found, to_change, is_marked=is_marked, is_done=False)
        if to_change or is_marked:
            _change(settings, connection, reader, concerned, to_change, report)
        matched(connection, kinds, declare.declare)
        if with_demonstration:
            declare.declare(connection, demonstration(default_ladder(settings)))
        # Last: by now there is a queue for what a policy dead-letters.
        policies = {policy.name: policy for policy in wanted.policies}
        for item in found.items:
            if item.kind == "policy" and item.state != SAME:
                reader.set_policy(policies[item.name])
        return Applied(found, to_change)


def _refuse_policies(found: Plan) -> None:
    """PolicyRefused if a policy would have no effect, or is not known; nothing else of its topology is made then."""
    for item in found.items:
        if item.kind == "policy" and item.state in (REFUSED, NOT_KNOWN):
            raise PolicyRefused(item.name, item.why or "the management API does not show the policies that are there")


def _make_sure_of(reader: inspect.Reader, connection: Connection) -> None:
    """BrokerUnreachable if the management API does not answer, or is that of another broker: policies are set there."""
    why = reader.silent
    if why is None and not too_old(connection.version):
        try:
            CheckedApi(reader.api, connection).get("overview")
        except Unanswered as silent:
            why = str(silent)
    if why is not None:
        raise BrokerUnreachable(reader.api.address, f"{why}; only the management API knows policies")


def export(settings: Settings, kinds: Sequence[Kind], version: tuple[int, ...] | None) -> dict[str, object]:
    """Definitions for a broker of this version; without a version, for the broker of the settings."""
    if version is None:
        with _connection(settings) as connection:
            version = connection.version
    topology = whole(kinds, unlimited_deliveries=version >= LIMITS_DELIVERIES)
    if topology.policies and (why := too_old(version)):
        raise PolicyRefused(topology.policies[0].name, why)
    return definitions(topology, vhost_of(settings.broker_urls[0]))


def delete(
    settings: Settings, kinds: Sequence[Kind], *, with_messages: bool = False, dry_run: bool = False
) -> tuple[Removal, ...]:
    """Delete all parts, or none if one of them must stay. What other topologies of ours share stays in any case."""
    with _connection(settings) as connection:
        if declare.changing(connection):
            raise ChangeUnderWay
        reader = inspect.Reader(management_api(settings))
        found, wanted = _plan(connection, reader, kinds)
        others = [kind for kind in kinds_of(settings) if kind not in kinds]
        old = Topology((), tuple(Queue(name) for name in _left_behind(reader, kinds)), ())
        doomed = wanted.without(whole(others)) + old
        if too_old(connection.version):
            doomed = replace(doomed, policies=())
        if doomed.policies:
            _make_sure_of(reader, connection)
        foreseen = foresee(connection, doomed, found, reader, with_messages=with_messages)
        if dry_run or any(one.why for one in foreseen):
            return foreseen
        names = [queue.name for queue in doomed.queues]
        quorum = quorum_queues(connection, names, otherwise=False, cut_off=True)
        # First: while it is in effect, it dead-letters to what is about to be deleted.
        for one in foreseen:
            if one.kind == "policy":
                reader.delete_policy(one.name)
        done = remove(connection, foreseen, quorum, with_messages=with_messages)
        ways_back = return_exchanges(connection, names, reader)
        return done + remove(connection, ways_back, frozenset(), with_messages=False)


@contextmanager
def _connection(settings: Settings) -> Iterator[Connection]:
    connection = connect(access_to(settings, "dlqbatch topology"))
    try:
        yield connection
    finally:
        connection.close()


def _plan(connection: Connection, reader: inspect.Reader, kinds: Sequence[Kind]) -> tuple[Plan, Topology]:
    wanted = whole(kinds, unlimited_deliveries=limits_deliveries(connection))
    found = inspect.read(connection, wanted, reader)
    # A broker before 4.0 declared the queue without this argument: that is no difference, and `apply` warns.
    parts = {
        part: None if differs is None else tuple(one for one in differs if one != _OLD_LIMIT)
        for part, differs in found.parts.items()
    }
    return compare(wanted, replace(found, parts=parts)), wanted


def _delays(connection: Connection, found: Plan, kinds: Sequence[Kind], concerned: Sequence[Kind]) -> tuple[str, ...]:
    """The delay queues whose TTL differs, and those with a relay left by a change that was cut off."""
    differing = found.ttl_changes(queue for kind in kinds for queue in kind.delay_queues)
    relays = {relay_of(queue): queue for kind in concerned for queue in kind.delay_queues}
    left_behind = (relays[relay] for relay in declare.existing(connection, relays))
    return tuple(dict.fromkeys((*differing, *left_behind)))


def _left_behind(reader: inspect.Reader, kinds: Sequence[Kind]) -> tuple[str, ...]:
    ladders = [kind for kind in kinds if isinstance(kind, Ladder)]
    there = (reader.dead_lettering() or {}) if ladders else {}
    return tuple(sorted(name for name, exchange in there.items() if is_left_behind(name, exchange, ladders)))


def _change(
    settings: Settings,
    connection: Connection,
    reader: inspect.Reader,
    concerned: Sequence[Kind],
    names: Sequence[str],
    report: Callable[[str, str], None],
) -> None:
    topology = whole(concerned, unlimited_deliveries=limits_deliveries(connection))
    direct = {queue for kind in concerned if isinstance(kind, PerQueue) for queue in kind.delay_queues}
    there = [each for name in names for each in declare.existing(connection, [name, relay_of(name)])]
    quorum = quorum_queues(connection, there, otherwise=False, cut_off=True)
    wanted = []
    for queue in topology.queues:
        if queue.name not in names:
            continue
        is_quorum = bool({queue.name, relay_of(queue.name)} & quorum) or queue.arguments.get(QUEUE_TYPE) == "quorum"
        if is_quorum:
            reader.messages(queue.name)
            if reader.silent is not None:
                raise ChangeNotSafe(queue.name, reader.silent)
        bindings = tuple(one for one in topology.bindings if one.queue == queue.name)
        wanted.append(Wanted(queue, bindings, is_quorum, entered_directly=queue.name in direct))
    # A change takes minutes, in which the API may fail and come back; a plan does not ask again.
    retrying = inspect.Reader(management_api(settings), asks_again_after=_ASKS_AGAIN_AFTER)
    Delays(
        connection,
        retrying.messages,
        calm_after=settings.max_seconds + settings.settle_seconds + _MARGIN,
        report=report,
    ).change(wanted)
