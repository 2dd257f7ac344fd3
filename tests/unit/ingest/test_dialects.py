from __future__ import annotations

import json
import traceback

import messages
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.amqp.x_death import Death
from dlqbatch.ingest.dialects import Dramatiq, Failure, failure, framework_id, read_dramatiq

REJECTED = Death("orders", "shop", "orders.created", "rejected", 1)


def said(headers: dict[str, str | bytes | messages.Value], body: bytes = b"", *deaths: Death) -> Failure:
    entries = [
        (name.encode(), value if isinstance(value, messages.Value) else messages.text(value))
        for name, value in headers.items()
    ]
    return failure(messages.encode_table(entries), deaths, read_dramatiq(body))


SPRING_TRACE = "java.lang.IllegalStateException: no stock\n\tat shop.Stock.take(Stock.java:12)\n"


def test_spring_amqp_writes_a_message_and_a_trace_whose_head_is_the_type() -> None:
    headers: dict[str, str | bytes | messages.Value] = {
        "x-exception-message": "no stock",
        "x-exception-stacktrace": SPRING_TRACE,
    }
    assert said(headers) == Failure("java.lang.IllegalStateException", "no stock", SPRING_TRACE)


def test_spring_amqps_own_wrapper_is_not_the_type() -> None:
    wrapper = "org.springframework.amqp.rabbit.support.ListenerExecutionFailedException: Listener threw exception"
    trace = f"{wrapper}\n\tat org.springframework.X.y(X.java:1)\nCaused by: {SPRING_TRACE}"
    assert said({"x-exception-stacktrace": trace}).type == "java.lang.IllegalStateException"
    assert said({"x-exception-stacktrace": wrapper}).type == wrapper.partition(":")[0]


def test_spring_amqp_often_sends_no_trace() -> None:
    assert said({"x-exception-message": "no stock"}) == Failure(None, "no stock", None)


def test_masstransit_names_type_message_and_stack() -> None:
    headers: dict[str, str | bytes | messages.Value] = {
        "MT-Reason": "fault",
        "MT-Fault-ExceptionType": "Shop.OutOfStock",
        "MT-Fault-Message": "no stock",
        "MT-Fault-StackTrace": "   at Shop.Stock.Take()",
    }
    assert said(headers) == Failure("Shop.OutOfStock", "no stock", "   at Shop.Stock.Take()")


SPRING_AND_WORKER: dict[str, str | bytes | messages.Value] = {
    "x-exception-message": "the first",
    "MT-Fault-ExceptionType": "KeyError",
    "MT-Fault-Message": "the second",
    "MT-Fault-Timestamp": "2026-11-19T12:00:00+00:00",
}
NOON = 1_795_089_600
BY_THE_BROKER = Failure("rejected", "a consumer of 'orders' rejected it")


def test_what_a_worker_of_ours_gave_up_is_told_in_its_words() -> None:
    table = messages.encode_table(
        [(name.encode(), messages.text(str(text))) for name, text in SPRING_AND_WORKER.items()]
    )
    later = REJECTED._replace(time=NOON + 3600)
    assert failure(table, [], b"").message == "the first"
    assert failure(table, [later], b"", is_given_up_by_worker=True) == Failure("KeyError", "the second")


@pytest.mark.parametrize(("seconds", "is_told"), [(-3600, True), (30, True), (31, False), (3600, False)])
def test_an_earlier_failures_headers_tell_nothing_of_a_later_one(seconds: int, *, is_told: bool) -> None:
    headers = {name: value for name, value in SPRING_AND_WORKER.items() if not name.startswith("x-")}
    later = REJECTED._replace(time=NOON + seconds)
    assert said(headers, b"", later) == (Failure("KeyError", "the second") if is_told else BY_THE_BROKER)
    headers["MT-Fault-Timestamp"] = "some day"
    assert said(headers, b"", later).type == "KeyError"


def test_what_masstransit_skipped_has_only_a_reason() -> None:
    assert said({"MT-Reason": "dead-letter"}, b"", REJECTED) == Failure("dead-letter")


def test_nservicebus_names_type_message_and_stack() -> None:
    headers: dict[str, str | bytes | messages.Value] = {
        "NServiceBus.FailedQ": "orders",
        "NServiceBus.ExceptionInfo.ExceptionType": "System.TimeoutException",
        "NServiceBus.ExceptionInfo.Message": "too slow",
        "NServiceBus.ExceptionInfo.StackTrace": "System.TimeoutException: too slow\n   at Shop.Order()",
    }
    assert said(headers) == Failure(
        "System.TimeoutException", "too slow", "System.TimeoutException: too slow\n   at Shop.Order()"
    )


def dramatiq(**options: object) -> bytes:
    return json.dumps({"queue_name": "orders", "actor_name": "take", "args": [], "options": options}).encode()


def raised(error: BaseException) -> str:
    try:
        _fail(KeyError("first"))
    except KeyError:
        try:
            _fail(error)
        except BaseException:  # noqa: BLE001  (any error is written down like this)
            return traceback.format_exc(limit=30)
    return ""


def _fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("no stock"), "ValueError", "no stock"),
        (ValueError("no stock:\n  of 'pens'\nnor: paper"), "ValueError", "no stock:\n  of 'pens'\nnor: paper"),
        (ValueError(), "ValueError", None),
        (json.JSONDecodeError("odd", "x", 0), "json.decoder.JSONDecodeError", "odd: line 1 column 1 (char 0)"),
    ],
)
def test_dramatiq_keeps_the_traceback_in_its_body(error: Exception, kind: str, message: str | None) -> None:
    trace = raised(error)
    assert said({}, dramatiq(traceback=trace, retries=3), REJECTED) == Failure(kind, message, trace)


@pytest.mark.parametrize(
    "body",
    [
        dramatiq(retries=0),
        dramatiq(traceback=3),
        dramatiq(traceback=""),
        b'{"actor_name": ',
        b'{"actor_name": "a", "options": []}',
        b'{"actor_name": "a", "options": ' + b"[" * 100_000,
        b'["actor_name"]',
        b'{"actor_name": "\xff"}',
        b'{"traceback": "x"}',
        b"",
    ],
)
def test_a_body_that_tells_nothing_leaves_it_to_the_broker(body: bytes) -> None:
    assert said({}, body, REJECTED) == Failure("rejected", "a consumer of 'orders' rejected it")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"message_id": "m-1", "options": {"retries": 3}}, ("m-1", 3)),
        ({"message_id": "x" * 256, "options": {"retries": -1}}, ("", 0)),
        ({"message_id": 7, "options": {"retries": True}}, ("", 0)),
        ({"message_id": "m-1", "options": {"retries": 2**40}}, ("m-1", 2**31 - 1)),
        ({"message_id": "m-1", "options": []}, ("m-1", 0)),
    ],
)
def test_dramatiqs_own_id_and_retries_are_read(changed: dict[str, object], found: tuple[str, int]) -> None:
    body = json.dumps({"queue_name": "orders", "actor_name": "take", "args": []} | changed).encode()
    assert read_dramatiq(body) == Dramatiq(*found, actor="take")


@pytest.mark.parametrize(
    "body",
    [
        b'{"message_id": "m-1"}',
        b'{"args": "\\"actor_name\\""}',
        b'{"args": {"actor_name": 1}}',
        b'["actor_name"]',
        b"{" * 9,
    ],
)
def test_what_names_no_actor_is_no_message_of_dramatiqs(body: bytes) -> None:
    assert read_dramatiq(body) is None


def test_a_traceback_that_is_none_is_kept_as_the_stack() -> None:
    assert said({}, dramatiq(traceback="!? no")) == Failure(None, None, "!? no")


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("rejected", "a consumer of 'orders' rejected it"),
        ("expired", "it waited too long in 'orders'"),
        ("maxlen", "'orders' was full"),
        ("delivery_limit", "it was delivered too often from 'orders'"),
        ("something new", "it left 'orders'"),
    ],
)
def test_without_headers_the_newest_death_tells(reason: str, message: str) -> None:
    assert said({}, b"", Death("orders", reason=reason), REJECTED) == Failure(reason, message)


def test_headers_are_believed_before_the_broker() -> None:
    assert said({"x-exception-message": "no stock"}, b"", REJECTED).message == "no stock"


def test_nothing_known_is_nothing_said() -> None:
    assert said({}) == Failure(None, None, None)
    assert said({"tenant": "acme"}, b"{}", Death("orders")) == Failure()


def test_bytes_that_are_not_utf_8_are_shown_with_replacement() -> None:
    assert said({"x-exception-message": b"no \xff stock"}).message == "no \N{REPLACEMENT CHARACTER} stock"
    assert said({}, b"", Death("\udcff", reason="maxlen")).message == "'\N{REPLACEMENT CHARACTER}' was full"
    assert said({"MT-Fault-Message": messages.Value(b"x", b"bytes")}).message == "bytes"


def test_a_header_of_another_type_says_nothing_and_the_first_of_two_counts() -> None:
    assert said({"x-exception-message": messages.long(1)}, b"", REJECTED).type == "rejected"
    entries = [(b"MT-Reason", messages.text(text)) for text in ("first", "second")]
    assert failure(messages.encode_table(entries), ()).type == "first"


@given(
    st.one_of(st.binary(), messages.tables.map(messages.encode_table)),
    st.lists(st.builds(Death, st.text(), reason=st.text()), max_size=2),
    st.one_of(st.binary(), st.text().map(lambda trace: dramatiq(traceback=trace))),
)
def test_nothing_makes_it_raise(foreign: bytes, deaths: list[Death], body: bytes) -> None:
    told = failure(foreign, deaths, read_dramatiq(body))
    for part in told:
        assert part is None or part.encode("utf-8", "replace")


SYMFONY = "X-Message-Stamp-Symfony\\Component\\Messenger\\Stamp\\ErrorDetailsStamp"


def symfony(kind: str, message: str) -> dict[str, object]:
    flat = {
        "message": message,
        "class": kind,
        "file": "/app/Pay.php",
        "line": 12,
        "traceAsString": "#0 /app/Pay.php(12)",
    }
    return {"exceptionClass": kind, "exceptionCode": 0, "exceptionMessage": message, "flattenException": flat}


def test_symfony_keeps_every_failure_in_a_stamp_and_the_last_one_counts() -> None:
    stamps = [symfony("App\\NoStock", "no stock"), symfony("App\\Declined", "card declined")]
    assert said({SYMFONY: json.dumps(stamps)}, b"", REJECTED) == Failure(
        "App\\Declined", "card declined", "#0 /app/Pay.php(12)"
    )
    del stamps[1]["flattenException"]
    assert said({SYMFONY: json.dumps(stamps)}, b"", REJECTED) == Failure("App\\Declined", "card declined")


@pytest.mark.parametrize("stamps", ["", "[]", "{}", "null", "[1]", '["a"]', "[" * 9999, '[{"exceptionClass": "E"}]'])
def test_a_stamp_that_cannot_be_read_leaves_it_to_the_broker(stamps: str) -> None:
    assert said({SYMFONY: stamps}, b"", REJECTED) == BY_THE_BROKER


def test_rascal_keeps_message_and_code_in_a_table() -> None:
    error = messages.nested((b"message", messages.text("no stock")), (b"code", messages.text("E_STOCK")))
    assert said({"rascal": messages.nested((b"error", error))}, b"", REJECTED) == Failure("E_STOCK", "no stock")
    error = messages.nested((b"message", messages.text("no stock")))
    assert said({"rascal": messages.nested((b"error", error))}, b"", REJECTED) == Failure(None, "no stock")
    assert said({"rascal": messages.nested()}, b"", REJECTED) == BY_THE_BROKER
    assert said({"rascal": messages.Value(b"F", b"\xff\x00")}, b"", REJECTED) == BY_THE_BROKER


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"task_id": "id-1", "task_name": "shop.pay", "labels": {}}', "id-1"),
        (b'{"task_id": 7, "task_name": "shop.pay"}', None),
        (b'{"task_id": "", "task_name": "shop.pay"}', None),
        (b'{"task_id": "id-1", "args": ["\\"task_name\\""]}', None),
        (b'{"task_name"', None),
        (b"pens", None),
        (dramatiq(), None),
    ],
)
def test_what_taskiq_publishes_anew_is_known_by_its_task_id(body: bytes, found: str | None) -> None:
    assert framework_id(body, read_dramatiq(body)) == found
