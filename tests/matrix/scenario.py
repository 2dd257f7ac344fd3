"""What a fault is, and the list of all."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from matrix.ground import Ground

QUEUES = ("classic", "quorum")
RELEASES = ("3.10", "4.3")


@dataclass(frozen=True, slots=True)
class Count:
    """What one round found when everything was quiet again."""

    messages: int
    lost: int = 0
    changed: int = 0
    doubled: int = 0
    allowed: int | None = 0
    """Copies that were under way at the crashes; None where nothing on our side bounds them: the `remark` says why."""
    hits: int = 1
    """How often the fault struck; a round that came too late has 0, and proves nothing."""
    gone: int = 0
    """Taken away by whoever purged or deleted a queue; not lost by us, and counted apart."""

    @property
    def is_good(self) -> bool:
        return not self.lost and not self.changed and (self.allowed is None or self.doubled <= self.allowed)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    title: str
    job: str
    make: Callable[[Ground], Count]
    kinds: tuple[str, ...]
    releases: tuple[str, ...]
    runs: int
    """Rounds of the longer run, for each kind and release."""
    remark: str
    """What a reader of the results has to know."""
    breaks_node: bool
    """The broker itself is killed, stopped or reconfigured: it has to be a private one."""

    @property
    def what_breaks(self) -> str:
        """One word for faults of the same kind: the name of the module that makes them, without `faults_`."""
        return self._module.rpartition("faults_")[2].replace("_", " ")

    @property
    def breaks_in_words(self) -> str:
        """The first paragraph of that module's docstring."""
        return " ".join((sys.modules[self._module].__doc__ or self.what_breaks).partition("\n\n")[0].split())

    @property
    def _module(self) -> str:
        return str(getattr(self.make, "func", self.make).__module__)


_all: dict[str, Fault] = {}


def fault(
    title: str,
    *,
    name: str = "",
    job: str,
    kinds: tuple[str, ...] = QUEUES,
    releases: tuple[str, ...] = RELEASES,
    runs: int = 5,
    remark: str = "",
    breaks_node: bool = False,
) -> Callable[[Callable[[Ground], Count]], Callable[[Ground], Count]]:
    """Add a function to the list, under its own name unless another is given."""

    def add(make: Callable[[Ground], Count]) -> Callable[[Ground], Count]:
        chosen = name or make.__name__.replace("_", "-")
        assert chosen not in _all, f"two faults are called {chosen}"
        _all[chosen] = Fault(chosen, title, job, make, kinds, releases, runs, remark, breaks_node)
        return make

    return add


def faults() -> dict[str, Fault]:
    """All there are, in the order of modules and lines."""
    for module in sorted(pkgutil.iter_modules([str(Path(__file__).parent)]), key=lambda one: one.name):
        if module.name.startswith("faults_"):
            importlib.import_module(f"matrix.{module.name}")
    return dict(_all)
