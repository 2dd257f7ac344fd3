"""Certificates of a test's own, and a server end that shows them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from program import HANGS_AFTER

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

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
ELSEWHERE: list[x509.GeneralName] = [x509.DNSName("elsewhere.example")]


class TlsLink:
    """A server end of TLS before a server that speaks none, whichever protocol it has.

    With an authority for `clients` it takes only those who show a certificate of it.
    """

    def __init__(self, target: int, certificate: tuple[Path, Path], clients: Authority | None = None) -> None:
        self._target = ("127.0.0.1", target)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*certificate)
        if clients is not None:
            self._context.load_verify_locations(clients.file)
            self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)
        self._serving: list[threading.Thread] = []
        self._open: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _hang_up(self._listener)
        self._accepting.join(HANGS_AFTER)
        for one in self._open:
            _hang_up(one)
        for thread in self._serving:
            thread.join(HANGS_AFTER)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._listener.accept()
                self._open.append(taken)
                self._serving.append(threading.Thread(target=self._serve, args=(taken,)))
                self._serving[-1].start()

    def _serve(self, taken: socket.socket) -> None:
        with taken, contextlib.suppress(OSError):
            taken.settimeout(20)
            with (
                self._context.wrap_socket(taken, server_side=True) as near,
                socket.create_connection(self._target) as far,
            ):
                self._open += (near, far)
                near.settimeout(0.01)
                far.settimeout(0.01)
                while True:
                    # One thread for both ways: two would use one TLS connection at once.
                    for source, sink in ((near, far), (far, near)):
                        with contextlib.suppress(TimeoutError):
                            data = source.recv(65_536)
                            if not data:
                                return
                            sink.settimeout(20)
                            sink.sendall(data)
                            sink.settimeout(0.01)


def _hang_up(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
