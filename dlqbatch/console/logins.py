"""How the console knows who somebody is: a signed cookie after a login, a trusted proxy's header, or a token."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from dlqbatch.console.rights import Members, Person, Role
from dlqbatch.errors import SettingsError
from dlqbatch.settings import Settings

SESSION: Final = timedelta(hours=10)
PROXY_HEADER: Final = "X-Dlqbatch-Proxy-Secret"
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_LONGEST_COOKIE: Final = 4_096
_MOST_ENDED: Final = 10_000


def host_of(address: str) -> str:
    return address.rpartition(":")[0].strip("[]").lower()


def is_loopback(address: str) -> bool:
    return host_of(address) in _LOOPBACK


class Sessions:
    """Cookies that say who logged in: signed, with an end, and refused from the moment of a logout here."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._ended: dict[str, float] = {}

    def issue(self, person: Person, now: float | None = None) -> str:
        now = time.time() if now is None else now
        content = {
            "id": secrets.token_hex(8),
            "name": person.name,
            "role": int(person.role),
            "reveal": person.may_reveal,
            "verified": person.is_verified,
            "by": person.by,
            "ends": now + SESSION.total_seconds(),
        }
        return self.sign(content)

    def person(self, cookie: str | None, now: float | None = None) -> Person | None:
        content = self.read(cookie, now)
        if content is None or content.get("id") in self._ended or "role" not in content:
            return None
        role, reveal, verified = Role(int(str(content["role"]))), bool(content["reveal"]), bool(content["verified"])
        return Person(str(content["name"]), role, reveal, verified, str(content["by"]))

    def end(self, cookie: str | None) -> None:
        content = self.read(cookie)
        if content is not None:
            now = time.time()
            self._ended = {each: ends for each, ends in self._ended.items() if ends > now}
            if len(self._ended) < _MOST_ENDED:
                self._ended[str(content["id"])] = float(str(content["ends"]))

    def sign(self, content: Mapping[str, object]) -> str:
        body = urlsafe_b64encode(json.dumps(content, separators=(",", ":")).encode())
        return f"{body.decode()}.{self._signature(body)}"

    def read(self, cookie: str | None, now: float | None = None) -> dict[str, object] | None:
        """What a cookie of ours holds; None if it is none of ours, or its time is over."""
        if not cookie or len(cookie) > _LONGEST_COOKIE or not cookie.isascii():
            return None
        body, _, signature = cookie.partition(".")
        if not hmac.compare_digest(signature, self._signature(body.encode())):
            return None
        content: dict[str, object] = json.loads(urlsafe_b64decode(body))
        return content if float(str(content["ends"])) > (time.time() if now is None else now) else None

    def _signature(self, body: bytes) -> str:
        return urlsafe_b64encode(hmac.new(self._key, body, hashlib.sha256).digest()).decode()


@dataclass(frozen=True, slots=True)
class ApiToken:
    name: str
    role: Role
    may_reveal: bool
    ends: datetime
    digest: str


def token_line(name: str, role: Role, *, may_reveal: bool, ends: datetime) -> tuple[str, str]:
    """A new token, and the line for the file that lets it in; the file holds only its digest."""
    token = f"dlq_{secrets.token_urlsafe(32)}"
    right = role.word + ("+reveal" if may_reveal else "")
    return token, f"{name} {right} {ends:%Y-%m-%dT%H:%M:%SZ} sha256 {_digest(token)}"


def parse_tokens(text: str) -> tuple[ApiToken, ...]:
    """The tokens of a file: `NAME ROLE ENDS sha256 DIGEST` on each line; # begins a comment."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        try:
            found.append(_token(*parts))
        except (ValueError, KeyError, TypeError):
            raise SettingsError(
                f"line {number} of the file of tokens is not `NAME ROLE ENDS sha256 DIGEST`; "
                "`dlqbatch console --new-token NAME` prints such a line"
            ) from None
    return tuple(found)


def _token(name: str, right: str, ends: str, kind: str, digest: str) -> ApiToken:
    """ValueError, KeyError or TypeError if it is none."""
    role, _, reveal = right.partition("+")
    if kind != "sha256" or len(digest) != hashlib.sha256().digest_size * 2 or reveal not in {"", "reveal"}:
        raise ValueError(kind)
    at = datetime.fromisoformat(ends)
    at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
    return ApiToken(name, Role[role.upper()], bool(reveal), at, digest.lower())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


class ApiTokens:
    """The tokens of a file, which is read again when it changes: a line that is taken out counts no more."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._read: tuple[tuple[int, int], tuple[ApiToken, ...]] | None = None

    def person(self, token: str, now: datetime | None = None) -> Person | None:
        digest = _digest(token)
        for each in self._tokens():
            # Every line is compared, so that the time says nothing about which one is nearly right.
            if hmac.compare_digest(each.digest, digest) and each.ends > (now or datetime.now(UTC)):
                return Person(each.name, each.role, each.may_reveal, is_verified=True, by="token")
        return None

    def _tokens(self) -> tuple[ApiToken, ...]:
        if self._path is None:
            return ()
        try:
            found = self._path.stat()
            version = (found.st_mtime_ns, found.st_size)
            if self._read is None or self._read[0] != version:
                self._read = (version, parse_tokens(self._path.read_text()))
        except (OSError, UnicodeError):
            return ()  # without the file nobody is let in
        return self._read[1]


@dataclass(slots=True)
class Logins:
    """Every way in that the settings open."""

    sessions: Sessions
    tokens: ApiTokens
    members: Members
    proxy_secret: str | None
    proxy_user_header: str
    proxy_groups_header: str
    has_oidc: bool
    local: Person | None = None
    """Whoever started a console on this machine alone; the token of the printed address makes this person."""
    local_token: str = field(default="", repr=False)

    def by_local_token(self, token: str) -> Person | None:
        if self.local is None or not hmac.compare_digest(token.encode(), self.local_token.encode()):
            return None
        return self.local

    def by_proxy(self, headers: Mapping[str, str]) -> Person | None:
        said = headers.get(PROXY_HEADER, "")
        if self.proxy_secret is None or not hmac.compare_digest(said.encode(), self.proxy_secret.encode()):
            return None
        name = headers.get(self.proxy_user_header, "").strip()
        groups = [group.strip() for group in headers.get(self.proxy_groups_header, "").split(",")]
        return self.members.person(name, [group for group in groups if group], "proxy") if name else None


def logins_of(settings: Settings, user: str, role: Role) -> Logins:
    """The ways in; SettingsError where the console could be reached from elsewhere and nothing says who is there."""
    oidc = settings.console_oidc_issuer is not None
    proxy = settings.console_proxy_secret
    members = Members(
        settings.console_readers, settings.console_operators, settings.console_admins, settings.console_revealers
    )
    if oidc and not (settings.console_oidc_client_id and settings.console_url):
        raise SettingsError(
            "a login at an OIDC provider needs dlqbatch.console-oidc-client-id and dlqbatch.console-url too. Nothing "
            "was started"
        )
    if (oidc or proxy is not None) and not any((members.readers, members.operators, members.admins)):
        raise SettingsError(
            "nobody could look at anything: name people or groups in dlqbatch.console-readers, "
            "dlqbatch.console-operators or dlqbatch.console-admins (* is everybody who has logged in). Nothing was "
            "started"
        )
    if settings.console_tokens is not None:
        parse_tokens(settings.console_tokens.read_text())
    is_local = is_loopback(settings.console_address) and not oidc and proxy is None
    if not is_local and not oidc and proxy is None and settings.console_tokens is None:
        raise SettingsError(
            f"{settings.console_address} can be reached from other machines, and nothing says who is there. Set "
            "dlqbatch.console-oidc-issuer, or dlqbatch.console-proxy-secret for a proxy that logs people in, or "
            "dlqbatch.console-tokens for programs; or listen at 127.0.0.1. Nothing was started"
        )
    key = settings.console_secret
    return Logins(
        sessions=Sessions(key.get_secret_value().encode() if key is not None else secrets.token_bytes(32)),
        tokens=ApiTokens(settings.console_tokens),
        members=members,
        proxy_secret=None if proxy is None else proxy.get_secret_value(),
        proxy_user_header=settings.console_proxy_user_header,
        proxy_groups_header=settings.console_proxy_groups_header,
        has_oidc=oidc,
        local=Person(user, role, may_reveal=role is Role.ADMIN, is_verified=False, by="this machine")
        if is_local
        else None,
        local_token=secrets.token_urlsafe(24),
    )
