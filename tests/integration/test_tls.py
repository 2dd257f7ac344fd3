"""amqps: certificate and host name are checked unless somebody says that they shall not be."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pika
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dlqbatch import wiring
from dlqbatch.broker.connection import Access, connect
from dlqbatch.errors import BrokerUnreachable
from dlqbatch.settings import load
from scripts import services
from scripts.servers.rabbitmq import RabbitNode
from scripts.servers.server import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOUR = timedelta(hours=1)


class Authority:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(self._name, self._key.public_key(), [], HOUR, authority=True)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, hosts: list[x509.GeneralName], valid_for: timedelta = HOUR) -> tuple[Path, Path]:
        """The files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key.public_key(), hosts, valid_for, authority=False)
        files = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePublicKey,
        hosts: list[x509.GeneralName],
        valid_for: timedelta,
        *,
        authority: bool,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * HOUR)
            .not_valid_after(now + valid_for)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        return builder.sign(self._key, hashes.SHA256())


LOCALHOST: list[x509.GeneralName] = [x509.DNSName("localhost")]


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[tuple[int, Authority]]:
    """The port of a broker that speaks TLS as 'localhost' and asks for a client certificate it can check."""
    with services.work_folder() as folder:
        authority = Authority(folder, "authority")
        certificate, key = authority.issue("broker", LOCALHOST)
        (port,) = free_ports(1)
        config = f"""
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.cacertfile = {authority.file}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
"""
        with RabbitNode(folder / "rabbitmq", config=config).start():
            yield port, authority


def test_a_drain_over_tls_moves_small_and_large_bodies_unchanged(
    tls_broker: tuple[int, Authority], tmp_path: Path
) -> None:
    port, authority = tls_broker
    certificate, key = authority.issue("client", LOCALHOST)
    options = {
        "broker_url": f"amqps://guest:guest@localhost:{port}/%2F",
        "tls_ca_file": str(authority.file),
        "tls_cert_file": str(certificate),
        "tls_key_file": str(key),
        "database_url": f"sqlite:///{tmp_path / 'none.sqlite3'}",
        "allow_empty_policy": "true",
    }
    settings = load(options, environ={"DLQBATCH_CONFIG": "/dev/null"})
    wiring.apply_topology(settings)
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(certificate, key)
    parameters = pika.ConnectionParameters("localhost", port, ssl_options=pika.SSLOptions(context, "localhost"))
    bodies = [
        bytes([number % 256]) * size for number, size in enumerate([0, 1, 1000, 131_064, 131_065, 3_000_000] * 20)
    ]
    with pika.BlockingConnection(parameters) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for body in bodies:
            channel.basic_publish("retry-exchange", "retry-routing-key", body)
        report = wiring.run("drain", settings, wiring.Occasion())
        assert report.counts["dead_lettered"] == len(bodies)
        found = [channel.basic_get("dlq-queue", auto_ack=True)[2] for _ in bodies]
    assert found == bodies


def access(port: int, authority: Path | None, client: tuple[Path, Path] | None, host: str = "localhost") -> Access:
    return Access(
        urls=[f"amqps://guest:guest@{host}:{port}/%2F"],
        connect_timeout=3.0,
        tls_ca_file=str(authority) if authority else None,
        tls_cert_file=str(client[0]) if client else None,
        tls_key_file=str(client[1]) if client else None,
    )


def test_connects_to_a_broker_whose_certificate_is_good(tls_broker: tuple[int, Authority]) -> None:
    port, authority = tls_broker
    connection = connect(access(port, authority.file, authority.issue("client", LOCALHOST)))
    with connection.scratch() as scratch:
        scratch.call("queue_declare", queue="over-tls", durable=True)
        assert scratch.call("queue_declare", queue="over-tls", passive=True).message_count == 0
    connection.close()


def test_refuses_a_certificate_of_an_unknown_authority(tls_broker: tuple[int, Authority]) -> None:
    port, authority = tls_broker
    with pytest.raises(BrokerUnreachable, match=r"(?i)certificate verify failed"):
        connect(access(port, None, authority.issue("client", LOCALHOST)))


def test_refuses_a_certificate_for_another_host(tls_broker: tuple[int, Authority]) -> None:
    port, authority = tls_broker
    with pytest.raises(BrokerUnreachable, match=r"(?i)certificate verify failed.*127\.0\.0\.1"):
        connect(access(port, authority.file, authority.issue("client", LOCALHOST), host="127.0.0.1"))


def test_a_broker_that_wants_a_client_certificate_and_gets_none_is_unreachable(
    tls_broker: tuple[int, Authority],
) -> None:
    port, authority = tls_broker
    with pytest.raises(BrokerUnreachable):
        connect(access(port, authority.file, None))
