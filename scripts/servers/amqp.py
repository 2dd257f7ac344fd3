"""Does a broker let this user in? Only the AMQP handshake, with nothing but the standard library."""

from __future__ import annotations

import socket
import struct
from urllib.parse import unquote, urlsplit

CONNECTION = 10
START, START_OK, TUNE, TUNE_OK, OPEN, OPEN_OK, CLOSE, CLOSE_OK = 10, 11, 30, 31, 40, 41, 50, 51
METHOD_FRAME, FRAME_END = 1, b"\xce"
LARGEST_FRAME = 8_192  # no more than any broker allows; one channel, for the same reason


def accepts(url: str, timeout: float = 3.0) -> bool:
    """Whether the broker at this amqp:// address accepts the login and opens the virtual host."""
    parts = urlsplit(url)
    login = b"\0%b\0%b" % (unquote(parts.username or "guest").encode(), unquote(parts.password or "guest").encode())
    vhost = unquote(parts.path[1:] or "/").encode()
    no_properties = struct.pack(">I", 0)
    try:
        with socket.create_connection((parts.hostname or "127.0.0.1", parts.port or 5672), timeout) as sock:
            sock.sendall(b"AMQP\0\0\x09\x01")
            _expect(sock, START)
            _call(sock, START_OK, no_properties + _short(b"PLAIN") + _long(login) + _short(b"en_US"))
            _expect(sock, TUNE)
            _call(sock, TUNE_OK, struct.pack(">HIH", 1, LARGEST_FRAME, 0))
            _call(sock, OPEN, _short(vhost) + b"\0\0")
            _expect(sock, OPEN_OK)
            # Without a goodbye the broker logs a warning for every look.
            _call(sock, CLOSE, struct.pack(">HBHH", 200, 0, 0, 0))
            _expect(sock, CLOSE_OK)
    except (OSError, struct.error):
        return False
    return True


def _short(text: bytes) -> bytes:
    return struct.pack(">B", len(text)) + text


def _long(text: bytes) -> bytes:
    return struct.pack(">I", len(text)) + text


def _call(sock: socket.socket, method: int, arguments: bytes) -> None:
    payload = struct.pack(">HH", CONNECTION, method) + arguments
    sock.sendall(struct.pack(">BHI", METHOD_FRAME, 0, len(payload)) + payload + FRAME_END)


def _expect(sock: socket.socket, method: int) -> None:
    kind, _, size = struct.unpack(">BHI", _receive(sock, 7))
    if kind != METHOD_FRAME or size > LARGEST_FRAME:
        raise ConnectionError("not AMQP 0-9-1")
    payload = _receive(sock, size + 1)
    if payload[:4] != struct.pack(">HH", CONNECTION, method):
        raise ConnectionError("refused")


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return data
