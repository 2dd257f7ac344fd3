"""How a replay plan is shown: its messages, what speaks against it, how far it is, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from dlqbatch.cli.printing import print_json, print_lines, print_table, remark
from dlqbatch.logs import plain

_LONGEST_SAMPLE: Final = 200
_MOST_RANGES: Final = 10
LEFT_OUT: Final = {"processing": "processing: being sent, or sent and being observed"}


def show_plan(plan: dict[str, Any]) -> None:
    where = f", all to '{plan['to_queue']}'" if plan["to_queue"] else ""
    lines = [f"{plan['size']:,} message(s), some of each kind first, then the oldest first{where}"]
    for title in ("by_status", "by_origin", "by_event", "by_error"):
        lines += [f"{title.replace('_', ' ')}:"] if plan[title] else []
        lines += [f"  {plain(str(name)):<50}{number:>9,}" for name, number in plan[title].items()]
    for why, number in plan["left_out"].items():
        lines.append(f"left out: {number:,} {LEFT_OUT.get(why, why)}")
    if plan["mended"]:
        over = ", ".join(f"{risk['name']} ({risk['messages']:,})" for risk in plan["answered"])
        lines.append(f"mended: {plain(plan['mended'])}; {f'it answers {over}' if over else 'it answers no risk'}")
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


def show_status(plan: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(plan)
        return
    since = f"{plan['created_at'][:19].replace('T', ' ')} UTC"
    lines = [f"plan {plan['hash']}: {plan['state']}, {plan['size']:,} message(s), by {plain(plan['actor'])}, {since}"]
    lines += [f"  mended: {plain(plan['mended'])}"] if plan["mended"] else []
    for word in ("approved", "released"):
        if by := plan[word]:
            at = by["at"][:19].replace("T", " ")
            lines.append(f"  {word} by {plain(by['by'])}, {at} UTC: {plain(by['reason'])}")
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
    if plan["per_second"] is not None and plan["waiting"]:
        lines.append(f"  rate: {plan['per_second']:g} a second")
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
