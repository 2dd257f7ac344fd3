from __future__ import annotations

import itertools
from struct import error as StructError  # noqa: N812  (struct names its exception in lower case)

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.properties import join, split
from dlqbatch.amqp.table import UnreadableTable

SAMPLES = {
    name: name.encode() if size is None else bytes(range(1, size + 1)) for name, _, size in messages.PROPERTIES
} | {"headers": messages.encode_table([(b"tenant", messages.text("acme"))])}


def test_every_combination_of_properties_is_cut_and_joined_without_loss() -> None:
    for chosen in itertools.product((False, True), repeat=len(messages.PROPERTIES)):
        values = {name: SAMPLES[name] for (name, _, _), taken in zip(messages.PROPERTIES, chosen, strict=True) if taken}
        cut = split(messages.encode_properties(values))
        table = cut.data[cut.table_start : cut.table_end]
        assert table == values.get("headers", b"")
        assert (cut.expiration, cut.user_id) == (values.get("expiration"), values.get("user_id"))
        wanted = values | {"headers": b"", "delivery_mode": b"\x02"}
        wanted.pop("expiration", None)
        assert messages.decode_properties(join(cut, b"", login=b"user_id")) == wanted
        wanted.pop("user_id", None)
        assert messages.decode_properties(join(cut, table, login=b"another")) == wanted | {"headers": table}


@given(messages.other_properties, messages.tables, st.binary(max_size=20))
def test_everything_else_stays_byte_for_byte(
    others: dict[str, bytes], table: list[messages.Entry], login: bytes
) -> None:
    encoded = messages.encode_table(table)
    cut = split(messages.encode_properties({**others, "headers": encoded}))
    wanted = {**others, "headers": encoded, "delivery_mode": b"\x02"}
    wanted.pop("expiration", None)
    if wanted.get("user_id") != login:
        wanted.pop("user_id", None)
    assert messages.decode_properties(join(cut, encoded, login)) == wanted


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\x80\x00", b"\x80\x00\x05abc", b"\x20\x00\x00\x00", b"\x20\x00\x00\x00\x00\x09a", b"\x00\x01"],
)
def test_lengths_that_do_not_add_up_are_refused(data: bytes) -> None:
    with pytest.raises((UnreadableTable, IndexError, StructError)):
        split(data)
