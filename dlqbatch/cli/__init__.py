"""The command line: it parses, starts a job or a command, and prints. Here is the process from start to exit code."""

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
"""The exit code after stdout was closed early; programs that SIGPIPE ends have the same."""
INTERRUPTED: Final = 130
ONE_REQUEST_SECONDS: Final = 1.0
"""Two SIGTERM within this time are one: `timeout 60 dlqbatch …` sends it to the process, and to its group with it."""
_NOT_INSTALLED: Final = 2
# Options that are typed without a command and start no job.
_PROGRAM_OPTIONS: Final = frozenset({"--help", "-h", "--version", "--install-completion", "--show-completion"})
# New objects between two garbage collections. A start makes nearly as many, and none of them is garbage.
_GARBAGE_THRESHOLD: Final = 100_000
_USUAL_THRESHOLD: Final = gc.get_threshold()


def prepare_short_process() -> None:
    """Make the start of a process faster; call it before anything else is imported."""
    gc.set_threshold(_GARBAGE_THRESHOLD)
    # A plugin of pydantic would see every setting, also passwords. The search for plugins reads the metadata of every
    # installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def prepare_long_process() -> None:
    """Collect garbage as often as Python does by default, for a process that runs for days and opens connections."""
    gc.set_threshold(*_USUAL_THRESHOLD)


def program() -> NoReturn:
    """Run one command, and exit with its code."""
    # First of all, because process 1 of a container receives no signal that it has no handler for.
    signal.signal(signal.SIGTERM, end_now)
    _open_closed_streams()
    code = main()
    # The work is done. A signal while Python ends would change the exit code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


def end_now(number: int, _frame: object = None) -> None:
    """End the process as the signal does by default, also process 1. A job sets its own handler before it begins."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    os._exit(128 + number)  # only process 1 gets here


def _open_closed_streams() -> None:
    """Open the standard streams that are closed, as by `2>&-`; else the first socket would take the place of one."""
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
    words = list(sys.argv[1:] if arguments is None else arguments)
    out = sys.stdout
    for stream in (out, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that a terminal or a file cannot show is written as an escape.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run(words)
        out.flush()
    except (BrokenPipeError, SystemExit) as error:
        # The parser turns a broken pipe into a SystemExit.
        if _is_unread(out):
            return NOBODY_READS
        if isinstance(error, SystemExit):
            raise
        return _unexpected(error, words)
    # Else Python searches everything for garbage as it ends, which takes a tenth of a short run's time.
    gc.freeze()
    return code


def _run(words: list[str]) -> int:
    try:
        # A shell sets this when it completes a command line. That must never start a run.
        is_completing = bool(os.environ.get("_DLQBATCH_COMPLETE"))
        if not words and not is_completing:
            # A start from cron or in a container. The parser would double the time it takes.
            from dlqbatch.cli.run import run_job

            return run_job(None)
        from dlqbatch.cli.commands import run_command

        # Options without a command, as in `handler.py --json`, are options of the job that the settings name.
        if is_completing or not words[0].startswith("-") or words[0].partition("=")[0] in _PROGRAM_OPTIONS:
            return run_command(words)
        return run_command([*_job(words), *words], names_job=False)
    except KeyboardInterrupt:
        from dlqbatch.cli.printing import print_failure

        print_failure("KeyboardInterrupt", "interrupted", INTERRUPTED, as_json="--json" in words)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "dlqbatch":
            raise
        return _not_installed(error.name, as_json="--json" in words)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001  (the last to see it: logged with its trace, never with a password)
        return _unexpected(error, words)


def _job(words: list[str]) -> Sequence[str]:
    """The job that the settings name, as a command. If they are wrong, it says so when it reads all of them."""
    from dlqbatch.errors import DlqbatchError
    from dlqbatch.jobs import COMMANDS
    from dlqbatch.settings import load
    from dlqbatch.settings.sources import CONFIG_VARIABLE

    parts = [part for word in words for part in _flag_and_value(word)]
    environ, jobs = dict(os.environ), {}
    for flag, value in pairwise(parts):
        if flag in {"-c", "--config"}:
            environ[CONFIG_VARIABLE] = value
        elif flag in {"-s", "--set"} and value.partition("=")[0].strip() == "job":
            jobs["job"] = value.partition("=")[2]
    try:
        job = load(jobs, environ).job
    except DlqbatchError:
        job = "drain"
    return COMMANDS.get(job, (job,))


def _flag_and_value(word: str) -> list[str]:
    """A word divided as the parser does it: --set=job=ingest and -sjob=ingest."""
    if word.startswith("--"):
        return word.split("=", 1)
    return [word[:2], word[2:]] if word[:2] in {"-c", "-s"} and word[2:] else [word]


def _unexpected(error: Exception, words: list[str]) -> int:
    from dlqbatch.cli.printing import print_unexpected_error

    return print_unexpected_error(error, as_json="--json" in words)


def _not_installed(package: str, *, as_json: bool) -> int:
    from dlqbatch.cli.printing import print_failure

    text = (
        f"the package '{package}' is not installed for {sys.executable}. Nothing was done. Run "
        "`python3 -m venv .venv` and `.venv/bin/pip install -r requirements.txt --editable .` in the checkout; then "
        "start `.venv/bin/dlqbatch`."
    )
    print_failure("ModuleNotFoundError", text, _NOT_INSTALLED, as_json=as_json)
    return _NOT_INSTALLED


def _is_unread(out: TextIO) -> bool:
    """Whether the reader of a pipe has closed it. If so, what is still buffered is thrown away."""
    # After a failed write the next one may succeed, so that the pipe itself is polled.
    pipe = select.poll()
    pipe.register(out, select.POLLOUT)
    if not any(event & (select.POLLERR | select.POLLHUP) for _, event in pipe.poll(0)):
        return False
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, out.fileno())
    os.close(devnull)
    return True
