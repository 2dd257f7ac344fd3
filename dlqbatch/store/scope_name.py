"""The names of scopes: `CLUSTER/VIRTUAL_HOST`, such as `rabbit@rabbit-1/shop`. This loads no SQLAlchemy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

EVERY: Final = "all"
"""What a person writes for the rows of every scope, which can only be looked at."""


def scope_name(cluster: str, virtual_host: str) -> str:
    """A slash in one of the two is written as in an address, %2F, so that no two deployments have one name."""
    return f"{_part(cluster)}/{_part(virtual_host)}"


def of_virtual_host(names: Iterable[str], virtual_host: str) -> list[str]:
    """The names of a virtual host of that name, of whatever broker."""
    return [name for name in names if name.endswith(f"/{_part(virtual_host)}")]


def _part(text: str) -> str:
    return text.replace("%", "%25").replace("/", "%2F")
