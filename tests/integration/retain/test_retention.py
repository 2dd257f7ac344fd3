"""Retain on real databases and a real folder: what is over goes, the rest stays, and no row goes without its copy."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
from dead_rows import NOW, add, lock, row, store_at
from program import HANGS_AFTER
from sqlalchemy import func, insert, select, text, update

from dlqbatch.actions.queries import recent
from dlqbatch.actions.undo import undo
from dlqbatch.amqp.fields import Fields
from dlqbatch.messages.actions import MessageActions
from dlqbatch.retain.archive import lines_of, locate, survey
from dlqbatch.retain.folder import ColdFolder
from dlqbatch.retain.format import seal
from dlqbatch.retain.job import Bounds, Retain
from dlqbatch.retain.restore import Restoring
from dlqbatch.retain.rows import Keep, Retention, prune_actions
from dlqbatch.store import journal as states
from dlqbatch.store.engine import reading, writing
from dlqbatch.store.states import NEW_GROUP, Status, path
from dlqbatch.store.tables import ALERTS, COLD_COPIES, MESSAGES, PLAN_ITEMS, PLANS, RUNS, TRANSITIONS, UNPROVEN_RUNS

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Engine

    from dlqbatch.jobs import Report

DAY = timedelta(days=1)
KEEP = Keep(30 * DAY, 90 * DAY, 365 * DAY)
LATER = NOW + 400 * DAY
MUCH_LATER = LATER + 400 * DAY


@pytest.fixture(params=["postgresql", "sqlite"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return store_at(str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param])))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def in_state(engine: Engine, status: Status, **columns: Any) -> int:
    (row_id,) = add(engine, row(**columns))
    walk(engine, row_id, Status.PENDING, status)
    return row_id


def walk(engine: Engine, row_id: int, start: Status, end: Status, at: Any = NOW) -> None:
    with writing(engine) as connection:
        for step in path(start, end, by_person=True):
            held = "t" if step.start == Status.PROCESSING else None
            given = lock() if step.end == Status.PROCESSING else {}
            assert states.move(connection, row_id, step.start, step.end, held, at, "a person", "why", **given)


def retain(engine: Engine, folder: Path | None, now: Any = LATER, most: int = 100, **changes: Any) -> Report:
    bounds = changes.pop("bounds", None) or Bounds(most, time.monotonic() + HANGS_AFTER)
    cold = None if folder is None else ColdFolder(folder)
    report = Retain(Retention(engine), cold, KEEP, bounds, now, **changes).run()
    counts = dict(report.counts)
    assert counts.pop("got") == sum(counts.values())
    return report


def statuses(engine: Engine) -> dict[int, str]:
    with reading(engine) as connection:
        return {row.id: row.status.value for row in connection.execute(select(MESSAGES.c.id, MESSAGES.c.status))}


def number(engine: Engine, table: Any) -> int:
    with reading(engine) as connection:
        return int(connection.scalar(select(func.count()).select_from(table)) or 0)


def whole(engine: Engine, row_id: int) -> bytes:
    retention = Retention(engine)
    for status in Status:
        for due in retention.due(status, MUCH_LATER + DAY, 1_000):
            if due.id == row_id:
                (line,) = retention.lines([due])
                return seal(line)
    raise AssertionError(row_id)


@pytest.mark.parametrize(("status", "days"), [(Status.RESOLVED, 30), (Status.FAILED, 90), (Status.ARCHIVED, 365)])
def test_a_message_is_due_when_its_time_in_that_state_is_over_and_not_before(
    engine: Engine, folder: Path, status: Status, days: int
) -> None:
    row_id = in_state(engine, status)
    assert retain(engine, folder, NOW + days * DAY).counts["got"] == 0
    assert statuses(engine) == {row_id: status}
    retain(engine, folder, NOW + days * DAY + timedelta(microseconds=1))
    assert statuses(engine) == ({row_id: "archived"} if status == Status.FAILED else {})


def test_what_a_person_or_a_worker_has_to_end_is_kept_for_ever(engine: Engine, folder: Path) -> None:
    kept = {in_state(engine, status): status for status in (Status.PENDING, Status.PROCESSING, Status.MANUAL)}
    assert retain(engine, folder, NOW + 36_500 * DAY).counts["got"] == 0
    assert statuses(engine) == kept


def test_a_failed_message_is_copied_whole_archived_and_a_year_later_only_its_copy_is_left(
    engine: Engine, folder: Path
) -> None:
    row_id = in_state(
        engine, Status.FAILED, body=b"\xff\0body", properties=b"\0\0", error_message="naïve \x00", tags=["a"]
    )
    before = whole(engine, row_id)
    report = retain(engine, folder)
    assert (report.outcome, report.counts["archived"], report.stopped_by) == ("ok", 1, "empty")
    found = survey(ColdFolder(folder))
    (line,) = lines_of(ColdFolder(folder), found.parts[0])
    assert (seal(line), line.message["body"], line.message["status"]) == (before, b"\xff\0body", "failed")
    assert line.transitions[-1]["to_status"] == "failed"
    with reading(engine) as connection:
        assert connection.execute(select(COLD_COPIES.c.message_id, COLD_COPIES.c.part)).one() == (
            row_id,
            found.parts[0].part,
        )
    report = retain(engine, folder, MUCH_LATER)
    assert (report.outcome, report.counts["deleted"], report.reasons) == ("ok", 1, {"archived": 1})
    assert number(engine, MESSAGES) == number(engine, COLD_COPIES) == number(engine, TRANSITIONS) == 0
    assert survey(ColdFolder(folder)) == found, "no second copy was needed"


def test_what_a_person_discarded_is_copied_before_it_goes(engine: Engine, folder: Path) -> None:
    row_id = in_state(engine, Status.ARCHIVED)
    before = whole(engine, row_id)
    assert retain(engine, folder).counts["deleted"] == 1
    found = locate(ColdFolder(folder), survey(ColdFolder(folder)), row_id)
    assert found is not None
    assert seal(found.line) == before
    assert statuses(engine) == {}


def test_what_was_restored_and_archived_again_is_copied_anew(engine: Engine, folder: Path) -> None:
    row_id = in_state(engine, Status.FAILED)
    retain(engine, folder)
    walk(engine, row_id, Status.ARCHIVED, Status.MANUAL, LATER)
    walk(engine, row_id, Status.MANUAL, Status.ARCHIVED, LATER)
    before = whole(engine, row_id)
    assert retain(engine, folder, MUCH_LATER).counts["deleted"] == 1
    known = survey(ColdFolder(folder))
    assert len(known.parts) == 2
    found = locate(ColdFolder(folder), known, row_id)
    assert found is not None
    assert seal(found.line) == before


def test_a_note_that_came_after_the_copy_makes_another_one(engine: Engine, folder: Path) -> None:
    row_id = in_state(engine, Status.FAILED)
    retain(engine, folder)
    with writing(engine) as connection:
        states.note(connection, row_id, NOW, "ingest", "the same message again")  # a clock that is behind
    assert retain(engine, folder, MUCH_LATER).counts["deleted"] == 1
    found = locate(ColdFolder(folder), survey(ColdFolder(folder)), row_id)
    assert found is not None
    assert found.line.transitions[-1]["reason"] == "the same message again"


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "no manifest", "forged name"])
def test_a_copy_that_cannot_be_read_deletes_nothing_and_another_is_written(
    engine: Engine, folder: Path, damage: str
) -> None:
    row_id = in_state(engine, Status.FAILED)
    retain(engine, folder)
    (file,) = folder.rglob("*.gz")
    (manifest,) = folder.rglob("*.json")
    data = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "truncated":
        file.write_bytes(data[:-1])
    elif damage == "forged name":
        with writing(engine) as connection:
            connection.execute(update(COLD_COPIES).values(part="../../etc/x"))
    else:
        (manifest if damage == "no manifest" else file).unlink()
    report = retain(engine, folder, MUCH_LATER)
    assert (report.outcome, report.counts["deleted"], report.counts["left"]) == ("partial", 0, 1)
    assert report.reasons == {"cold-copy-damaged": 1}
    assert any("damaged" in warning for warning in report.warnings)
    assert statuses(engine) == {row_id: "archived"}
    report = retain(engine, folder, MUCH_LATER)
    assert (report.outcome, report.counts["deleted"]) == ("ok", 1)


def test_where_nothing_can_be_written_nothing_is_archived_and_the_resolved_are_deleted(
    engine: Engine, tmp_path: Path
) -> None:
    failed, resolved = in_state(engine, Status.FAILED), in_state(engine, Status.RESOLVED)
    archived = in_state(engine, Status.ARCHIVED)
    report = retain(engine, tmp_path / "not mounted" / "cold")
    assert (report.outcome, report.counts["deleted"], report.counts["left"]) == ("partial", 1, 1)
    assert any("cannot be used" in warning for warning in report.warnings)
    assert statuses(engine) == {failed: "failed", archived: "archived"}
    assert resolved not in statuses(engine)


def test_a_disk_that_keeps_something_else_than_it_was_given_archives_nothing(engine: Engine, folder: Path) -> None:
    row_id = in_state(engine, Status.FAILED)

    class Lying(ColdFolder):
        def write(self, name: str, data: bytes) -> None:
            super().write(name, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:] if name.endswith(".gz") else data)

    report = Retain(Retention(engine), Lying(folder), KEEP, Bounds(9, time.monotonic() + HANGS_AFTER), LATER).run()
    assert (report.outcome, report.reasons) == ("partial", {"not-copied": 1})
    assert statuses(engine) == {row_id: "failed"}
    assert number(engine, COLD_COPIES) == 0


def test_without_cold_storage_only_the_resolved_go_and_the_others_are_counted(engine: Engine) -> None:
    failed, archived = in_state(engine, Status.FAILED), in_state(engine, Status.ARCHIVED)
    in_state(engine, Status.RESOLVED)
    report = retain(engine, None)
    assert (report.outcome, report.counts["got"], report.counts["deleted"]) == ("ok", 1, 1)
    assert "2 failed or archived message(s) are due" in report.warnings[0]
    assert statuses(engine) == {failed: "failed", archived: "archived"}


def test_a_dry_run_tells_and_touches_nothing(engine: Engine, folder: Path) -> None:
    for status in (Status.FAILED, Status.ARCHIVED, Status.RESOLVED):
        in_state(engine, status)
    before = statuses(engine)
    report = retain(engine, folder, dry_run=True)
    assert (report.counts["archived"], report.counts["deleted"]) == (1, 2)
    assert statuses(engine) == before
    assert not folder.exists()


def test_what_a_replay_plan_has_reserved_is_left_alone(engine: Engine, folder: Path) -> None:
    kept = {in_state(engine, status): status.value for status in (Status.FAILED, Status.ARCHIVED, Status.RESOLVED)}
    with writing(engine) as connection:
        connection.execute(update(MESSAGES).values(plan_id=7))
    assert retain(engine, folder).counts["got"] == 0
    assert statuses(engine) == kept


def test_a_run_takes_no_more_than_it_may_and_each_kind_its_share(engine: Engine, folder: Path) -> None:
    for status in (Status.FAILED, Status.ARCHIVED, Status.RESOLVED):
        for _ in range(5):
            in_state(engine, status)
    report = retain(engine, folder, most=6)
    assert (report.stopped_by, report.counts["archived"], report.reasons) == (
        "messages",
        2,
        {"archived": 2, "resolved": 2},
    )
    assert retain(engine, folder, most=9).stopped_by == "empty"
    assert set(statuses(engine).values()) == {"archived"}


def due_in_each_state(engine: Engine, each: int) -> None:
    for status in (Status.FAILED, Status.ARCHIVED, Status.RESOLVED):
        for _ in range(each):
            in_state(engine, status)


def test_without_a_bound_a_run_goes_on_until_nothing_is_due(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page after page; what could not be archived does not keep the run alive, and stops none of the others."""
    monkeypatch.setattr("dlqbatch.retain.job.MOST_TOGETHER", 2)
    due_in_each_state(engine, 5)

    class Slow(Retention):
        def copied(self, due: Any, part: str, now: Any) -> set[int]:
            return super().copied([each for each in due if each.id != stays], part, now)

    stays = min(row_id for row_id, status in statuses(engine).items() if status == "failed")
    bounds = Bounds(None, time.monotonic() + HANGS_AFTER)
    report = Retain(Slow(engine), ColdFolder(folder), KEEP, bounds, LATER).run()
    assert (report.outcome, report.stopped_by, report.reasons) == (
        "ok",
        "empty",
        {"archived": 5, "changed": 1, "resolved": 5},
    )
    assert (report.counts["archived"], report.counts["deleted"], report.counts["skipped"]) == (4, 10, 1)
    assert statuses(engine)[stays] == "failed"


def test_a_run_that_is_cut_says_what_is_still_due_and_has_served_each_state(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlqbatch.retain.job.MOST_TOGETHER", 2)
    due_in_each_state(engine, 6)
    pages: list[int] = []
    bounds = Bounds(
        None, time.monotonic() + HANGS_AFTER, lambda: len(pages) >= 3, lambda taken, _of: pages.append(taken)
    )
    report = retain(engine, folder, bounds=bounds)
    assert (report.outcome, report.stopped_by) == ("ok", "signal")
    assert (report.counts["archived"], report.reasons) == (2, {"archived": 2, "resolved": 2})
    assert report.as_dict()["still_due"] == {"resolved": 4, "failed": 4, "archived": 4}
    assert "12 message(s) are still due (4 resolved, 4 failed, 4 archived)" in report.warnings[0]


@pytest.mark.parametrize(("why", "bounds"), [("signal", Bounds(9, 1e12, lambda: True)), ("time", Bounds(9, 0.0))])
def test_a_signal_or_the_time_ends_it_between_two_batches(
    engine: Engine, folder: Path, why: str, bounds: Bounds
) -> None:
    row_id = in_state(engine, Status.FAILED)
    report = retain(engine, folder, bounds=bounds)
    assert (report.stopped_by, report.outcome, report.counts["got"]) == (why, "ok", 0)
    assert statuses(engine) == {row_id: "failed"}


def test_two_at_once_archive_and_delete_each_message_once(engine: Engine, folder: Path) -> None:
    for status in (Status.FAILED, Status.ARCHIVED, Status.RESOLVED):
        add_many = [in_state(engine, status) for _ in range(30)]
        assert add_many
    together = Barrier(2)

    def one(_: int) -> Report:
        together.wait(HANGS_AFTER)
        return retain(engine, folder, most=1_000)

    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(one, range(2)))
    assert sum(report.counts["archived"] for report in reports) == 30
    assert sum(report.counts["deleted"] for report in reports) == 60
    assert len(statuses(engine)) == 30
    with reading(engine) as connection:
        moves = connection.scalar(select(func.count()).select_from(TRANSITIONS).where(TRANSITIONS.c.actor == "retain"))
    assert moves == number(engine, COLD_COPIES) == 30


def test_a_message_that_is_changed_between_its_copy_and_its_archiving_stays(engine: Engine, folder: Path) -> None:
    row_id = in_state(engine, Status.FAILED)

    class Changing(Retention):
        def copied(self, *given: Any) -> set[int]:
            walk(engine, row_id, Status.FAILED, Status.MANUAL, LATER)
            return super().copied(*given)

    bounds = Bounds(9, time.monotonic() + HANGS_AFTER)
    report = Retain(Changing(engine), ColdFolder(folder), KEEP, bounds, LATER).run()
    assert (report.counts["archived"], report.counts["skipped"], report.reasons) == (0, 1, {"changed": 1})
    assert statuses(engine) == {row_id: "manual"}
    assert number(engine, COLD_COPIES) == 0


def test_what_a_cut_run_began_is_removed_and_a_part_without_a_manifest_is_told_of(engine: Engine, folder: Path) -> None:
    day = folder / f"{NOW:%Y/%m/%d}"
    day.mkdir(parents=True)
    (day / ".20300601T120000-ab.jsonl.gz.0f.tmp").write_bytes(b"half")
    (day / "20300601T120000-ab.jsonl.gz").write_bytes(b"whole")
    (folder / "notes.txt").write_text("not ours")
    report = retain(engine, folder)
    assert (report.outcome, len(report.warnings)) == ("ok", 1)
    assert "2030/06/01/20300601T120000-ab" in report.warnings[0]
    assert sorted(each.name for each in folder.rglob("*.*")) == ["20300601T120000-ab.jsonl.gz", "notes.txt"]


def test_old_actions_go_with_their_messages_a_bounded_number_at_once(engine: Engine) -> None:
    ids = add(engine, *(row() for _ in range(5)))
    store = MessageActions(engine)
    store.discard(ids, actor="ann", reason="r", now=NOW - timedelta(days=400))
    store.restore(ids[:2], actor="ann", reason="r", now=NOW)
    before = NOW - timedelta(days=365)
    assert prune_actions(engine, before, 3) == {"action_rows": 3, "actions": 0}
    assert prune_actions(engine, before, 3) == {"action_rows": 2, "actions": 1}
    assert prune_actions(engine, before, 3) == {"action_rows": 0, "actions": 0}
    assert [each.name for each in recent(engine)] == ["A-2"]


def test_old_plans_alerts_and_runs_are_pruned_and_those_that_matter_are_kept(engine: Engine) -> None:
    plan = {"actor": "a", "reason": "r", "filters": {}, "size": 1, "risks": {}, "created_at": NOW}
    alert = {"subject": "s", "severity": "warning", "fired_at": NOW, "summary": "s"}
    ran = {"job": "drain", "outcome": "ok", "stopped_by": "empty", "emptied": [], "report": {}}
    held = in_state(engine, Status.MANUAL)
    with writing(engine) as connection:
        for name, state, at in (
            ("old", "done", NOW),
            ("older", "aborted", NOW),
            ("stopped", "stopped", NOW),
            ("paused", "stopped", LATER - DAY),
            ("planned", "planned", NOW),
            ("new", "planned", LATER - DAY),
            ("young", "done", LATER - DAY),
            ("holding", "done", NOW),
        ):
            (plan_id,) = connection.execute(
                insert(PLANS).values(hash=name, state=state, state_since=at, **plan).returning(PLANS.c.id)
            ).one()
            item = {"seen_status": "manual", "seen_updated_at": NOW, "state": "sent", "message_id": held}
            connection.execute(insert(PLAN_ITEMS).values(plan_id=plan_id, place=1, **item))
            if name == "holding":
                connection.execute(update(MESSAGES).values(plan_id=plan_id))
        connection.execute(insert(ALERTS).values(name="over", resolved_at=NOW, **alert))
        connection.execute(insert(ALERTS).values(name="active", **alert))
        connection.execute(insert(ALERTS).values(name=NEW_GROUP, resolved_at=NOW, **alert))
        for at in (NOW, LATER):
            connection.execute(insert(RUNS).values(started_at=at, ended_at=at, **ran))
    retain(engine, None)
    with reading(engine) as connection:
        assert dict(connection.execute(select(PLANS.c.hash, PLANS.c.state)).all()) == {
            "stopped": "aborted",
            "young": "done",
            "holding": "done",  # its messages are let go, after 30 days
            "paused": "stopped",
            "new": "planned",
        }
        # Without its alert the group would be told of once more.
        assert set(connection.scalars(select(ALERTS.c.name))) == {"active", NEW_GROUP}
    assert (number(engine, PLAN_ITEMS), number(engine, RUNS)) == (5, 1)


def test_a_cut_run_of_ingest_is_remembered_as_long_as_its_messages_may_come_again(engine: Engine) -> None:
    in_state(engine, Status.MANUAL, identity="b" * 24 + "00000000", had_id=False, ack_proven=False)
    in_state(engine, Status.MANUAL, identity="c" * 24 + "00000000", had_id=False, ack_proven=True)
    with writing(engine) as connection:
        for run, since in (("a", NOW), ("b", NOW), ("c", NOW), ("d", LATER - DAY)):
            connection.execute(insert(UNPROVEN_RUNS).values(run=run * 24, since=since))
    retain(engine, None)
    with reading(engine) as connection:
        assert set(connection.scalars(select(UNPROVEN_RUNS.c.run))) == {"b" * 24, "d" * 24}


def test_a_message_that_is_gone_comes_back_as_it_was_with_its_journal(engine: Engine, folder: Path) -> None:
    row_id = in_state(engine, Status.FAILED, body=b"\xff\0", identity="the one", created_at=NOW - DAY)
    retain(engine, folder)
    retain(engine, folder, MUCH_LATER)
    assert statuses(engine) == {}

    def bring_back(*, dry_run: bool = False, sought: int | str = row_id) -> Any:
        cold = ColdFolder(folder)
        return Restoring(engine, Fields()).bring_back(
            sought,
            lambda: locate(cold, survey(cold), sought),
            actor="a person",
            reason="needed",
            now=MUCH_LATER,
            dry_run=dry_run,
        )

    assert bring_back(dry_run=True).is_done
    assert statuses(engine) == {}
    done = bring_back(sought="the one")
    assert (done.is_done, statuses(engine)) == (True, {done.id: "manual"})
    (line,) = Retention(engine).lines(Retention(engine).due(Status.MANUAL, MUCH_LATER + DAY, 1))
    assert (line.message["body"], line.message["created_at"]) == (b"\xff\0", NOW - DAY)
    assert [each["to_status"] for each in line.transitions] == ["pending", "processing", "failed", "manual"]
    assert "restored from cold storage 20" in line.transitions[-1]["reason"]
    again = bring_back()
    assert (again.is_done, "its identity is in the dead store again" in again.why) == (False, True)
    again = bring_back(sought="the one")
    assert (again.is_done, "manual; only what is archived" in again.why) == (False, True)
    assert "neither in the dead store nor in cold storage" in bring_back(sought="no such").why


def test_what_was_restored_is_one_action_and_undo_archives_it_again(engine: Engine, folder: Path) -> None:
    gone = in_state(engine, Status.FAILED, identity="gone", created_at=NOW - DAY)
    retain(engine, folder)
    retain(engine, folder, MUCH_LATER)
    here = in_state(engine, Status.ARCHIVED, identity="here")
    cold = ColdFolder(folder)
    restoring = Restoring(engine, Fields())

    def bring_back(sought: int) -> int:
        found = partial(locate, cold, survey(cold), sought)
        who = {"actor": "ann", "reason": "for the auditors"}
        return restoring.bring_back(sought, found, **who, dry_run=False, now=MUCH_LATER).id

    ids = [bring_back(gone), bring_back(here)]
    action = restoring.end()
    assert statuses(engine) == dict.fromkeys(ids, "manual")
    assert action is not None
    (listed,) = recent(engine)
    assert (listed.kind, listed.actor, listed.reason) == ("restore", "ann", "for the auditors")
    assert {one.id for one in undo(engine, action, actor="ann", reason="the wrong ones").changes if one.is_done} == {
        *ids
    }
    assert statuses(engine) == dict.fromkeys(ids, "archived")
    assert Restoring(engine, Fields()).end() is None


def test_finding_what_is_due_walks_an_index(engine: Engine) -> None:
    with reading(engine) as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SET LOCAL enable_seqscan = off"))
        explain = "EXPLAIN " if engine.dialect.name == "postgresql" else "EXPLAIN QUERY PLAN "
        plan = connection.execute(
            text(
                f"{explain} SELECT id FROM dlq_messages WHERE scope_id = 1 AND status = 'failed' AND "
                "status_since < :before AND plan_id IS NULL ORDER BY status_since, id LIMIT 100"
            ),
            {"before": NOW.isoformat()},
        ).all()
    assert "dlq_messages_scope_ages" in str(plan)


@pytest.mark.parametrize("more", [0, 1, 4 * 1024 * 1024])
def test_a_body_that_is_read_in_pieces_is_copied_whole(engine: Engine, folder: Path, more: int) -> None:
    body = bytes(range(256)) * (16 * 1024) + b"\n" * more
    large, other = in_state(engine, Status.FAILED, body=body), in_state(engine, Status.FAILED, body=b"")
    rows = Retention(engine)
    due = rows.due(Status.FAILED, LATER, 9)
    assert {line.message["id"]: line.message["body"] for line in rows.lines(due)} == {large: body, other: b""}
    with writing(engine) as connection:
        connection.execute(text("DELETE FROM dlq_messages"))
    assert list(rows.lines(due)) == []
