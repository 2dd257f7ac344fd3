"""Addresses with a password in them: checked, kept, and never shown."""

from __future__ import annotations

import re
from urllib.parse import SplitResult, quote, unquote, urlsplit

from pydantic import Secret

from dlqbatch.amqp.masking import SECRET_PARAMETER, masked_url

_NEXT_URL = re.compile(r"\s*,\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
_ENCODE_HINT = "write @ as %40, : as %3A, / as %2F, ? as %3F and # as %23 inside a user name or password"
_DATABASE_SCHEMES = {
    "sqlite": "sqlite",
    "postgresql+psycopg": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+iam": "postgresql+iam",
}


class SecretUrl(Secret[str]):
    """A URL, or several with commas between them, that shows its password only to `get_secret_value()`."""

    def _display(self) -> str:
        return redact(self.get_secret_value())


class SecretAddress(Secret[str]):
    """A URL that is a secret in its path, as a webhook's is: only its host is shown."""

    def _display(self) -> str:
        parts = urlsplit(self.get_secret_value())
        return f"{parts.scheme}://{parts.hostname}/***"


def with_login(url: str, user: str, password: str) -> str:
    """The same address of a database with another user and password."""
    scheme, _, rest = url.partition("://")
    authority, slash, more = rest.partition("/")
    return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{authority.rpartition('@')[2]}{slash}{more}"


def is_secret(annotation: object) -> bool:
    """Whether an option of this type holds a secret, alone or as one of several types."""
    parts = getattr(annotation, "__args__", ())
    origin = getattr(annotation, "__origin__", annotation)
    return (isinstance(origin, type) and issubclass(origin, Secret)) or any(map(is_secret, parts))


def redact(url: str) -> str:
    """Mask what is secret in a URL or a comma-separated list of them; what is no URL is masked whole."""
    return ",".join(masked_url(one) if "://" in one else "***" for one in split_urls(url))


def secrets_in(url: str) -> tuple[str, ...]:
    """The passwords in a URL or several, as they are written there and as they are sent."""
    found = []
    for one in split_urls(url):
        try:
            parts = urlsplit(one)
            written = [parts.password or "", *(value for _, value in _secret_parameters(parts.query))]
        except ValueError:
            continue
        found += [form for text in written for form in (text, unquote(text)) if form]
    return tuple(dict.fromkeys(found))


def _secret_parameters(query: str) -> list[tuple[str, str]]:
    pairs = (pair.partition("=")[::2] for pair in query.split("&"))
    return [(name, value) for name, value in pairs if SECRET_PARAMETER.search(unquote(name))]


def split_urls(text: str) -> tuple[str, ...]:
    # Only a comma before the next scheme separates: a password may hold one.
    return tuple(_NEXT_URL.split(text.strip()))


def check_broker_url(url: SecretUrl) -> SecretUrl:
    for one in split_urls(url.get_secret_value()):
        parts = _split(one, "an amqp:// or amqps:// address", ("amqp", "amqps"))
        if parts.query or parts.fragment:
            raise ValueError(f"has a ? or # part, which a broker address cannot have; {_ENCODE_HINT}")
        if "/" in parts.path[1:] or "@" in parts.path:
            raise ValueError(f"has a / or @ in its virtual host; write them %2F and %40; {_ENCODE_HINT}")
    return url


def check_database_url(url: SecretUrl) -> SecretUrl:
    """Accept what the dead store can open, and name the driver that SQLAlchemy is to use."""
    scheme, separator, rest = url.get_secret_value().partition("://")
    if not separator or scheme not in _DATABASE_SCHEMES:
        raise ValueError(
            "is not a database address; it must look like postgresql://user:password@host:5432/name "
            "or sqlite:////folder/file.sqlite3"
        )
    if scheme == "sqlite":
        if not rest.isprintable() or not rest.startswith("/"):
            raise ValueError("names no file; write sqlite:/// and then the path, which begins with a / of its own")
        path = rest[1:]
        if not path or path == ":memory:" or path.startswith("file:") or "?" in path:
            raise ValueError("is to name a file, and takes no options: write sqlite:/// and then the path")
    else:
        # The host may be missing: ?host=/run/postgresql is a socket.
        is_iam = scheme == "postgresql+iam"
        parts = _split(f"postgresql://{rest}", "a postgresql:// address", ("postgresql",), needs_host=is_iam)
        if is_iam and (parts.password is not None or not parts.username):
            raise ValueError(
                "is for a token of AWS IAM, which takes a user and no password; write postgresql+iam://USER@HOST/…"
            )
    return SecretUrl(f"{_DATABASE_SCHEMES[scheme]}://{rest}")


def check_management_url(url: SecretUrl) -> SecretUrl:
    parts = _split(url.get_secret_value(), "an http:// or https:// address", ("http", "https"))
    if parts.query or parts.fragment:
        raise ValueError(f"has a ? or # part, which the management address cannot have; {_ENCODE_HINT}")
    return url


def check_webhook_url(url: SecretAddress) -> SecretAddress:
    _split(url.get_secret_value(), "an http:// or https:// address", ("http", "https"))
    return url


def _split(url: str, kind: str, schemes: tuple[str, ...], *, needs_host: bool = True) -> SplitResult:
    wrong = f"is not {kind}, such as {schemes[0]}://user:password@host:port/name"
    # urlsplit drops tabs and newlines without a word, and its own errors quote the password.
    if _UNSAFE.search(url):
        raise ValueError(f"{wrong}; it holds a space or a control character")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(f"has no valid host and port (1 to 65535); {_ENCODE_HINT}") from None
    if port == 0:
        raise ValueError("has port 0; a port is 1 to 65535")
    if parts.scheme not in schemes or (needs_host and not host):
        raise ValueError(wrong)
    if host and "," in host:
        raise ValueError("has a comma in its host; write several hosts as several whole addresses")
    return parts
