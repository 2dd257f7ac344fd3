"""A help page is there at once: it loads neither the database nor the broker."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Without a command it loads every module of the command line.
HELP = """
import sys
from dlqbatch.cli import main
main([*sys.argv[1:], "--help"])
print(*sys.modules)
"""


@pytest.mark.parametrize("command", ["", "replay", "messages list", "drain", "schedule"])
def test_a_help_page_loads_neither_sqlalchemy_nor_pika(command: str) -> None:
    words = [sys.executable, "-c", HELP, *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "dlqbatch.cli.options" in loaded
    assert loaded & {"sqlalchemy", "pika", "psycopg", "alembic"} == set()
