"""What wildcards match, and whom an API behind https has to convince."""

from __future__ import annotations

import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import pytest
from broker_client import Side
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dlqbatch.broker.management import Api, expansion
from dlqbatch.errors import BrokerUnreachable, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from scripts.servers.management import Management

BROKER = "amqps://127.0.0.1/"


def test_a_wildcard_that_matches_nothing_is_told(broker_url: str, broker_addresses: tuple[str, str]) -> None:
    side = Side(broker_url)
    for name in ("dlq.a", "dlq.b", "orders"):
        side.queue(name)
    found = expansion(["dlq.*", "fail.*", "gone", "*.a", "none*"], Api(broker_url, broker_addresses[1]))
    side.close()
    assert found.queues == ("gone", "dlq.a", "dlq.b")
    assert found.unmatched == ("fail.*", "none*")


@pytest.mark.usefixtures("on_every_broker")
def test_a_stream_that_a_wildcard_matches_is_left_out_and_told(broker_url: str, management: Management) -> None:
    side = Side(broker_url)
    side.queue("dlq.s", "stream")
    side.queue("dlq.z")
    found = expansion(["dlq.*", "*.s"], Api(broker_url, "http://guest:guest@{}:{}".format(*management._address)))
    side.close()
    assert found == (("dlq.z",), (), ("'dlq.s' is a stream and is left out",), {"dlq.z": "classic"})


def expand(names: list[str], broker_url: str, url: str | None, **trust: Any) -> tuple[str, ...]:
    return expansion(names, Api(broker_url, url, **trust)).queues


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key in the same file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "management")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    file = tmp_path / "management.pem"
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(certificate.public_bytes(encoding) + private)
    return file


@pytest.fixture
def api(authority: Path) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = json.dumps({"page_count": 1, "items": [{"name": "dlq.a"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_api_behind_https_is_trusted_by_the_file_that_the_broker_is(api: str, authority: Path) -> None:
    assert expand(["dlq.*"], BROKER, api, tls_ca_file=str(authority)) == ("dlq.a",)
    assert expand(["dlq.*"], BROKER, api, tls_verify=False) == ("dlq.a",)
    with pytest.raises(BrokerUnreachable, match="certificate"):
        expand(["dlq.*"], BROKER, api)


def test_a_certificate_for_another_host_is_not_trusted(api: str, authority: Path) -> None:
    with pytest.raises(BrokerUnreachable, match="localhost"):
        expand(["dlq.*"], BROKER, api.replace("127.0.0.1", "localhost"), tls_ca_file=str(authority))


def test_a_file_of_authorities_that_is_none_is_named(api: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no-such\.pem"):
        expand(["dlq.*"], BROKER, api, tls_ca_file=str(tmp_path / "no-such.pem"))
