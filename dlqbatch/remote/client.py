"""HTTP to a console: TLS is verified, every wait has a bound, and a decision that is sent again is taken once."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode, urlsplit
from uuid import uuid4

from dlqbatch import __version__
from dlqbatch.errors import DlqbatchError, SettingsError
from dlqbatch.settings import Settings

API: Final = "/api/v1"
KEY: Final = "Idempotency-Key"
INSTANCE: Final = "Idempotency-Instance"
"""Sent with a repeated decision: the process of the console that was asked first."""
_READ_SECONDS: Final = 60.0
_DECIDES_WITHIN: Final = 900.0
"""Seconds in which a console that can be reached has to answer a decision; it works on the first request meanwhile."""
_COMES_BACK_WITHIN: Final = 60.0
"""Seconds after a broken connection in which the console has to be there again, to say what became of a decision."""
_LONGEST_PAUSE: Final = 5.0
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_FAILURES_FROM: Final = 300


class RemoteUnreachable(DlqbatchError):
    exit_code = 4

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(f"the console at {url} cannot be reached: {why}. Nothing was done.")


class TokenRefused(DlqbatchError):
    """The token is wrong, its time is over, or it was taken back: nobody says which."""

    exit_code = 4

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(
            f"the console at {url} does not take this token. It is wrong, its time is over, or it was taken back. "
            "Nothing was done. `dlqbatch console --new-token NAME`, where the console runs, prints a new one"
        )


class OtherVersion(DlqbatchError):
    """What answers is no console, or one of a version that does not know this."""

    exit_code = 2

    def __init__(self, url: str, what: str) -> None:
        self.url, self.what = url, what
        super().__init__(
            f"what answers at {url} {what}: it is no console of dlqbatch, or one of another version than this command "
            f"({__version__}). Nothing was done. Upgrade the older one, or run the command where the console runs"
        )


class DecisionUnknown(DlqbatchError):
    """The connection broke while the console was deciding, and nobody can say what came of it."""

    exit_code = 4

    def __init__(self, url: str, why: str) -> None:
        self.url, self.why = url, why
        super().__init__(
            f"the connection to the console at {url} broke when the decision had been sent: {why}. Whether it was "
            "taken is NOT known. Look before you repeat it: `dlqbatch actions list`, `dlqbatch replay status`"
        )


class _Broken(Exception):
    """The connection broke after something was sent."""


class Answer(NamedTuple):
    status: int
    body: bytes


class Me(NamedTuple):
    """Who the token says that this is, and who answers."""

    name: str
    version: str
    instance: str


class RemoteConsole:
    """A console that is asked by its API."""

    def __init__(
        self, url: str, token: str, connect_seconds: float = 10.0, comes_back_within: float = _COMES_BACK_WITHIN
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self._token, self._connect_seconds, self._comes_back_within = token, connect_seconds, comes_back_within
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._is_tls = parts.scheme == "https"
        if not self._is_tls and self._host not in _LOOPBACK:
            raise SettingsError(
                f"the token would go to {self._host} readable for everybody on the way. Nothing was sent. Set "
                "dlqbatch.remote (--remote) to an https:// address; http:// is for this machine alone"
            )

    @classmethod
    def of(cls, settings: Settings) -> RemoteConsole:
        """SettingsError without a token, or with one that everybody can read in the list of processes."""
        if settings.remote is None or settings.remote_token is None:
            raise SettingsError(
                "--remote takes a token. Put it into a file that only you can read, and name that with "
                "DLQBATCH_REMOTE_TOKEN_FILE. `dlqbatch console --new-token NAME`, where the console runs, prints one"
            )
        if settings.written_in.get("remote_token") == "command line":
            raise SettingsError(
                "a token on the command line can be read by everybody on this machine. Nothing was sent. Put it into a "
                "file, and name that with DLQBATCH_REMOTE_TOKEN_FILE"
            )
        return cls(settings.remote, settings.remote_token.get_secret_value(), settings.connect_timeout_seconds)

    @cached_property
    def me(self) -> Me:
        found = self.get("/me")
        try:
            return Me(found["name"], found["version"], found["instance"])
        except (KeyError, TypeError):
            raise OtherVersion(self.url, "does not say who it is") from None

    def get(self, path: str, **query: object) -> Any:
        words = {name: value for name, value in query.items() if value is not None}
        return self._read("GET", f"{path}?{urlencode(words)}" if words else path, None)

    def ask(self, path: str, *, seconds: float = 0.0, **content: object) -> Any:
        """A question whose filter may be longer than an address, or that takes a reason; it may be asked again."""
        return self._read("POST", path, _without_none(content), seconds)

    def decide(self, path: str, **content: object) -> Any:
        """Have something changed, once: what breaks on the way is sent again, under the same key.

        DecisionUnknown if the console does not come back, or comes back as a process that knows nothing of it.
        """
        instance, headers = self.me.instance, {KEY: uuid4().hex}
        ends, pause, is_repeated = time.monotonic() + _DECIDES_WITHIN, 0.1, False
        body = _without_none(content)
        while True:
            try:
                return self._answer(self._exchange("POST", path, body, headers))
            except (_Broken, RemoteUnreachable) as error:
                if isinstance(error, RemoteUnreachable) and not is_repeated:
                    raise
                if not is_repeated:
                    headers, is_repeated = headers | {INSTANCE: instance}, True
                if isinstance(error, RemoteUnreachable) or not str(error).startswith(_SLOW):
                    ends = min(ends, time.monotonic() + self._comes_back_within)
                if time.monotonic() + pause >= ends:
                    raise DecisionUnknown(self.url, _why(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _read(self, method: str, path: str, content: Mapping[str, object] | None, seconds: float = 0.0) -> Any:
        try:
            return self._answer(self._exchange(method, path, content, {}, _READ_SECONDS + seconds))
        except _Broken as error:
            raise RemoteUnreachable(self.url, str(error)) from None

    def _exchange(
        self,
        method: str,
        path: str,
        content: Mapping[str, object] | None,
        headers: Mapping[str, str],
        seconds: float = _READ_SECONDS,
    ) -> Answer:
        connection = self._connection()
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise RemoteUnreachable(self.url, _os_text(error)) from None
        sent = {
            "Authorization": f"Bearer {self._token}",
            "Accept": "application/json",
            "User-Agent": f"dlqbatch/{__version__}",
            **({} if content is None else {"Content-Type": "application/json"}),
            **headers,
        }
        try:
            connection.sock.settimeout(seconds)
            body = None if content is None else json.dumps(content).encode()
            connection.request(method, f"{self._prefix}{API}{path}", body, sent)
            response = connection.getresponse()
            return Answer(response.status, response.read())
        except TimeoutError:
            raise _Broken(f"{_SLOW} for {seconds:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise _Broken(_os_text(error)) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_tls:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=self._connect_seconds, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=self._connect_seconds)

    def _answer(self, answer: Answer) -> Any:
        try:
            content = json.loads(answer.body)
        except ValueError:
            content = None
        is_failure = answer.status >= _FAILURES_FROM
        if not is_failure and isinstance(content, dict):
            return content
        error = content.get("error") if isinstance(content, dict) else None
        if isinstance(error, dict):
            if answer.status == http.HTTPStatus.UNAUTHORIZED:
                raise TokenRefused(self.url)
            raise error_of(error)
        if answer.status in _PROXY_SAYS:
            raise _Broken(f"a proxy answered {answer.status} {http.HTTPStatus(answer.status).phrase}")
        raise OtherVersion(self.url, f"says {answer.status} to {API}")


_SLOW: Final = "no answer"
_PROXY_SAYS: Final = frozenset({502, 503, 504})


def error_of(error: Mapping[str, Any]) -> DlqbatchError:
    """What the command would have failed with where the console runs: the same class, text and exit code."""
    kind, text, code = str(error.get("type")), str(error.get("message")), error.get("exit_code", 1)
    if "split" in error:
        from dlqbatch.messages.selection import NumberUnexpected, Split  # noqa: PLC0415  (it loads SQLAlchemy)

        return NumberUnexpected(Split.from_dict(error["split"]), error.get("expected"))
    made: type[DlqbatchError] = type(kind, (DlqbatchError,), {"exit_code": code if isinstance(code, int) else 1})
    return made(text)


def segment(word: str) -> str:
    """A word of a person as one part of a path."""
    if not word or set(word) & {"/", "\\"} or set(word) == {"."}:
        from dlqbatch.store.filters import NotUnderstood  # noqa: PLC0415  (only for a mistake)

        raise NotUnderstood(f"'{word}' names nothing. Nothing was done.")
    return quote(word, safe="")


def _without_none(content: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in content.items() if value is not None}


def _why(error: Exception) -> str:
    return error.why if isinstance(error, RemoteUnreachable) else str(error)


def _os_text(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); SSL_CERT_FILE names one of your own"
    return getattr(error, "strerror", None) or str(error) or "the connection was closed"
