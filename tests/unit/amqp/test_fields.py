"""Fields of a message: read from any bytes, bounded, as they are written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import Value, encode_table, long, text

from dlqbatch.amqp.fields import LARGEST_READ, MOST_VALUES, Fields, check_place
from dlqbatch.errors import SettingsError
from dlqbatch.settings import load

FIELDS = Fields({"order.id": "$.order.id", "sku": "$.lines[*].sku", "tenant": "header:x-tenant", "ok": "$.ok"})
EMPTY = b"\0\0"


def headers(*entries: object) -> bytes:
    table = encode_table(entries)  # type: ignore[arg-type]
    return b"\x20\x00" + len(table).to_bytes(4, "big") + table


def test_values_are_read_as_they_are_written() -> None:
    body = b'{"order": {"id": 1.50}, "lines": [{"sku": "a"}, {"sku": 7}, {"sku": null}, {"sku": "a"}], "ok": true}'
    found = [("order.id", "1.50"), ("sku", "a"), ("sku", "7"), ("ok", "true")]
    assert list(FIELDS.read(body, EMPTY)) == found
    assert FIELDS.read(b'{"order": {"id": ["x", {"y": 1}]}}', EMPTY) == (("order.id", "x"),)


def test_a_byte_order_mark_before_a_document_does_not_matter() -> None:
    assert FIELDS.read(b'\xef\xbb\xbf {"order": {"id": "x"}}', EMPTY) == (("order.id", "x"),)


def test_headers_and_the_ids_of_frameworks_are_read() -> None:
    held = headers((b"task", text("shop.pay")), (b"id", text("uuid-1")), (b"x-tenant", long(7)))
    assert FIELDS.read(b"", held) == (("task_id", "uuid-1"), ("tenant", "7"))
    assert [FIELDS.read(b"", headers((b"x-tenant", Value(b"t", bit)))) for bit in (b"\0", b"\1")] == [
        (("tenant", "false"),),
        (("tenant", "true"),),
    ]
    # Priority, correlation_id and message_id, and no headers.
    assert FIELDS.read(b"", b"\x0c\x80\x05\x03c-1\x03m-1") == (("correlation_id", "c-1"),)
    assert FIELDS.read(b"", headers((b"id", text("no task")))) == ()


def test_what_cannot_be_read_has_no_fields_and_what_is_too_much_is_left_out() -> None:
    for body in (b"", b"text", b"{", b"[" * 100_000, b"\xff\xfe{", b'{"order": 7}', b'{"order": {"id": {}}}'):
        assert FIELDS.read(body, EMPTY) == ()
    large = json.dumps({"order": {"id": "x"}, "filler": "y" * LARGEST_READ}).encode()
    assert FIELDS.read(large, EMPTY) == ()
    many = json.dumps({"lines": [{"sku": number} for number in range(1000)]}).encode()
    assert len(FIELDS.read(many, EMPTY)) == MOST_VALUES


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_any_bytes_can_be_read(body: bytes, properties: bytes) -> None:
    FIELDS.read(body, properties)
    FIELDS.read(b'{"order": ' + body, b"\x20\x00" + properties)


def test_the_settings_describe_fields(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("settings") / "application.properties"
    file.write_text("dlqbatch.fields.order.id=$.order.id\ndlqbatch.fields.tenant=header:x-tenant\n")
    assert load({}, {"DLQBATCH_CONFIG": str(file)}).fields == {"order.id": "$.order.id", "tenant": "header:x-tenant"}
    for line, why in {
        "x=order.id": "no JSON path",
        "x=header:": "names a header that no message can have",
        "message_id=$.id": "are there without a setting",
        "a b=$.id": "no option|name that no field can have",
        "x=": "no JSON path",
    }.items():
        file.write_text(f"dlqbatch.fields.{line}\n".replace("a b", "a\\ b"))
        with pytest.raises(SettingsError, match=why):
            load({}, {"DLQBATCH_CONFIG": str(file)})


def test_a_place_is_checked() -> None:
    assert check_place("header:x") == "header:x"
    with pytest.raises(ValueError, match="no JSON path"):
        check_place("body.x")
