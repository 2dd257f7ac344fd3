"""`postgresql+iam://`: the password of each new connection is a token that AWS's credentials sign."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from program import eventually

from dlqbatch.aws import database_token
from dlqbatch.aws.client import AwsRefused
from dlqbatch.store.engine import create_engine_for, reading
from dlqbatch.store.run_log import RunRecord, record
from scripts import services
from scripts.servers.postgres import PostgresCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

USER = "signed"


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    database_token._client.cache_clear()
    yield
    database_token._client.cache_clear()


@pytest.fixture
def cluster() -> Iterator[PostgresCluster]:
    """One that asks the user for a password, and nobody else."""
    with services.work_folder(volatile=True) as folder, PostgresCluster(folder / "postgres").start() as made:
        hba = made.data / "pg_hba.conf"
        hba.write_text(f"host all {USER} 127.0.0.1/32 scram-sha-256\n{hba.read_text()}")
        with psycopg.connect(made.url.replace("+psycopg", ""), autocommit=True) as owner:
            owner.execute(f"CREATE ROLE {USER} LOGIN PASSWORD 'none'")
            owner.execute("SELECT pg_reload_conf()")
        assert eventually(lambda: is_refused(made.port))
        yield made


def is_refused(port: int) -> bool:
    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(f"host=127.0.0.1 port={port} user={USER} dbname=postgres password=wrong").close()
        return False
    return True


def test_each_connection_has_a_token_of_its_own_as_its_password(
    cluster: PostgresCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As RDS does it, the server takes the newest token and no other: it becomes the password of the user."""
    sign, signed = database_token.token, []

    def token(*place: object) -> str:
        made = f"{sign(*place)}&number={len(signed)}"  # type: ignore[arg-type]
        signed.append(place)
        with psycopg.connect(cluster.url.replace("+psycopg", ""), autocommit=True) as owner:
            owner.execute(f"ALTER ROLE {USER} PASSWORD '{made}'")
        return made

    monkeypatch.setattr(database_token, "token", token)
    url = f"postgresql+iam://{USER}@127.0.0.1:{cluster.port}/postgres"
    engine = create_engine_for(url, connect_timeout=30)
    for _ in range(2):
        with reading(engine) as connection:
            assert connection.exec_driver_sql("SELECT current_user").scalar() == USER
    now = datetime.now(UTC)
    # There is no such table, which only somebody who came in can know.
    assert record(url, RunRecord("drain", now, now, "ok", "empty", (), {})).warning is None
    assert signed == [("127.0.0.1", cluster.port, USER)] * 3


def test_a_token_is_signed_for_host_port_and_user_and_for_a_quarter_of_an_hour() -> None:
    parts = urlsplit(f"https://{database_token.token('db.example', 5433, 'ann@x')}")
    said = {name: values[0] for name, values in parse_qs(parts.query).items()}
    assert (parts.hostname, parts.port) == ("db.example", 5433)
    assert (said["Action"], said["DBUser"], said["X-Amz-Expires"]) == ("connect", "ann@x", "900")
    key, _, region, service, _ = said["X-Amz-Credential"].split("/")
    assert (key, region, service) == ("AKID", "eu-west-1", "rds-db")
    assert len(said["X-Amz-Signature"]) == 64


def test_without_credentials_the_error_is_that_of_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    engine = create_engine_for("postgresql+iam://ann@127.0.0.1:1/d", connect_timeout=2)
    with pytest.raises(AwsRefused, match=r"rds-db:connect failed: no AWS credentials"), reading(engine):
        pass
