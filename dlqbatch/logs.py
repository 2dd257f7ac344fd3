"""One line to stderr for every run and every unusual message: text for a person, JSON for a machine.

    log = logs.get(__name__)
    log.info("run", job="drain", got=5000)

Whatever a message or a server put into a value is made harmless here: no control characters, no passwords, no end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from typing import Literal

from dlqbatch import __version__
from dlqbatch.amqp.masking import MASK, Masking

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "text", "json"]

ROOT = "dlqbatch"
_LONGEST_VALUE = 500
_LONGEST_TRACE = 8_000
# From here on a JSON reader with 64-bit numbers goes wrong; these, infinity and NaN are written as text.
_LARGEST_NUMBER = 2**63
_MOST_ITEMS = 50
_DEEPEST = 4
_NEEDS_QUOTES = re.compile(r"[\s\"=]")


_process: dict[str, object] = {"version": __version__}
"""What every line of JSON says of where it comes from, besides its process."""


def begin_request(request_id: str | None) -> None:
    """Give the lines from now on the platform's id of the request that is served; no run of it has begun yet."""
    _process.pop("run_id", None)
    _process.pop("aws_request_id", None)
    if request_id is not None:
        _process["aws_request_id"] = request_id


def begin_run() -> None:
    """Give the lines from now on the id of a new run."""
    _process["run_id"] = os.urandom(8).hex()


def origin() -> dict[str, object]:
    """Where a line comes from: version and process, and during a run also its id and that of its request."""
    return {**_process, "pid": os.getpid()}


def plain(text: str, limit: int | None = None) -> str:
    """Make any text safe for a terminal and one line long: what cannot be printed is shown as its escape."""
    if limit is not None and len(text) > limit:
        text = text[: max(limit - 1, 0)] + "…"
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def hide(secrets: Iterable[str]) -> None:
    """Mask these texts from now on, except short ones, which may be parts of common words."""
    _hidden.update(secret for secret in secrets if len(secret) >= _SHORTEST_SECRET)


_hidden: set[str] = set()
_SHORTEST_SECRET = 8


def mask_by(rules: Masking) -> None:
    """Hide by these rules from now on, in the logs and in whatever shows the content of messages."""
    global _rules  # noqa: PLW0603  (one configuration for the process, as with `hide`)
    _rules = rules


def masking() -> Masking:
    """The rules that hold in this process."""
    return _rules


_rules = Masking()


def masked(text: str) -> str:
    """The text without the passwords passed to `hide`, and without whatever the rules call a secret."""
    for secret in _hidden:
        text = text.replace(secret, MASK)
    return _rules.text(text)


class Log:
    """What a module writes to: an event's name, then fields; `failure` adds the trace of an exception."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, *, failure: BaseException | None = None, **fields: object) -> None:
        self._write(logging.DEBUG, event, failure, fields)

    def info(self, event: str, /, *, failure: BaseException | None = None, **fields: object) -> None:
        self._write(logging.INFO, event, failure, fields)

    def warning(self, event: str, /, *, failure: BaseException | None = None, **fields: object) -> None:
        self._write(logging.WARNING, event, failure, fields)

    def error(self, event: str, /, *, failure: BaseException | None = None, **fields: object) -> None:
        self._write(logging.ERROR, event, failure, fields)

    def _write(self, level: int, event: str, failure: BaseException | None, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, "%s", event, extra={"fields": fields}, exc_info=failure)


def get(name: str) -> Log:
    # handler.py and __main__ are outside the package, and would otherwise count as somebody else's.
    return Log(logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}"))


def configure(level: Level = "info", style: Format = "auto") -> None:
    """Send every log of the process to stderr in one form; calling it again changes level and form."""
    as_text = style == "text" or (style == "auto" and _is_terminal())
    handler = _Stderr()
    handler.setFormatter(_Text() if as_text else _Json())
    # Replacing what is there also removes AWS Lambda's own handler, which would print every line twice.
    logging.root.handlers[:] = [handler]
    # Other libraries only warn: at lower levels boto3 and SQLAlchemy print credentials and message bodies.
    logging.root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
    # pika logs every refused connection as several errors; the adapter reports it once, in our words.
    logging.getLogger("pika").setLevel(logging.INFO if level == "debug" else logging.CRITICAL)


def is_json() -> bool:
    """Whether `configure` chose JSON."""
    return any(isinstance(handler.formatter, _Json) for handler in logging.root.handlers)


def is_on_terminal() -> bool:
    """Whether the logs are text that a person reads on a terminal, where a command prints its report too."""
    return not is_json() and _is_terminal()


def json_line(level: Level, event: str, logger: str, fields: Mapping[str, object]) -> str:
    """A line as the logs have them whose values are whole: an error that ends a process is not cut."""
    at = datetime.now(UTC)
    return json.dumps(_entry(at, level, event, logger, fields))


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # no stderr at all, or a closed one
        return False


class _Stderr(logging.Handler):
    """Writes to the stderr of the moment; a log that cannot be written never ends a run."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = _entry(_time(record), record.levelname.lower(), _event(record), record.name, _fields(record))
        if trace := _trace(record):
            entry["trace"] = trace
        return json.dumps(entry)


def _entry(at: datetime, level: str, event: str, logger: str, fields: Mapping[str, object]) -> dict[str, object]:
    ts = at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"ts": ts, "level": level, "event": event, "logger": logger, "fields": fields, **origin()}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        pairs = [f"{key}={_as_text(value)}" for key, value in _fields(record).items()]
        first = f"{_time(record):%H:%M:%S} {record.levelname.lower():<7} {_event(record)}"
        return "\n".join([" ".join([first, *pairs]), *(f"    {line}" for line in _trace(record))])


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _event(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 (somebody else's log call, with arguments that do not fit)
        text = str(record.msg)
    return _text(text)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = getattr(record, "fields", None)
    return {_text(str(key)): _value(value, 1) for key, value in fields.items()} if isinstance(fields, Mapping) else {}


def _trace(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    try:
        trace = "".join(traceback.format_exception(record.exc_info[1]))
    except Exception as exc:  # noqa: BLE001 (an exception whose own text fails)
        trace = f"no trace: {type(exc).__name__}"
    return [plain(line) for line in masked(trace)[-_LONGEST_TRACE:].splitlines()]


def _value(value: object, depth: int) -> object:
    """Turn a value into what JSON knows, cut and made harmless."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER:
        return value
    if isinstance(value, Mapping) and depth < _DEEPEST:
        return {_text(str(key)): _value(item, depth + 1) for key, item in list(value.items())[:_MOST_ITEMS]}
    if isinstance(value, (list, tuple, AbstractSet)) and depth < _DEEPEST:
        return [_value(item, depth + 1) for item in list(value)[:_MOST_ITEMS]]
    return _text(_written(value))


def _written(value: object) -> str:
    try:
        if isinstance(value, datetime):
            return value.isoformat()
        if isinstance(value, bytes):
            return value.decode("utf-8", "backslashreplace")
        return str(value)
    except Exception:  # noqa: BLE001 (a value whose own text fails must not end a run)
        return f"<{type(value).__name__}>"


def _text(text: str) -> str:
    # Masked before it is cut: a cut may take away the @ by which an address with a password is known.
    return plain(masked(text), _LONGEST_VALUE)


def _as_text(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES.search(text) else text
