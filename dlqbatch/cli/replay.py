"""`dlqbatch replay`: send dead messages back to where they failed, by a plan that a person has looked at."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import typer

from dlqbatch import settings as configuration
from dlqbatch.cli.jobs import replay_released
from dlqbatch.cli.options import (
    ROW_ID,
    Actor,
    AsJson,
    Commands,
    DryRun,
    Limit,
    Reached,
    ReplayFilters,
    RowIds,
)
from dlqbatch.cli.plan_page import LEFT_OUT, show_plan, show_status
from dlqbatch.cli.printing import NOTHING, PARTIAL, print_json, print_report, print_table, remark
from dlqbatch.cli.replay_control import Hash, abort, approve, change_rate, pause, resume
from dlqbatch.cli.timeline import time

if TYPE_CHECKING:  # they need broker and database, which a help page does not
    from dlqbatch.replay.batches import ApplyOptions
    from dlqbatch.replay.job import Replayed

app = Commands(
    help="""Send dead messages back to where they failed: plan -> apply or release -> status or abort.

    `plan` freezes which messages would go and says what speaks against it. `apply` sends them, a canary first, and
    proves what became of them; after `release` the job `replay` does so, and no terminal has to stay open. `pause`,
    `resume` and `rate` act on it from anywhere. `abort` gives up what is not sent.

    dlqbatch replay plan --group dba642681715e5f0
    dlqbatch replay apply 1684bb502551e20c
    dlqbatch replay status 1684bb502551e20c
    dlqbatch replay abort 1684bb502551e20c
    """,
)

_EXIT: Final = {"ok": 0, "partial": PARTIAL}

ToQueue: TypeAlias = Annotated[
    str | None, typer.Option("--to-queue", metavar="QUEUE", help="Send them to this queue, not to where they failed.")
]
Rate: TypeAlias = Annotated[
    str | None, typer.Option("--rate", metavar="RATE", help="At most so many, such as 50/s, 600/min or 10/h.")
]
Canary: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--canary/--no-canary",
        help="First 4, then at most 5 times as many as are proven to be handled, and so on.",
    ),
]
MaxFailureRate: TypeAlias = Annotated[
    float,
    typer.Option(
        "--max-failure-rate",
        metavar="SHARE",
        min=0,
        max=1,
        help="Stop when a larger share of what was sent came back.",
    ),
]
Guard: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--guard/--no-guard",
        help="Watch the queues that are sent to, and stop when consumers go away or take nothing.",
    ),
]
Mended: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--mended",
        metavar="TICKET",
        help="What was mended since they failed. It is kept with the plan, and answers the risks that they fail "
        "again the same way.",
    ),
]
PlanReason: TypeAlias = Annotated[str, typer.Option("--reason", help="Why; it is kept with the plan.")]


@app.command()
def plan(
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    reach: Reached,
    filters: ReplayFilters,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The oldest so many.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is pending, manual or failed.")] = False,
    to_queue: ToQueue = None,
    in_order: Annotated[
        str | None,
        typer.Option(
            "--in-order",
            metavar="FIELD",
            help="Of messages with one value of this field (a name of dlqbatch.fields, header:NAME, or a place in the "
            "body such as account.id) the next goes only when the one before is acknowledged.",
        ),
    ] = None,
    mended: Mended = None,
    reason: PlanReason = "replay",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Freeze which messages would go, by their numbers or by a filter, and show what speaks against it.

    Nothing moves. Without --status: what is pending, manual or failed.

    dlqbatch replay plan --group dba642681715e5f0
    dlqbatch replay plan --text "timed out" --since 2030-06-01 --limit 1000
    dlqbatch replay plan --group dba642681715e5f0 --mended INC-4711
    """
    from dlqbatch.messages.actions import MessageActions
    from dlqbatch.replay.freeze import Selection
    from dlqbatch.replay.job import plan_replay

    selection = Selection(filters, tuple(row_ids or ()), everything, limit, to_queue, in_order, mended)
    planned = reach.run(plan_replay, selection, actor=actor, reason=reason, dry_run=dry_run).as_dict()
    if not planned["size"] or filters.ids or filters.fields or filters.origins or filters.unwanted:
        near, missing = MessageActions.near, MessageActions.values_not_found
        for sentence in reach.messages(near, filters) + reach.messages(missing, filters):
            remark(sentence)
    if planned["approval_above"] is not None:
        remark(
            f"above {planned['approval_above']:,} messages (dlqbatch.replay-approval) somebody other than "
            f"{planned['actor']} has to approve it: dlqbatch replay approve {planned['hash']}"
        )
    _end_with_plan(planned, as_json=as_json)


@app.command()
def apply(
    name: Hash,
    *,
    reach: Reached,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, max=10_000, help="Messages taken from the dead store at once.")
    ] = 100,
    pause: Annotated[
        float, typer.Option("--pause", metavar="SECONDS", min=0, max=86_400, help="Seconds between two batches.")
    ] = 0.0,
    rate: Rate = None,
    canary: Canary = True,
    max_failure_rate: MaxFailureRate = 0.1,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            max=604_800,
            help="Wait at most so long for the outcomes of a step, for what a killed run holds, or while the plan is "
            "paused, before this run ends.",
        ),
    ] = 3600.0,
    settle: Annotated[
        bool,
        typer.Option(
            "--settle/--no-settle",
            help="Run the drain and the ingest that prove the outcomes; without it jobs have to do it.",
        ),
    ] = True,
    guard: Guard = True,
    resume_stopped: Annotated[
        bool, typer.Option("--resume-stopped", help="Go on with a plan that was stopped, with a new canary.")
    ] = False,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send what a plan holds, step by step, and prove what became of it. It stops when too much comes back.

    dlqbatch replay apply 1684bb502551e20c --dry-run
    dlqbatch replay apply 1684bb502551e20c --rate 50/s
    """
    from dlqbatch.replay.batches import ApplyOptions
    from dlqbatch.replay.job import preview_replay

    settings = reach.here("The job sends it: `dlqbatch replay release HASH`. ")
    options = ApplyOptions(
        batch_size=batch_size,
        pause=pause,
        rate=rate,
        canary=canary,
        max_failure_rate=max_failure_rate,
        wait=wait,
        settle=settle,
        guard=guard,
        resume_stopped=resume_stopped,
    )
    if dry_run:
        _end_with_report(preview_replay(settings, name, options, actor=actor), as_json=as_json)
    _apply(name, settings, options, actor, as_json=as_json)


@app.command()
def release(
    name: Hash,
    *,
    reach: Reached,
    rate: Rate = None,
    canary: Canary = True,
    max_failure_rate: MaxFailureRate = 0.1,
    guard: Guard = True,
    reason: Annotated[str, typer.Option("--reason", help="Why; it goes into the journal.")] = "as planned",
    actor: Actor,
    as_json: AsJson = False,
) -> None:
    """Hand a plan to the job `replay`, which sends it run after run as `apply` does; nothing is sent by this command.

    The job has to run: `dlqbatch schedule`, a timer or a cloud function starts it (docs/deploy.md).

    dlqbatch replay release 1684bb502551e20c
    dlqbatch replay release 1684bb502551e20c --rate 50/s
    """
    from dlqbatch.replay.batches import ApplyOptions
    from dlqbatch.replay.job import has_run_lately, release_replay

    options = ApplyOptions(rate=rate, canary=canary, max_failure_rate=max_failure_rate, guard=guard)
    released = reach.run(release_replay, name, options, actor=actor, reason=reason)
    show_status(released.as_dict(), as_json=as_json)
    if not reach.run(has_run_lately):
        remark(
            "no run of the job `replay` has begun in the last ten minutes, so nothing is sent yet. `dlqbatch schedule` "
            "starts it, or a timer (docs/deploy.md); `dlqbatch replay run` is one run"
        )


app.command("run")(replay_released)
app.command()(approve)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(metavar="HASH", help="The plan's hash; without it, all plans.")] = None,
    *,
    reach: Reached,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Show how far a plan is and what became of its messages, or list the plans, the newest first.

    dlqbatch replay status
    dlqbatch replay status 1684bb502551e20c
    """
    from dlqbatch.replay.job import replay_plans, replay_status

    if name is not None:
        show_status(reach.run(replay_status, name).as_dict(), as_json=as_json)
        return
    plans = [plan.as_dict() for plan in reach.run(replay_plans, limit)]
    if as_json:
        print_json(plans)
    elif plans:
        rows = [
            {
                "hash": each["hash"],
                "state": each["state"],
                "created_at": time(datetime.fromisoformat(each["created_at"])),
                "actor": each["actor"],
                "mended": each["mended"] or "",
                "released": (each["released"] or {}).get("by", ""),
                "size": each["size"],
                "sent": each["sent"],
                "waiting": each["waiting"],
                "skipped": each["skipped"],
                **each["outcomes"],
            }
            for each in plans
        ]
        print_table(rows, below=("created_at", "actor", "mended", "released", "skipped"))
    else:
        remark("there are no plans; `dlqbatch replay plan` makes one")
    raise typer.Exit(0 if plans else NOTHING)


app.command()(abort)
app.command()(pause)
app.command()(resume)
app.command("rate")(change_rate)


def replay_messages(
    row_ids: RowIds,
    *,
    reach: Reached,
    to_queue: ToQueue = None,
    rate: Rate = None,
    mended: Mended = None,
    reason: PlanReason = "replay",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send these messages back to where they failed, at once: a plan and its apply in one, without a canary.

    dlqbatch messages replay 4711 4712
    """
    from dlqbatch.replay.batches import ApplyOptions
    from dlqbatch.replay.freeze import Selection
    from dlqbatch.replay.job import plan_replay

    settings = reach.here("`dlqbatch replay plan ID` and `dlqbatch replay release HASH` do it. ")
    options = ApplyOptions(canary=False, rate=rate)
    selection = Selection(row_ids=tuple(row_ids), to_queue=to_queue, mended=mended)
    planned = plan_replay(settings, selection, actor=actor, reason=reason, dry_run=dry_run)
    if dry_run or not planned.frozen.size:
        _end_with_plan(planned.as_dict(), as_json=as_json)
    for why, number in planned.frozen.left_out.items():
        remark(f"{number} left out: {LEFT_OUT.get(why, why)}")
    for risk in planned.risks:
        remark(f"note: {risk.says}")
    _apply(planned.frozen.hash, settings, options, actor, as_json=as_json)


def _apply(name: str, settings: configuration.Settings, options: ApplyOptions, actor: str, *, as_json: bool) -> None:
    from dlqbatch.cli.run import Progress, on_signal
    from dlqbatch.jobs import RunOptions
    from dlqbatch.replay.job import apply_replay

    progress = Progress()
    run_options = RunOptions(stopped=on_signal(), progress=progress)
    try:
        done = apply_replay(settings, run_options, name, options, actor=actor, live=progress.line)
    finally:
        progress.end()
    _end_with_report(done, as_json=as_json)


def _end_with_plan(plan: dict[str, Any], *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(plan)
    else:
        show_plan(plan)
    raise typer.Exit(0 if plan["size"] else NOTHING)


def _end_with_report(done: Replayed, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(done.as_dict())
    else:
        print_report(done.report)
        show_status(done.status.as_dict(), as_json=False)
    raise typer.Exit(_EXIT.get(done.report.outcome, 1))
