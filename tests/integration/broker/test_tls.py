"""amqps: certificate and host name are checked unless somebody says that they shall not be."""

from __future__ import annotations

import os
import re
import socket
import ssl
import struct
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pika
import psycopg
import pytest
from certificates import ELSEWHERE, HOUR, LOCALHOST, Authority, TlsLink
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from program import eventually
from sqlalchemy import text
from webhook_receiver import OK, hook

from dlqbatch import jobs
from dlqbatch.broker.access import Access, connect
from dlqbatch.broker.management import Api
from dlqbatch.doctor.job import diagnose
from dlqbatch.errors import BrokerUnreachable, DatabaseUnreadable, SettingsError
from dlqbatch.monitor.alert_rules import Notice, Severity
from dlqbatch.monitor.queue_depths import Depth
from dlqbatch.monitor.receivers import Webhook
from dlqbatch.settings import Settings, load
from dlqbatch.store import migrate
from dlqbatch.store.engine import create_engine_for, reading
from dlqbatch.store.run_log import RunRecord, record
from dlqbatch.topology.declare import apply_topology
from scripts import services
from scripts.servers.postgres import PostgresCluster
from scripts.servers.rabbitmq import RabbitNode
from scripts.servers.server import free_ports

NOTICE = Notice(1, "Backlog", "", Severity.WARNING, "many", 7, None, datetime(2030, 6, 1, tzinfo=UTC))

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def tls_broker() -> Iterator[tuple[int, Authority]]:
    """The port of a broker that speaks TLS as 'localhost' and asks for a client certificate it can check."""
    with services.work_folder(volatile=True) as folder:
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
    apply_topology(settings)
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
        report = jobs.run("drain", settings, jobs.RunOptions())
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
    connection = connect(
        replace(access(port, authority.file, authority.issue("client", LOCALHOST)), connect_timeout=30.0)
    )
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


WRONG_HOST = r"(?i)hostname mismatch|not valid for"
EXPIRED = r"(?i)certificate has expired"
UNKNOWN = r"(?i)unable to get local issuer|self.signed"
WRONG = {"wrong host": WRONG_HOST, "expired": EXPIRED, "unknown authority": UNKNOWN}


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """The one that is trusted, and somebody else's."""
    folder = tmp_path_factory.mktemp("authorities")
    return Authority(folder, "trusted"), Authority(folder, "another")


def shown(authorities: tuple[Authority, Authority], what: str) -> tuple[Path, Path]:
    trusted, another = authorities
    name = what.replace(" ", "-")
    if what == "unknown authority":
        return another.issue(name, LOCALHOST)
    hosts = ELSEWHERE if what == "wrong host" else LOCALHOST
    return trusted.issue(name, hosts, -HOUR if what == "expired" else HOUR)


@pytest.mark.parametrize("what", WRONG)
def test_a_broker_whose_certificate_is_wrong_gets_no_password(
    authorities: tuple[Authority, Authority], broker_url: str, what: str
) -> None:
    port = int(urlsplit(broker_url).port or 0)
    with TlsLink(port, shown(authorities, what)) as link:
        one = access(link.port, authorities[0].file, None)
        with pytest.raises(BrokerUnreachable, match=WRONG[what]):
            connect(replace(one, connect_timeout=1.0))
        # Only who says so trusts anybody.
        connect(replace(one, tls_verify=False, connect_timeout=30.0)).close()


def of_jobs(tmp_path: Path, link: TlsLink, api: TlsLink, vhost: str, authorities: Any, **files: Any) -> Settings:
    given = {
        "broker_url": f"amqps://guest:guest@localhost:{link.port}/{vhost}",
        "management_url": f"https://guest:guest@localhost:{api.port}",
        "database_url": f"sqlite:///{tmp_path / 'store.sqlite3'}",
        "tls_ca_file": str(authorities[0].file),
        "allow_empty_policy": "true",
        "check_queues": "dlq.*",
        "connect_timeout_seconds": "1",
        **files,
    }
    return load(given, environ={"DLQBATCH_CONFIG": "/dev/null"})


# A request that the other side ends leaves its socket to the garbage collector: urllib's way.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_job_shows_its_client_certificate_to_the_broker_and_to_the_management_api(
    authorities: tuple[Authority, Authority], broker_url: str, broker_addresses: tuple[str, str], tmp_path: Path
) -> None:
    trusted, another = authorities
    server = shown(authorities, "good")
    migrate.upgrade(f"sqlite:///{tmp_path / 'store.sqlite3'}")
    place, api = urlsplit(broker_url), urlsplit(broker_addresses[1])
    with TlsLink(int(place.port or 0), server, trusted) as link, TlsLink(int(api.port or 0), server, trusted) as http:

        def settings(client: tuple[Path, Path] | None) -> Settings:
            files = {} if client is None else {"tls_cert_file": str(client[0]), "tls_key_file": str(client[1])}
            return of_jobs(tmp_path, link, http, place.path[1:], authorities, **files)

        def doctor(found: Settings) -> set[str]:
            return {one.code for one in diagnose(found).findings}

        right = settings(trusted.issue("client", LOCALHOST)).model_copy(update={"connect_timeout_seconds": 30.0})
        apply_topology(right)
        for job in ("drain", "ingest", "check", "lifecycle"):
            assert jobs.run(job, right, jobs.RunOptions()).outcome == "ok", job
        assert Depth(right).read() is not None
        assert "management-silent" not in doctor(right)
        for wrong in (settings(None), settings(another.issue("stranger", LOCALHOST))):
            for job in ("drain", "ingest", "check", "lifecycle"):
                with pytest.raises(BrokerUnreachable) as refused:
                    jobs.run(job, wrong, jobs.RunOptions())
                assert "guest:guest" not in str(refused.value)
            assert Depth(wrong).read() is None
            with pytest.raises(BrokerUnreachable):
                apply_topology(wrong)


@pytest.mark.parametrize("what", WRONG)
def test_a_management_api_whose_certificate_is_wrong_gets_no_password(
    authorities: tuple[Authority, Authority],
    broker_url: str,
    broker_addresses: tuple[str, str],
    tmp_path: Path,
    what: str,
) -> None:
    """The broker itself may be reached without TLS: the files are for the API then."""
    with TlsLink(int(urlsplit(broker_addresses[1]).port or 0), shown(authorities, what)) as link:
        given = {
            "broker_url": broker_url,
            "management_url": f"https://guest:guest@localhost:{link.port}",
            "database_url": f"sqlite:///{tmp_path / 'none.sqlite3'}",
            "tls_ca_file": str(authorities[0].file),
            "check_queues": "dlq.*",
        }
        with pytest.raises(BrokerUnreachable, match=WRONG[what]):
            jobs.run("check", load(given, environ={"DLQBATCH_CONFIG": "/dev/null"}), jobs.RunOptions())
        given["tls_verify"] = "false"
        report = jobs.run("check", load(given, environ={"DLQBATCH_CONFIG": "/dev/null"}), jobs.RunOptions())
        assert report.outcome == "ok"


def test_a_file_that_cannot_be_used_is_named(authorities: tuple[Authority, Authority], tmp_path: Path) -> None:
    trusted, another = authorities
    certificate, key = trusted.issue("client", LOCALHOST)
    _, other_key = another.issue("other", LOCALHOST)
    junk, locked = tmp_path / "junk.pem", tmp_path / "locked.key"
    junk.write_text("no certificate")
    secret = serialization.load_pem_private_key(key.read_bytes(), None)
    locked.write_bytes(
        secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"passphrase"),
        )
    )
    for files, words in {
        (junk, certificate, key): "tls_ca_file .*junk.pem",
        (trusted.file, junk, key): "tls_cert_file .*junk.pem",
        (trusted.file, certificate, other_key): "the key is not that of the certificate",
        (trusted.file, certificate, locked): "the key is encrypted",
        (trusted.file, certificate, tmp_path / "none"): "No such file",
    }.items():
        names = dict(zip(("tls_ca_file", "tls_cert_file", "tls_key_file"), map(str, files), strict=True))
        with pytest.raises(SettingsError, match=words):
            connect(Access(["amqps://localhost:1/"], connect_timeout=1.0, **names))
        with pytest.raises(SettingsError, match=words):
            Api("amqps://localhost:1/", "https://localhost:1", **names).ask("overview")


@pytest.mark.parametrize("what", ["good", *WRONG])
def test_a_webhook_whose_certificate_is_wrong_is_not_told(
    authorities: tuple[Authority, Authority], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    # Its authority is one of the system's, or of the file that this variable of OpenSSL's names.
    monkeypatch.setenv("SSL_CERT_FILE", str(authorities[0].file))
    with hook(OK) as other, TlsLink(other.port, shown(authorities, what)) as link:
        answer = Webhook(f"https://localhost:{link.port}/T0KEN", total=3.0).send([NOTICE])
        if what == "good":
            assert (answer, len(other.requests)) == (None, 1)
        else:
            assert answer is not None
            assert "its certificate is not trusted" in answer
            assert re.search(WRONG[what], answer)
            assert "T0KEN" not in answer
            assert other.requests == []


@pytest.fixture(scope="module")
def tls_cluster(authorities: tuple[Authority, Authority]) -> Iterator[PostgresCluster]:
    with services.work_folder(volatile=True) as folder, PostgresCluster(folder / "postgres").start() as cluster:
        yield cluster


def present(cluster: PostgresCluster, certificate: tuple[Path, Path]) -> None:
    """The server shows this one from now on."""
    owner = cluster.data.stat()
    for source, name in zip(certificate, ("server.crt", "server.key"), strict=True):
        target = cluster.data / name
        target.write_bytes(source.read_bytes())
        os.chown(target, owner.st_uid, owner.st_gid)
        target.chmod(0o600)
    with psycopg.connect(cluster.url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET ssl = on")
        connection.execute("SELECT pg_reload_conf()")
    wanted = x509.load_pem_x509_certificate(certificate[0].read_bytes()).public_bytes(serialization.Encoding.DER)
    assert eventually(lambda: presented(cluster.port) == wanted)


def presented(port: int) -> bytes | None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", port), 10) as plain:
        plain.sendall(struct.pack(">II", 8, 80_877_103))
        if plain.recv(1) != b"S":
            return None
        with context.wrap_socket(plain) as secured:
            return secured.getpeercert(binary_form=True)


@pytest.mark.parametrize("what", ["good", *WRONG])
def test_a_database_whose_certificate_is_wrong_gets_no_password(
    authorities: tuple[Authority, Authority], tls_cluster: PostgresCluster, what: str
) -> None:
    present(tls_cluster, shown(authorities, what))
    query = f"sslmode=verify-full&sslrootcert={authorities[0].file}"
    url = f"postgresql+psycopg://postgres:secret-word@localhost:{tls_cluster.port}/postgres?{query}"
    engine = create_engine_for(url, connect_timeout=30)
    now = datetime.now(UTC)
    run = RunRecord("drain", now, now, "ok", "empty", (), {})
    if what == "good":
        with reading(engine) as connection:
            assert connection.execute(text("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")).scalar() is True
        # There is no such table, which only somebody who came in can know.
        assert record(url, run).warning is None
        return
    words = {"wrong host": "does not match", "expired": "certificate", "unknown authority": "certificate verify failed"}
    with pytest.raises(DatabaseUnreadable, match=words[what]) as refused, reading(engine):
        pass
    warning = record(url, run).warning
    assert warning is not None
    assert words[what] in warning
    assert "secret-word" not in str(refused.value) + warning
