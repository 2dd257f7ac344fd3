"""An independent witness: compares two sightings of one message and names everything that differs and may not.

It uses none of dlqbatch's code; what may change is what the contract, section 4.4, says. A message is told by its
ticket, which stands in its correlation id or at the start of its body.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rawamqp import FLAGS, Entry, Seen, array, entries_of, headers_of, items_of, named_properties, short, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_MAY_CHANGE = frozenset({"headers", "delivery_mode", "expiration", "user_id"})
OURS = frozenset(
    b"dlqbatch-" + name
    for name in (
        *(b"id", b"parent", b"retries", b"trips", b"origin-queue", b"origin-exchange", b"origin-key"),
        *(b"first-failed-at", b"history", b"expiration", b"user-id", b"reason", b"dead-at", b"attempt", b"digest"),
        *(b"failed-queue", b"failed-exchange", b"failed-key", b"retry-after"),
    )
)
BROKERS = frozenset(
    {b"x-death", b"CC", b"BCC", b"x-delivery-count", b"x-acquired-count"}
    | {b"x-%b-death-%b" % (a, b) for a in (b"first", b"last") for b in (b"queue", b"reason", b"exchange")}
)


def ticket_of(seen: Seen) -> bytes:
    ticket = named_properties(seen.properties).get("correlation_id", b"")
    return ticket if ticket.startswith(b"t-") else seen.body[:10]


def by_ticket(sightings: Iterable[Seen]) -> dict[bytes, list[Seen]]:
    found: dict[bytes, list[Seen]] = {}
    for seen in sightings:
        found.setdefault(ticket_of(seen), []).append(seen)
    return found


def copies(sightings: Iterable[Seen]) -> Counter[bytes]:
    return Counter(ticket_of(seen) for seen in sightings)


def changes(before: Seen, after: Seen, login: bytes) -> list[str]:
    """What dlqbatch, connected as `login`, changed of a message and had no right to; empty if nothing."""
    was, now = named_properties(before.properties), named_properties(after.properties)
    wrong = [] if before.body == after.body else [f"body: {before.body[:80]!r} became {after.body[:80]!r}"]
    altered = [name for name in FLAGS if name not in _MAY_CHANGE and was.get(name) != now.get(name)]
    wrong += [f"{name}: {was.get(name)!r} became {now.get(name)!r}" for name in altered]
    headers_before, headers_after = entries_of(was.get("headers", b"")), entries_of(now.get("headers", b""))
    foreign_before = [entry for entry in headers_before if entry[0] not in OURS and entry[0] not in BROKERS]
    brought = [value for name, value in headers_before if name == b"dlqbatch-id"]
    if brought and brought[0] not in [value for name, value in headers_after if name == b"dlqbatch-id"]:
        # Another message than the one whose headers it carries: how often a worker had tried that is not its own.
        foreign_before = [entry for entry in foreign_before if entry[0] != b"dlqbatch-worker-retries"]
    foreign_after = [entry for entry in headers_after if entry[0] not in OURS and entry[0] not in BROKERS]
    # A quorum queue that adds its delivery count sorts the headers by name.
    if foreign_after not in (foreign_before, sorted(foreign_before, key=lambda entry: entry[0])):
        lost = [entry for entry in foreign_before if entry not in foreign_after]
        new = [entry for entry in foreign_after if entry not in foreign_before]
        wrong.append(f"headers: {str(lost)[:300]} became {str(new)[:300]}" if lost or new else "headers: reordered")
    if now.get("delivery_mode") != b"\x02":
        wrong.append(f"not persistent: {now.get('delivery_mode')!r}")
    if "expiration" in now:
        wrong.append("carries an expiration")
    if now.get("user_id") != (was.get("user_id") if was.get("user_id") == login else None):
        wrong.append(f"user_id: {was.get('user_id')!r} became {now.get('user_id')!r}")
    return wrong + _wrong_with_ours(headers_after)


def moved(before: Seen, after: Seen, login: bytes) -> list[str]:
    """What had to be taken off a message and is not told in our headers; empty if all is there.

    Not for a message so large that our optional headers had to go.
    """
    was = named_properties(before.properties)
    headers_before, ours = entries_of(was.get("headers", b"")), dict(headers_of(after.properties))
    wrong = []
    if "expiration" in was and ours.get(b"dlqbatch-expiration") != text(was["expiration"]):
        wrong.append(f"expiration {was['expiration']!r} is not in the headers")
    if was.get("user_id", login) != login and ours.get(b"dlqbatch-user-id") != text(was["user_id"]):
        wrong.append(f"user_id {was['user_id']!r} is not in the headers")
    history = b"".join(items_of(ours.get(b"dlqbatch-history", array())))
    for name, value in headers_before:
        if name == b"x-death" and value[:1] == b"A":
            wrong += [f"a death is not in the history: {item!r}" for item in items_of(value) if item not in history]
        elif name in {b"CC", b"BCC", b"x-delivery-count"} and short(name) + value not in history:
            wrong.append(f"{name!r} is not in the history")
    return wrong


def _wrong_with_ours(headers: Sequence[Entry]) -> list[str]:
    doubled = [name for name, times in Counter(name for name, _ in headers if name in OURS).items() if times > 1]
    wrong = [f"{name!r} stands there twice" for name in doubled]
    ours = {name: value for name, value in headers if name in OURS}
    identity = ours.get(b"dlqbatch-id", b"")
    if identity[:1] != b"S" or not 5 < len(identity) <= 260:
        wrong.append(f"dlqbatch-id: {identity!r}")
    trips = ours.get(b"dlqbatch-trips", b"")
    if trips[:1] != b"l" or int.from_bytes(trips[1:], "big", signed=True) < 0:
        wrong.append(f"dlqbatch-trips: {trips!r}")
    if b"dlqbatch-history" in ours:
        items_of(ours[b"dlqbatch-history"])
    return wrong
