"""A secret in Secrets Manager is read once, checked as any other setting, and shown by nobody."""

from __future__ import annotations

import json
import os
import socket
import traceback
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from sqlalchemy.engine import make_url
from webhook_receiver import hook, status

from dlqbatch.aws import secrets
from dlqbatch.errors import SettingsError
from dlqbatch.settings import load, secrets_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dlqbatch.settings import Settings

NAME = "dlqbatch/test"
CANARY = "c4n4ry"
BROKER = f"amqps://app:{CANARY}@broker.example:5671/%2F"
DATABASE = f"postgresql://app:{CANARY}@database.example/dlq"


@pytest.fixture(autouse=True)
def _a_process_that_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    secrets._known.clear()
    yield
    secrets._known.clear()


@pytest.fixture
def account(aws: dict[str, str]) -> Any:
    return boto3.client("secretsmanager")


def reading(**environ: str) -> Settings:
    named = {"DLQBATCH_CONFIG": os.devnull, "DLQBATCH_SECRET": NAME} | environ
    return load({}, named, secrets=secrets.fetch)


def problems(**environ: str) -> list[str]:
    with pytest.raises(SettingsError) as wrong:
        reading(**environ)
    assert CANARY not in "".join(traceback.format_exception(wrong.value))
    return list(wrong.value.problems)


def test_the_addresses_of_a_secret_are_those_of_the_run(account: Any) -> None:
    held = {"broker_url": BROKER, "database_url": DATABASE}
    account.create_secret(Name=NAME, SecretString=json.dumps(held))
    found = reading()
    assert found.broker_url.get_secret_value() == BROKER
    assert found.database_url.get_secret_value() == DATABASE.replace("postgresql:", "postgresql+psycopg:")
    assert not found.database_url_is_default
    assert (found.management_url, found.webhook_url) == (None, None)
    assert CANARY not in repr(found)


def test_an_arn_says_its_region_itself(account: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = boto3.client("secretsmanager", region_name="eu-west-1")
    arn = elsewhere.create_secret(Name=NAME, SecretString=json.dumps({"broker_url": BROKER}))["ARN"]
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert reading(DLQBATCH_SECRET=arn).broker_url.get_secret_value() == BROKER


def test_without_awss_default_region_the_one_that_lambda_sets_is_asked(
    account: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = boto3.client("secretsmanager", region_name="eu-west-1")
    elsewhere.create_secret(Name=NAME, SecretString=json.dumps({"broker_url": BROKER}))
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert reading().broker_url.get_secret_value() == BROKER
    secrets._known.clear()
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    assert reading().broker_url.get_secret_value() == BROKER


@pytest.mark.parametrize("default", [None, "", " "])
@pytest.mark.parametrize("region", [None, "", " "])
def test_without_any_region_the_error_says_which_variable_to_set(
    account: Any, monkeypatch: pytest.MonkeyPatch, region: str | None, default: str | None
) -> None:
    for variable, value in (("AWS_REGION", region), ("AWS_DEFAULT_REGION", default)):
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    with pytest.raises(secrets.SecretUnreadable, match="no AWS region is set; set AWS_REGION") as unread:
        reading()
    assert unread.value.code == "NoRegionError"


def test_a_region_that_is_set_to_nothing_is_not_set(account: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    account.create_secret(Name=NAME, SecretString=json.dumps({"broker_url": BROKER}))
    monkeypatch.setenv("AWS_REGION", "")
    assert reading().broker_url.get_secret_value() == BROKER


def test_a_secret_that_says_nothing_is_an_error_that_names_its_keys(account: Any) -> None:
    account.create_secret(Name=NAME, SecretString="{}")
    (said,) = problems()
    assert said.startswith(f"the secret {NAME} is an empty object; it is to hold any of broker_url, database_url")
    secrets.stale(NAME)
    held = {"broker_url": None, "database_url": "", "management_url": " ", "webhook_url": f"https://{CANARY}.example"}
    account.put_secret_value(SecretId=NAME, SecretString=json.dumps(held))
    assert problems() == [
        f"{key} (secret {NAME}) is empty; write the address, or leave the key out."
        for key in ("broker_url", "database_url", "management_url")
    ]


def test_a_binary_secret_is_read_as_text(account: Any) -> None:
    account.create_secret(Name=NAME, SecretBinary=json.dumps({"broker_url": BROKER}).encode())
    assert reading().broker_url.get_secret_value() == BROKER


def test_the_environment_goes_before_the_secret_and_the_secret_before_the_file(account: Any, tmp_path: Path) -> None:
    file = tmp_path / "application.properties"
    file.write_text(
        f"dlqbatch.secret={NAME}\n"
        "dlqbatch.broker-url=amqp://file/\n"
        "dlqbatch.database-url=sqlite:////file\n"
        "dlqbatch.management-url=http://file:15672\n"
    )
    held = {name: f"{scheme}://secret" for name, scheme in (("broker_url", "amqp"), ("management_url", "http"))}
    account.create_secret(Name=NAME, SecretString=json.dumps(held | {"database_url": "postgresql://secret/d"}))
    environ = {"DLQBATCH_CONFIG": str(file), "DLQBATCH_DATABASE_URL": "sqlite:////environment"}
    found = load({"management_url": "http://given:15672"}, environ, secrets=secrets.fetch)
    assert found.broker_url.get_secret_value() == "amqp://secret"
    assert found.database_url.get_secret_value() == "sqlite:////environment"
    assert found.management_url is not None
    assert found.management_url.get_secret_value() == "http://given:15672"


def test_every_problem_of_its_content_is_told_with_its_key_and_without_its_value(account: Any) -> None:
    held = {
        "broker_url": f"http://app:{CANARY}@host/",
        "database_url": 5,
        "broker_urls": CANARY,
        "password": CANARY,
        "max_messages": CANARY,
        "odd\x1b": CANARY,
    }
    account.create_secret(Name=NAME, SecretString=json.dumps(held))
    said = problems(DLQBATCH_MAX_BYTES="many")
    assert len(said) == 7
    assert any(line.startswith(f"broker_url (secret {NAME}) is not an amqp://") for line in said)
    assert any(line.startswith(f"database_url (secret {NAME}) is no text") for line in said)
    assert any("perhaps broker_url was meant" in line for line in said)
    assert any(line.startswith(f"password (secret {NAME}) is nothing that a secret holds; it may") for line in said)
    assert any(line.startswith("max_messages (secret") for line in said)
    assert any(line.startswith("DLQBATCH_MAX_BYTES (environment)") for line in said)
    assert not any("\x1b" in line for line in said)


@pytest.mark.parametrize("held", [CANARY, f'"{CANARY}"', f'["{CANARY}"]', f'{{"broker_url": "{CANARY}', "[" * 100_000])
def test_a_secret_that_is_no_json_object_says_so_and_not_what_it_is(account: Any, held: str) -> None:
    account.create_secret(Name=NAME, SecretString=held)
    (said,) = problems()
    assert f"'{NAME}' does not hold a JSON object" in said


def test_a_binary_secret_that_is_no_text_is_no_json_object_either(account: Any) -> None:
    account.create_secret(Name=NAME, SecretBinary=b"\xff\xfe" + CANARY.encode())
    assert "JSON object" in problems()[0]


def test_a_name_that_is_none_is_told_before_anybody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(DLQBATCH_SECRET="two words") == [
        "DLQBATCH_SECRET (environment) is neither the name nor the ARN of a secret."
    ]


def test_a_secret_that_is_not_there_is_told_with_awss_own_code(account: Any) -> None:
    with pytest.raises(secrets.SecretUnreadable, match=rf"'{NAME}'.*ResourceNotFoundException.*AWS_REGION") as refused:
        reading()
    assert refused.value.exit_code == 4


def test_a_refusal_names_the_permission(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"__type": "AccessDeniedException", "Message": "User: arn:x is not authorized\nsession-t0ken"}
    with hook(status(400, body=json.dumps(said).encode())) as other:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{other.port}")
        with pytest.raises(secrets.SecretUnreadable, match=r"arn:x is not authorized.*GetSecretValue") as refused:
            reading()
        assert len(other.requests) == 1
    assert "t0ken" not in str(refused.value)


def test_an_endpoint_that_nobody_serves_is_given_up_with_a_hint(
    aws: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", closed_port())
    with pytest.raises(secrets.SecretUnreadable, match="VPC endpoint") as refused:
        reading()
    assert refused.value.exit_code == 4


def test_without_credentials_or_region_the_error_says_what_is_missing(
    aws: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(secrets.SecretUnreadable, match="credentials"):
        reading()
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(secrets.SecretUnreadable, match="AWS_REGION"):
        reading()


def test_a_process_asks_once_and_again_when_told_that_it_is_stale(account: Any) -> None:
    account.create_secret(Name=NAME, SecretString=json.dumps({"broker_url": BROKER}))
    reading()
    account.put_secret_value(SecretId=NAME, SecretString=json.dumps({"broker_url": "amqp://new"}))
    assert reading().broker_url.get_secret_value() == BROKER
    secrets.stale(NAME)
    assert reading().broker_url.get_secret_value() == "amqp://new"


def test_what_is_known_grows_old_and_is_used_all_the_same_while_aws_is_away(
    account: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "MOST_AGE", 0.0)
    monkeypatch.setattr(secrets, "_SOON", 0.0)
    account.create_secret(Name=NAME, SecretString=json.dumps({"broker_url": BROKER}))
    reading()
    account.put_secret_value(SecretId=NAME, SecretString=json.dumps({"broker_url": "amqp://new"}))
    assert reading().broker_url.get_secret_value() == "amqp://new"
    with monkeypatch.context() as without:
        without.setenv("AWS_ENDPOINT_URL", closed_port())
        assert reading().broker_url.get_secret_value() == "amqp://new"
    account.delete_secret(SecretId=NAME, ForceDeleteWithoutRecovery=True)
    with pytest.raises(secrets.SecretUnreadable, match="ResourceNotFoundException"):
        reading()


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def managed(account: Any, content: object, database_url: str = DATABASE) -> dict[str, str]:
    """A second secret, as RDS makes it."""
    account.create_secret(Name=NAME, SecretString=json.dumps({"broker_url": BROKER, "database_url": database_url}))
    made = account.create_secret(Name="rds!db-1", SecretString=json.dumps(content))
    return {"DLQBATCH_DATABASE_SECRET": made["ARN"]}


@pytest.mark.parametrize("authority", ["", "someone:else@"])
def test_the_login_that_rds_keeps_takes_the_place_of_the_one_in_the_address(account: Any, authority: str) -> None:
    login = {"username": "app@work", "password": f"{CANARY}/?#%", "engine": "postgres", "host": "elsewhere"}
    address = f"postgresql://{authority}database.example:6432/dlq?sslmode=verify-full"
    found = reading(**managed(account, login, address))
    url = make_url(found.database_url.get_secret_value())
    assert (url.username, url.password) == (login["username"], login["password"])
    assert (url.host, url.port, url.database, url.query) == (
        "database.example",
        6432,
        "dlq",
        {"sslmode": "verify-full"},
    )
    assert CANARY not in repr(found)
    assert login["password"] in secrets_of(found)


@pytest.mark.parametrize(
    ("content", "address", "wrong"),
    [
        ({"username": "app"}, DATABASE, "holds no username and password"),
        ({"username": "app", "password": 7}, DATABASE, "holds no username and password"),
        ([CANARY], DATABASE, "does not hold a JSON object"),
        ({"username": "app", "password": CANARY}, "sqlite:////tmp/dlq.sqlite3", "begins with sqlite://"),
        ({"username": "app", "password": CANARY}, "postgresql+iam://app@host/dlq", "begins with postgresql+iam://"),
    ],
)
def test_a_login_that_cannot_be_used_is_a_wrong_setting(
    account: Any, content: object, address: str, wrong: str
) -> None:
    (problem,) = problems(**managed(account, content, address))
    assert wrong in problem
