"""`dlqbatch replay`: send dead messages back to where they failed, by a plan that a person has looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TypeAlias

import typer

from dlqbatch import settings as configuration
from dlqbatch.cli.options import ROW_ID, Actor, AsJson, Commands, DryRun, Limit, ReplayFilters, RowIds, Settings
from dlqbatch.cli.printing import NOTHING, PARTIAL, print_json, print_lines, print_report, print_table, remark
from dlqbatch.cli.timeline import time
from dlqbatch.logs import plain

if TYPE_CHECKING:  # they need broker and database, which a help page does not
    from dlqbatch.replay.batches import ApplyOptions
    from dlqbatch.replay.job import Planned, Replayed

app = Commands(
    help="""Send dead messages back to where they failed: plan -> apply -> status or abort.

    `plan` freezes which messages would go and says what speaks against it. `apply` sends them, a canary first: apply
    it again until the plan is done. `status` shows what became of them. `abort` gives up what is not sent yet.

    dlqbatch replay plan --group dba642681715e5f0
    dlqbatch replay apply 1684bb502551e20c
    dlqbatch replay status 1684bb502551e20c
    dlqbatch replay abort 1684bb502551e20c
    """,
)

_LONGEST_SAMPLE: Final = 200
_MOST_RANGES: Final = 10
_LEFT_OUT: Final = {"processing": "processing: being sent, or sent and being observed"}
_EXIT: Final = {"ok": 0, "partial": PARTIAL}

Hash: TypeAlias = Annotated[
    str, typer.Argument(metavar="HASH", help="The plan's hash, or its first 8 characters or more.")
]
ToQueue: TypeAlias = Annotated[
    str | None, typer.Option("--to-queue", metavar="QUEUE", help="Send them to this queue, not to where they failed.")
]
Rate: TypeAlias = Annotated[
    str | None, typer.Option("--rate", metavar="RATE", help="At most so many, such as 50/s, 600/min or 10/h.")
]
PlanReason: TypeAlias = Annotated[str, typer.Option("--reason", help="Why; it is kept with the plan.")]


@app.command()
def plan(
    row_ids: Annotated[list[int] | None, ROW_ID] = None,
    *,
    settings: Settings,
    filters: ReplayFilters,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The oldest so many.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is pending, manual or failed.")] = False,
    to_queue: ToQueue = None,
    reason: PlanReason = "replay",
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Freeze which messages would go, by their numbers or by a filter, and show what speaks against it.

    Nothing moves. Without --status: what is pending, manual or failed.

    dlqbatch replay plan --group dba642681715e5f0
    dlqbatch replay plan --text "timed out" --since 2030-06-01 --limit 1000
    """
    from dlqbatch.messages.actions import MessageActions
    from dlqbatch.replay.freeze import Selection
    from dlqbatch.replay.job import plan_replay
    from dlqbatch.store.access import store_for

    selection = Selection(filters, tuple(row_ids or ()), everything, limit, to_queue)
    planned = plan_replay(settings, selection, actor=actor, reason=reason, dry_run=dry_run)
    if not planned.frozen.size:
        for sentence in MessageActions(store_for(settings)).near(filters):
            remark(sentence)
    _end_with_plan(planned, as_json=as_json)


@app.command()
def apply(
    name: Hash,
    *,
    settings: Settings,
    batch_size: Annotated[
        int, typer.Option("--batch-size", min=1, max=10_000, help="Messages taken from the dead store at once.")
    ] = 100,
    pause: Annotated[
        float, typer.Option("--pause", metavar="SECONDS", min=0, max=86_400, help="Seconds between two batches.")
    ] = 0.0,
    rate: Rate = None,
    canary: Annotated[
        bool,
        typer.Option(
            "--canary/--no-canary",
            help="First 1, then 10, then 100 in all, each only when it is known what became of those before.",
        ),
    ] = True,
    max_failure_rate: Annotated[
        float,
        typer.Option(
            "--max-failure-rate",
            metavar="SHARE",
            min=0,
            max=1,
            help="Stop when a larger share of what was sent came back.",
        ),
    ] = 0.1,
    wait: Annotated[
        float,
        typer.Option(
            "--wait", metavar="SECONDS", min=0, max=604_800, help="Wait so long for outcomes before this run ends."
        ),
    ] = 0.0,
    resume_stopped: Annotated[
        bool, typer.Option("--resume-stopped", help="Go on with a plan that was stopped, with a new canary.")
    ] = False,
    actor: Actor,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Send what a plan holds; apply it again for what is left. It stops when too much comes back.

    dlqbatch replay apply 1684bb502551e20c --dry-run
    dlqbatch replay apply 1684bb502551e20c --rate 50/s
    """
    from dlqbatch.replay.batches import ApplyOptions
    from dlqbatch.replay.job import preview_replay

    options = ApplyOptions(
        batch_size=batch_size,
        pause=pause,
        rate=rate,
        canary=canary,
        max_failure_rate=max_failure_rate,
        wait=wait,
        resume_stopped=resume_stopped,
    )
    if dry_run:
        _end_with_report(preview_replay(settings, name, options, actor=actor), as_json=as_json)
    _apply(name, settings, options, actor, as_json=as_json)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(metavar="HASH", help="The plan's hash; without it, all plans.")] = None,
    *,
    settings: Settings,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """Show how far a plan is and what became of its messages, or list the plans, the newest first.

    dlqbatch replay status
    dlqbatch replay status 1684bb502551e20c
    """
    from dlqbatch.replay.job import replay_plans, replay_status

    if name is not None:
        _show_status(replay_status(settings, name).as_dict(), as_json=as_json)
        return
    plans = replay_plans(settings, limit)
    if as_json:
        print_json([plan.as_dict() for plan in plans])
    elif plans:
        rows = [
            {
                "hash": each.hash,
                "state": each.state,
                "created_at": time(each.created_at),
                "actor": each.actor,
                "size": each.size,
                "sent": each.sent,
                "waiting": each.waiting,
                "skipped": each.skipped,
                "failed": each.outcomes.failed,
                "succeeded": each.outcomes.succeeded,
                "open": each.outcomes.open,
            }
            for each in plans
        ]
        print_table(rows, below=("created_at", "actor", "skipped"))
    else:
        remark("there are no plans; `dlqbatch replay plan` makes one")
    raise typer.Exit(0 if plans else NOTHING)


@app.command()
def abort(name: Hash, *, settings: Settings, actor: Actor, as_json: AsJson = False) -> None:
    """Give a plan up: what it has not sent is as it was before, and nothing of it is sent any more.

    It waits for the runs that apply the plan, at most ten seconds.

    dlqbatch replay abort 1684bb502551e20c
    """
    from dlqbatch.cli.run import Progress, on_signal
    from dlqbatch.replay.abort import abort_replay

    progress = Progress()
    aborted = abort_replay(settings, name, actor=actor, stopped=on_signal(), waiting=progress.waiting).as_dict()
    progress.end()
    _show_status(aborted, as_json=as_json)
    raise typer.Exit(PARTIAL if aborted["held"] else 0)


def replay_messages(
    row_ids: RowIds,
    *,
    settings: Settings,
    to_queue: ToQueue = None,
    rate: Rate = None,
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

    options = ApplyOptions(canary=False, rate=rate)
    selection = Selection(row_ids=tuple(row_ids), to_queue=to_queue)
    planned = plan_replay(settings, selection, actor=actor, reason=reason, dry_run=dry_run)
    if dry_run or not planned.frozen.size:
        _end_with_plan(planned, as_json=as_json)
    for why, number in planned.frozen.left_out.items():
        remark(f"{number} left out: {_LEFT_OUT.get(why, why)}")
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
        done = apply_replay(settings, run_options, name, options, actor=actor)
    finally:
        progress.end()
    _end_with_report(done, as_json=as_json)


def _end_with_plan(planned: Planned, *, as_json: bool) -> NoReturn:
    plan = planned.as_dict()
    if as_json:
        print_json(plan)
    else:
        _show_plan(plan)
    raise typer.Exit(0 if planned.frozen.size else NOTHING)


def _end_with_report(done: Replayed, *, as_json: bool) -> NoReturn:
    if as_json:
        print_json(done.as_dict())
    else:
        print_report(done.report)
        _show_status(done.status.as_dict(), as_json=False)
    raise typer.Exit(_EXIT.get(done.report.outcome, 1))


def _show_plan(plan: dict[str, Any]) -> None:
    where = f", all to '{plan['to_queue']}'" if plan["to_queue"] else ""
    lines = [f"{plan['size']:,} message(s), the oldest first{where}"]
    for title in ("by_status", "by_origin", "by_event", "by_error"):
        lines += [f"{title.replace('_', ' ')}:"] if plan[title] else []
        lines += [f"  {plain(str(name)):<50}{number:>9,}" for name, number in plan[title].items()]
    for why, number in plan["left_out"].items():
        lines.append(f"left out: {number:,} {_LEFT_OUT.get(why, why)}")
    if plan["size"]:
        lines.append("risks:" if plan["risks"] else "risks: none found")
    lines += [f"  {risk['name']:<18}{risk['messages']:>9,}  {plain(risk['says'])}" for risk in plan["risks"]]
    print_lines(lines)
    if plan["sample"]:
        print_lines(["the first of them:"])
        rows = [
            {
                "id": each["id"],
                "status": each["status"],
                "origin": each["origin_queue"] or each["origin_exchange"],
                "event": each["event"],
                "error": plain(str(each["error_type"] or "").partition("\n")[0], _LONGEST_SAMPLE),
                "failed": each["dlq_retry_count"],
            }
            for each in plan["sample"]
        ]
        print_table(rows, below=("error", "event"))
    if plan["hash"]:
        print_lines([f"plan {plan['hash']}", f"nothing has moved; to send them: dlqbatch replay apply {plan['hash']}"])
    elif plan["size"]:
        remark("a dry run: no plan is kept")
    else:
        remark("nothing found that can be replayed")


def _show_status(plan: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(plan)
        return
    since = f"{plan['created_at'][:19].replace('T', ' ')} UTC"
    lines = [f"plan {plan['hash']}: {plan['state']}, {plan['size']:,} message(s), by {plain(plan['actor'])}, {since}"]
    lines.append(f"  {'sent':<12}{plan['sent']:>9,}")
    lines += [f"    {name:<10}{number:>9,}" for name, number in plan["outcomes"].items() if plan["sent"]]
    if ids := plan.get("sent_ids"):
        lines.append(f"    messages {ranges(ids)}" + (" and more" if plan["sent"] > len(ids) else ""))
    if plan["state"] == "aborted":
        lines.append(f"  {'not sent':<12}{plan['waiting'] - plan['held']:>9,}  as they were before the plan")
        lines += [f"  {'not known':<12}{plan['held']:>9,}"] if plan["held"] else []
    else:
        lines.append(f"  {'waiting':<12}{plan['waiting']:>9,}")
    lines.append(f"  {'skipped':<12}{plan['skipped']:>9,}")
    lines += [f"    {number:>7,}  {plain(why)}" for why, number in plan["skipped_why"].items()]
    lines += [f"  sent to {plain(each['place'])}, not resolved: {plain(each['missing'])}" for each in plan["unproven"]]
    if plan["step"] is not None:
        lines.append(f"  canary: {plan['step']}, stops above {plan['max_failure_rate']:.0%} failed")
    lines.append(f"next: {plain(plan['do_next'])}")
    print_lines(lines)


def ranges(ids: Iterable[int]) -> str:
    """The ids as a person reads them, such as `1-20, 25`; of many ranges only the first."""
    runs: list[list[int]] = []
    for each in sorted(ids):
        if runs and each == runs[-1][1] + 1:
            runs[-1][1] = each
        else:
            runs.append([each, each])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[:_MOST_RANGES]]
    return ", ".join(shown) + (", …" if len(runs) > _MOST_RANGES else "")
