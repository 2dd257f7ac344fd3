"""What only PostgreSQL can do to a job: leave a commit unanswered, and be stricter than it has to be."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import replay_rows
from cutting_link import CuttingLink
from dead_rows import add, row, store_at
from lifecycle_rows import ORIGIN, connect, copies, fill, number, worker
from program import HANGS_AFTER, Program
from rawamqp import Peer

UNREACHABLE = 4
ROWS = 400


@pytest.mark.parametrize(("is_heard", "status"), [(True, "archived"), (False, "manual")])
def test_a_person_is_told_when_nobody_knows_whether_the_change_was_made(
    database_url: str, is_heard: bool, status: str
) -> None:
    other, row_id = add(store_at(database_url), row(status="manual"), row(status="manual"))
    program = Program({"database_url": database_url, "log_level": "error"})
    command = ("messages", "discard", "--reason", "a test", "--yes")
    with CuttingLink(database_url) as counting:
        done = program.but(database_url=counting.url).run(*command, str(other))
        assert done.code == 0, done.said
    # Its last commit but one is the change; the last one marks the action as ended.
    with CuttingLink(database_url, counting.commits - 1, is_heard=is_heard) as link:
        done = program.but(database_url=link.url).run(*command, str(row_id))
        assert link.has_cut.is_set(), done.said
    assert done.code == UNREACHABLE, done.said
    assert "whether the last change was made is not known" in done.err
    assert "No message was moved" not in done.err
    with connect(database_url) as store:
        assert store.execute("SELECT status FROM dlq_messages WHERE id = %s", (row_id,)).fetchall() == [(status,)]
        journal = f"SELECT count(*) FROM dlq_transitions WHERE message_id = {row_id} AND to_status = 'archived'"
        assert number(store, journal) == int(is_heard)


def test_a_person_whose_change_is_cut_is_told_which_action_holds_what_was_done(database_url: str) -> None:
    other, row_id = add(store_at(database_url), row(status="manual"), row(status="manual"))
    program = Program({"database_url": database_url, "log_level": "error"})
    command = ("messages", "discard", "--reason", "a test", "--yes")
    with CuttingLink(database_url) as counting:
        assert program.but(database_url=counting.url).run(*command, str(other)).code == 0
    with CuttingLink(database_url, counting.commits) as link:
        done = program.but(database_url=link.url).run(*command, str(row_id))
        assert link.has_cut.is_set(), done.said
    assert done.code == UNREACHABLE, done.said
    assert "A-2 holds what was changed before" in done.err
    assert "No message was moved" not in done.err
    shown = program.run("actions", "show", "A-2", "--json").told
    assert [(each["id"], each["state"]) for each in shown["messages"]] == [(row_id, "done")]


def test_two_workers_do_not_disturb_each_other_where_transactions_are_serializable_by_default(
    broker_url: str, database_url: str
) -> None:
    fill(store_at(database_url), ROWS)
    with connect(database_url) as store, Peer(broker_url) as peer:
        peer.queue(ORIGIN)
        name = database_url.rpartition("/")[2]
        store.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'".encode())
        running = [worker(broker_url, database_url).start() for _ in range(2)]
        for process in running:
            out, err = process.communicate(timeout=HANGS_AFTER)
            assert process.returncode == 0, out + err
        assert number(store, "SELECT count(*) FROM dlq_attempts WHERE sent_at IS NOT NULL AND number = 1") == ROWS
    found = copies(broker_url)
    assert (len(found), found.total()) == (ROWS, ROWS)


def test_a_replay_whose_database_goes_away_for_good_says_what_was_sent(broker_url: str, database_url: str) -> None:
    engine = store_at(database_url)
    replay_rows.fill(engine, range(10))
    given = {"broker_url": broker_url, "database_url": database_url, "log_level": "error", "settle_seconds": "2"}
    program = Program(given)
    with Peer(broker_url) as peer:
        peer.queue(ORIGIN)
        planned = program.run("replay", "plan", "--all", "--json")
        assert planned.code == 0, planned.said
        command = ("replay", "apply", planned.told["hash"], "--no-canary", "--json")
        # All are out, and the first statement that marks them is the last that is heard.
        with CuttingLink(database_url, 1, text=b"UPDATE dlq_attempts") as link:
            link.act(link.go_down)
            done = program.but(database_url=link.url).run(*command)
        assert (done.code, "10 message(s) had been sent" in done.err) == (UNREACHABLE, True), done.said
        assert peer.depth(ORIGIN) == 10
        replay_rows.end_leases(engine, datetime.now(UTC))
        done = program.run(*command)
        assert (done.code, done.told["plan"]["sent"]) == (0, 10), done.said
        found = copies(broker_url)
        assert (len(found), found.total()) == (10, 20)
