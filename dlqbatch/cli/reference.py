"""docs/cli.md, from the commands themselves: `python -m dlqbatch.cli.reference > docs/cli.md`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer.main

from dlqbatch.cli.commands import application

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """\
# The command line

`python handler.py COMMAND`, `python -m dlqbatch COMMAND` and the installed `dlqbatch COMMAND` are the same.
Without a command it is one run of the job that the settings name, which is `drain`.

- What was asked for goes to stdout, logs go to stderr. With `--json` stdout holds one JSON value and nothing else, also
  after an error: `{"outcome": "failed", "error": {"type": …, "message": …}}`.
- Logs are text on a terminal and JSON lines elsewhere (`dlqbatch.log-format`). The error that ends a command has
  the same form: in JSON it is one line, `"event": "failed"`, with `job`, `error`, `exit_code` and `message`.
- `-s OPTION=VALUE` sets any option of [settings.md](settings.md) for this one command.
  It stands after the command, and counts before every other source.
- What is given on a command line is seen by every user of the machine (`ps`): passwords belong into the environment or
  into the properties file.

| exit code | means |
|---|---|
| 0 | done |
| 1 | failed: the broker refused, or what was named is not there |
| 2 | usage or configuration is wrong, or the database lacks our tables (`dlqbatch db upgrade`); nothing was moved |
| 3 | partial: something was left in its queue |
| 4 | the broker or the database cannot be reached |

This page is generated: `python -m dlqbatch.cli.reference > docs/cli.md`. A test compares it with the program.
"""


def page() -> str:
    return "\n".join([_HEAD, *_sections(typer.main.get_command(application()), "dlqbatch")])


def _sections(command: Any, path: str) -> Iterator[str]:
    inner = getattr(command, "commands", {})
    if not inner:
        yield from _section(command, path)
    for name, found in inner.items():
        yield from _sections(found, f"{path} {name}")


def _section(command: Any, path: str) -> Iterator[str]:
    context = typer.Context(command, info_name=path)
    yield f"## {path}\n"
    yield f"`{path} {' '.join(command.collect_usage_pieces(context))}`\n"
    yield f"{command.help}\n"
    yield "| | |\n|---|---|"
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and "--help" not in parameter.opts:
            name, meaning = record
            yield f"| `{name.replace('|', '/')}` | {meaning} |"
    yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
