"""The console as it is started: closed by default, ended in order, absent without its extra."""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any

import httpx2
import pytest
from dead_rows import add, row, store_at
from program import OURS, ROOT, Program, eventually

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


def started(program: Program) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    process = program.start("console", "--json")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    return process, json.loads(line)


@pytest.fixture
def program(sqlite_url: str) -> Program:
    add(store_at(sqlite_url), row(error_type="TimeoutError"))
    return Program({"database_url": sqlite_url, "console_address": "127.0.0.1:0"})


def test_it_prints_an_address_shows_the_store_and_ends_at_a_signal(program: Program) -> None:
    process, said = started(program)
    with httpx2.Client(follow_redirects=True) as browser:
        assert "Log in" in browser.get(said["address"]).text
        assert "TimeoutError" in browser.get(said["open"]).text
        with browser.stream("GET", f"{said['address']}/live/now") as stream:
            found = next(line for line in stream.iter_lines() if line.startswith("data: "))
            assert "TimeoutError" in json.loads(found.removeprefix("data: "))["parts"]["fails"]
            # An open stream does not keep it alive.
            process.send_signal(signal.SIGTERM)
            assert eventually(lambda: process.poll() is not None)
    assert process.returncode == 0
    assert process.stderr is not None
    lines = process.stderr.read().splitlines()
    assert [json.loads(line)["outcome"] for line in lines if '"log in"' in line] == ["done"]
    assert said["open"].partition("token=")[2] not in "\n".join(lines)


def test_where_others_could_reach_it_it_does_not_start_open(program: Program) -> None:
    done = program.but(console_address="0.0.0.0:0").run("console")
    assert done.code == 2
    assert "nothing says who is there" in done.err


def test_a_taken_address_is_named(program: Program) -> None:
    process, said = started(program)
    done = program.but(console_address=said["address"].removeprefix("http://")).run("console")
    assert done.code == 1
    assert "console-address" in done.err
    process.send_signal(signal.SIGINT)
    assert eventually(lambda: process.poll() is not None)


def test_without_its_packages_it_says_which_extra_to_install(program: Program, tmp_path: Path) -> None:
    (tmp_path / "starlette.py").write_text("raise ModuleNotFoundError('no', name='starlette')\n")
    hidden = (
        f"import runpy, sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; "
        "runpy.run_module('dlqbatch', run_name='__main__')"
    )
    done = Program(program.settings, (sys.executable, "-c", hidden)).run("console")
    assert done.code == 2
    assert "pip install 'dlqbatch[console]'" in done.err


def test_a_new_token_is_printed_once_and_lets_a_program_in(program: Program, tmp_path: Path) -> None:
    done = program.run("console", "--new-token", "ci", "--role", "reader", "--json")
    token, line = done.told["token"], done.told["line"]
    assert token not in line
    file = tmp_path / "tokens"
    file.write_text(line + "\n")
    process, said = started(program.but(console_tokens=str(file), console_address="127.0.0.1:0"))
    headers = {"Authorization": f"Bearer {token}"}
    assert httpx2.get(f"{said['address']}/messages", headers=headers).status_code == 200
    assert httpx2.post(f"{said['address']}/messages/1/reveal", headers=headers).status_code == 403
    file.write_text("")
    assert httpx2.get(f"{said['address']}/messages", headers=headers).status_code == 303
    process.send_signal(signal.SIGTERM)
    assert eventually(lambda: process.poll() is not None)


def test_no_job_loads_anything_of_the_console() -> None:
    code = (
        "import sys; import handler; import dlqbatch.cli.jobs, dlqbatch.drain.job, dlqbatch.ingest.job, "
        "dlqbatch.lifecycle.job, dlqbatch.monitor.job, dlqbatch.retain.job, dlqbatch.replay.job; "
        "found = {each.partition('.')[0] for each in sys.modules}; "
        "print(sorted(found & {'starlette', 'jinja2', 'uvicorn', 'authlib', 'httpx2', 'joserfc', 'anyio'}), "
        "[each for each in sys.modules if each.startswith('dlqbatch.console')])"
    )
    done = Program({}, (OURS[0], "-c", code)).run()
    assert done.out.strip() == "[] []", done.said
