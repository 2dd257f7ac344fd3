"""Start the console: who may enter, the printed address, and the server until a signal."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

import uvicorn

from dlqbatch import logs
from dlqbatch.console import audit
from dlqbatch.console.app import Console, application
from dlqbatch.console.logins import is_loopback, logins_of
from dlqbatch.console.rights import Role
from dlqbatch.errors import DlqbatchError
from dlqbatch.settings import Settings
from dlqbatch.store.access import store_for

log = logs.get(__name__)

_ENDS_WITHIN: Final = 3


class AddressRefused(DlqbatchError):
    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"nothing can listen at {address}: {why}. Set dlqbatch.console-address to a free address of this machine. "
            "Nothing was started."
        )


def serve(settings: Settings, user: str, role: Role, say: Callable[[dict[str, str]], None]) -> None:
    """Answer until SIGINT or SIGTERM; `say` prints the address, and the one with the token of this machine alone."""
    logins = logins_of(settings, user, role)
    console = Console(settings, store_for(settings), logins)
    audit.to_stderr()
    with _listening(settings.console_address) as listener:
        address = _address(settings, listener, console.prefix)
        token = {"open": f"{address}/login?token={logins.local_token}"} if logins.local is not None else {}
        say({"address": address, **token})
        is_behind_a_proxy = logins.has_oidc or logins.proxy_secret is not None
        config = uvicorn.Config(
            application(console),
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=is_behind_a_proxy,
            timeout_graceful_shutdown=_ENDS_WITHIN,
            ws="none",
            lifespan="on",
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            # The server raises the signal that has ended it once more, to whoever handled it before.
            signal.signal(number, lambda *_: None)
        uvicorn.Server(config).run(sockets=[listener])


def _listening(address: str) -> socket.socket:
    parts = urlsplit(f"//{address}")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            parts.hostname, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(512)
    except (OSError, UnicodeError) as error:
        raise AddressRefused(address, getattr(error, "strerror", None) or str(error)) from error
    return listener


def _address(settings: Settings, listener: socket.socket, prefix: str) -> str:
    host, port = listener.getsockname()[:2]
    if settings.console_url is not None and not is_loopback(settings.console_address):
        return settings.console_url
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{prefix}"
