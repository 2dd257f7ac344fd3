"""What the workers of tests/interop do: six causes of failure, and a message that fails at its first try alone.

A file `mended` in the folder ends all failures. Each call is a line of `calls`.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(os.environ["WORK_FOLDER"])
CAUSES = ("declined", "refused", "missing", "late", "negative", "overdrawn")


class PaymentDeclined(Exception):
    pass


def work(name: str) -> None:
    """`name` is a cause and a number, such as `declined-2`."""
    is_first = not (FOLDER / "calls").exists() or name not in (FOLDER / "calls").read_text().split()
    is_handled = (FOLDER / "mended").exists() or (name.startswith("once") and not is_first)
    with (FOLDER / "calls").open("a") as calls:
        calls.write(f"{name} {'handled' if is_handled else 'failed'}\n")
    if not is_handled:
        fail(name)


def fail(name: str) -> None:
    cause, _, number = name.partition("-")
    match cause:
        case "declined" | "once":
            raise PaymentDeclined(f"card of order {number} declined")
        case "refused":
            raise ConnectionRefusedError(111, "Connection refused")
        case "missing":
            raise KeyError("total")
        case "late":
            raise TimeoutError(f"no answer for order {number}")
        case "negative":
            check_amount(number)
        case "overdrawn":
            check_account(number)


def check_amount(number: str) -> None:
    raise ValueError(f"amount of order {number} is negative")


def check_account(number: str) -> None:
    raise ValueError(f"account of order {number} is overdrawn")
