from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from itertools import combinations

import made_failures
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch.ingest.dialects import Failure
from dlqbatch.ingest.fingerprint import fingerprint, masked, simple_type
from dlqbatch.ingest.stacks import application_frame, traces

# --- The measure


def rightly_grouped(told: list[tuple[str, str]]) -> float:
    """The share of messages that are in their own true group's fingerprint.

    A true group owns the one fingerprint that holds most of it, and a fingerprint belongs to one true group at most,
    the one it holds most of. So whatever is split off and whatever is merged in counts as wrong.
    """
    together = Counter(told)
    owner: dict[str, str] = {}
    taken: set[str] = set()
    for (truth, given_to), _ in sorted(together.items(), key=lambda each: (-each[1], each[0])):
        if truth not in owner and given_to not in taken:
            owner[truth] = given_to
            taken.add(given_to)
    return sum(owner.get(truth) == given_to for truth, given_to in told) / len(told)


def pairwise_figures(told: list[tuple[str, str]]) -> tuple[float, float]:
    """Of all pairs put together the share that belongs together, and of all that belong together the share put so."""
    pairs = Counter((one[0] == other[0], one[1] == other[1]) for one, other in combinations(told, 2))
    both = pairs[True, True]
    return both / (both + pairs[False, True]), both / (both + pairs[True, False])


def test_the_measure_counts_what_is_split_off_and_what_is_merged() -> None:
    assert rightly_grouped([("a", "1"), ("a", "1"), ("b", "2")]) == 1
    assert rightly_grouped([("a", "1"), ("a", "1"), ("a", "2"), ("b", "3")]) == 3 / 4
    assert rightly_grouped([("a", "1"), ("a", "1"), ("b", "1"), ("b", "1")]) == 2 / 4
    assert rightly_grouped([("a", "1"), ("a", "1"), ("a", "1"), ("b", "1"), ("b", "2")]) == 4 / 5


@pytest.mark.parametrize("seed", [20260211, 1, 2])
def test_a_thousand_failures_in_four_dialects_are_grouped_as_they_were_made(seed: int) -> None:
    made = made_failures.generate(1000, seed)
    told = [(failed.truth, fingerprint(failed.failure, failed.origin)) for failed in made]
    share, (precision, recall) = rightly_grouped(told), pairwise_figures(told)
    split = sorted({truth for truth, _ in told if len({each for name, each in told if name == truth}) > 1})
    # pytest shows it with -s, and whenever this test fails.
    sys.stdout.write(
        f"\nseed {seed}: {share:.1%} of {len(told)} failures of {len({truth for truth, _ in told})} groups are rightly "
        f"grouped; pairs: precision {precision:.2%}, recall {recall:.2%}; fallen apart: {', '.join(split) or 'none'}\n"
    )
    assert {failed.dialect for failed in made} == {"spring", "masstransit", "nservicebus", "dramatiq"}
    assert share >= 0.95
    assert precision >= 0.95
    assert recall >= 0.95


def test_what_was_made_really_varies() -> None:
    made = made_failures.generate(1000, 1)
    assert made == made_failures.generate(1000, 1)
    assert made != made_failures.generate(1000, 2)
    assert len({(tuple(failed.headers.items()), failed.body) for failed in made}) > 900
    assert Counter(failed.truth for failed in made).most_common()[-1][1] >= 25


def test_every_process_gives_the_same_answer() -> None:
    failure = Failure("shop.OutOfStock", "no stock for order-17 at 10.0.0.1", None)
    program = (
        "from dlqbatch.ingest.dialects import Failure; from dlqbatch.ingest.fingerprint import fingerprint; "
        "print(fingerprint(Failure('shop.OutOfStock', 'no stock for order-99 at 10.0.0.2', None), 'orders'))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == fingerprint(failure, "orders") == "7aee88e6a69f4ec0"


# --- What was raised, and where

JAVA = """java.lang.RuntimeException: it failed
\tat org.springframework.amqp.X.invoke(X.java:5) ~[spring-rabbit-3.1.jar!/:3.1]
\tat java.base/java.lang.Thread.run(Thread.java:840)
Caused by: shop.OutOfStock: none of 12
\tat app//shop.Stock$$EnhancerBySpringCGLIB$$1f2e.take(<generated>)
\tat shop.Stock.lambda$take$3(Stock.java:12) ~[classes!/:na]
\tat java.base/java.util.Optional.orElseThrow(Optional.java:403)
\t... 12 more
"""
NSERVICEBUS = """Shop.Failed: it failed
 ---> System.TimeoutException: too slow
   at System.Net.Http.HttpClient.Send()
   at Shop.Carrier.<>c__DisplayClass3_0.<<Call>b__0>d.MoveNext() in C:\\src\\Carrier.cs:line 12
--- End of stack trace from previous location ---
   at Shop.Carrier.<CallAsync>d__5`1.MoveNext() in C:\\src\\Carrier.cs:line 30
   --- End of inner exception stack trace ---
   at Shop.Handler.Handle(Order order, IMessageHandlerContext context) in C:\\src\\Handler.cs:line 8
"""
MASSTRANSIT = """   at System.Net.Http.HttpClient.Send()
   at Shop.Carrier.<>c__DisplayClass9_1.<<Call>b__4>d.MoveNext() in /src/Carrier.cs:line 77
   at Shop.Other.Consume(ConsumeContext`1 context) in /src/Other.cs:line 3"""
PYTHON = """Traceback (most recent call last):
  File "/srv/app/shop/stock.py", line 12, in take
    raise OutOfStock from error
  File "/opt/venv/lib/python3.12/site-packages/tenacity/__init__.py", line 3, in call
    return fn()
           ^^^^
shop.errors.OutOfStock: none
left of 'pens'
"""
NODE = """Error: it failed
    at JSON.parse (<anonymous>)
    at async Promise.all (index 0)
    at Object.<anonymous> (node:internal/process/task_queues:95:5)
    at Client.request (/app/node_modules/axios/lib/client.js:12:5)
    at async Stock.take [as handler] (file:///srv/app/dist/stock.js:10:11)
    at /srv/app/dist/main.js:1:1
"""
GO = """panic: runtime error: index out of range [5] with length 3

goroutine 17 [running]:
runtime.gopanic({0x1, 0x2})
\t/usr/local/go/src/runtime/panic.go:770 +0x132
shop/stock.(*Stock).Take.func1(0xc000012345)
\t/build/stock/stock.go:12 +0x1d
main.main()
\t/build/main.go:5 +0x1d
"""


@pytest.mark.parametrize(
    ("stack", "frames"),
    [
        (JAVA, [None, "shop.Stock.take"]),
        (NSERVICEBUS, ["Shop.Handler.Handle", "Shop.Carrier.Call"]),
        (MASSTRANSIT, ["Shop.Carrier.Call"]),
        (PYTHON, ["shop/stock.py:take"]),
        (NODE, ["dist/stock.js:Stock.take"]),
        (GO, ["shop/stock.(*Stock).Take"]),
        ("nothing of the kind", []),
        ("", []),
    ],
)
def test_the_first_frame_of_the_application_is_found(stack: str, frames: list[str | None]) -> None:
    assert [application_frame(trace) for trace in traces(stack)] == frames


def test_a_wrapper_is_looked_through() -> None:
    bare = "shop.OutOfStock: none of 7\n\tat shop.Stock.lambda$take$9(Stock.java:99)\n"
    assert fingerprint(Failure("java.lang.RuntimeException", "it failed", JAVA)) == fingerprint(
        Failure("shop.OutOfStock", "none of 7", bare)
    )


def test_both_dialects_of_dotnet_give_the_same() -> None:
    one = Failure("Shop.Failed", "it failed", NSERVICEBUS)
    assert fingerprint(one) == fingerprint(Failure("System.TimeoutException", "too slow", MASSTRANSIT))


def test_what_was_suppressed_is_no_cause() -> None:
    stack = (
        "java.util.concurrent.ExecutionException: x\n\tat java.base/java.A.b(A.java:1)\n\tSuppressed: shop.Closing: y\n"
        "\t\tat shop.Pool.close(Pool.java:2)\nCaused by: shop.Failed: z\n\tat shop.Stock.take(Stock.java:3)\n"
    )
    assert [trace.type for trace in traces(stack)] == ["java.util.concurrent.ExecutionException", "shop.Failed"]


def test_a_cause_that_leaves_its_frames_out_takes_those_of_what_encloses_it() -> None:
    stack = (
        "java.lang.RuntimeException: x\n\tat shop.Stock.take(Stock.java:3)\n"
        "Caused by: java.io.IOException: y\n\tat java.base/java.io.A.b(A.java:1)\n\t... 1 more\n"
    )
    plain = "java.io.IOException: y\n\tat shop.Stock.take(Stock.java:9)\n"
    assert fingerprint(Failure(None, "x", stack)) == fingerprint(Failure(None, "y", plain))


def test_another_type_or_another_frame_is_another_group() -> None:
    stacks = [
        f"{kind}: x\n\tat shop.Stock.{method}(Stock.java:1)\n" for kind in ("a.B", "a.C") for method in ("give", "take")
    ]
    assert len({fingerprint(Failure(None, "x", stack)) for stack in stacks}) == 4


def test_with_a_frame_the_queue_does_not_matter_and_without_one_it_is_the_place() -> None:
    assert fingerprint(Failure(None, "x", JAVA), "a") == fingerprint(Failure(None, "y", JAVA), "b")
    assert fingerprint(Failure("rejected", "x"), "a") != fingerprint(Failure("rejected", "x"), "b")
    frameworks_only = "a.B: x\n\tat java.base/java.io.A.b(A.java:1)\n"
    assert fingerprint(Failure("a.B", "x", frameworks_only), "a") == fingerprint(Failure("a.B", "x", None), "a")


def test_a_queue_whose_name_is_made_anew_each_time_is_one_place() -> None:
    for one, other in (
        ("amq.gen-JzTY20BRgKO-HjmUJj0wLg", "amq.gen-AzTY20BRgKO-HjmUJj0wLx"),
        ("orders.0f8fad5b-d9cb-469f-a165-70867728950e", "orders.7c9e6679-7425-40de-944b-e07fc1f90ae7"),
        ("spring.gen-FVdTrTUzSZC0dxfKo0Ytpg", "spring.gen-AVdTrTUzSZC0dxfKo0Ytpx"),
    ):
        assert fingerprint(Failure("x"), one) == fingerprint(Failure("x"), other)
    assert fingerprint(Failure("x"), "a-long-name-of-a-queue-of-orders") != fingerprint(
        Failure("x"), "another-long-name"
    )


@pytest.mark.parametrize(
    ("name", "simple"),
    [
        ("java.net.SocketTimeoutException", "SocketTimeoutException"),
        ("org.web.HttpClientErrorException$NotFound", "HttpClientErrorException$NotFound"),
        ("Shop.Stock+Empty", "Stock$Empty"),
        ("Shop.Fault`1[[Shop.Order, Shop, Version=1.0.0.0]]", "Fault"),
        ("Shop.Fault<Shop.Order>", "Fault"),
        ("*url.Error", "Error"),
        ("ValueError", "ValueError"),
        ("", ""),
    ],
)
def test_a_type_is_known_by_its_class(name: str, simple: str) -> None:
    assert simple_type(name) == simple


# --- Texts


@pytest.mark.parametrize(
    ("texts", "mask"),
    [
        (["Order 12 not found", "order 99817 not found"], "order <*> not found"),
        (["no stock for order-12345", "no stock for SKU_99A", "no stock for 7f3a9c"], "no stock for <*>"),
        (["took 5000ms", "took 5s", "took 1.5 %", "took 12,345.67"], None),
        (["id 0f8fad5b-d9cb-469f-a165-70867728950e", "id 7c9e6679-7425-40de-944b-e07fc1f90ae7"], "id <*>"),
        (["at 0x7ffbce795790", "at 0xDEADBEEF", "at deadbeef01"], "at <*>"),
        (["user 'a' is gone", 'user "b c" is gone', "user `d` is gone", "user “e” is gone"], "user <*> is gone"),
        (["mail to a.b+c@shop.example.com bounced", "mail to x@y.org bounced"], "mail to <*> bounced"),
        (["to 10.0.0.1:5432 failed", "to db-1.eu.internal:80 failed", "to localhost:5432 failed"], "to <*> failed"),
        (["to [2001:db8::1]:443 failed", "to fe80:0:0:0:0:0:0:1 failed"], "to <*> failed"),
        (["get https://a.example/x?y=1 failed", "get http://b:80/z failed"], "get <*> failed"),
        (
            [
                "since 2026-02-11T12:00:07.123Z",
                "since 2026-02-11 12:00",
                "since 2026-02-11",
                "since 11/02/2026 1:05 PM",
            ],
            "since <*>",
        ),
        (["since Wed, 11 Feb 2026 12:00:07 GMT", "since Feb 3 12:00:07 2025", "since 12:00:01"], "since <*>"),
        (["open /a/b/c.csv failed", r"open C:\x\y.csv failed"], "open <*> failed"),
        (['bad payload {"a": 1, "b": [2]} here', "bad payload {'x': '}'} here", "bad payload {} here"], None),
        (['got {"a": "}"} back', "got [1, 2, 3] back", 'got [{"a": 1}] back', "got [a, b] back"], "got <*> back"),
        (['got {"a": 1, "b', 'got {"c": {"d": 2'], "got <*>"),
        (["lines\n  1\n 2, 3", "lines 1 2"], "lines <*>"),
        (["it's can't", "It's  can't"], "it's can't"),
    ],
)
def test_what_varies_is_masked(texts: list[str], mask: str | None) -> None:
    if mask is not None:
        assert {masked(text) for text in texts} == {mask}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Request failed with status code 404", "Request failed with status code 503"),
        ("404 Client Error: for url: http://a", "429 Client Error: for url: http://a"),
        ("[Errno 111] x", "[Errno 104] x"),
        ("ORA-00001: x", "ORA-00060: x"),
        ("SQLSTATE[23505]: x", "SQLSTATE[40001]: x"),
        ("connection refused", "connection reset"),
        ("HTTP/1.1 500", "HTTP/1.1 502"),
    ],
)
def test_what_tells_two_failures_apart_is_kept(one: str, other: str) -> None:
    assert masked(one) != masked(other)


@given(st.integers(0, 10**12), st.uuids(), st.ip_addresses(), st.datetimes(), st.text("abcxyz ", max_size=20))
def test_the_same_sentence_about_something_else_is_the_same(
    number: int, uuid: object, ip: object, at: object, quoted: str
) -> None:
    told = f"Order {number} ({uuid}) for '{quoted}' from {ip} at {at} failed"
    assert masked(told) == masked(f"Order 1 ({uuid}) for 'q' from 10.0.0.1 at 2026-01-01 00:00:00 failed")


@pytest.mark.parametrize(
    "text",
    [
        "a" * 1_000_000,
        "a.b-" * 250_000,
        '"\\' * 500_000,
        "{[" * 500_000,
        "1:" * 500_000,
        "/a" * 500_000,
        "'" * 1_000_001,
        "x@" * 500_000,
        "at a.b(" * 140_000,
        "\n   at a.b(" * 100_000,
        "\tat a.b.c.d.e.f$g$h(I.java:1)\n" * 30_000,
        '  File "' * 140_000,
        "Caused by: " * 90_000,
        " ---> " * 160_000,
        "\n ---> a" * 120_000,
        " " * 1_000_000,
        "x\n\t/a.go:1\n" * 80_000,
        "    at a (/b/c" * 70_000,
    ],
)
def test_a_megabyte_takes_no_time(text: str) -> None:
    started = time.process_time()
    fingerprint(Failure(text, text, text), text)
    assert time.process_time() - started < 1


def test_the_newest_frame_of_a_very_long_python_traceback_counts() -> None:
    long = PYTHON.replace(
        "Traceback (most recent call last):", "Traceback:" + '\n  File "/a/b/c.py", line 1, in d' * 9_000
    )
    assert len(long) > 200_000
    assert fingerprint(Failure(None, "x", long)) == fingerprint(Failure(None, "y", PYTHON))


PIECES = st.sampled_from(
    [*JAVA.splitlines(), *NSERVICEBUS.splitlines(), *PYTHON.splitlines(), *NODE.splitlines(), *GO.splitlines(), ""]
)
STACKS = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("\n".join))


@given(st.one_of(st.none(), st.text()), st.one_of(st.none(), st.text()), st.one_of(st.none(), STACKS), st.text())
def test_every_failure_has_a_fingerprint_and_always_the_same(
    kind: str | None, message: str | None, stack: str | None, origin: str
) -> None:
    told = fingerprint(Failure(kind, message, stack), origin)
    assert re.fullmatch("[0-9a-f]{16}", told)
    assert told == fingerprint(Failure(kind, message, stack), origin)
