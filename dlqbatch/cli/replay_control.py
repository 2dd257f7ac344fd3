"""What people do to a plan from anywhere, while it is sent or before: approve, pause, resume, rate and abort."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from dlqbatch.cli.options import Actor, AsJson, JournalReason, ScopedReach
from dlqbatch.cli.plan_page import show_status
from dlqbatch.cli.printing import PARTIAL

Hash: TypeAlias = Annotated[
    str, typer.Argument(metavar="HASH", help="The plan's hash, or its first 8 characters or more.")
]


def approve(name: Hash, *, reach: ScopedReach, reason: JournalReason, actor: Actor, as_json: AsJson = False) -> None:
    """Agree to a plan that somebody else made and that is too large for one person (dlqbatch.replay-approval).

    dlqbatch replay approve 1684bb502551e20c --reason "the api is back"
    """
    from dlqbatch.replay.approve import approve_replay

    show_status(reach.run(approve_replay, name, actor=actor, reason=reason).as_dict(), as_json=as_json)


def abort(name: Hash, *, reach: ScopedReach, actor: Actor, as_json: AsJson = False) -> None:
    """Give a plan up: what it has not sent is as it was before, and nothing of it is sent any more.

    It waits for the runs that apply the plan, at most ten seconds.

    dlqbatch replay abort 1684bb502551e20c
    """
    from dlqbatch.cli.run import Progress, on_signal
    from dlqbatch.replay.abort import abort_replay

    progress = Progress()
    aborted = reach.run(abort_replay, name, actor=actor, stopped=on_signal(), waiting=progress.waiting).as_dict()
    progress.end()
    show_status(aborted, as_json=as_json)
    raise typer.Exit(PARTIAL if aborted["held"] else 0)


def pause(
    name: Hash,
    *,
    reach: ScopedReach,
    actor: Actor,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is shown to everybody.")] = "",
    as_json: AsJson = False,
) -> None:
    """Pause a plan that is being sent, wherever its apply runs: nothing of it is sent until somebody resumes it.

    dlqbatch replay pause 1684bb502551e20c --reason "the consumers restart"
    """
    from dlqbatch.cli.run import Progress, on_signal
    from dlqbatch.replay.control import pause_replay

    progress = Progress()
    paused = reach.run(
        pause_replay, name, actor=actor, reason=reason, stopped=on_signal(), waiting=progress.waiting
    ).as_dict()
    progress.end()
    show_status(paused, as_json=as_json)
    raise typer.Exit(PARTIAL if paused["held"] else 0)


def resume(name: Hash, *, reach: ScopedReach, actor: Actor, as_json: AsJson = False) -> None:
    """Let a plan go on that was paused or stopped; an apply that still runs, or the job, does so by itself.

    After a stop that nobody has asked for it begins with a new canary. The apply has ended then: `replay apply` sends
    the rest.

    dlqbatch replay resume 1684bb502551e20c
    """
    from dlqbatch.replay.control import resume_replay

    show_status(reach.run(resume_replay, name, actor=actor).as_dict(), as_json=as_json)


def change_rate(
    name: Hash,
    rate: Annotated[str, typer.Argument(metavar="RATE", help="Such as 50/s, or: faster, slower (by half), none.")],
    *,
    reach: ScopedReach,
    actor: Actor,
    as_json: AsJson = False,
) -> None:
    """Change how fast a plan is sent, also while it is; faster doubles the rate, slower halves it.

    dlqbatch replay rate 1684bb502551e20c 50/s
    dlqbatch replay rate 1684bb502551e20c slower
    """
    from dlqbatch.replay.control import set_rate

    show_status(reach.run(set_rate, name, rate, actor=actor).as_dict(), as_json=as_json)
