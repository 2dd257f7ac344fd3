"""Two virtual hosts of one broker share a database: all their jobs at once, and each message goes its own way."""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from program import Client, Program, client, eventually
from ready_store import make_tables
from sqlalchemy import text

from dlqbatch import jobs, settings
from dlqbatch.broker.access import access_to, connect
from dlqbatch.settings import Settings
from dlqbatch.store.engine import create_engine_for, reading
from dlqbatch.topology.declare import apply_topology

if TYPE_CHECKING:
    from collections.abc import Iterator

MESSAGES = 12
QUICK = {
    "tier_ttls": "50,50,50",
    "retry_delays": "1ms",
    "recheck": "1ms",
    "observation_window": "1ms",
    "breaker_cool_down": "1ms",
    "off_peak_hours": ",".join(map(str, range(24))),
}
ORIGIN = "orders-queue"


@dataclass
class Deployment:
    team: Client
    given: dict[str, str]
    name: str

    @property
    def settings(self) -> Settings:
        return settings.load(self.given, {"DLQBATCH_CONFIG": "/dev/null"})

    def run(self, job: str) -> dict[str, Any]:
        return jobs.run(job, self.settings, jobs.RunOptions()).as_dict()

    def every_job(self, _: int = 0) -> None:
        for job in ("drain", "ingest", "lifecycle", "retain", "monitor"):
            report = self.run(job)
            assert report["outcome"] == "ok", report

    def consume(self) -> list[bytes]:
        """What its consumer takes from the origin now."""
        found: list[bytes] = []
        while (got := self.team.channel.basic_get(ORIGIN, auto_ack=True))[0] is not None:
            found.append(got[2])
        return found


@pytest.fixture(params=["postgresql", "sqlite"])
def database(request: pytest.FixtureRequest) -> str:
    url = str(request.getfixturevalue({"postgresql": "database_url", "sqlite": "sqlite_url"}[request.param]))
    make_tables(url)
    return url


@pytest.fixture
def two(
    broker_url: str, second_broker_url: str, broker_addresses: tuple[str, str], database: str
) -> Iterator[tuple[Deployment, Deployment]]:
    with client(broker_url) as first, client(second_broker_url) as second:
        found = []
        for team, url in ((first, broker_url), (second, second_broker_url)):
            given = {"broker_url": url, "database_url": database, "allow_empty_policy": "true"} | QUICK
            given["management_url"] = broker_addresses[1]
            one = Deployment(team, given, url.rpartition("/")[2])
            apply_topology(one.settings)
            team.make_origin(ORIGIN)
            found.append(one)
        yield found[0], found[1]


def rows(database: str, sql: str) -> list[tuple[Any, ...]]:
    with reading(create_engine_for(database, connect_timeout=30)) as connection:
        return [tuple(each) for each in connection.execute(text(sql))]


def test_all_jobs_of_both_at_once_and_no_message_crosses(two: tuple[Deployment, Deployment], database: str) -> None:
    for one in two:
        bodies = [b"%s %d" % (one.name.encode(), number) for number in range(MESSAGES)]
        failure = {"x-exception-message": "connection timed out"}
        # Half with an id that the other deployment's message has too.
        for number, body in enumerate(bodies):
            headers = failure | ({"dlqbatch-id": f"same-{number}"} if number % 2 else {})
            one.team.publish("orders", "orders.created", body, headers)
        assert one.team.reject_all(ORIGIN) == MESSAGES
        one.team.await_depth("retry-queue", MESSAGES)
    taken: dict[str, list[bytes]] = {one.name: [] for one in two}

    def all_resolved() -> bool:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Deployment.every_job, [*two, *two]))
        for one in two:
            taken[one.name] += one.consume()
        return rows(database, "SELECT count(*) FROM dlq_messages WHERE status = 'resolved'") == [(2 * MESSAGES,)]

    assert eventually(all_resolved), rows(database, "SELECT scope_id, status, strategy FROM dlq_messages")
    for one in two:
        assert sorted(taken[one.name]) == sorted(b"%s %d" % (one.name.encode(), n) for n in range(MESSAGES))
    sent = "SELECT s.name, count(*) FROM dlq_attempts a JOIN dlq_messages m ON m.id = a.message_id "
    sent += "JOIN dlq_scopes s ON s.id = m.scope_id WHERE a.scope_id = m.scope_id GROUP BY s.name"
    found = dict(rows(database, sent))
    assert {name.rpartition("/")[2]: number for name, number in found.items()} == {one.name: MESSAGES for one in two}
    # A run that did not reach the broker in time, on a slow machine, does not know its scope.
    runs = rows(database, "SELECT DISTINCT scope FROM dlq_runs WHERE scope IS NOT NULL")
    assert {name for (name,) in runs} == set(found)


def test_the_scope_is_the_clusters_name_and_the_virtual_host(two: tuple[Deployment, Deployment], database: str) -> None:
    one, other = two
    one.run("ingest")
    connection = connect(access_to(one.settings, "test"))
    try:
        cluster = connection.cluster
    finally:
        connection.close()
    assert rows(database, "SELECT id, name FROM dlq_scopes") == [(1, f"{cluster}/{one.name}")]
    # Named by a setting, whatever the broker says.
    other.given["scope"] = f"billing-{secrets.token_hex(2)}"
    other.run("lifecycle")
    assert rows(database, "SELECT id, name FROM dlq_scopes ORDER BY id")[1] == (2, other.given["scope"])


def test_a_plan_of_another_scope_is_not_applied(two: tuple[Deployment, Deployment], database: str) -> None:
    one, other = two
    one.team.fail(ORIGIN, "orders.created", b"1")
    for job in ("drain", "ingest"):
        one.run(job)
        other.run(job)
    assert rows(database, "SELECT count(*) FROM dlq_messages") == [(1,)]
    ours, theirs = Program(one.given), Program(other.given)
    refused = theirs.run("replay", "plan", "--all", "--json")
    assert refused.told["size"] == 0, refused.said
    planned = ours.run("replay", "plan", "--all", "--json")
    hash_ = planned.told["hash"]
    refused = theirs.run("replay", "apply", hash_)
    assert refused.code == 2, refused.said
    assert f"there is no plan '{hash_}'" in refused.said
    listed = theirs.run("messages", "list", "--scope", "all", "--json")
    assert len(listed.told["messages"]) == 1, listed.said
    assert theirs.run("messages", "list", "--json").told["messages"] == []
    assert theirs.run("messages", "discard", "1", "--reason", "wrong").code != 0
    every = theirs.run("messages", "discard", "--all", "--yes", "--reason", "wrong", "--scope", "all")
    assert every.code == 2, every.said
    assert rows(database, "SELECT status FROM dlq_messages") == [("pending",)]
    assert ours.run("replay", "apply", hash_, "--no-canary").code == 0
    assert one.consume() == [b"1"]
    assert other.consume() == []
