"""Which ways to a server are called unprotected."""

from __future__ import annotations

import pytest

from dlqbatch.broker.facts import BrokerFacts
from dlqbatch.doctor import broker, database
from dlqbatch.doctor.broker import is_local
from dlqbatch.doctor.database import DatabaseFacts
from dlqbatch.doctor.findings import Code, Finding
from dlqbatch.doctor.job import examine
from dlqbatch.doctor.virtual_host import Deployment
from dlqbatch.settings import Settings, load

FAR = "amqps://app:s3cret@rabbit.example.com:5671/shop"
VERIFIED = "postgresql://app:s3cret@db.example.com/dlqbatch?sslmode=verify-full"


def unprotected(settings: Settings, environment: dict[str, str]) -> list[Finding]:
    url = settings.database_url.get_secret_value()
    return [*broker.unprotected(settings), *database.unprotected(url, environment)]


def ways(environment: dict[str, str] | None = None, **options: object) -> list[tuple[Code, str]]:
    settings = load({"broker_url": FAR, "database_url": VERIFIED} | options, {"DLQBATCH_CONFIG": "/dev/null"})
    found = unprotected(settings, environment or {})
    assert not any("s3cret" in one.where + one.what + one.fix for one in found)
    return [(one.code, one.where) for one in found]


def test_what_is_encrypted_and_verified_or_stays_here_is_protected() -> None:
    assert ways() == []
    assert ways(broker_url="amqp://guest:guest@localhost", database_url="sqlite:////srv/x.sqlite3") == []
    assert ways(database_url="postgresql://app@/dlqbatch?host=/run/postgresql") == []
    assert ways(database_url="postgresql:///dlqbatch") == []
    assert ways(database_url="postgresql+psycopg://app:p@[::1]:5432/dlqbatch") == []
    assert ways({"PGSSLMODE": "verify-full"}, database_url="postgresql://db.example.com/dlqbatch") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"broker_url": "amqp://a:s3cret@rabbit/%2F"}, (Code.BROKER_IN_CLEAR, "rabbit:5672")),
        ({"tls_verify": "false"}, None),
        ({"management_url": "http://rabbit.example.com:15672"}, (Code.BROKER_IN_CLEAR, "rabbit.example.com:15672")),
        ({"database_url": "postgresql://a:s3cret@db/x"}, (Code.DATABASE_UNVERIFIED, "db (sslmode=prefer)")),
        ({"database_url": "postgresql://a@db/x?sslmode=disable"}, (Code.DATABASE_UNVERIFIED, "db (sslmode=disable)")),
        ({"database_url": "postgresql://a@db/x?sslmode=require"}, (Code.DATABASE_UNVERIFIED, "db (sslmode=require)")),
        (
            {"database_url": "postgresql://a@db/x?sslmode=verify-ca"},
            (Code.DATABASE_UNVERIFIED, "db (sslmode=verify-ca)"),
        ),
        ({"database_url": "postgresql://a@/x?host=db1,db2"}, (Code.DATABASE_UNVERIFIED, "db1, db2 (sslmode=prefer)")),
    ],
)
def test_what_is_not(options: dict[str, object], expected: tuple[Code, str] | None) -> None:
    assert ways(**options) == [expected or (Code.BROKER_UNVERIFIED, "rabbit.example.com:5671")]


def test_the_environments_host_and_mode_count_where_the_address_has_none() -> None:
    assert ways({"PGHOST": "db"}, database_url="postgresql:///x") == [(Code.DATABASE_UNVERIFIED, "db (sslmode=prefer)")]
    assert ways({"PGSSLMODE": "require"}, database_url="postgresql://db/x") == [
        (Code.DATABASE_UNVERIFIED, "db (sslmode=require)")
    ]


@pytest.mark.parametrize(
    "host", ["", "localhost", "broker.localhost", "127.3.2.1", "::1", "/run/postgresql", "@abstract"]
)
def test_what_is_local(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize("host", ["rabbit", "10.0.0.1", "::2", "localhost.example.com", "notlocalhost", "0.0.0.0"])
def test_what_is_not_local(host: str) -> None:
    assert not is_local(host)


def test_each_is_a_finding() -> None:
    settings = load(
        {
            "broker_url": "amqp://rabbit",
            "management_url": "http://rabbit:15672",
            "database_url": "postgresql://db/x",
        },
        {"DLQBATCH_CONFIG": "/dev/null"},
    )
    there, store = BrokerFacts((4, 3), "v", "u", "http://h"), DatabaseFacts("d", "c", is_there=False)
    deployment = Deployment((), frozenset(), frozenset(), "dlq-queue")
    found = examine(there, store, deployment, unprotected(settings, {}))
    assert [one.code for one in found] == [Code.BROKER_IN_CLEAR, Code.BROKER_IN_CLEAR, Code.DATABASE_UNVERIFIED]
    unverified = unprotected(load({"broker_url": FAR, "tls_verify": "false", "database_url": VERIFIED}, {}), {})
    [one] = examine(there, store, deployment, unverified)
    assert one.code is Code.BROKER_UNVERIFIED
