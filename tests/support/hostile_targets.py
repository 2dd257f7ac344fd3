"""What the fuzzer feeds: each target takes any bytes, and says by an exception that something is wrong.

What a function may raise is caught here; all else is a finding. Where another reader of the same bytes exists that
shares no code, the two have to agree.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import struct
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import oracle
import rawamqp

from dlqbatch.amqp import table
from dlqbatch.amqp.delivery import Delivery, open_envelope
from dlqbatch.amqp.origin import Trust, is_addressable
from dlqbatch.amqp.patterns import TopicTrie, matches, rank
from dlqbatch.amqp.readable import body_form, body_lines, readable
from dlqbatch.amqp.stamp import stamp
from dlqbatch.aws.events import understand
from dlqbatch.broker import frames
from dlqbatch.check.rules import failures, journey_of
from dlqbatch.drain.retry_decision import Return, Rules, decide
from dlqbatch.errors import SettingsError
from dlqbatch.ingest.examine import examine
from dlqbatch.retain.archive import unpack
from dlqbatch.retain.format import ArchiveDamaged, Manifest, decode_manifest
from dlqbatch.settings.properties import BrokenEscape, pairs, unescaped
from dlqbatch.topology.kinds import Ladder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hostile import Hostile

LADDER: Final = Ladder()
NOW: Final = datetime(2030, 6, 1, tzinfo=UTC)
LIMIT: Final = 131_052
_UNREADABLE = (table.UnreadableTable, IndexError, struct.error)


class _Five:
    def max_retries(self, event: str, /) -> int | None:
        return 5 if len(event) % 2 else None


class _Receipt:
    queue = "dlq-queue"

    def settle(self, tag: int) -> None: ...
    def hold(self, tag: int, reason: str | None) -> None: ...


def tables(data: bytes) -> None:
    with suppress(*_UNREADABLE):
        entries = list(table.fields(data))
        # Not a byte of it is lost or changed.
        assert b"".join(table.encode_field(name, value) for name, value in entries) == data
        assert table.first_fields(data) == dict(reversed(entries))
        assert [name for name, _ in entries] == [name for name, _ in rawamqp.entries_of(data)]
        for _, value in entries:
            value.as_text(), value.as_integer(), value.as_timestamp()
    is_array = table.is_array(data)
    with suppress(*_UNREADABLE):
        items = list(table.items(data))
        assert is_array
        assert b"".join(map(table.encode_item, items)) == data


def messages(data: bytes) -> None:
    """The first byte says where it comes from; the rest are the properties of a content header."""
    kind, properties = data[:1], data[1:]
    exchange = ("retry-exchange", "", "shop", "dlqbatch.return.x")[kind[0] % 4] if kind else ""
    trust = Trust(
        LADDER.queue_names, LADDER.exchange_names, ("*",) if kind > b"\x80" else (), last_death=kind > b"\xc0"
    )
    envelope = open_envelope(exchange, "key", False, 0, properties)
    new_id = (f"new-{number}" for number in itertools.count()).__next__
    for first_stage, to_queue in ((True, True), (True, False), (False, True), (False, False)):
        rules = Rules(LADDER.tiers, trust, 100, to_queue)
        decision = decide(
            envelope, _Five(), rules, first_stage=first_stage, now=1_900_000_000, new_id=new_id, digest=lambda: ""
        )
        if isinstance(decision, Return):
            assert is_addressable(decision.origin)
            assert not trust.is_ours(decision.origin)
        stamped = stamp(envelope, decision.journey, login=b"guest", limit=LIMIT, digest="", reason="text", dead_at=1)
        if to_queue:
            _unchanged(properties, stamped)
    if envelope.headers is not None:
        failures(envelope.headers)
        stamp(
            envelope,
            journey_of(envelope, envelope.headers, trust, new_id, lambda: ""),
            login=b"guest",
            limit=LIMIT,
            digest="",
        )
    delivery = Delivery(_Receipt(), 1, exchange, "key", False)
    delivery.properties, delivery.chunks = properties, [data + b"\xce"]
    seen = examine(delivery, trust, NOW)
    assert seen.properties == properties
    assert seen.first_failed_at <= seen.last_failed_at <= NOW
    json.dumps([str(readable(properties))])
    list(body_lines(data, body_form(data)))


def _unchanged(before: bytes, after: bytes | None) -> None:
    """By a reader of the tests' own, wherever it understands what came in."""
    if after is None:
        return
    try:
        rawamqp.headers_of(before)
    except (AssertionError, IndexError, struct.error):
        return
    was, now = (rawamqp.Seen("", b"", b"", False, each, b"") for each in (before, after))
    if int.from_bytes(before[:2], "big") & 0x3:
        return  # a flag that AMQP does not have
    wrong = oracle.changes(was, now, b"guest")
    assert not wrong, wrong


def content(data: bytes) -> None:
    for position in range(min(len(data), 4)):
        found = frames.read_content(data, position, 1)
        if found is not None:
            properties, chunk, after = found
            assert position < after <= len(data)
            assert data[position:after].endswith(chunk)
            assert properties in data
    with suppress(IndexError):
        name, end = frames.read_short_string(data, 0)
        assert table.to_bytes(name) == data[1:end]


def key_values(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    numbers = []
    for number, key, value in pairs(text):
        numbers.append(number)
        with suppress(BrokenEscape):
            unescaped(key), unescaped(value)
    assert numbers == sorted(set(numbers))


def events(data: bytes) -> None:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = {"Records": [{"Sns": {"Message": data.decode("utf-8", "replace")}}]}
    with suppress(SettingsError):
        understand(event)


def archives(data: bytes) -> None:
    """A manifest and a part, forged so that sizes and digests agree with it."""
    with suppress(ArchiveDamaged):
        decode_manifest(data, "2030/06/01/x")
    for packed in (data, gzip.compress(data, 1, mtime=0)):
        digest = hashlib.sha256(packed).hexdigest()
        forged = (1, 1, 1, max(len(data), 1), hashlib.sha256(data).hexdigest(), len(packed), digest, "00000000")
        with suppress(ArchiveDamaged):
            for line in unpack(packed, Manifest("2030/06/01/x", NOW, *forged)):
                assert isinstance(line.message["body"], bytes)


def topics(data: bytes) -> None:
    key, *patterns = data[:200].decode("utf-8", "replace").split("\n")
    trie = TopicTrie(patterns)
    wanted = sorted({pattern for pattern in patterns if matches(pattern, key)}, key=rank)
    assert trie.matching(key) == wanted
    for pattern in patterns:
        if len(pattern) <= 12 and len(key) <= 12:
            words = [part.split(".") if part else [] for part in (pattern, key)]
            assert matches(pattern, key) == _slowly(*words)


def _slowly(pattern: list[str], key: list[str]) -> bool:
    if not pattern:
        return not key
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(_slowly(rest, key[taken:]) for taken in range(len(key) + 1))
    return bool(key) and head in ("*", key[0]) and _slowly(rest, key[1:])


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    target.__name__: target for target in (tables, messages, content, key_values, events, archives, topics)
}


def seeds(name: str, hostile: Hostile) -> Iterator[bytes]:
    """Inputs that a target understands, to begin with."""
    while True:
        if name == "tables":
            yield rawamqp.properties(hostile.any_entries(4, 3))[6:]
        elif name == "messages":
            headers = hostile.forged() + hostile.any_entries(2, 3)
            named: dict[str, Any] = {"correlation_id": b"t-1", "priority": 3, "timestamp": 2**64 - 1, "user_id": b"x"}
            for property_ in hostile.random.sample(list(named), 2):
                del named[property_]
            yield hostile.random.randbytes(1) + rawamqp.properties(headers, delivery_mode=1, **named)
        elif name == "content":
            body = hostile.random.randbytes(hostile.random.randrange(9))
            header = struct.pack(">HHQ", 60, 0, len(body)) + rawamqp.properties(hostile.any_entries(1, 1))
            frame = struct.pack(">BHI", 2, 1, len(header)) + header + b"\xce"
            yield frame + struct.pack(">BHI", 3, 1, len(body)) + body + b"\xce"
        else:
            yield hostile.random.choice(_EXAMPLES[name])


_LINE = (
    b'{"attempts":[],"message":{"ack_proven":true,"body":"QQ==","created_at":"2030-06-01T00:00:00+00:00","digest":"'
    + b"A" * 43
    + b'="},"transitions":[{"at":"2030-06-01T00:00:00+00:00","to_status":"pending"}]}\n'
)
_EXAMPLES: Final = {
    "key_values": (
        b"# c\ndlqbatch.a.b = c\\\n  d\n!x\n\\u0041\\ud83d\\ude00:\\t\\\\\n",
        b"a\\ b=c\r\n \\\n\f=",
        b"\\\\\\",
    ),
    "events": (
        b'{"job":"drain","max_messages":5}',
        b'{"detail-type":"CloudWatch Alarm State Change","detail":{"alarmName":"a","state":{"value":"ALARM"}}}',
        b'{"source":"aws.cloudwatch","alarmData":{"alarmName":"a","state":{"value":"OK"}}}',
        b'{"Records":[{"Sns":{"Message":"{\\"NewStateValue\\":\\"ALARM\\"}"}}]}',
        b"[" * 30_000,
    ),
    "archives": (
        _LINE,
        json.dumps(
            {
                "schema": 1,
                "part": "2030/06/01/x",
                "created": "2030-06-01T00:00:00+00:00",
                **dict.fromkeys(("count", "first_id", "last_id", "content_bytes", "file_bytes"), 1),
                **dict.fromkeys(("content_sha256", "file_sha256"), "0" * 64),
                "identities": "00000000",
            }
        ).encode(),
        gzip.compress(_LINE, mtime=0),
    ),
    "topics": (b"a.b.c\na.*.c\n#\n#.c\n*.#.*\na.#.#", b"\n#\n\n*", b"a..b\na.*.b\n#.\n.#"),
}
