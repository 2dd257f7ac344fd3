from __future__ import annotations

import re

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.headers import Headers, scan
from dlqbatch.amqp.x_death import Death, _read_all, deaths, newest_death, past_deaths

REJECTED = Death("orders", "shop", "orders.created", "rejected", 1, 1_700_000_000)


def headers(*entries: messages.Entry) -> Headers:
    encoded = messages.encode_table(entries)
    return scan(encoded, 0, len(encoded))


def newest(*entries: messages.Entry, ignored: tuple[str, ...] = (), trust_last_death: bool = False) -> Death | None:
    return newest_death(headers(*entries), ignored, trust_last_death=trust_last_death)


def test_a_message_that_never_died_has_no_death() -> None:
    assert newest() is None
    assert newest((b"tenant", messages.text("acme"))) is None


def test_everything_the_broker_says_of_a_death_is_read() -> None:
    entry = messages.nested(
        (b"count", messages.long(7)),
        (b"reason", messages.text("expired")),
        (b"queue", messages.text("orders")),
        (b"time", messages.timestamp(1_700_000_000)),
        (b"exchange", messages.text("shop")),
        (b"routing-keys", messages.array(messages.text("orders.created"), messages.text("copy"))),
        (b"original-expiration", messages.text("60000")),
    )
    assert newest(messages.x_death(entry)) == Death(
        "orders", "shop", "orders.created", "expired", 7, 1_700_000_000, "60000"
    )


def test_on_3_x_the_first_entry_is_the_newest() -> None:
    shape = messages.x_death(messages.death("orders"), messages.death("mail"))
    assert newest(shape) == REJECTED
    # Before 4.0 such headers are a client's.
    last = (b"x-last-death-queue", messages.text("mail")), (b"x-last-death-reason", messages.text("rejected"))
    assert newest(shape, *last) == REJECTED


def test_on_4_x_the_broker_names_the_newest() -> None:
    entries = messages.death("orders"), messages.death("mail", reason="expired"), messages.death("mail")
    last = (b"x-last-death-queue", messages.text("mail")), (b"x-last-death-reason", messages.text("rejected"))
    assert newest(messages.x_death(*entries), *last, trust_last_death=True) == REJECTED._replace(queue="mail")
    # The last one was in a queue of ours, which does not count.
    assert newest(messages.x_death(*entries), *last, ignored=("mail",), trust_last_death=True) == REJECTED
    assert newest(messages.x_death(*entries), last[0], trust_last_death=True) == REJECTED


def waited(queue: str = "orders.wait", exchange: str = "wait") -> messages.Value:
    return messages.death(queue, exchange, "orders.created", "expired")


ON_4_X = [(b"x-last-death-queue", messages.text("orders.wait")), (b"x-last-death-reason", messages.text("expired"))]


@pytest.mark.parametrize("release", [3, 4])
def test_a_queue_where_the_message_only_waited_is_not_where_it_failed(release: int) -> None:
    """A team's own delay between its queue and ours: fed by dead letters, left when the time is up."""
    ours = messages.death("queue.delay.1", "route-delay", "binding.1", "expired")
    for before in ([], [ours]):
        shape = messages.x_death(*before, waited(), messages.death())
        last = ON_4_X if not before else []
        assert newest(shape, *last, ignored=("queue.delay.1",), trust_last_death=release > 3) == REJECTED


@pytest.mark.parametrize("release", [3, 4])
@pytest.mark.parametrize(
    "x_death",
    [
        [waited()],
        [waited("orders", "shop"), messages.death()],
        [messages.death("orders.wait", "wait"), messages.death()],
        [messages.nested((b"count", messages.long(2)), *messages.decode_table(waited().content)[1:]), messages.death()],
        [waited(), messages.nested((b"count", messages.long(2)), *messages.decode_table(messages.death().content)[1:])],
    ],
    ids=["nothing before", "the same queue", "rejected there", "more than once", "a circle"],
)
def test_a_queue_whose_messages_expire_is_where_they_failed(release: int, x_death: list[messages.Value]) -> None:
    found = newest(messages.x_death(*x_death), trust_last_death=release > 3)
    assert found is not None
    assert found.queue == dict(messages.decode_table(x_death[0].content))[b"queue"].content.decode()


@pytest.mark.parametrize(
    "before",
    [
        [messages.death(exchange="wait")],
        [messages.death(reason="expired")],
        [waited("orders.earlier", "earlier"), messages.death()],
    ],
    ids=["from the same exchange", "expired as well", "more than one"],
)
def test_what_a_client_can_have_published_in_between_is_no_wait_before_4_0(before: list[messages.Value]) -> None:
    """There the x-death that a client sends with its message is gone on with; from 4.0 it is not."""
    shape = messages.x_death(waited(), *before)
    found, certain = newest(shape), newest(shape, *ON_4_X, trust_last_death=True)
    assert found is not None
    assert found.queue == "orders.wait"
    assert certain is not None
    assert certain.queue == "orders"


def test_deaths_in_our_own_queues_do_not_count() -> None:
    shape = messages.x_death(messages.death("queue.delay.1"), messages.death("orders"))
    assert newest(shape, ignored=("queue.delay.1",)) == REJECTED
    assert newest(shape, ignored=("queue.delay.1", "orders")) is None


def test_what_expired_among_dramatiqs_dead_failed_where_it_died_before() -> None:
    dead = messages.death("orders.XQ", reason="expired")
    assert newest(messages.x_death(dead, messages.death("mail"), messages.death("orders"))) == REJECTED
    delayed = newest(messages.x_death(dead, messages.death("orders.DQ")))
    assert delayed is not None
    assert delayed.queue == "orders.DQ"
    alone = newest(messages.x_death(dead))
    assert alone is not None
    assert alone.queue == "orders.XQ"


@pytest.mark.parametrize(
    "value",
    [
        messages.text("orders"),
        messages.long(1),
        messages.array(messages.long(1), messages.long(2)),
        messages.array(),
        messages.nested((b"queue", messages.text("orders"))),
        messages.Value(b"V", b""),
        messages.Value(b"A", b"F\x00\x00\x00\x09\x05queue"),
        messages.Value(b"A", b"F\x00\x00\x00\x07\x05queueS"),
        messages.Value(b"A", b"\xff"),
        messages.array(messages.Value(b"F", b"\x05queueU\x00\x00")),
        messages.array(messages.nested((b"queue", messages.long(1)))),
        messages.array(messages.nested((b"queue", messages.text("")))),
        messages.array(messages.array(messages.death())),
    ],
)
def test_an_x_death_of_another_type_is_no_death(value: messages.Value) -> None:
    assert newest((b"x-death", value)) is None


def test_entries_before_an_unreadable_one_count() -> None:
    content = messages.array(messages.long(1), messages.death("orders")).content + b"F\x00"
    assert deaths(headers((b"x-death", messages.Value(b"A", content)))) == (REJECTED,)


def test_parts_of_another_type_are_empty() -> None:
    entry = messages.nested(
        (b"queue", messages.text("orders")),
        (b"queue", messages.text("another")),
        (b"exchange", messages.long(1)),
        (b"count", messages.text("three")),
        (b"time", messages.timestamp(2**64 - 1)),
        (b"routing-keys", messages.text("orders.created")),
        (b"original-expiration", messages.text("9" * 256)),
    )
    assert newest(messages.x_death(entry)) == Death("orders")
    keys = messages.nested((b"queue", messages.text("orders")), (b"routing-keys", messages.array(messages.long(1))))
    assert newest(messages.x_death(keys)) == Death("orders")


def test_an_x_death_too_long_to_remember_is_read_all_the_same() -> None:
    many = [messages.death(f"queue-{number}") for number in range(100)]
    assert [death.queue for death in deaths(headers(messages.x_death(*many)))] == [f"queue-{n}" for n in range(100)]


def test_the_history_tells_the_earlier_deaths() -> None:
    cc = messages.nested((b"CC", messages.array(messages.text("copy"))))
    history = (b"dlqbatch-history", messages.array(cc, messages.death("mail"), messages.death("queue.delay.1")))
    told = past_deaths(headers(messages.x_death(messages.death("orders")), history))
    assert [death.queue for death in told] == ["orders", "mail", "queue.delay.1"]
    assert past_deaths(headers()) == past_deaths(headers((b"dlqbatch-history", messages.long(1)))) == ()


@given(messages.valid_properties)
def test_no_content_makes_it_raise(data: bytes) -> None:
    for value in [messages.Value(b"A", data), *(value for _, value in messages.headers_of(data))]:
        newest((b"x-death", value), trust_last_death=True)


_TIMES = st.integers(0, 2**64 - 1) | st.just(int.from_bytes(b"\x04timeTTT", "big"))
_NAMES = st.sampled_from([b"queue", b"exchange", b"reason", b"time", b"count", b"other"])
_VALUES = st.one_of(
    st.builds(messages.timestamp, _TIMES),
    st.builds(messages.text, st.sampled_from([b"", b"orders", b"\x04timeT", b"\x04timeT12345678", b"T\x04time"])),
    st.builds(messages.long, st.integers(0, 3)),
)
_ENTRIES = st.builds(lambda entries: messages.nested(*entries), st.lists(st.tuples(_NAMES, _VALUES), max_size=5))


@given(st.lists(_ENTRIES, max_size=3), st.lists(_TIMES, min_size=3, max_size=3), st.integers(0, 20))
def test_a_death_known_but_for_its_time_is_read_as_if_it_were_not(
    entries: list[messages.Value], times: list[int], cut: int
) -> None:
    content = messages.array(*entries).content
    marks = [match.end() for match in re.finditer(rb"\x04timeT(?=.{8})", content, re.DOTALL)]
    other = content
    for mark, time in zip(marks, times, strict=False):
        other = other[:mark] + time.to_bytes(8, "big") + other[mark + 8 :]
    for x_death in (content, other, content[: len(content) - cut], other[: len(other) - cut]):
        assert deaths(headers((b"x-death", messages.Value(b"A", x_death)))) == _read_all(x_death)
