from __future__ import annotations

import io
import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlqbatch import __version__, logs
from dlqbatch.settings import SecretUrl

if TYPE_CHECKING:
    from collections.abc import Iterator

CANARY = "c4n4ry"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    logs.begin_request(None)
    root, levels = logging.root, {name: logging.getLogger(name).level for name in ("dlqbatch", "pika")}
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


class Written:
    """Everything that went to stderr since the test began."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Written:
    return Written(capsys)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class Unprintable:
    def __str__(self) -> str:
        raise RuntimeError(CANARY)


def line(stream: Written | io.StringIO) -> dict[str, Any]:
    (only,) = stream.getvalue().splitlines()
    entry: dict[str, Any] = json.loads(only)
    return entry


def test_a_json_line_has_time_level_event_and_fields(stderr: Written) -> None:
    logs.configure("info", "json")
    logs.get("dlqbatch.drain.run").info(
        "run", job="drain", got=5, rate=1.5, done=True, none=None, event="rk", level="x"
    )
    entry = line(stderr)
    assert datetime.fromisoformat(entry["ts"]).tzinfo == UTC
    assert abs((datetime.now(UTC) - datetime.fromisoformat(entry["ts"])).total_seconds()) < 60
    del entry["ts"]
    assert entry == {
        "level": "info",
        "event": "run",
        "logger": "dlqbatch.drain.run",
        "fields": {"job": "drain", "got": 5, "rate": 1.5, "done": True, "none": None, "event": "rk", "level": "x"},
        "version": __version__,
        "pid": os.getpid(),
    }


def test_the_lines_of_a_run_have_its_id_and_that_of_its_request(stderr: Written) -> None:
    logs.configure("info", "json")
    log = logs.get("dlqbatch")
    logs.begin_request("8a5b")
    log.info("before")
    logs.begin_run()
    log.info("first")
    log.info("second")
    logs.begin_run()
    log.info("again")
    logs.begin_request(None)
    log.info("after")
    before, first, second, again, after = map(json.loads, stderr.getvalue().splitlines())
    assert first["run_id"] == second["run_id"] != again["run_id"]
    assert "run_id" not in before.keys() | after.keys()
    assert [one.get("aws_request_id") for one in (before, first, second, again, after)] == [*["8a5b"] * 4, None]


def test_a_text_line_is_short_and_quotes_what_needs_it(stderr: Written) -> None:
    logs.configure("info", "text")
    logs.get("dlqbatch").warning("left", queue="q 1", reason="", key="a=b", n=3, origin="caf\u00e9")
    text = stderr.getvalue()
    assert text.endswith(' warning left queue="q 1" reason="" key="a=b" n=3 origin=caf\u00e9\n')


def test_auto_is_text_on_a_terminal_and_json_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, begins_with_brace in ((Terminal(), False), (io.StringIO(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure()
        logs.get("dlqbatch").info("run")
        assert stream.getvalue().startswith("{") is begins_with_brace


def test_configuring_twice_prints_once(stderr: Written) -> None:
    logs.configure("info", "json")
    logs.configure("debug", "json")
    logs.get("dlqbatch").debug("once")
    assert line(stderr)["event"] == "once"


def test_less_important_lines_are_not_written(stderr: Written) -> None:
    logs.configure("warning", "json")
    log = logs.get("dlqbatch.x")
    log.debug("no")
    log.info("no")
    log.error("yes")
    assert line(stderr)["event"] == "yes"


def test_a_logger_of_a_top_level_module_is_one_of_ours(stderr: Written) -> None:
    logs.configure("info", "json")
    logs.get("handler").info("run")
    assert line(stderr)["logger"] == "dlqbatch.handler"


def test_other_libraries_only_warn_and_pika_is_silent_but_at_level_debug(stderr: Written) -> None:
    logs.configure("info", "json")
    logging.getLogger("sqlalchemy.engine").info(CANARY)
    logging.getLogger("pika.adapters").error("refused")
    assert stderr.getvalue() == ""
    logs.configure("debug", "json")
    logging.getLogger("sqlalchemy.engine").info(CANARY)
    logging.getLogger("pika.channel").debug("frame")
    logging.getLogger("pika.adapters").info("connecting to %s", "h")
    assert line(stderr)["event"] == "connecting to h"


def test_somebody_elses_broken_log_call_is_still_a_line(stderr: Written) -> None:
    logs.configure("info", "json")
    logging.getLogger("other").warning("got %d", "three")
    assert line(stderr)["event"] == "got %d"


def test_terminal_escapes_become_visible_everywhere(stderr: Written) -> None:
    evil = "\x1b]0;title\x07\u202e\r\n\x9b31m\ud800"
    logs.configure("info", "text")
    logs.get("dlqbatch").info(
        f"e{evil}", failure=None, **{f"k{evil}": evil, "deep": [{"x": evil}], "raw": evil.encode("utf-8", "replace")}
    )
    text = stderr.getvalue()
    assert text.removesuffix("\n").isprintable()
    assert r"\x1b]0;title\x07\u202e\r\n\x9b31m\ud800" in text


def test_long_values_long_lists_and_deep_ones_are_cut(stderr: Written) -> None:
    logs.configure("info", "json")
    deep: list[object] = []
    for _ in range(50):
        deep = [deep]
    logs.get("dlqbatch").info("run", text="x" * 100_000, many=list(range(1000)), deep=deep)
    fields = line(stderr)["fields"]
    assert len(fields["text"]) == 500
    assert fields["text"].endswith("…")
    assert len(fields["many"]) == 50
    assert len(stderr.getvalue()) < 5000


@pytest.mark.parametrize(
    "text",
    [
        f"amqp://u:{CANARY}@h/v",
        f"cannot reach (amqp://u:{CANARY}@h:5672), gave up",
        f"amqp://u:p@{CANARY}/x@h",
        f"https://{CANARY}@h",
        f"postgresql://h/d?password={CANARY}&x=1",
        f"host=h password={CANARY} dbname=x",
        f"AWS_SECRET_ACCESS_KEY={CANARY}",
        f"amqp://u:{'x' * 600}{CANARY}@h",
        f"password: {CANARY}, and so on",
        f'{{"password": "{CANARY}", "user": "u"}}',
        f"{{'db_passwd': '{CANARY} {CANARY}'}}",
        f"pass={CANARY}",
        f"X-Api-Key: {CANARY}",
        f"Authorization: Bearer {CANARY}",
        f"it sent a bearer {CANARY}{CANARY}.{CANARY}",
        SecretUrl(f"amqp://u:{CANARY}@h"),
        ValueError(f"bad amqp://u:{CANARY}@h"),
    ],
)
def test_passwords_are_masked_in_events_keys_values_and_traces(stderr: Written, text: object) -> None:
    for style in ("text", "json"):
        logs.configure("info", style)
        failure = RuntimeError(str(text))
        logs.get("dlqbatch").error(str(text), failure=failure, value=text, **{str(text): [text, {"a": text}]})
        logging.getLogger("other").error("%s", text)
    assert "***" in stderr.getvalue()
    assert CANARY not in stderr.getvalue()
    assert "xxxx" not in stderr.getvalue()


def test_what_only_looks_a_little_like_a_secret_is_left() -> None:
    assert logs.masked("key AKIAIOSFODNN7EXAMPLE of AWS") == "key *** of AWS"
    for text in (
        "the password is wrong for user u",
        "dlqbatch.secret names prod/dlqbatch",
        "a bearer of news",
        "it passes: 12 of 12; bypass=1",
        "token://h/x",
    ):
        assert logs.masked(text) == text


def test_a_failure_brings_its_trace(stderr: Written) -> None:
    failure = ValueError("broke\x1b[0m")
    for style in ("text", "json"):
        logs.configure("info", style)
        logs.get("dlqbatch").error("failed", failure=failure)
    text, entry = stderr.getvalue().rsplit("\n", 2)[:2]
    assert text.endswith("    ValueError: broke\\x1b[0m")
    assert json.loads(entry)["trace"][-1] == "ValueError: broke\\x1b[0m"


def test_a_log_that_cannot_be_written_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.configure("info", "json")
    for stream in (Broken(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        logs.configure()
        logs.get("dlqbatch").info("run")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    logs.configure()
    logs.get("dlqbatch").info("run")


def test_a_value_without_a_text_ends_nothing(stderr: Written) -> None:
    logs.configure("info", "json")
    failure = RuntimeError(Unprintable())
    logs.get("dlqbatch").info("run", failure=failure, value=Unprintable(), huge=10**5000, nan=float("nan"), big=2**70)
    assert line(stderr)["fields"] == {"value": "<Unprintable>", "huge": "<int>", "nan": "nan", "big": str(2**70)}
    assert CANARY not in stderr.getvalue()


def test_times_and_sets_are_written_as_text_and_lists(stderr: Written) -> None:
    logs.configure("info", "json")
    logs.get("dlqbatch").info("run", at=datetime(2026, 1, 2, tzinfo=UTC), tags={"a"}, pair=(1, 2))
    assert line(stderr)["fields"] == {"at": "2026-01-02T00:00:00+00:00", "tags": ["a"], "pair": [1, 2]}


@given(text=st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zs", "Zl"])))
def test_plain_text_is_always_printable_and_leaves_the_printable_alone(text: str) -> None:
    shown = logs.plain(text)
    assert shown.isprintable()
    shown.encode()
    assert shown == text or not text.isprintable()


@given(text=st.text(), limit=st.integers(min_value=1, max_value=20))
def test_plain_text_can_be_cut(text: str, limit: int) -> None:
    assert logs.plain(text, limit) == logs.plain(text) or "…" in logs.plain(text, limit)


value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.datetimes(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
)


@given(fields=st.dictionaries(st.text().filter(lambda key: key not in {"self", "failure"}), value))
def test_any_fields_make_one_line_of_json(fields: dict[str, Any]) -> None:
    stream, before = io.StringIO(), sys.stderr
    sys.stderr = stream
    try:
        logs.configure("info", "json")
        logs.get("dlqbatch").info("run", **fields)
    finally:
        sys.stderr = before
    assert line(stream)["event"] == "run"
