"""The line that says why a command failed has the form of the logs beside it."""

from __future__ import annotations

import json
import os
import pty
import sys
from typing import TYPE_CHECKING, Any

import pytest
from program import HANDLER, Program, environment

if TYPE_CHECKING:
    from pathlib import Path

DOWN = {"broker_url": "amqp://127.0.0.1:1", "database_url": "postgresql://nobody@127.0.0.1:1/none"}
QUICK = DOWN | {"connect_timeout_seconds": "0.2"}


def lines(err: str) -> list[dict[str, Any]]:
    """Every line of stderr is JSON."""
    return [json.loads(line) for line in err.splitlines()]


@pytest.mark.parametrize(
    ("arguments", "settings", "told"),
    [
        (["drain"], {}, ("drain", "BrokerUnreachable", 4)),
        ([], {"job": "monitor"}, ("monitor", "DatabaseUnreadable", 4)),
        (["messages", "list"], {}, ("messages", "DatabaseUnreadable", 4)),
        (["drain"], {"max_messages": "0"}, ("drain", "SettingsError", 2)),
        (["drain", "--no-such-option"], {}, ("drain", "UsageError", 2)),
        (["drian"], {}, (None, "UsageError", 2)),
    ],
)
def test_where_the_logs_are_json_an_error_is_one_line_of_json(
    arguments: list[str], settings: dict[str, str], told: tuple[str | None, str, int]
) -> None:
    done = Program(QUICK | settings).run(*arguments)
    found = lines(done.err)
    (failure,) = [line for line in found if line["event"] == "failed"]
    assert failure is found[-1]
    assert failure["level"] == "error"
    fields = failure["fields"]
    assert (fields["job"], fields["error"], fields["exit_code"]) == told, done.said
    assert done.code == told[-1]
    assert len(fields["message"]) > 20


def test_every_problem_of_the_settings_is_in_that_line_whole(tmp_path: Path) -> None:
    broken = {f"wrong_{number}": f"dlqbatch.wrong{number}.{'x' * 60}=1" for number in range(30)}
    file = tmp_path / "application.properties"
    file.write_text("\n".join(broken.values()))
    (failure,) = lines(Program({"config": str(file)}).run("drain").err)
    assert len(failure["fields"]["message"].splitlines()) == 30


@pytest.mark.parametrize("way", ["environment", "file", "option"])
def test_text_that_was_asked_for_is_text_also_where_another_setting_is_wrong(way: str, tmp_path: Path) -> None:
    file = tmp_path / "application.properties"
    file.write_text("dlqbatch.log-format=TEXT\n" if way == "file" else "")
    program = Program(
        {"config": str(file), "max_messages": "0"} | ({"log_format": "text"} if way == "environment" else {})
    )
    done = program.run("drain", *(["-s", "log_format=text"] if way == "option" else []))
    assert done.code == 2
    assert done.err.startswith("dlqbatch: DLQBATCH_MAX_MESSAGES (environment) is '0'")


def test_on_a_terminal_it_is_text() -> None:
    ours, theirs = pty.openpty()
    pid = os.fork()
    if pid == 0:
        os.dup2(theirs, 2)
        os.execve(sys.executable, [sys.executable, HANDLER, "drain"], environment(**QUICK, max_messages="0"))
    os.close(theirs)
    said = b""
    while True:
        try:
            said += os.read(ours, 4096)
        except OSError:  # the other side has ended
            break
    os.close(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert said.startswith(b"dlqbatch: DLQBATCH_MAX_MESSAGES")


def test_what_nobody_thought_of_is_one_line_beside_its_trace() -> None:
    program = (
        "import sys; from dlqbatch import cli, jobs\ndef fail(*_, **__): raise ZeroDivisionError('amqp://u:c4n4ry@h')\n"
    )
    program += "jobs.run = fail\nsys.exit(cli.main(['drain']))"
    done = Program(QUICK, (sys.executable, "-c", program)).run()
    trace, failure = lines(done.err)
    assert trace["event"] == "unexpected error"
    assert (failure["fields"]["error"], failure["fields"]["exit_code"], done.code) == ("ZeroDivisionError", 1, 1)
    assert "c4n4ry" not in done.said


def test_a_run_that_fails_reports_as_json_like_any_other() -> None:
    told = Program(QUICK).run("drain", "--json").told
    error = told.pop("error")
    assert told == {"job": "drain", "outcome": "failed", "stopped_by": "failure", "counts": {"got": 0}}
    assert error["type"] == "BrokerUnreachable"
    assert set(Program(QUICK).run("messages", "list", "--json").told) == {"outcome", "error"}
