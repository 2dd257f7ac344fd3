"""Logins other than a password: the client's certificate (SASL EXTERNAL), and an OAuth 2 token in a file."""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from broker_client import Side
from certificates import LOCALHOST, Authority, TlsLink
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from joserfc import jwt
from joserfc.jwk import RSAKey
from pika import BasicProperties
from program import HANGS_AFTER

from dlqbatch import jobs
from dlqbatch.broker.access import Access, access_to, connect, management_api
from dlqbatch.broker.connection import Connection
from dlqbatch.doctor.job import diagnose
from dlqbatch.errors import BrokerLost, BrokerUnreachable, ChannelRefused, LoginRefused
from dlqbatch.settings import Settings, load
from dlqbatch.topology.declare import apply_topology
from scripts import services
from scripts.servers.management import Management
from scripts.servers.rabbitmq import RabbitNode
from scripts.servers.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLUGINS = ("rabbitmq_auth_mechanism_ssl", "rabbitmq_auth_backend_oauth2")
CONFIG = """
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.cacertfile = {authority.file}
ssl_options.certfile = {server[0]}
ssl_options.keyfile = {server[1]}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = false
ssl_cert_login_from = common_name
auth_mechanisms.1 = PLAIN
auth_mechanisms.2 = EXTERNAL
auth_backends.1 = internal
auth_backends.2 = rabbit_auth_backend_oauth2
auth_oauth2.resource_server_id = broker
auth_oauth2.default_key = ours
auth_oauth2.signing_keys.ours = {signing_key}
"""
BATCH = "orders-batch"
EVERYTHING = {"configure": ".*", "write": ".*", "read": ".*"}
PUBLISHES_ONLY = {"configure": "^$", "write": ".*", "read": "^$"}
# The third part is the routing key: without it the broker refuses every publish to a topic exchange.
SCOPES = "broker.configure:*/*/* broker.read:*/*/* broker.write:*/*/* broker.tag:management"


class Broker(NamedTuple):
    """One whose virtual host is open to the user of a certificate, and to guest for publishing only."""

    node: RabbitNode
    tls_port: int
    authority: Authority
    key: rsa.RSAPrivateKey
    folder: Path

    def token(self, lifetime: float = 3600.0, name: str = BATCH) -> str:
        claims = {"sub": name, "aud": ["broker"], "scope": SCOPES, "exp": int(time.time() + lifetime)}
        return jwt.encode({"alg": "RS256", "kid": "ours"}, claims, RSAKey.import_key(self.key))

    def by_certificate(self, name: str) -> dict[str, Any]:
        certificate, key = self.authority.issue(name, LOCALHOST)
        return {
            "broker_url": f"amqps://guest:guest@localhost:{self.tls_port}/shop",
            "management_url": self.node.management_url,
            "tls_ca_file": str(self.authority.file),
            "tls_cert_file": str(certificate),
            "tls_key_file": str(key),
            "broker_auth": "external",
        }

    def by_token(self, file: Path) -> dict[str, Any]:
        return {
            "broker_url": f"amqp://guest:guest@127.0.0.1:{self.node.port}/shop",
            "management_url": f"http://127.0.0.1:{self.node.management_port}",
            "broker_token_file": str(file),
        }


@pytest.fixture(scope="module", params=["installed", "4.3"])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    with services.work_folder(volatile=True) as folder:
        authority = Authority(folder, "authority")
        key = rsa.generate_private_key(65537, 2048)
        signing_key = folder / "signing.pem"
        form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        signing_key.write_bytes(key.public_key().public_bytes(*form))
        (port,) = free_ports(1)
        node = RabbitNode(folder / "node", plugins=PLUGINS)
        if request.param == "4.3":
            node = services.node_of_43(folder / "node", PLUGINS)
        server = authority.issue("broker", LOCALHOST)
        node.config += CONFIG.format(port=port, authority=authority, server=server, signing_key=signing_key)
        with node.start():
            management = Management(node.management_url)
            management.put(f"users/{BATCH}", {"password_hash": "", "tags": ""})
            management.put("vhosts/shop")
            management.put(f"permissions/shop/{BATCH}", EVERYTHING)
            management.put("permissions/shop/guest", PUBLISHES_ONLY)
            yield Broker(node, port, authority, key, folder)


def settings_of(options: dict[str, Any], tmp_path: Path) -> Settings:
    given = {"database_url": f"sqlite:///{tmp_path / 'none.sqlite3'}", "allow_empty_policy": "true", **options}
    return load(given, environ={"DLQBATCH_CONFIG": "/dev/null"})


def drains_one(broker: Broker, settings: Settings) -> None:
    """What guest has published carries guest's name, which only guest may publish."""
    apply_topology(settings)
    with closing(Side(broker.node.url.replace("%2F", "shop"))) as guest:
        guest.channel.confirm_delivery()
        guest.channel.basic_publish(
            "retry-exchange", "retry-routing-key", b"body", BasicProperties(user_id="guest"), mandatory=True
        )
    report = jobs.run("drain", settings, jobs.RunOptions())
    assert (report.outcome, report.counts["dead_lettered"]) == ("ok", 1)


def test_a_drain_logs_in_with_its_certificate_and_not_as_the_user_of_the_address(
    broker: Broker, tmp_path: Path
) -> None:
    drains_one(broker, settings_of(broker.by_certificate(BATCH), tmp_path))


def test_a_drain_logs_in_with_a_token_and_not_as_the_user_of_the_address(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{broker.token()}\n")
    drains_one(broker, settings_of(broker.by_token(file), tmp_path))


def test_the_management_api_takes_the_token_unless_its_address_names_a_user(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(broker.token(name="by-token"))
    options = broker.by_token(file)
    assert management_api(settings_of(options, tmp_path)).ask("whoami").content["name"] == "by-token"
    options["management_url"] = broker.node.management_url
    assert management_api(settings_of(options, tmp_path)).ask("whoami").content["name"] == "guest"


@pytest.mark.parametrize("way", ["certificate", "token"])
def test_the_doctor_does_not_speak_of_the_user_of_an_address_that_is_not_logged_in(
    broker: Broker, tmp_path: Path, way: str
) -> None:
    file = tmp_path / "token"
    file.write_text(broker.token())
    options = broker.by_certificate(BATCH) if way == "certificate" else broker.by_token(file)
    settings = settings_of(options, tmp_path)
    apply_topology(settings)
    found = diagnose(settings)
    assert "guest" not in found.looked_at()
    assert "permission-missing" not in {one.code for one in found.findings}


def test_a_certificate_whose_name_is_no_user_is_refused_with_that_reason(broker: Broker, tmp_path: Path) -> None:
    settings = settings_of(broker.by_certificate("stranger"), tmp_path)
    with pytest.raises(LoginRefused, match="no user has the certificate's name"):
        connect(access_to(settings, "test"))


def test_a_broker_that_does_not_offer_external_is_named_with_its_plugin(tmp_path: Path, broker_url: str) -> None:
    place = urlsplit(broker_url)
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.issue("client", LOCALHOST)
    with TlsLink(int(place.port or 0), authority.issue("broker", LOCALHOST)) as link:
        urls = [f"amqps://localhost:{link.port}{place.path}"]
        files = {"tls_ca_file": str(authority.file), "tls_cert_file": str(certificate), "tls_key_file": str(key)}
        with pytest.raises(LoginRefused, match=r"EXTERNAL takes the plugin rabbitmq_auth_mechanism_ssl"):
            connect(Access(urls, external=True, **files))


def test_a_token_is_read_anew_for_each_connection_and_an_expired_one_is_named(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(broker.token(lifetime=-60))
    access = access_to(settings_of(broker.by_token(file), tmp_path), "test")
    with pytest.raises(LoginRefused, match=rf"the token in {file} expired at \d{{4}}-.* UTC"):
        connect(access)
    file.write_text(broker.token())
    connect(access).close()


def test_a_file_without_a_token_is_named_and_what_it_holds_is_not_shown(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(broker.token())
    settings = settings_of(broker.by_token(file) | {"connect_timeout_seconds": "0.1"}, tmp_path)
    for content, words in ((b"", "nothing else"), (b"secret words", "nothing else"), (b"secret\xff", "is no text")):
        file.write_bytes(content)
        for ask in (lambda: connect(access_to(settings, "test")), lambda: management_api(settings).ask("whoami")):
            with pytest.raises(BrokerUnreachable, match=f"{file} .*{words}") as refused:
                ask()
            assert "secret" not in str(refused.value)


def test_a_connection_whose_token_expires_ends_with_the_brokers_words(broker: Broker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(broker.token())
    access = access_to(settings_of(broker.by_token(file), tmp_path), "test")
    for lifetime in (2, 20, 120):  # a busy machine may need longer to connect
        file.write_text(broker.token(lifetime))
        try:
            connection = connect(access)
            break
        except BrokerUnreachable:
            continue
    with closing(connection), pytest.raises((BrokerLost, ChannelRefused), match="expired"):
        declare_until_it_ends(connection)


def declare_until_it_ends(connection: Connection) -> None:
    deadline = time.monotonic() + HANGS_AFTER
    while time.monotonic() < deadline:
        connection.pause(0.1)
        with connection.scratch() as scratch:
            # A new name each time: what was allowed once stays so for up to a minute on older brokers.
            scratch.call("queue_declare", queue=f"q-{time.monotonic_ns()}", exclusive=True)
