"""A plan of messages whose cause somebody has mended: the ticket is kept with it, and answers some of its risks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from program import Program
from replay_rows import fill
from replay_store import Store, opened

from dlqbatch.actions.queries import recent
from dlqbatch.cli.plan_page import show_plan, show_status
from dlqbatch.replay import job as replay_job
from dlqbatch.replay.freeze import Selection
from dlqbatch.store.filters import NotUnderstood

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlqbatch.replay.job import Planned


@pytest.fixture(params=["postgresql", "sqlite"])
def store(request: pytest.FixtureRequest, broker_url: str) -> Iterator[Store]:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    with opened(url, broker_url) as store:
        fill(store.engine, range(3), dlq_retry_count=1)
        fill(store.engine, [9], possible_duplicate=True)
        yield store


def plan(store: Store, mended: str | None, *, dry_run: bool = False) -> Planned:
    selection = Selection(everything=True, mended=mended)
    return replay_job.plan_replay(store.settings, selection, actor="ann", reason="why", dry_run=dry_run)


def test_a_mend_silences_the_risk_that_they_fail_again_and_leaves_the_others(store: Store) -> None:
    without = {str(risk.name) for risk in plan(store, None, dry_run=True).risks}
    planned = plan(store, " INC-1 ")
    assert without == {"failed-before", "possible-duplicate", "no-consumers"}
    assert {str(risk.name) for risk in planned.risks} == without - {"failed-before"}
    assert [(str(risk.name), risk.messages) for risk in planned.answered] == [("failed-before", 4)]
    kept = replay_job.replay_status(store.settings, planned.frozen.hash)
    assert (kept.mended, kept.filters) == ("INC-1", {"all": True})
    assert {risk["name"] for risk in kept.risks} == without - {"failed-before"}


def test_what_was_mended_is_shown_with_the_plan_and_its_action(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = plan(store, "INC-1, password=hunter2")
    show_plan(planned.as_dict())
    shown = capsys.readouterr().out
    assert "mended: INC-1" in shown
    assert "it answers failed-before (4)" in shown
    store.apply(planned.frozen.hash)
    status = replay_job.replay_status(store.settings, planned.frozen.hash).as_dict()
    show_status(status, as_json=False)
    shown += capsys.readouterr().out
    assert "  mended: INC-1" in shown
    (action,) = recent(store.engine)
    assert str(action.details["mended"]).startswith("INC-1")
    assert "hunter2" not in f"{shown} {status} {action.as_dict()} {planned.as_dict()}"


def test_a_mend_that_says_nothing_is_refused() -> None:
    for blank in ("", " \n"):
        with pytest.raises(NotUnderstood, match="--mended wants a ticket"):
            Selection(everything=True, mended=blank)


def test_a_mend_is_no_filter() -> None:
    with pytest.raises(NotUnderstood, match="nothing says which messages"):
        Selection(mended="INC-1")


def test_messages_that_are_replayed_at_once_keep_the_ticket_too(store: Store, broker_url: str) -> None:
    url = store.engine.url.render_as_string(hide_password=False)
    program = Program({"broker_url": broker_url, "database_url": url})
    done = program.run("messages", "replay", "1", "--mended", "INC-4711")
    assert done.code == 0, done.said
    assert "failed before" not in done.said
    assert "INC-4711" in program.run("replay", "status").out
