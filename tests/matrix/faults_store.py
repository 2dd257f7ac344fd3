"""The run is killed, or its database connection is cut, at a commit of a job of the dead store.

The fault comes before the commit, or after it and before its answer. Which commit is chance; a run without a fault has
told how many there are. So every arrow is met that leads into the database or out of it: committed before the ack,
between claim and publish, between publish and record, in the middle of a canary, between a cold copy and a deletion.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from cutting_link import CuttingLink

from matrix.scenario import fault
from matrix.store_jobs import DONE, KILLED, PARTIAL, SCENES, UNREACHABLE, Scene

if TYPE_CHECKING:
    import subprocess

    from matrix.ground import Ground
    from matrix.scenario import Count

STORES = ("postgresql", "sqlite")
_commits: dict[tuple[str, str], int] = {}


def commits(ground: Ground, scene: type[Scene]) -> int:
    """How many commits a run makes that nothing happens to; asked once."""
    known = scene.__name__, ground.kind
    if known not in _commits:
        with scene(ground) as one:
            if one.tables.is_sqlite:
                counted = ground.folder / "commits"
                one.end(one.start({"STRANGE_COUNT": str(counted)}))
                _commits[known] = int(counted.read_text())
            else:
                with CuttingLink(one.database) as link:
                    one.end(one.start(database_url=link.url))
                    _commits[known] = link.commits
            one.empty()
    return _commits[known]


def killed(ground: Ground, scene: type[Scene], number: int, *, is_heard: bool) -> Count:
    """SIGKILL with the commit of this number on its lips; done by the database only if it `is_heard`."""
    ground.note(f"killed {'after' if is_heard else 'before'} commit {number}")
    with scene(ground) as one:
        if one.tables.is_sqlite:
            done = one.end(one.start({"STRANGE_COMMIT": f"{number}:{'after' if is_heard else 'before'}"}))
            hit = done.code == KILLED
        else:
            running: list[subprocess.Popen[str]] = []

            def kill() -> None:
                running[0].send_signal(signal.SIGKILL)
                running[0].wait(30)

            with CuttingLink(one.database, number, is_heard=is_heard, act=kill) as link:
                running.append(one.start(database_url=link.url))
                hit = one.end(running[0]).code == KILLED
        return one.found(crashes=int(hit), hits=int(hit))


def cut(ground: Ground, scene: type[Scene], number: int, *, is_heard: bool) -> Count:
    """The connection is cut there; the next one is whole. What the commit's answer was, nobody knows."""
    ground.note(f"cut {'after' if is_heard else 'before'} commit {number}")
    with scene(ground) as one, CuttingLink(one.database, number, is_heard=is_heard) as link:
        done = one.end(one.start(database_url=link.url))
        assert done.code in {DONE, PARTIAL, UNREACHABLE}, done.err
        hit = link.has_cut.is_set()
        return one.found(crashes=int(hit), hits=int(hit))


def _register(scene: type[Scene]) -> None:
    def killed_at_a_commit(ground: Ground) -> Count:
        number = ground.random.randint(1, commits(ground, scene))
        return killed(ground, scene, number, is_heard=ground.random.random() < 0.5)

    def cut_at_a_commit(ground: Ground) -> Count:
        number = ground.random.randint(1, commits(ground, scene))
        return cut(ground, scene, number, is_heard=ground.random.random() < 0.5)

    name = scene.__name__.lower()
    killed_at_a_commit.__name__, cut_at_a_commit.__name__ = f"{name}_killed_at_a_commit", f"{name}_cut_at_a_commit"
    title = "in a canary step, " if name == "canary" else ""
    fault(title + "killed before or after any commit", job=scene.job, kinds=STORES, releases=("3.10",), runs=40)(
        killed_at_a_commit
    )
    fault(
        title + "connection cut at any commit, answered or not",
        job=scene.job,
        kinds=("postgresql",),
        releases=("3.10",),
        runs=40,
    )(cut_at_a_commit)


for _scene in SCENES:
    _register(_scene)
