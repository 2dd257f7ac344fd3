"""The HTTP API of RabbitMQ's management plugin, as seen from one virtual host."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
from typing import Any
from urllib.parse import quote, unquote, urlsplit

TIMEOUT_SECONDS = 15.0


class ManagementError(RuntimeError):
    """The API answered with another status than 2xx; `status` is that answer."""

    def __init__(self, request: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{request}: {status} {text}")


class Management:
    """Reads a virtual host back from the broker.

    Topology is exact at once. Message counts are statistics: a private node refreshes them twice a second, others
    every five; wait for a count to become right, and never assert one that has not been waited for.
    """

    def __init__(self, url: str, vhost: str = "/") -> None:
        parts = urlsplit(url)
        self.vhost = vhost
        self._address = (parts.hostname or "127.0.0.1", parts.port or 15_672)
        login = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._headers = {
            "Authorization": "Basic " + base64.b64encode(login.encode()).decode(),
            "Content-Type": "application/json",
        }

    def get(self, path: str) -> Any:
        """The answer to GET /api/PATH; names in the path must be quoted already (`quoted`)."""
        return self._request("GET", path)

    def put(self, path: str, body: object = None) -> Any:
        return self._request("PUT", path, {} if body is None else body)

    def post(self, path: str, body: object = None) -> Any:
        return self._request("POST", path, {} if body is None else body)

    def delete(self, path: str) -> None:
        self._request("DELETE", path)

    def queues(self) -> list[dict[str, Any]]:
        return self._list("queues")

    def exchanges(self) -> list[dict[str, Any]]:
        """The exchanges somebody declared: not the default one, not `amq.*`."""
        return [one for one in self._list("exchanges") if one["name"] and not one["name"].startswith("amq.")]

    def bindings(self) -> list[dict[str, Any]]:
        """The bindings somebody made: not those of every queue to the default exchange."""
        return [one for one in self._list("bindings") if one["source"]]

    def queue(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"queues/{quoted(self.vhost)}/{quoted(name)}")
        return found

    def make_vhost(self) -> None:
        """Create this client's virtual host and open it to the client's own user."""
        self.put(f"vhosts/{quoted(self.vhost)}")
        user = self.get("whoami")["name"]
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        self.put(f"permissions/{quoted(self.vhost)}/{quoted(user)}", everything)

    def drop_vhost(self) -> None:
        self.delete(f"vhosts/{quoted(self.vhost)}")

    def _list(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(f"{kind}/{quoted(self.vhost)}")
        return found

    def _request(self, method: str, path: str, body: object = None) -> Any:
        with contextlib.closing(http.client.HTTPConnection(*self._address, timeout=TIMEOUT_SECONDS)) as connection:
            payload = None if body is None else json.dumps(body)
            connection.request(method, "/api/" + path, payload, self._headers)
            response = connection.getresponse()
            text = response.read().decode()
        if not 200 <= response.status < 300:  # noqa: PLR2004 - the HTTP range of success
            raise ManagementError(f"{method} /api/{path}", response.status, text)
        return json.loads(text) if text else None


def quoted(name: str) -> str:
    """A name as one element of a path: the slash of the default virtual host is quoted too."""
    return quote(name, safe="")
