"""`python -m dlqbatch` is the command line."""

from dlqbatch.cli import program

program()
