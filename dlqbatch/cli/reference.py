"""Writes docs/cli.md from the commands: `python -m dlqbatch.cli.reference > docs/cli.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import typer.main

from dlqbatch.cli.commands import application
from dlqbatch.cli.help_pages import (
    EXIT_CODES,
    EXIT_CODES_OF,
    examples,
    is_argument,
    meaning_of,
    name_of,
    paragraphs,
    parameters,
    usage,
)

_HEAD: Final = """\
# The command line

`dlqbatch COMMAND`, `python -m dlqbatch COMMAND` and, in a checkout, `python handler.py COMMAND` are the same.
Without a command it is one run of the job that the settings name, which is `drain`.

```
dlqbatch help                 # all commands; dlqbatch COMMAND -h, or dlqbatch help COMMAND, tells of one
dlqbatch drain --dry-run
```

- What was asked for goes to stdout, logs go to stderr. With `--json` stdout holds one JSON value and nothing else, also
  after an error: `{"outcome": "failed", "error": {"type": …, "message": …}}`, of a run with `job`, `stopped_by` and
  `counts` as well.
- Logs are text on a terminal and JSON lines elsewhere (`dlqbatch.log-format`). On a terminal the report of a run is not
  logged a second time. The error that ends a command has the same form as the logs: in JSON it is one line,
  `"event": "failed"`, with `job`, `error`, `exit_code` and `message`.
- Each JSON line has `ts`, `level`, `event`, `logger`, `fields`, `version` and `pid`; in a run also `run_id`, which its
  row of `dlq_runs` (`report`) has too, and on Lambda `aws_request_id`.
- In a pipe each row of a table is one line. On a terminal that is too narrow a row takes several lines, so that no id,
  hash or error is cut or folded; `messages groups` leaves out `first` then.
- `-s OPTION=VALUE` sets any option of [settings.md](settings.md) for this one command.
  It stands after the command, and counts before every other source.
- What is given on a command line is seen by every user of the machine (`ps`): passwords belong into the environment or
  into the properties file.
- `dlqbatch --install-completion` teaches your shell (bash, zsh, fish, PowerShell) to complete commands and options with
  Tab; `--show-completion` only prints the script. It is for the installed `dlqbatch`.

This page is generated: `python -m dlqbatch.cli.reference > docs/cli.md`. A test compares it with the program.
"""
_SHARED_BY: Final = 3
"""An option that at least this many commands have, with the same meaning, is described once for all of them."""
_EXCEPTIONS: Final = 5
"""An option that all commands but at most this many have is not named in the section of each command."""

Row = tuple[str, str]
"""An option or argument as it is typed, and what it means."""


class Reference:
    def __init__(self, root: Any) -> None:
        self._commands = list(_leaves(root, ""))
        having: dict[Row, list[str]] = {}
        for path, command, context in self._commands:
            for row in _options(command, context):
                having.setdefault(row, []).append(path)
        self._shared = {row: paths for row, paths in having.items() if len(paths) >= _SHARED_BY}

    def page(self) -> str:
        return "\n".join([_HEAD, *self._shared_options(), *self._exit_codes(), *self._sections()])

    def _shared_options(self) -> Iterator[str]:
        yield "## Shared options\n"
        yield "What several commands have, with the same meaning.\n"
        yield "| | | |\n|---|---|---|"
        for (name, meaning), paths in self._shared.items():
            missing = [path for path, _, _ in self._commands if path not in paths]
            which = f"every command{' but ' if missing else ''}{_in_code(missing)}" if self._is_common(paths) else ""
            yield f"| `{name}` | {_cell(meaning)} | {which} |"
        yield ""

    def _exit_codes(self) -> Iterator[str]:
        yield "## Exit codes\n"
        yield "What a code means for every command, then where a command says more.\n"
        yield "| command | code | means |\n|---|---|---|"
        for code, meaning in EXIT_CODES.items():
            yield f"| every | {code} | {meaning} |"
        for path, _, _ in self._commands:
            for code, meaning in EXIT_CODES_OF.get(path, {}).items():
                yield f"| [{path}](#{_anchor(path)}) | {code} | {meaning} |"
        yield ""

    def _sections(self) -> Iterator[str]:
        for path, command, context in self._commands:
            yield f"## dlqbatch {path}\n"
            yield f"`{usage(command, context, f'dlqbatch {path}')}`\n"
            yield from (f"{each}\n" for each in paragraphs(command))
            yield "\n".join(["```", *examples(command), "```\n"])
            rows = _options(command, context)
            own = [*_arguments(command, context), *(row for row in rows if row not in self._shared)]
            if own:
                yield "| | |\n|---|---|"
                yield from (f"| `{name}` | {_cell(meaning)} |" for name, meaning in own)
                yield ""
            shared = [name for name, meaning in rows if not self._is_common(self._shared.get((name, meaning), ()))]
            shared = [name for name in shared if name not in dict(own)]
            notes = [f"[Also](#shared-options): {_in_code(shared)}."] if shared else []
            if path in EXIT_CODES_OF:
                notes.append(f"[Exit codes](#exit-codes): {', '.join(map(str, EXIT_CODES_OF[path]))}.")
            if notes:
                yield " ".join(notes) + "\n"

    def _is_common(self, paths: Sequence[str]) -> bool:
        return len(paths) >= len(self._commands) - _EXCEPTIONS


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Every command that is no group: its words, the command and its context."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command, typer.Context(command, info_name=f"dlqbatch {path}")
    for name, command_inside in inner.items():
        yield from _leaves(command_inside, f"{path} {name}".strip())


def _options(command: Any, context: Any) -> list[Row]:
    options = [each for each in parameters(command, context) if not is_argument(each) and each.name != "help"]
    return [(name_of(each), meaning_of(each)) for each in options]


def _arguments(command: Any, context: Any) -> list[Row]:
    return [(name_of(each), meaning_of(each)) for each in parameters(command, context) if is_argument(each)]


def _in_code(words: Sequence[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _anchor(path: str) -> str:
    return f"dlqbatch {path}".replace(" ", "-")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(Reference(typer.main.get_command(application())).page())
