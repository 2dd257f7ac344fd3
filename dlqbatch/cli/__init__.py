"""The command line: nothing but parsing and printing."""

from __future__ import annotations

import gc
import io
import os
import select
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NoReturn, TextIO

NOBODY_READS: Final = 141
"""The exit code when stdout was closed early, as of every program that SIGPIPE ends."""
INTERRUPTED: Final = 130
ONE_REQUEST_SECONDS: Final = 1.0
"""Two SIGTERM within this time are one: `timeout 60 dlqbatch …` sends it to the process, and to its group with it."""
_NOT_INSTALLED: Final = 2
# Options that stand without a command and belong to no job.
_OF_THE_PROGRAM: Final = frozenset({"--help", "-h", "--version", "--install-completion", "--show-completion"})
# Python looks for garbage after so many new objects. A start makes nearly as many, and all of them stay.
_GARBAGE_THRESHOLD: Final = 100_000
_USUAL_THRESHOLD: Final = gc.get_threshold()


def prepare_short_process() -> None:
    """Let a process of our own start quickly. It has to be called before anything else is imported."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    # A plugin of pydantic would see every setting, passwords too; and looking for one reads what every installed
    # package says of itself.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def prepare_long_process() -> None:
    """Collect garbage as often as Python does by itself, for a process that lives long and opens many connections."""
    gc.set_threshold(*_USUAL_THRESHOLD)


def program() -> NoReturn:
    """The whole process: one command, and its exit code."""
    # First of all: as process 1 of a container, a process does not receive a signal that it has no handler for.
    signal.signal(signal.SIGTERM, end_now)
    _open_what_is_closed()
    code = main()
    # What is left is Python's own end, where a signal would change the exit code of work that is done.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


def end_now(number: int, _frame: object = None) -> None:
    """What the signal does by default, also to process 1. A job sets its own handler once it may hold something."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # only process 1 comes so far


def _open_what_is_closed() -> None:
    """A program may be started without stdout or stderr, as by `2>&-`: a socket must not take their place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; without arguments, one run of the job that the settings name."""
    prepare_short_process()
    given = list(sys.argv[1:] if arguments is None else arguments)
    out = sys.stdout
    for stream in (out, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or a file that is not UTF-8 gets an escape for what it cannot show.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(given)
        out.flush()
    except (BrokenPipeError, SystemExit) as error:
        # The parser makes a SystemExit of a broken pipe.
        if _is_unread(out):
            return NOBODY_READS
        if isinstance(error, SystemExit):
            raise
        return _unexpected(error, given)
    # Else Python looks through all that was ever loaded for garbage as it ends: a tenth of a short run's time.
    gc.freeze()
    return code


def _run(given: list[str]) -> int:
    try:
        # A shell that completes a command line sets this, and must never start a run.
        is_completing = bool(os.environ.get("_DLQBATCH_COMPLETE"))
        if not given and not is_completing:
            # A cold start from cron or a container: the parser and its tables would double the time it takes.
            from dlqbatch.cli.run import run_job

            return run_job(None)
        from dlqbatch.cli.commands import run_command

        # `handler.py --json` runs the same job as `handler.py` alone.
        if is_completing or not given[0].startswith("-") or given[0].partition("=")[0] in _OF_THE_PROGRAM:
            return run_command(given)
        return run_command([_job(given), *given], names_job=False)
    except KeyboardInterrupt:
        from dlqbatch.cli.failure import say

        say("KeyboardInterrupt", "interrupted", INTERRUPTED, as_json="--json" in given)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "dlqbatch":
            raise
        return _not_installed(error.name, as_json="--json" in given)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  (the last to see it: logged with its trace, never with a password)
        return _unexpected(error, given)


def _job(given: list[str]) -> str:
    """The job that the settings name; which of them is wrong is said by the job itself, when it reads them all."""
    from dlqbatch.errors import DlqbatchError
    from dlqbatch.settings import load
    from dlqbatch.settings.sources import CONFIG_VARIABLE

    words = [part for word in given for part in _flag_and_value(word)]
    environ, jobs = dict(os.environ), {}
    for flag, value in pairwise(words):
        if flag in {"-c", "--config"}:
            environ[CONFIG_VARIABLE] = value
        elif flag in {"-s", "--set"} and value.partition("=")[0].strip() == "job":
            jobs["job"] = value.partition("=")[2]
    try:
        return load(jobs, environ).job
    except DlqbatchError:
        return "drain"


def _flag_and_value(word: str) -> list[str]:
    """As the parser takes them apart: --set=job=ingest and -sjob=ingest."""
    if word.startswith("--"):
        return word.split("=", 1)
    return [word[:2], word[2:]] if word[:2] in {"-c", "-s"} and word[2:] else [word]


def _unexpected(error: Exception, given: list[str]) -> int:
    from dlqbatch.cli.failure import unexpected

    return unexpected(error, as_json="--json" in given)


def _not_installed(package: str, *, as_json: bool) -> int:
    from dlqbatch.cli.failure import say

    text = (
        f"the package '{package}' is not installed for {sys.executable}. Nothing was done. Run "
        "`python3 -m venv .venv` and `.venv/bin/pip install -r requirements.txt --editable .` in the checkout; then "
        "start `.venv/bin/dlqbatch`."
    )
    say("ModuleNotFoundError", text, _NOT_INSTALLED, as_json=as_json)
    return _NOT_INSTALLED


def _is_unread(out: TextIO) -> bool:
    """Whether nobody reads it any more; what is still to be written goes nowhere then, without a word."""
    # A write that failed once need not fail again: the pipe itself is asked.
    pipe = select.poll()
    pipe.register(out, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0)):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)
    return True
