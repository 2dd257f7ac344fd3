"""Runs whose addresses are a secret in Secrets Manager: passwords change while a process lives, and nobody notices."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import boto3
import psycopg
import pytest
import sqlalchemy
from program import FORKED, HANGS_AFTER, ROOT, Client, Program, eventually

from dlqbatch.drain.event_config import EventConfig
from dlqbatch.store import migrate
from dlqbatch.store.engine import create_engine_for
from scripts import services
from scripts.servers.management import quoted
from scripts.servers.postgres import PostgresCluster

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

NAME = "dlqbatch/test"
ORIGIN = "orders-queue"
OLD, NEW = "0ld-c4n4ry", "n3w-c4n4ry"
EVERYTHING = {"configure": ".*", "write": ".*", "read": ".*"}

# One container of the platform, which stays warm: an event in, what the handler answers or raises out.
CONTAINER = """
import json, sys
sys.path.insert(0, {root!r})
from handler import handler

for line in sys.stdin:
    try:
        answer = handler(json.loads(line))
    except Exception as error:
        answer = {{"raised": type(error).__name__, "text": str(error)}}
    print(json.dumps(answer), flush=True)
"""


class Container:
    def __init__(self, program: Program) -> None:
        self._process = Program(program.settings, (FORKED, CONTAINER.format(root=str(ROOT)))).start()
        self.said = ""

    def run(self, job: str = "drain") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        self.said += line
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        out, err = self._process.communicate(timeout=HANGS_AFTER)
        self.said += out + err
        assert self._process.returncode == 0


@contextmanager
def container_of(**settings: str) -> Iterator[Container]:
    """Whatever it does, no password is in anything that it says."""
    started = Container(Program({"secret": NAME, "no_proxy": "127.0.0.1", "tier_ttls": "1h,2h,3h"} | settings))
    try:
        yield started
    finally:
        started.end()
    assert OLD not in started.said
    assert NEW not in started.said


@pytest.fixture
def policy(policy_file: Path, sqlite_url: str) -> str:
    """The address of an SQLite file in which an event is configured."""
    shutil.copyfile(policy_file, sqlite_url.removeprefix("sqlite:///"))
    return sqlite_url


class Account:
    """Its one secret, and how often somebody has read it."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._server = variables["AWS_ENDPOINT_URL"]
        self._client = boto3.client("secretsmanager")
        self._client.create_secret(Name=NAME, SecretString="{}")
        self._post("reset-recording")
        self._post("start-recording")

    def hold(self, **held: str) -> None:
        self._client.put_secret_value(SecretId=NAME, SecretString=json.dumps(held))

    def lose(self) -> None:
        self._client.delete_secret(SecretId=NAME, ForceDeleteWithoutRecovery=True)

    @property
    def readings(self) -> int:
        with urlopen(f"{self._server}/moto-api/recorder/download-recording", timeout=HANGS_AFTER) as answer:
            return answer.read().decode().count("secretsmanager.GetSecretValue")

    def end(self) -> None:
        self._post("stop-recording")

    def _post(self, what: str) -> None:
        with urlopen(Request(f"{self._server}/moto-api/recorder/{what}", method="POST"), timeout=HANGS_AFTER):
            pass


@pytest.fixture
def account(aws: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    monkeypatch.chdir(tmp_path)
    made = Account(aws)
    yield made
    made.end()


class User:
    """One of the broker's, who may do everything in the virtual host of the test."""

    def __init__(self, management: Management, url: str) -> None:
        self._management, self._place = management, url.rpartition("@")[2]
        self.name = f"app-{secrets.token_hex(4)}"
        self.change(OLD)
        management.put(f"permissions/{quoted(management.vhost)}/{self.name}", EVERYTHING)

    def change(self, password: str) -> None:
        self._management.put(f"users/{self.name}", {"password": password, "tags": "management"})

    def url(self, password: str) -> str:
        return f"amqp://{self.name}:{password}@{self._place}"

    def end(self) -> None:
        self._management.delete(f"users/{self.name}")


@pytest.fixture
def user(management: Management, broker_url: str) -> Iterator[User]:
    made = User(management, broker_url)
    yield made
    made.end()


def fail(team: Client, number: int) -> None:
    team.make_origin(ORIGIN)
    team.fail(ORIGIN, "orders.created", *(b"%d" % each for each in range(number)))


def test_a_warm_function_asks_once_and_survives_a_new_password_of_the_broker(
    account: Account, user: User, policy: str, team: Client
) -> None:
    account.hold(broker_url=user.url(OLD), database_url=policy)
    with container_of() as container:
        assert container.run()["outcome"] == "ok"
        fail(team, 3)
        assert container.run()["counts"]["delayed"] == 3
        assert container.run()["outcome"] == "ok"
        assert account.readings == 1

        user.change(NEW)
        refused = container.run()
        assert refused["raised"] == "LoginRefused", "the secret still says the old one"
        assert account.readings == 2

        account.hold(broker_url=user.url(NEW), database_url=policy)
        fail(team, 4)
        report = container.run()
        assert (report["outcome"], report["counts"]["delayed"]) == ("ok", 4)
        assert account.readings == 3
        assert container.run()["outcome"] == "ok"
        assert account.readings == 3
    assert container.said.count("the run is repeated") == 1
    assert container.said.count("LoginRefused") == 1


def test_every_job_that_connects_to_the_broker_goes_on_after_a_new_password(
    account: Account, user: User, policy: str
) -> None:
    with container_of(check_queues="dlq-queue") as container:
        account.hold(broker_url=user.url(OLD), database_url=policy)
        container.run("drain")  # declares what the others look at
        passwords = [NEW, OLD]
        for job in ("ingest", "lifecycle", "check"):
            user.change(passwords[0])
            account.hold(broker_url=user.url(passwords[0]), database_url=policy)
            report = container.run(job)
            assert (report.get("outcome"), report.get("warnings")) == ("ok", None), report
            passwords.reverse()
        assert account.readings == 4
    assert container.said.count("the run is repeated") == 3


def test_a_new_password_reaches_the_management_api_that_wildcards_need(
    account: Account, user: User, management: Management, policy: str
) -> None:
    def hold(password: str) -> None:
        api = "http://{}:{}@{}:{}".format(user.name, password, *management._address)
        account.hold(broker_url=user.url(password), database_url=policy, management_url=api)

    hold(OLD)
    with container_of(check_queues="dlq-*") as container:
        container.run("drain")  # declares what the others look at
        assert container.run("check")["outcome"] == "ok"
        user.change(NEW)
        hold(NEW)
        assert container.run("check").get("outcome") == "ok"
    assert container.said.count("the run is repeated") == 1


def test_a_broker_that_has_moved_is_found_where_the_secret_says(account: Account, user: User, policy: str) -> None:
    account.hold(broker_url="amqp://127.0.0.1:1", database_url=policy)
    with container_of(connect_timeout_seconds="0.5") as container:
        assert container.run()["raised"] == "BrokerUnreachable"
        account.hold(broker_url=user.url(OLD), database_url=policy)
        assert container.run()["outcome"] == "ok"
    assert container.said.count("the run is repeated") == 1


def test_a_refused_login_stays_refused_when_the_secret_is_gone(account: Account, user: User, policy: str) -> None:
    account.hold(broker_url=user.url(OLD), database_url=policy)
    with container_of() as container:
        assert container.run()["outcome"] == "ok"
        user.change(NEW)
        account.lose()
        assert container.run()["raised"] == "LoginRefused"
        assert container.run()["raised"] == "SecretUnreadable"
    assert "the secret could not be read again" in container.said


def test_an_address_that_the_environment_gives_is_not_replaced_by_a_new_secret(
    account: Account, user: User, policy: str
) -> None:
    account.hold(database_url=policy)
    with container_of(broker_url=user.url(OLD)) as container:
        assert container.run()["outcome"] == "ok"
        user.change(NEW)
        account.hold(broker_url=user.url(NEW), database_url=policy)
        assert container.run()["raised"] == "LoginRefused"


@pytest.fixture(scope="module")
def locked_server() -> Iterator[str]:
    """A PostgreSQL that asks the role `app` for its password; the address of whoever needs none."""
    with services.work_folder(volatile=True) as folder, PostgresCluster(folder / "postgres").start() as cluster:
        url = cluster.url.replace("+psycopg", "")
        rules = cluster.data / "pg_hba.conf"
        rules.write_text(f"host all app 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE app LOGIN SUPERUSER PASSWORD '{OLD}'")
            connection.execute("SELECT pg_reload_conf()")
        assert eventually(lambda: not lets_in(as_app(url, "wrong")))
        yield url


@pytest.fixture
def database(locked_server: str) -> Iterator[str]:
    """A dead store with one event, and the password of `app` as it was."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(locked_server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        url = f"{locked_server.rpartition('/')[0]}/{name}"
        migrate.upgrade(url)
        EventConfig(create_engine_for(url, connect_timeout=30)).set("orders.*", 3)
        yield url
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
        connection.execute(f"ALTER ROLE app PASSWORD '{OLD}'")


def as_app(url: str, password: str) -> str:
    made = sqlalchemy.make_url(url).set(username="app", password=password)
    return made.render_as_string(hide_password=False)


def lets_in(url: str) -> bool:
    try:
        psycopg.connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def change(database: str, password: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"ALTER ROLE app PASSWORD '{password}'")


def test_a_warm_function_survives_a_new_password_of_the_database(
    account: Account, database: str, broker_url: str, team: Client
) -> None:
    with container_of() as container:
        account.hold(broker_url=broker_url, database_url=as_app(database, OLD))
        assert container.run()["outcome"] == "ok"
        fail(team, 2)
        assert container.run()["counts"]["delayed"] == 2
        change(database, NEW)
        fail(team, 3)
        refused = container.run()
        assert refused["raised"] == "DatabaseRefused", refused
        assert team.depth("retry-queue") >= 3, "nothing was moved"
        account.hold(broker_url=broker_url, database_url=as_app(database, NEW))
        report = container.run()
        assert (report["outcome"], report["counts"]["delayed"], report.get("warnings")) == ("ok", 3, None), report
    assert container.said.count("the run is repeated") == 1


def test_a_warm_function_survives_a_rotation_of_the_login_that_rds_keeps(
    account: Account, database: str, broker_url: str, team: Client
) -> None:
    managed = "rds!db-1"
    client = boto3.client("secretsmanager")

    def rotate(password: str) -> None:
        client.put_secret_value(SecretId=managed, SecretString=json.dumps({"username": "app", "password": password}))

    client.create_secret(Name=managed, SecretString="{}")
    rotate(OLD)
    account.hold(broker_url=broker_url, database_url=database)
    with container_of(database_secret=managed) as container:
        assert container.run()["outcome"] == "ok"
        change(database, NEW)
        fail(team, 3)
        assert container.run()["raised"] == "DatabaseRefused"
        rotate(NEW)
        report = container.run()
        assert (report["outcome"], report["counts"]["delayed"], report.get("warnings")) == ("ok", 3, None), report
    assert container.said.count("the run is repeated") == 1
    client.delete_secret(SecretId=managed, ForceDeleteWithoutRecovery=True)


def test_a_run_with_nothing_to_do_learns_of_a_new_password_for_the_next_one(
    account: Account, database: str, broker_url: str
) -> None:
    account.hold(broker_url=broker_url, database_url=as_app(database, OLD))
    with container_of() as container:
        assert container.run().get("warnings") is None
        change(database, NEW)
        account.hold(broker_url=broker_url, database_url=as_app(database, NEW))
        (warning,) = container.run()["warnings"]
        assert "not in the log of runs" in warning
        assert container.run().get("warnings") is None
    assert account.readings == 2


def test_every_job_of_the_dead_store_goes_on_after_a_new_password(
    account: Account, database: str, broker_url: str
) -> None:
    with container_of() as container:
        account.hold(broker_url=broker_url, database_url=as_app(database, OLD))
        container.run("drain")  # declares what the others look at
        passwords = [NEW, OLD]
        for job in ("ingest", "lifecycle", "monitor", "retain"):
            account.hold(broker_url=broker_url, database_url=as_app(database, passwords[0]))
            change(database, passwords[0])
            report = container.run(job)
            assert (report.get("outcome"), report.get("warnings")) == ("ok", None), report
            passwords.reverse()


def test_the_command_line_reads_the_secret_and_its_exit_code_says_what_is_wrong(
    account: Account, user: User, policy: str
) -> None:
    installed = Program({"secret": NAME, "tier_ttls": "1h,2h,3h"})
    account.hold(broker_url=user.url(OLD), database_url=policy)
    done = installed.run("drain", "--json")
    assert (done.code, done.told["outcome"]) == (0, "ok"), done.said
    account.hold(broker_url=f"http://{OLD}@host", password=OLD)
    wrong = installed.run("drain")
    assert wrong.code == 2
    assert f"broker_url (secret {NAME}) is not an amqp" in wrong.err
    assert f"password (secret {NAME})" in wrong.err
    account.lose()
    gone = installed.run("status", "--json")
    assert (gone.code, gone.told["error"]["type"]) == (4, "SecretUnreadable")
    assert OLD not in done.said + wrong.said + gone.said


LOADED = """
import sys
sys.path.insert(0, {root!r})
from handler import handler
for job in ("drain", "ingest", "monitor"):
    handler({{"job": job}})
found = [name for name in sys.modules if name.partition(".")[0] in ("boto3", "botocore")]
print(found, file=sys.stderr)
sys.exit(bool(found))
"""


def test_a_run_that_uses_no_service_of_aws_loads_none_of_its_libraries(program: Program) -> None:
    done = Program(program.settings, (sys.executable, "-c", LOADED.format(root=str(ROOT)))).run()
    assert done.code == 0, done.said


def test_a_run_with_a_secret_but_without_boto3_says_what_to_install(program: Program, tmp_path: Path) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError('not here')\n")
    hidden = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(0, {str(ROOT)!r}); "
    hidden += "from dlqbatch.cli import main; sys.argv[1:] = ['drain']; sys.exit(main())"
    done = Program({**program.settings, "secret": NAME}, (sys.executable, "-c", hidden)).run()
    assert done.code == 2, done.said
    assert "pip install 'dlqbatch[aws]', or in a checkout: pip install -r requirements-aws.txt" in done.err
    assert os.linesep.join(done.err.splitlines()).count("Traceback") == 0


def metrics_of(out: str) -> list[dict[str, Any]]:
    return [found for line in out.splitlines() if "_aws" in (found := json.loads(line))]


MEASURED = """
import json, sys
sys.path.insert(0, {root!r})
from handler import handler
for event in json.loads(sys.argv[1]):
    try:
        print(json.dumps(handler(event)))
    except Exception as error:
        print(json.dumps({{"raised": type(error).__name__}}))
"""


def test_a_function_prints_the_metrics_of_each_run_once_and_the_command_line_none(program: Program) -> None:
    measured = program.but(metrics_namespace="dlqbatch/test")
    function = Program(measured.settings, (sys.executable, "-c", MEASURED.format(root=str(ROOT))))
    events = [{"job": "drain"}, {"job": "monitor"}, {"job": "drain", "dry_run": True}, {"job": "no such job"}]
    done = function.run(json.dumps(events))
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert ["_aws" in line for line in lines] == [True, False, True, False, False, False], done.said
    drained, monitored = metrics_of(done.out)
    assert (drained["job"], drained["got"], drained["failed"]) == ("drain", [0], [0])
    assert (monitored["job"], monitored["backlog"]) == ("monitor", [0])
    assert lines[1]["outcome"] == "ok"

    without = Program({**function.settings, "broker_url": "amqp://127.0.0.1:1", "connect_timeout_seconds": "0.5"})
    failing = Program(without.settings, function.command).run(json.dumps([{"job": "drain"}]))
    (told,) = metrics_of(failing.out)
    assert (told["failed"], "got" in told) == ([1], False)
    assert json.loads(failing.out.splitlines()[1])["raised"] == "BrokerUnreachable"

    assert measured.run("drain", "--json").told["outcome"] == "ok"
