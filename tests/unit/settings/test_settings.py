from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from program import HANGS_AFTER

from dlqbatch.cli.options import overrides
from dlqbatch.errors import SettingsError
from dlqbatch.logs import masked
from dlqbatch.settings import HOME, OPTIONS, SecretUrl, Settings, load, redact, reference
from dlqbatch.settings.options import must_be, property_key
from dlqbatch.settings.sources import SECRETS, Spelled

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Write = Callable[[str | bytes], dict[str, str]]
CANARY = "c4n4ry"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write an application.properties, and give the environment that names it."""

    def write(content: str | bytes) -> dict[str, str]:
        path = tmp_path / "application.properties"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return {"DLQBATCH_CONFIG": str(path)}

    return write


def problems(overrides: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(overrides, {"DLQBATCH_CONFIG": os.devnull} | dict(environ or {}))
    return list(caught.value.problems)


def plainly(**overrides: object) -> Settings:
    return load(overrides, {"DLQBATCH_CONFIG": os.devnull})


# --- where values come from


def test_the_call_beats_the_environment_beats_the_file_beats_the_default(write: Write) -> None:
    environ = write("dlqbatch.max-messages=2\ndlqbatch.max-trips=2\ndlqbatch.retry-queue=from-file\n")
    environ |= {"DLQBATCH_MAX_MESSAGES": "3", "DLQBATCH_MAX_TRIPS": "3"}
    found = load({"max_messages": 4}, environ)
    assert (found.max_messages, found.max_trips, found.retry_queue, found.default_max_retries) == (4, 3, "from-file", 3)


@pytest.mark.parametrize("key", ["max-messages", "max_messages", "max.messages", "max.-messages".replace(".-", ".")])
def test_dots_dashes_and_underscores_are_one_in_a_key(write: Write, key: str) -> None:
    assert load({}, write(f"dlqbatch.{key}=7")).max_messages == 7
    assert load({key: 8}, {"DLQBATCH_CONFIG": os.devnull}).max_messages == 8


# A value of the right form for each secret.
SECRET_VALUES = {
    "broker_url": f"amqps://app:{CANARY}@broker.example.com/%2F",
    "database_url": f"postgresql+psycopg://app:{CANARY}@db.example.com/dlqbatch",
    "management_url": f"https://app:{CANARY}@broker.example.com",
    "webhook_url": f"https://hooks.example.com/{CANARY}",
    "console_oidc_client_secret": CANARY * 8,
    "console_proxy_secret": CANARY * 8,
    "console_secret": CANARY * 8,
    "remote_token": f"dlq_{CANARY}",
    "webhook_secret": f"whsec_{'c4n4' * 8}",
    "pagerduty_key": "c4" * 16,
}


def test_every_secret_can_be_in_a_file_that_its_variable_names(tmp_path: Path) -> None:
    assert set(SECRET_VALUES) == SECRETS
    for option, value in SECRET_VALUES.items():
        file = tmp_path / option
        file.write_text(f"{value}\n")
        loaded = load({}, {"DLQBATCH_CONFIG": os.devnull, f"DLQBATCH_{option.upper()}_FILE": str(file)})
        assert getattr(loaded, option).get_secret_value() == value
        assert loaded.warnings == ()


def test_a_file_of_a_secret_goes_before_the_properties_and_its_variable_may_be_empty(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "url").write_text("amqp://file/")
    environ = write("dlqbatch.broker-url=amqp://properties/")
    both = {"DLQBATCH_BROKER_URL_FILE": str(tmp_path / "url"), "DLQBATCH_BROKER_URL": " "}
    assert load({}, environ | both).broker_url.get_secret_value() == "amqp://file/"
    assert load({}, environ | {"DLQBATCH_BROKER_URL_FILE": ""}).broker_url.get_secret_value() == "amqp://properties/"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b" \n", "is empty"),
        (b"\xff\xfe", "no text in UTF-8"),
        (b"x" * 70_000, "holds more than 65,536 characters"),
        (f"nonsense {CANARY}".encode(), "amqp"),
    ],
)
def test_a_file_of_a_secret_that_is_wrong_is_named_and_its_content_is_not(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    (problem,) = problems(environ={"DLQBATCH_BROKER_URL_FILE": str(file)})
    assert problem.startswith(f"DLQBATCH_BROKER_URL_FILE (file {str(file)[:60]}")
    assert words in problem
    assert CANARY not in problem


def test_a_secret_in_a_variable_and_in_a_file_is_a_problem(tmp_path: Path) -> None:
    both = {"DLQBATCH_BROKER_URL": "amqp://one/", "DLQBATCH_BROKER_URL_FILE": str(tmp_path / "two")}
    (problem,) = problems(environ=both)
    assert problem == "DLQBATCH_BROKER_URL_FILE and DLQBATCH_BROKER_URL are both set; leave one of them out."


def test_an_option_that_is_no_secret_has_no_file(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("ingest")
    loaded = load({}, {"DLQBATCH_CONFIG": os.devnull, "DLQBATCH_JOB_FILE": str(tmp_path / "job")})
    assert loaded.job == "drain"
    assert "DLQBATCH_JOB_FILE (environment) is no option" in loaded.warnings[0]


def test_every_option_can_be_set_from_the_environment_by_the_same_rule() -> None:
    for option in OPTIONS:
        found = problems({}, {f"DLQBATCH_{option.upper()}": "\ud800"})
        assert found[0].startswith(f"DLQBATCH_{option.upper()} (environment) ")


def test_an_empty_value_is_not_set(write: Write) -> None:
    environ = write("dlqbatch.max-messages=\ndlqbatch.job=   \ndlqbatch.max-trips=6") | {"DLQBATCH_MAX_TRIPS": ""}
    found = load({"return_via": None}, environ)
    assert (found.max_messages, found.job, found.max_trips, found.return_via) == (5000, "drain", 6, "queue")


@pytest.mark.parametrize("value", ["", " \t", []])
@pytest.mark.parametrize("option", ["check_queues", "check_target", "max_bytes", "job", "topology.slow.ttl"])
def test_an_empty_value_of_the_call_is_not_taken_from_elsewhere(write: Write, option: str, value: object) -> None:
    environ = write("dlqbatch.check-queues=all.*\ndlqbatch.check-target=dead\n")
    with pytest.raises(SettingsError) as caught:
        load({option: value}, environ, overrides_from="event")
    assert str(caught.value) == f"{option} (event) is empty; give it a value, or leave it out."


def test_keys_of_other_programs_are_left_alone(write: Write) -> None:
    assert load({}, write("server.port=x\ndlqbatchling=1\nspring.rabbitmq.password=s\n")).max_messages == 5000


def test_without_a_named_file_the_one_beside_the_handler_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "application.properties").write_text("dlqbatch.max-messages=1\n")
    (tmp_path / "handler.py").write_text("")
    monkeypatch.chdir(tmp_path)
    found = load({}, {})
    assert found.max_messages == 5000
    assert found.config_file == HOME / "application.properties" == ROOT / "application.properties"
    # An event in the file that everybody has would hide that a database is forgotten or empty.
    assert not found.events


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        plainly().max_messages = 1


# --- values


@pytest.mark.parametrize(
    ("written", "expected"),
    [("1048576", 2**20), ("256MiB", 256 * 2**20), ("10MB", 10**7), ("10 kb", 10_000), ("1g", 10**9), ("7B", 7)],
)
def test_sizes(written: str, expected: int) -> None:
    assert plainly(max_bytes=written).max_bytes == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("10000,15000,20000", (10_000, 15_000, 20_000)),
        ("10s, 15m,1h", (10_000, 900_000, 3_600_000)),
        ("500ms", (500,)),
        ([5, "2s"], (5, 2000)),
        ("4294967295", (2**32 - 1,)),
    ],
)
def test_tier_ttls(written: object, expected: object) -> None:
    assert plainly(tier_ttls=written).tier_ttls == expected


@pytest.mark.parametrize("written", ["0", "4294967296", "50d", "-1", "10s,,20s", "soon", ",", "1.5s"])
def test_wrong_tier_ttls(written: object) -> None:
    (problem,) = problems({"tier_ttls": written})
    assert problem.startswith(f"--tier-ttls (command line) is '{written}'; it must be 1 to 100 delays")


def test_allowed_origins_are_a_list_of_names() -> None:
    assert plainly(origins_allowed="orders.*, payments ,").origins_allowed == ("orders.*", "payments")
    assert plainly(origins_allowed=["a", "b"]).origins_allowed == ("a", "b")


@pytest.mark.parametrize("option", ["check_queues", "ingest_queues"])
def test_queues_to_look_through_are_names_that_a_broker_may_have(option: str) -> None:
    longest = "*" + "é" * 127
    assert getattr(plainly(**{option: f"a, {longest},"}), option) == ("a", longest)
    for wrong, size in ((longest + "x", 256), (["a", ""], 0), (["a", "é" * 128], 256)):
        (problem,) = problems({option: wrong})
        assert problem.endswith(f"names a queue of {size} bytes, but a name has 1 to 255.")
    # Without a word in it, `ingest` would take from another queue than was asked for.
    (problem,) = problems({option: " ,"})
    assert "it must be names or wildcards" in problem


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_messages", "0"),
        ("max_messages", "many"),
        ("max_messages", True),
        ("max_messages", [1]),
        ("max_bytes", "1XB"),
        ("max_bytes", "0"),
        ("max_seconds", "0"),
        ("max_seconds", "inf"),
        ("max_seconds", "nan"),
        ("lambda_margin_seconds", "-1"),
        ("default_max_retries", "-1"),
        ("default_max_retries", "2147483648"),
        ("heartbeat_seconds", "65536"),
        ("queue_type", "stream"),
        ("return_via", "fanout"),
        ("log_format", "xml"),
        ("log_level", "loud"),
        ("tls_verify", "perhaps"),
        ("job", "Drain it"),
    ],
)
def test_a_wrong_value_is_told_with_key_place_value_and_what_would_be_right(option: str, value: object) -> None:
    (problem,) = problems({option: value})
    shown = str(value).lower() if isinstance(value, bool) else value
    assert problem == (f"--{option.replace('_', '-')} (command line) is '{shown}'; it must be {must_be(option)}.")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("x" * 201, "has 201 bytes"),
        ("é" * 101, "has 202 bytes"),
        ("amq.topic", "begins with amq."),
        ("a\x1b[31m", "holds a control character"),
        ("a\ud800", "half a character"),
    ],
)
def test_wrong_names(name: str, what: str) -> None:
    for option in ("retry_queue", "dlq_exchange"):
        (problem,) = problems({option: name})
        assert what in problem
        assert "\x1b" not in problem
    assert plainly(dlq_routing_key="amq.key", dlq_queue="é" * 100).dlq_routing_key == "amq.key"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"retry_queue": "q", "dlq_queue": "q"}, "--dlq-queue (command line) makes queue 'q' stand for both"),
        ({"dlq_queue": "queue.delay.2"}, "--dlq-queue (command line) makes queue 'queue.delay.2' stand for both"),
        ({"dlq_queue": "retry-queue-1"}, "--dlq-queue (command line) makes queue 'retry-queue-1' stand for both"),
        ({"delay_exchange": "retry-exchange-3"}, "makes exchange 'retry-exchange-3' stand for both"),
    ],
)
def test_queues_and_exchanges_are_distinct_with_their_tiers(overrides: dict[str, object], said: str) -> None:
    (problem,) = problems(overrides)
    assert said in problem


def test_two_options_with_one_queue_name_are_told_once_where_they_were_written(write: Write) -> None:
    (problem,) = problems({}, write("dlqbatch.dlq-queue=retry-queue"))
    assert ":1) makes queue 'retry-queue' stand for both dlqbatch.retry-queue and dlqbatch.dlq-queue" in problem


# --- events


def test_events_keep_their_key_exactly(write: Write) -> None:
    environ = write(
        "dlqbatch.events.Orders.*.created=5\ndlqbatch.events.payment.#=0\ndlqbatch.events.#=\n"
        "dlqbatch.events.a-b_c=1\ndlqbatch.events.a.b.c=2\ndlqbatch.events.with\\ space\\:and\\=more=3\n"
        "dlqbatch.events.=4\ndlqbatch.events.only-key\n"
    )
    assert load({}, environ).events == {
        "Orders.*.created": 5,
        "payment.#": 0,
        "#": None,
        "a-b_c": 1,
        "a.b.c": 2,
        "with space:and=more": 3,
        "": 4,
        "only-key": None,
    }


@pytest.mark.parametrize("value", ["-1", "three", "1.5", "2147483648", "3 # three", "٣", "9" * 5000])
def test_a_wrong_number_of_retries(write: Write, value: object) -> None:
    (problem,) = problems({}, write(f"\ndlqbatch.events.rk={value}"))
    assert "dlqbatch.events.rk (" in problem
    assert "application.properties:2)" in problem
    assert "whole number from 0 to 2147483647" in problem


def test_an_unescaped_colon_in_an_event_is_an_error_with_the_way_out(write: Write) -> None:
    (problem,) = problems({}, write("dlqbatch.events.a:b=3"))
    assert "takes a backslash before it" in problem


def test_half_a_character_in_an_event_is_an_error(write: Write) -> None:
    (problem,) = problems({}, write("dlqbatch.events.a\\ud83d=3"))
    assert "half a character" in problem
    assert load({}, write("dlqbatch.events.a\\ud83d\\ude00=3")).events == {"a\N{GRINNING FACE}": 3}


# --- what nobody knows


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("dlqbatch.max-mesages", "dlqbatch.max-messages"),
        ("dlqbatch.maxMessages", "dlqbatch.max-messages"),
        ("dlqbatch.broker.uri", "dlqbatch.broker-url"),
        ("dlqbatch.Tier-TTLs", "dlqbatch.tier-ttls"),
    ],
)
def test_an_unknown_key_in_the_file_is_an_error_with_a_suggestion(write: Write, key: str, meant: str) -> None:
    (problem,) = problems({}, write(f"# one\n{key}=1"))
    assert problem.startswith(f"{key} (")
    assert problem.endswith(f"application.properties:2) is no option; perhaps {meant} was meant.")


def test_an_unknown_key_like_nothing_points_to_the_list(write: Write) -> None:
    for key in ("dlqbatch.", "dlqbatch.zzz", "dlqbatch.warnings.x"):
        (problem,) = problems({}, write(f"{key}=1"))
        assert "is no option" in problem


@pytest.mark.parametrize("fact", ["events", "warnings", "config_file", "database_url_is_default"])
def test_what_loading_finds_out_cannot_be_set(write: Write, fact: str) -> None:
    assert "is no option" in problems({fact: "x"})[0]
    assert "is no option" in problems({}, write(f"dlqbatch.{fact}=x"))[0]


def test_an_unknown_override_is_an_error_in_the_callers_words() -> None:
    assert problems({"max_mesages": 1}) == [
        "-s max_mesages (command line) is no option; perhaps -s max_messages was meant."
    ]
    with pytest.raises(SettingsError) as caught:
        load({"maxMessages": 1, "max_trips": 0}, {"DLQBATCH_CONFIG": os.devnull}, overrides_from="event")
    assert caught.value.problems == (
        "maxMessages (event) is no option; perhaps max_messages was meant.",
        "max_trips (event) is '0'; it must be a whole number of at least 1.",
    )


def test_an_unknown_variable_is_a_warning_with_a_suggestion_and_without_its_value() -> None:
    environ = {"DLQBATCH_MAX_MESAGES": CANARY, "DLQBATCH_PORT": f"tcp://{CANARY}:80", "DLQBATCH_job": "x", "OTHER": "y"}
    found = load({}, environ | {"DLQBATCH_CONFIG": os.devnull})
    assert found.job == "drain"
    assert found.warnings[0] == (
        "DLQBATCH_MAX_MESAGES (environment) is no option and was ignored; perhaps DLQBATCH_MAX_MESSAGES was meant."
    )
    assert [warning.split()[0] for warning in found.warnings[1:]] == ["DLQBATCH_PORT", "DLQBATCH_job"]
    assert CANARY not in "".join(found.warnings)


def test_every_problem_is_told_at_once(write: Write) -> None:
    environ = write("dlqbatch.nonsense=1\ndlqbatch.max-trips=0\ndlqbatch.events.a=x\ndlqbatch.job=a\\u12\n")
    environ |= {"DLQBATCH_MAX_SECONDS": "never", "DLQBATCH_BROKER_URL": "http://x"}
    found = problems({"max_messages": "no", "dlq_queue": "retry-queue"}, environ)
    assert len(found) == 8
    everything = "\n".join(found)
    for part in (
        "--max-messages (command line)",
        "--dlq-queue (command line) makes queue",
        "DLQBATCH_MAX_SECONDS (environment)",
        "DLQBATCH_BROKER_URL (environment)",
        "dlqbatch.nonsense (",
        "dlqbatch.max-trips (",
        "dlqbatch.events.a (",
        "application.properties:4 has a broken \\u escape",
    ):
        assert part in everything


# --- broken files


def test_a_missing_file_is_an_error_if_it_was_named(tmp_path: Path) -> None:
    (problem,) = problems({}, {"DLQBATCH_CONFIG": str(tmp_path / "none.properties")})
    assert problem.startswith(f"{tmp_path}/none.properties does not exist; make it, or correct its name")


def test_a_folder_is_an_error(tmp_path: Path) -> None:
    assert "is a folder" in problems({}, {"DLQBATCH_CONFIG": str(tmp_path)})[0]


def test_a_pipe_is_an_error_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in problems({}, {"DLQBATCH_CONFIG": str(tmp_path / "pipe")})[0]


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    # A link to itself cannot be read by anybody, root included.
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop", tmp_path / "loop" / "x", tmp_path / ("x" * 300), "a\x00b"):
        assert "cannot be read (" in problems({}, {"DLQBATCH_CONFIG": str(path)})[0]


def test_a_huge_file_is_an_error(write: Write) -> None:
    assert "more than settings can have" in problems({}, write(b"#" * (2**20 + 1)))[0]


def test_a_binary_or_utf16_file_is_an_error(write: Write) -> None:
    assert "UTF-16" in problems({}, write("dlqbatch.job=drain".encode("utf-16")))[0]


def test_utf8_with_and_without_a_mark_and_latin1_are_read(write: Write) -> None:
    for encoding in ("utf-8", "utf-8-sig", "latin-1"):
        assert load({}, write("dlqbatch.retry-queue=caf\u00e9".encode(encoding))).retry_queue == "caf\u00e9"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_are_counted_with_every_line_end_and_continuation(write: Write, end: str) -> None:
    content = f"# one{end}dlqbatch.job=dr\\{end}   ain{end}{end}dlqbatch.x=\\u00zz{end}dlqbatch.max-trips=0{end}"
    found = problems({}, write(content))
    assert [problem.partition("application.properties:")[2][0] for problem in found] == ["5", "6"]


def test_a_broken_escape_is_told_without_what_stands_around_it(write: Write) -> None:
    (problem,) = problems({}, write(f"dlqbatch.broker-url=amqp://u:\\u{CANARY}@h"))
    assert "application.properties:1 has a broken \\u escape" in problem
    assert CANARY[:2] not in problem.replace("application", "")


def test_an_option_or_event_that_is_there_twice_is_an_error(write: Write) -> None:
    found = problems(
        {}, write("dlqbatch.max-trips=1\ndlqbatch.max.trips=1\ndlqbatch.events.a=1\ndlqbatch.events.a=1\n")
    )
    assert len(found) == 2
    assert found[0].startswith("dlqbatch.max.trips (")
    assert "is already set in line 1" in found[0]
    assert "is already set in line 3" in found[1]


def test_a_key_with_terminal_escapes_is_shown_harmless(write: Write) -> None:
    (problem,) = problems({}, write("dlqbatch.\\u001b[31mred=1"))
    assert problem.startswith("dlqbatch.\\x1b[31mred (")


# --- addresses and secrets


@pytest.mark.parametrize(
    "url",
    [
        "amqp://localhost",
        "amqps://u:p@host:5671/vhost",
        "amqp://u:p%40%2F@[::1]:5672/%2F",
        "amqp://a:p@h1,amqps://b:p@h2/v , amqp://h3:5673",
        "amqp://u:with,comma@h",
    ],
)
def test_right_broker_addresses(url: str) -> None:
    assert plainly(broker_url=url).broker_url.get_secret_value() == url


def test_several_brokers_are_split_before_a_scheme_only() -> None:
    assert plainly(broker_url="amqp://a:p,q@h1 , amqp://h2").broker_urls == ("amqp://a:p,q@h1", "amqp://h2")


@pytest.mark.parametrize(
    "url",
    [
        f"http://u:{CANARY}@host",
        f"amqp:u:{CANARY}@host",
        f"amqp://u:{CANARY}@",
        f"amqp://u:{CANARY}@host:99999",
        f"amqp://u:{CANARY}@host:0",
        f"amqp://u:{CANARY}/x@host",
        f"amqp://u:{CANARY}#x@host",
        f"amqp://u:12/{CANARY}@host",
        f"amqp://u:12?{CANARY}@host",
        f"amqp://u:{CANARY}@host/a/b",
        f"amqp://u:{CANARY}@host//",
        f"amqp://u:{CANARY}@host?heartbeat=3",
        f"amqp://u:{CANARY}@[::1",
        f"amqp://u:{CANARY}@h1,h2",
        f"amqp://u:{CANARY} @host",
        f"amqp://u:{CANARY}\n@host",
        f"amqp://good, amqp:/{CANARY}",
        f"amqp://good,amqp://u:{CANARY}@host:x",
        f"\ud800{CANARY}",
        CANARY,
    ],
)
def test_wrong_broker_addresses_are_told_without_the_password(url: str, write: Write) -> None:
    for found in (problems({"broker_url": url}), problems({}, {"DLQBATCH_BROKER_URL": url})):
        assert len(found) == 1
        assert CANARY not in found[0]
        assert "broker" in found[0].lower()


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("postgresql://u:p@h:5432/db", "postgresql+psycopg://u:p@h:5432/db"),
        ("postgres://h/db", "postgresql+psycopg://h/db"),
        ("postgresql+iam://u@h/db", "postgresql+iam://u@h/db"),
        ("postgresql+psycopg://u@/db?host=/run/postgresql", "postgresql+psycopg://u@/db?host=/run/postgresql"),
        ("sqlite:////data/a b.sqlite3", "sqlite:////data/a b.sqlite3"),
    ],
)
def test_right_database_addresses_name_the_driver(url: str, kept: str) -> None:
    found = plainly(database_url=url)
    assert found.database_url.get_secret_value() == kept
    assert not found.database_url_is_default


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://u:{CANARY}@h/d",
        f"postgresql://u:{CANARY}@h:x/d",
        f"postgresql://u:{CANARY}\t@h",
        f"postgresql+iam://u:{CANARY}@h/d",
        "postgresql+iam://h/d",
        "postgresql+iam://u@/d?host=/run",
        CANARY,
        "sqlite://",
        "sqlite:///",
        "sqlite:///:memory:",
        "sqlite:///file:x",
        "sqlite:////x?mode=ro",
    ],
)
def test_wrong_database_addresses_are_told_without_the_password(url: str) -> None:
    (problem,) = problems({"database_url": url})
    assert CANARY not in problem


def test_the_management_address_is_http() -> None:
    assert str(plainly(management_url=f"https://u:{CANARY}@h:15671/x").management_url) == "https://u:***@h:15671/x"
    for wrong in (f"amqp://u:{CANARY}@h", f"http://u:{CANARY}@h?a", f"http://u:{CANARY}@"):
        assert CANARY not in problems({"management_url": wrong})[0]


def test_no_secret_in_repr_text_or_json() -> None:
    found = plainly(
        broker_url=f"amqp://u:{CANARY}@h1,amqp://u:{CANARY}@h2",
        database_url=f"postgresql://u:{CANARY}@h/d?sslpassword={CANARY}",
        management_url=f"http://u:{CANARY}@h",
    )
    for shown in (repr(found), str(found), found.model_dump_json(), repr(found.model_dump()), repr(found.__dict__)):
        assert CANARY not in shown
        assert "u:***@h1" in shown
    assert found.broker_urls[1] == f"amqp://u:{CANARY}@h2"


def test_no_secret_in_an_error_nor_in_what_caused_it(write: Write) -> None:
    url = f"amqp://u:{CANARY}@h:0"
    environ = write(f"dlqbatch.database-url={CANARY}\ndlqbatch.max-trips={url}\ndlqbatch.unknown={url}\n")
    with pytest.raises(SettingsError) as caught:
        load({"broker_url": url, "max_messages": url, "tier_ttls": [url], "job": {"a": url}}, environ)
    error: BaseException | None = caught.value
    assert len(caught.value.problems) == 7
    while error is not None:
        assert CANARY not in f"{error!r} {error}"
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://guest:guest@127.0.0.1:5672/%2F", "amqp://guest:***@127.0.0.1:5672/%2F"),
        ("amqp://host", "amqp://host"),
        ("amqp://u:p@ss/w:rd@host/v", "amqp://u:***@host/v"),
        ("https://token@host/x", "https://***@host/x"),
        ("postgresql://u:p@h/d?password=p&x=1", "postgresql://u:***@h/d?password=***&x=1"),
        ("postgresql://h/d?password=p@ss", "postgresql://***"),
        ("amqp://u:p?password=x@h", "amqp://***"),
        ("https://h/x?page=1&api%4bey=k", "https://h/x?page=1&api%4bey=***"),
        ("sqlite:////home/a@b/x.sqlite3", "sqlite:////home/a@b/x.sqlite3"),
        ("sqlite:///u:p@h/x", "sqlite:///u:***@h/x"),
        ("sqlite:///token@h/x", "sqlite://***@h/x"),
        ("nonsense", "***"),
    ],
)
def test_redacting_and_masking_agree(url: str, shown: str) -> None:
    assert redact(url) == shown
    assert masked(url) == (shown if "://" in url else url)


def test_redacting_masks_each_of_several_addresses() -> None:
    assert redact("amqp://a:p@h1,amqp://b:q@h2") == "amqp://a:***@h1,amqp://b:***@h2"
    assert redact("postgresql://h/d?pass%77ord=p") == "postgresql://h/d?pass%77ord=***"


@given(text=st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: "://" not in text))
def test_no_password_survives_redacting(text: str) -> None:
    password = CANARY + text + CANARY
    without_user, in_query = password.replace(":", ""), password.split("&", maxsplit=1)[0]
    for url in (
        f"amqp://u:{password}@h",
        f"amqp://u:p@h,amqp://u:{password}@h:1/v",
        f"https://{without_user}@h",
        f"postgresql://h/d?password={in_query}",
    ):
        assert CANARY not in redact(url)


# --- the database that is used when none is named


def test_the_default_database_is_beside_the_file_in_use(write: Write, tmp_path: Path) -> None:
    found = load({}, write(""))
    assert found.database_url == SecretUrl(f"sqlite:///{tmp_path}/dlqbatch.sqlite3")
    assert found.database_url_is_default
    assert load({}, {}).database_url == SecretUrl(f"sqlite:///{HOME}/dlqbatch.sqlite3")


@pytest.fixture
def unwritable() -> Iterator[Path]:
    """A folder with an empty application.properties that this process, also if it is root's, cannot write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "application.properties").write_text("")
        folder.chmod(0o555)
        was_root = os.geteuid() == 0
        if was_root:
            os.setresuid(65534, 65534, 0)
        try:
            yield folder
        finally:
            if was_root:
                os.setresuid(0, 0, 0)
            folder.chmod(0o755)


def test_the_default_database_goes_to_the_state_folder_only_if_its_own_cannot_be_written(unwritable: Path) -> None:
    environ = {"DLQBATCH_CONFIG": str(unwritable / "application.properties"), "HOME": "/home/somebody"}
    at_home = "sqlite:////home/somebody/.local/state/dlqbatch/dlqbatch.sqlite3"
    assert str(load({}, environ).database_url) == at_home
    assert str(load({}, environ | {"XDG_STATE_HOME": "relative"}).database_url) == at_home
    stated = load({}, environ | {"XDG_STATE_HOME": "/state"})
    assert str(stated.database_url) == "sqlite:////state/dlqbatch/dlqbatch.sqlite3"
    assert stated.database_url_is_default


def test_a_database_that_is_there_already_is_the_default_also_for_who_may_only_read_it(unwritable: Path) -> None:
    there = unwritable / "dlqbatch.sqlite3"
    _, user, saved = os.getresuid()
    os.seteuid(saved)
    unwritable.chmod(0o755)
    there.touch()
    unwritable.chmod(0o555)
    os.seteuid(user)
    environ = {"DLQBATCH_CONFIG": str(unwritable / "application.properties"), "HOME": "/home/somebody"}
    assert str(load({}, environ).database_url) == f"sqlite:///{there}"


def test_the_default_database_is_never_beside_an_installed_package(tmp_path: Path) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    config = folder / "application.properties"
    config.touch()
    found = load({}, {"DLQBATCH_CONFIG": str(config), "HOME": "/home/somebody"})
    assert str(found.database_url).startswith("sqlite:////home/somebody/.local/state/")


# --- TLS


def test_tls_files_are_read_before_the_first_connection(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    (problem,) = problems({"broker_url": "amqps://h", "tls_ca_file": str(pem)})
    assert problem == "--tls-ca-file (command line) names a file that cannot be read (No such file or directory)."
    pem.write_text("x")
    assert plainly(broker_url="amqps://h", tls_ca_file=str(pem)).tls_ca_file == pem
    assert "cannot be read" in problems({"broker_url": "amqps://h", "tls_ca_file": str(tmp_path)})[0]


def test_tls_files_are_for_amqps_only_and_a_key_needs_its_certificate(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.write_text("x")
    assert "is not amqps://" in problems({"tls_ca_file": str(pem)})[0]
    assert "without a certificate" in problems({"broker_url": "amqps://h", "tls_key_file": str(pem)})[0]


def test_a_certificate_as_the_login_needs_one_and_amqps_and_no_token(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.write_text("x")
    tls = {"broker_auth": "external", "tls_cert_file": str(pem)}
    assert plainly(broker_url="amqps://h", **tls).broker_auth == "external"
    needed = "--broker-auth (command line) is external, which takes amqps:// addresses and dlqbatch.tls-cert-file."
    assert needed in problems({"broker_url": "amqps://h", "broker_auth": "external"})
    assert needed in problems({"broker_url": "amqps://h,amqp://i", **tls})
    (problem,) = problems({"broker_url": "amqps://h", **tls, "broker_token_file": str(pem)})
    assert (
        problem
        == "--broker-token-file (command line) is a password, and dlqbatch.broker-auth is external; leave one out."
    )


def test_switching_the_certificate_check_off_is_a_loud_warning() -> None:
    assert plainly().warnings == ()
    found = plainly(tls_verify=False)
    assert not found.tls_verify
    assert "NOT checked" in found.warnings[0]


# --- what is documented is what is true


def test_an_error_names_what_was_written_and_no_flag_that_is_not_there() -> None:
    for flags, pairs, spelling in (
        ({}, ["lease=x"], "-s lease"),
        ({}, ["cold-storage=s3://"], "-s cold_storage"),
        ({"max_trips": 0}, ["max_trips=5"], "--max-trips"),
        ({Spelled("retain_max_seconds", "--max-seconds"): 0}, [], "--max-seconds"),
    ):
        with pytest.raises(SettingsError) as raised:
            load(overrides(pairs, flags), {"DLQBATCH_CONFIG": os.devnull})
        assert str(raised.value).startswith(f"{spelling} (command line) ")


def test_a_time_zone_that_is_not_known_is_not_repeated() -> None:
    with pytest.raises(SettingsError, match="names a time zone that this machine does not know") as raised:
        load({"time_zone": "x:CANARY@h"}, {"DLQBATCH_CONFIG": os.devnull})
    assert "CANARY" not in str(raised.value)


def test_the_documentation_lists_every_option_as_the_program_knows_it() -> None:
    assert reference.table() in (ROOT / "docs" / "settings.md").read_text(), reference.table()
    assert reference.commented() in (ROOT / "application.properties").read_text(), reference.commented()


def test_every_documented_default_is_the_default(write: Write) -> None:
    lines = [line.removeprefix("#") for line in reference.commented().splitlines() if line.startswith("#dlqbatch.")]
    assert len(lines) == len(OPTIONS)
    written = load({}, write("\n".join(lines)))
    assert written.model_copy(update={"written_in": {}}) == load({}, write(""))


def test_the_shipped_file_is_right_and_so_are_its_examples(write: Write) -> None:
    lines = (ROOT / "application.properties").read_text().splitlines()
    examples = "\n".join(line.removeprefix("#") for line in lines if line.startswith(("#dlqbatch.events", "dlqbatch.")))
    assert load({}, write(examples)).events == {
        "orders.*.created": 5,
        "payment.#": None,
        "rk.test.pass": 3,
        "rk.test.fail": 3,
        "rk.test.fail.pass": 3,
    }


def test_loading_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dlqbatch.settings import load; load();"
        "print(sorted({'sqlalchemy', 'rich', 'typer', 'pika', 'boto3', 'psycopg', 'alembic'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=HANGS_AFTER
    )
    assert done.stdout == "[]\n"


# --- whatever is in the file


def problems_or_none(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        load({}, environ)
    except SettingsError as exc:
        return exc.problems
    return ()


KEYS = st.sampled_from([property_key(option) for option in OPTIONS] + ["dlqbatch.events.", "dlqbatch.", "x"])
LINES = st.builds(lambda key, rest: key + rest, KEYS, st.text(max_size=20) | st.just("=1") | st.just("=\\u12"))
FILES = st.lists(LINES, max_size=8).map("\n".join).map(lambda text: text.encode("utf-8", "surrogatepass"))


@given(content=FILES | st.binary(max_size=200))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_the_file_holds_it_loads_or_is_a_settings_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "application.properties"
    path.write_bytes(content)
    assert all(problem.isprintable() for problem in problems_or_none({"DLQBATCH_CONFIG": str(path)}))


@given(environ=st.dictionaries(st.sampled_from(sorted(OPTIONS)), st.text(max_size=30)))
def test_whatever_the_environment_holds_it_loads_or_is_a_settings_error(environ: dict[str, str]) -> None:
    named = {f"DLQBATCH_{option.upper()}": value for option, value in environ.items()}
    assert all(problem.isprintable() for problem in problems_or_none(named | {"DLQBATCH_CONFIG": os.devnull}))
