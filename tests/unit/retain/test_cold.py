"""A row survives being a line, whatever it holds; and whatever a line, a manifest or a file pretends is found out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tracemalloc
import zlib
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from dlqbatch.retain.archive import Packing, unpack
from dlqbatch.retain.format import _BODY_PIECE as LARGE
from dlqbatch.retain.format import (
    ATTEMPT,
    MESSAGE,
    TRANSITION,
    ArchiveDamaged,
    Line,
    Manifest,
    _plain,
    data_name,
    decode,
    decode_manifest,
    is_left_behind,
    manifest_name,
    named,
    part_name,
    pieces,
    seal,
)
from dlqbatch.retain.rows import Due, Keep, batches
from dlqbatch.store.states import Status
from dlqbatch.store.tables import ATTEMPTS, MESSAGES, TRANSITIONS

NOW = datetime(2030, 6, 1, 12, tzinfo=UTC)
QUOTED = 'x"message":{"ack_proven":true,"body":"' + "A" * LARGE + '"}'
PART = "2030/06/01/20300601T120000-ab12cd34"

anything_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
VALUES: dict[type, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63) + 1, 2**63 - 1),
    str: st.text(st.characters()),
    bytes: st.binary(max_size=300),
    bool: st.booleans(),
    datetime: st.datetimes(timezones=st.just(UTC)),
    list: st.lists(anything_json, max_size=4),
    dict: st.dictionaries(st.text(), anything_json, max_size=4),
}


def entries(kinds: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            name: (st.none() | VALUES[kind.type]) if kind.may_be_null else VALUES[kind.type]
            for name, kind in kinds.items()
        }
    )


exact = {
    "id": st.integers(1, 2**63 - 1),
    "priority": st.integers(0, 255),
    "digest": st.binary(min_size=32, max_size=32),
    "full_digest": st.binary(min_size=32, max_size=32),
    "fingerprint": st.text(min_size=16, max_size=16),
}
messages = st.tuples(entries(MESSAGE), st.fixed_dictionaries(exact)).map(lambda two: two[0] | two[1])
lines = st.builds(
    Line,
    messages,
    st.lists(entries(ATTEMPT), max_size=3).map(tuple),
    st.lists(entries(TRANSITION), max_size=3).map(tuple),
)


def line(number: int = 1, **columns: Any) -> Line:
    values = {int: 0, str: "x", bytes: b"\xff\0", bool: False, datetime: NOW, list: [], dict: {}}
    message = {name: None if kind.may_be_null else values[kind.type] for name, kind in MESSAGE.items()}
    made = {"id": number, "digest": b"d" * 32, "full_digest": b"f" * 32, "fingerprint": "0" * 16, "status": "failed"}
    return Line(message | made | columns, (), ())


def encode(row: Line) -> bytes:
    return b"".join(pieces(row))


def pack(*packed: Line) -> tuple[bytes, Manifest]:
    packing = Packing()
    for each in packed:
        packing.add(each)
    return packing.finish(PART, NOW)


def forged(data: bytes, manifest: Manifest, **changes: Any) -> Manifest:
    """A manifest whose checksum of the file is right: the forger knows how to make one."""
    known = {"file_bytes": len(data), "file_sha256": hashlib.sha256(data).hexdigest()}
    return dataclasses.replace(manifest, **(known | changes))


def gzip(content: bytes) -> bytes:
    compress = zlib.compressobj(wbits=31)
    return compress.compress(content) + compress.flush()


@given(lines)
def test_a_line_is_the_row_again(row: Line) -> None:
    raw = encode(row)
    assert raw.count(b"\n") == 1
    assert decode(raw, PART) == row
    assert encode(decode(raw, PART)) == raw


@pytest.mark.parametrize("size", [0, LARGE - 1, LARGE, LARGE + 1, 3 * LARGE, 3 * LARGE + 2])
def test_a_large_body_makes_the_same_bytes_as_a_small_one_would(size: int) -> None:
    row = line(
        body=bytes(range(256)) * (size // 256) + b"\xff" * (size % 256), tags=[{"body": "A" * LARGE}], event=QUOTED
    )
    raw = encode(row)
    whole = json.dumps(
        {"message": _plain(row.message), "attempts": [], "transitions": []}, separators=(",", ":"), sort_keys=True
    )
    assert raw == whole.encode() + b"\n"
    assert decode(raw, PART) == decode(bytearray(raw), PART) == row
    (again,) = unpack(*pack(row))
    assert again == row
    assert seal(again) == seal(row)


@pytest.mark.parametrize("forgery", ["twice", "nested", "list", "bad", "cut", "after"])
def test_a_large_body_in_the_wrong_place_is_damage(forgery: str) -> None:
    raw, text = encode(line(body=b"x" * 2 * LARGE)), b'"' + b"eHh4" * LARGE + b'"'
    body = b'"message":{"ack_proven":false,"body":'
    told = {
        "twice": raw.replace(b'"attempts":[]', b'"attempts":[{' + body + text + b"}}]"),
        "nested": raw.replace(b'"attempts":[]', b'"attempts":{' + body + text + b"}}"),
        "list": b"[{" + body + text + b"}}]",
        "bad": raw.replace(b"eHh4", b"=Hh4", 1),
        "cut": raw[: 2 * LARGE],
        "after": raw.replace(b'"transitions":[]', b'"transitions":[{' + body + text + b"}}]"),
    }[forgery]
    with pytest.raises(ArchiveDamaged):
        decode(told, PART)


@settings(max_examples=examples(30))  # each example is several rows
@given(st.lists(lines, min_size=1, max_size=5, unique_by=lambda each: each.message["id"]))
def test_a_part_gives_back_what_was_put_into_it_and_the_same_rows_are_the_same_bytes(rows: list[Line]) -> None:
    data, manifest = pack(*rows)
    assert list(unpack(data, decode_manifest(manifest.encode(), PART))) == rows
    assert pack(*rows) == (data, manifest)
    assert all(manifest.may_hold(row.message["id"]) and manifest.may_hold(row.message["identity"]) for row in rows)


def test_a_line_has_every_column_of_the_tables() -> None:
    # The number of a scope means nothing outside its database: a copy has the scope's name.
    assert set(MESSAGE) - {"scope"} == set(MESSAGES.c.keys()) - {"scope_id"}
    assert ATTEMPT.keys() == set(ATTEMPTS.c.keys()) - {"id", "message_id", "scope_id"}
    assert TRANSITION.keys() == set(TRANSITIONS.c.keys()) - {"id", "message_id", "scope_id"}
    for kinds, table in ((MESSAGE, MESSAGES), (ATTEMPT, ATTEMPTS), (TRANSITION, TRANSITIONS)):
        assert {name for name, kind in kinds.items() if kind.may_be_null} - {"scope"} == {
            column.name for column in table.c if column.nullable
        } & kinds.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"body": "not base64!"},
        {"body": 7},
        {"id": True},
        {"id": 2**63},
        {"id": "1"},
        {"priority": 256},
        {"digest": "AAAA"},
        {"created_at": "yesterday"},
        {"created_at": "2030-06-01T12:00:00"},
        {"created_at": "0001-01-01T00:00:00+23:00"},
        {"tags": {}},
        {"identity": None},
        {"surplus": 1},
    ],
)
def test_a_value_that_its_column_cannot_have_is_damage(change: dict[str, Any]) -> None:
    told = json.loads(encode(line()))
    told["message"] |= change
    with pytest.raises(ArchiveDamaged, match=PART):
        decode(json.dumps(told).encode(), PART)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"1" * 100_000, b'{"message": {}}', b"7"]
)
def test_what_is_no_line_is_damage(raw: bytes) -> None:
    with pytest.raises(ArchiveDamaged, match=PART):
        decode(raw, PART)
    with pytest.raises(ArchiveDamaged, match=PART):
        decode_manifest(raw, PART)


@pytest.mark.parametrize(
    "change",
    [
        {"part": "../../etc/passwd"},
        {"schema": 2},
        {"schema": None},
        {"count": 0},
        {"count": 10**9},
        {"content_bytes": 2**40},
        {"file_bytes": -1},
        {"first_id": 9, "last_id": 2},
        {"file_sha256": "x" * 64},
        {"created": None},
        {"identities": ""},
        {"more": 1},
    ],
)
def test_a_forged_manifest_is_damage(change: dict[str, Any]) -> None:
    told = json.loads(pack(line())[1].encode()) | change
    with pytest.raises(ArchiveDamaged, match=PART):
        decode_manifest(json.dumps(told).encode(), PART)


def test_every_flipped_bit_and_every_cut_of_a_file_is_damage() -> None:
    data, manifest = pack(line(1), line(2, body=b"b" * 1000))
    for at in range(0, len(data), 7):
        wrong = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        for broken in (wrong, data[:at]):
            with pytest.raises(ArchiveDamaged):
                list(unpack(broken, manifest))
            # gzip's own checks and ours find it as well if the forger has made the first checksum right.
            if broken[10:] != data[10:]:  # its first ten bytes say nothing about the content
                with pytest.raises(ArchiveDamaged):
                    list(unpack(broken, forged(broken, manifest)))


def test_a_file_that_tells_less_more_or_other_than_its_manifest_is_damage() -> None:
    two = encode(line(1)) + encode(line(2))
    _, manifest = pack(line(1), line(2))
    for content in (encode(line(1)), two + encode(line(2)), two[:-1], two.replace(b'"failed"', b'"manual"'), b"\n" * 9):
        data = gzip(content)
        with pytest.raises(ArchiveDamaged):
            list(unpack(data, forged(data, manifest)))
    data = gzip(two)
    assert len(list(unpack(data, forged(data, manifest)))) == 2
    with pytest.raises(ArchiveDamaged):
        list(unpack(data + b"tail", forged(data + b"tail", manifest)))


def test_a_small_file_that_unpacks_to_a_huge_one_is_stopped_by_its_manifest() -> None:
    compress = zlib.compressobj(wbits=31)
    bomb = b"".join(compress.compress(bytes(2**20)) for _ in range(256)) + compress.flush()
    _, manifest = pack(line())
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveDamaged, match="more than its manifest"):
            list(unpack(bomb, forged(bomb, manifest)))
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


def test_a_manifest_that_makes_much_of_a_little_is_refused_before_its_file_is_read() -> None:
    """A forged file of 1 MB that unpacks to 1 GiB took 2 GB of memory before it was found out."""
    _, manifest = pack(line())
    for megabytes, is_refused in ((1, True), (100, False)):
        forgery = dataclasses.replace(manifest, content_bytes=1024**3, file_bytes=megabytes * 1024**2).encode()
        if is_refused:
            with pytest.raises(ArchiveDamaged, match="what no part can be"):
                decode_manifest(forgery, manifest.part)
        else:
            decode_manifest(forgery, manifest.part)


def test_a_large_body_passes_and_is_not_read_piece_by_piece_again_and_again() -> None:
    (row,) = unpack(*pack(line(body=b"\0\xff" * 5_000_000)))
    assert len(row.message["body"]) == 10_000_000


def test_a_seal_is_the_same_after_it_was_archived_by_retain_and_after_nothing_else() -> None:
    step = {"from_status": None, "to_status": "pending", "at": NOW, "actor": "ingest", "reason": "r"}
    ours = {"from_status": "failed", "to_status": "archived", "at": NOW, "actor": "retain", "reason": "r"}
    later = NOW + timedelta(days=1)
    failed = line()._replace(transitions=(step,))
    archived = line(status="archived", status_since=later, updated_at=later)._replace(transitions=(step, ours))
    assert seal(failed) == seal(archived)
    for other in (
        archived._replace(transitions=(step, ours, step)),
        archived._replace(transitions=(step, ours | {"actor": "a person"})),
        archived._replace(message={**archived.message, "body": b"other"}),
        archived._replace(message={**archived.message, "tags": ["new"]}),
        archived._replace(attempts=({"number": 1},)),
    ):
        assert seal(other) != seal(failed)


def test_names_lead_nowhere_else() -> None:
    part = part_name(NOW, "ab12cd34")
    assert part == PART
    assert named(data_name(part)) == (part, False)
    assert named(manifest_name(part)) == (part, True)
    for evil in ("../../x", "/etc/passwd", "2030/06/01/../x", "2030/06/01/x/y", "2030/06/01/x\n", "", "2030/06/01/"):
        with pytest.raises(ArchiveDamaged):
            data_name(evil)
        assert named(f"{evil}.jsonl.gz") is None
    assert named("2030/06/01/.x.jsonl.gz.ab.tmp") is None


def test_what_was_only_begun_is_left_behind_after_a_day() -> None:
    begun = "2030/06/01/.20300601T120000-ab12cd34.jsonl.gz.0f.tmp"
    assert not is_left_behind(begun, NOW + timedelta(hours=24))
    assert is_left_behind(begun, NOW + timedelta(days=2))
    for other in (data_name(PART), manifest_name(PART), "notes.tmp", "2030/06/01/notes.tmp", "2030/06/01/sub/.x.tmp"):
        assert not is_left_behind(other, NOW + timedelta(days=99))


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 5), st.integers(1, 40))
def test_batches_hold_every_row_in_order_and_no_more_than_they_may(
    sizes: list[int], most: int, most_bytes: int
) -> None:
    due = [Due(number, Status.FAILED, NOW, 1, size, None, NOW) for number, size in enumerate(sizes)]
    made = list(batches(due, most, most_bytes))
    assert [each for batch in made for each in batch] == due
    assert all(len(batch) <= most for batch in made)
    assert all(len(batch) == 1 or sum(each.size for each in batch) <= most_bytes for batch in made)


def test_only_three_states_are_ever_due() -> None:
    keep = Keep(timedelta(days=30), timedelta(days=90), timedelta(days=365))
    assert keep.before(NOW) == {
        Status.RESOLVED: NOW - timedelta(days=30),
        Status.FAILED: NOW - timedelta(days=90),
        Status.ARCHIVED: NOW - timedelta(days=365),
    }
