"""What is hidden when a message is shown: secrets by the name of a header or a JSON member, by JSON path, by pattern.

Nothing here changes a message: the stored bytes stay, and what is sent is sent as it was. The work is bounded: of a
text only the first part is looked through, and what was not looked through is not shown.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final
from urllib.parse import unquote, unquote_plus

from dlqbatch.amqp.json_path import Path, Places, follow, parse, start
from dlqbatch.amqp.packed import BASE64, FROM_URL, GZIP
from dlqbatch.amqp.patterns import pattern as wildcard

MASK: Final = "***"
LONGEST: Final = 1024 * 1024
"""The largest part of a text or a body, in characters, that is looked through and shown."""
_CUT: Final = "… the rest is not shown while secrets are masked"
_DEEPEST_TEXT: Final = 4
"""JSON can hold JSON as a text, and so on: from here on such a text is hidden whole."""
_DEEPEST: Final = 500
"""What is nested deeper in a document than this is hidden: no program reads it, and no person."""
_LONGEST_KEY: Final = 256
_SHORTEST_PATTERN: Final = 13
"""A word of fewer letters and digits is no secret by any pattern that is built in."""

# --- Names

_SEPARATORS: Final = re.compile(r"[\s_.\-]+")
_SECRET_NAME: Final = re.compile(
    r"authorization|cookie|passw|passphrase|pwd|secret|token|apikey|accesskey|privatekey|signingkey|credential|sessionid"
    r"|cardnumber|creditcard|(?:^|card)(?:cvv|cvc|csc)2?$|^(?:pass|pan|pin|ssn|otp|jwt)$"
)
NAMES: Final = (
    "authorization, cookie, password, passphrase, pwd, secret, token, api key, access key, private key, signing key, "
    "credential, session id, card number, credit card, cvv, cvc, pan, pin, ssn, otp, jwt"
)
"""The names that hide a value without any setting, as people read them."""

# --- Patterns: every quantifier that could be tried again from each character has a bound.

SECRET_PARAMETER: Final = re.compile(r"pass|pwd|secret|token|key|credential", re.IGNORECASE)
_URL: Final = re.compile(r"(?:sqlite)?://\S+")
_NAMED: Final = (
    r"(?:passw|pwd|passphrase|secret|token|(?:api|access|private|signing)[_-]?key|credential|session[_-]?id|cookie"
    r"|card[_-]?number|\bcvv2?\b|\bcvc2?\b|\bpass\b)"
)
_VALUE: Final = (
    r"(?:\\{1,8}\"[^\"]{1,65536}\"|[bru]{0,2}\"(?:[^\"\\]|\\.){1,65536}(?:\"|\Z)"
    r"|[bru]{0,2}'(?:[^'\\]|\\.){1,65536}(?:'|\Z)"
    r"|(?:(?:bearer|basic|digest)\s+)?[^&\s]+)"
)
_PAIR: Final = re.compile(
    # password=…, "password": "…", X-Api-Key: …; not the address that a text goes on with.
    rf"({_NAMED}[\w-]{{0,40}}\\{{0,8}}[\"']?(?:=>?|\s?[:=]>?\s?))(?!//){_VALUE}",
    re.IGNORECASE | re.DOTALL,
)
_LOGIN: Final = re.compile(
    # An Authorization or Cookie header goes on to the end of its line, or of the quotes that it stands in.
    r"((?:authorization|cookie)\\{0,8}[\"']?\s?[:=]\s?\\{0,8}[\"']?)(?!//)[^\r\n\"'\\]{1,65536}",
    re.IGNORECASE,
)
_ELEMENT: Final = re.compile(
    rf"(<(?:[\w-]{{1,40}}:)?[\w-]{{0,40}}?{_NAMED}[^<>]{{0,200}}>)[^<]{{1,65536}}", re.IGNORECASE
)
_ALONE: Final = re.compile(
    r"\b(bearer\s+)[\w.~+/=-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?<![\w.-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?"
    r"|\bgh[pousr]_\w{30,}|\bxox[abeprs]-[\w-]{10,}|\b[sr]k_(?:live|test)_\w{10,}|\bAIza[\w-]{35}"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----(?:[^-]|-(?!----END)){0,65536}",
    re.IGNORECASE,
)
_DIGITS: Final = re.compile(r"(?<![\w.+])\d+(?:[ -]\d+)*+")
_CARD_BEGINS: Final = re.compile(r"[3-6]|2[2-7]")
_SHORTEST_CARD, _LONGEST_CARD = 13, 19
_UNREADABLE: Final = re.compile(
    # In msgpack, pickle and their kin a name is followed by some bytes that are no text, then by its value.
    rf"({_NAMED}[\w-]{{0,40}}[^ -~]{{1,8}})[ -~]{{1,65536}}",
    re.IGNORECASE,
)
_PACKED: Final = (
    *(GZIP, b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04"),
    *(b"\x04\x22\x4d\x18", b"\x78\x01", b"\x78\x9c", b"\x78\xda"),
)
"""The first bytes of what is compressed: whoever can unpack it would read what a mask has left in it."""
_PACKINGS: Final = re.compile(r"gzip|deflate|compress|zstd|zlib|br|brotli|bzip2|lzma|xz|lz4|snappy", re.IGNORECASE)
_BASIC: Final = re.compile(r"\b(basic\s+)([A-Za-z0-9+/]{4,}={0,2})", re.IGNORECASE)
_PERCENT: Final = re.compile("%(?:25){0,8}(?:22|3[AD])", re.IGNORECASE)
"""Where a quote, a colon or an equals sign is encoded, a text may hold a document or a pair."""
_WORD: Final = re.compile(r"[^\s&=\"'<>]+")


def masked_url(url: str) -> str:
    """A URL without its password, the token in front of its host, and the parameters that have the name of a secret."""
    scheme, _, rest = url.partition("://")
    # The absolute path of a SQLite file may hold an @; with a : or ? it may be an address with a password after all.
    is_path = scheme == "sqlite" and rest.startswith("//") and not {":", "?"} & set(rest)
    address, question, query = (rest if is_path else _without_login(rest)).partition("?")
    return f"{scheme}://{address}{question}{'&'.join(map(_masked_parameter, query.split('&')))}"


def _masked_parameter(pair: str) -> str:
    name, equals, _ = pair.partition("=")
    return f"{name}={MASK}" if equals and SECRET_PARAMETER.search(unquote(name)) else pair


def _without_login(rest: str) -> str:
    # The last @ counts: a password may hold an @ or a / that should have been encoded.
    secret, at, place = rest.rpartition("@")
    if "?" in secret:  # nobody can tell which side of the ? or of the @ is the password
        return MASK
    user, colon, _ = secret.partition(":")
    return f"{user}:{MASK}@{place}" if colon else f"{MASK}@{place}" if at else rest


def is_card_number(digits: str) -> bool:
    """Whether the check digit of a card number is right (Luhn)."""
    total = 0
    for place, digit in enumerate(reversed(digits)):
        doubled = int(digit) * 2 if place % 2 else int(digit)
        total += doubled - 9 if doubled > 9 else doubled  # noqa: PLR2004  (the sum of its two digits)
    return total % 10 == 0


def _cards(found: re.Match[str]) -> str:
    """A run of digits with each card number in it masked; what stands around a number is kept."""
    run = found[0]
    groups = [(each.start(), each.end()) for each in re.finditer(r"\d+", run)]
    out, at, first = [], 0, 0
    while first < len(groups):
        begins = groups[first][0]
        end = _end_of_card(run, groups[first : first + _LONGEST_CARD]) if _CARD_BEGINS.match(run, begins) else None
        if end is not None:
            out += [run[at:begins], MASK]
            at = end
        first += 1
        while first < len(groups) and groups[first][0] < at:
            first += 1
    return "".join(out) + run[at:]


def _end_of_card(run: str, groups: list[tuple[int, int]]) -> int | None:
    """The end of the card number that begins with the first of these groups of digits."""
    digits = ""
    for begin, end in groups:
        digits += run[begin : min(end, begin + _LONGEST_CARD + 1)]
        if len(digits) > _LONGEST_CARD:
            return None
        if len(digits) >= _SHORTEST_CARD and is_card_number(digits):
            return end
    return None


_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\],:]|[^\s{}\[\],:"]+|\s+', re.DOTALL)


@dataclass(slots=True)
class _Frame:
    """An object or a list that is open while JSON is read."""

    places: Places
    member: str | int | None
    """The name or the number of the member that is read; None while an object waits for a name."""
    is_object: bool


_BYTE_ORDER_MARK: Final = "\ufeff"
_OPENING, _CLOSING = ("{", "["), ("}", "]")
_QUOTED: Final = f'"{MASK}"'


def _pass(stack: list[_Frame], part: str) -> None:
    """Go past a closing bracket, a comma, a colon or white space."""
    if part in _CLOSING and stack:
        stack.pop()
    elif part == "," and stack:
        frame = stack[-1]
        frame.member = None if frame.is_object else int(frame.member or 0) + 1


@dataclass(frozen=True)
class Masking:
    """The rules; what is built in holds beside them."""

    headers: tuple[str, ...] = ()
    """Names of headers; `*` stands for any text, and upper and lower case are the same."""
    paths: tuple[str, ...] = ()
    """JSON paths."""
    patterns: tuple[str, ...] = ()
    """Regular expressions; the settings refuse what could take very long."""
    shown: tuple[str, ...] = ()
    """Names that are shown although they look like those of secrets."""

    @cached_property
    def _paths(self) -> tuple[Path, ...]:
        return tuple(map(parse, self.paths))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(map(re.compile, self.patterns))

    @cached_property
    def _headers(self) -> tuple[re.Pattern[str], ...]:
        return tuple(wildcard(_key(name)) for name in self.headers)

    @cached_property
    def _shown(self) -> tuple[re.Pattern[str], ...]:
        return tuple(wildcard(_key(name)) for name in self.shown)

    def is_secret(self, name: str, *, is_header: bool = False) -> bool:
        """Whether the value of this name is hidden."""
        key = _key(name)
        if any(each.fullmatch(key) for each in self._shown):
            return False
        return _SECRET_NAME.search(key) is not None or (
            is_header and any(each.fullmatch(key) for each in self._headers)
        )

    def text(self, text: str, depth: int = 0) -> str:
        """The text with a mask for each secret in it; `depth` counts the texts that it was decoded from."""
        if len(text) < _SHORTEST_PATTERN and text.isalnum() and not self.patterns:
            return text
        rest = ""
        if len(text) > LONGEST:
            text, rest = text[:LONGEST], _CUT
        text = _URL.sub(lambda found: masked_url(found[0]), text)
        text = _PAIR.sub(rf"\1{MASK}", _LOGIN.sub(rf"\1{MASK}", text))
        text = _ELEMENT.sub(rf"\1{MASK}", text)
        text = _DIGITS.sub(_cards, _ALONE.sub(lambda found: f"{found[1] or ''}{MASK}", text))
        text = _BASIC.sub(_basic, text)
        if depth < _DEEPEST_TEXT and _PERCENT.search(text):
            text = _WORD.sub(lambda found: self._encoded(found[0], depth), text)
        for each in self._patterns:
            text = each.sub(MASK, text)
        return text + rest

    def _encoded(self, word: str, depth: int) -> str:
        """A word that may be percent-encoded; the whole of it is hidden if it holds a secret."""
        said = unquote_plus(word) if "%" in word else word
        return word if said == word or self._string(said, depth + 1) == said else MASK

    def fields(self, fields: Mapping[str, object]) -> dict[str, object]:
        """Headers or properties by name, with their secret values hidden."""
        return {self.text(name): self._field(name, value) for name, value in fields.items()}

    def _field(self, name: str, value: object) -> object:
        # Of two headers with one name the second is called `name (2)`.
        if self.is_secret(name.partition(" (")[0], is_header=True):
            return value if value in (None, "") else MASK
        return self.value(value)

    def value(self, value: Any) -> Any:
        """A value of any header, or a text that may be JSON, with its secrets hidden."""
        if isinstance(value, str):
            return self._string(value, 0)
        if isinstance(value, Mapping):
            return self.fields(value)
        if isinstance(value, (list, tuple)):
            return [self.value(each) for each in value]
        return MASK if isinstance(value, int) and self.text(str(value)) != str(value) else value

    def body(self, body: bytes, encoding: object = None) -> bytes:
        """The bytes with their secrets hidden; they are for people, and never sent. `encoding` is its property."""
        if body.startswith(_PACKED) or (isinstance(encoding, str) and _PACKINGS.search(encoding)):
            return MASK.encode() if body else body
        head, rest = body[:LONGEST], _CUT.encode() if len(body) > LONGEST else b""
        try:
            text = head.decode("utf-8", "ignore" if rest else "strict")
        except UnicodeDecodeError:
            return self._unreadable(head) + rest
        if "\0" in text:
            return self._unreadable(head) + rest
        return self._string(text, 0).encode() + rest

    def _unreadable(self, data: bytes) -> bytes:
        """Bytes that are no text: what can be read in them is masked as text."""
        text = data.decode("latin-1")
        # With two bytes for each character no pattern finds anything.
        squeezed = text.replace("\0", "")
        if 2 * len(squeezed) <= len(text) + 2 and self._string(squeezed, 0) != squeezed:
            return MASK.encode()
        return _UNREADABLE.sub(rf"\1{MASK}", self.text(text)).encode("latin-1", "replace")

    def _string(self, text: str, depth: int) -> str:
        """A text that may be JSON, or hold it in base64."""
        begins = text.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1]
        if depth >= _DEEPEST_TEXT:
            return MASK if begins in ("{", "[") or BASE64.fullmatch(text) else self.text(text, depth)
        if BASE64.fullmatch(text) and len(text) <= LONGEST and self._is_secret_base64(text, depth):
            return MASK
        if begins not in ("{", "["):
            return self.text(text, depth)
        masked = self._json(text[:LONGEST], depth) + (_CUT if len(text) > LONGEST else "")
        # Where it is no JSON after all, what stands between its strings is a text like any other.
        return masked if _is_json(text) else self.text(masked)

    def _is_secret_base64(self, text: str, depth: int) -> bool:
        try:
            data = b64decode(text.translate(FROM_URL) + "==")
        except ValueError:
            return False
        if data.startswith(_PACKED):
            return True
        try:
            said = data.decode()
        except UnicodeDecodeError:
            return False  # an id, most often
        return self._string(said, depth + 1) != said

    def _json(self, text: str, depth: int) -> str:
        """The text of a document with its secrets hidden, and all else as it was written, valid JSON or not."""
        out: list[str] = []
        stack: list[_Frame] = []
        hidden = 0  # how many brackets are open since a secret object or list began: nothing inside it is written
        for found in _TOKEN.finditer(text):
            part = found[0]
            if hidden:
                hidden += (part in _OPENING) - (part in _CLOSING)
                continue
            if part in _OPENING:
                places, is_secret = self._at(stack)
                is_secret = is_secret or len(stack) >= _DEEPEST
                hidden = int(is_secret)
                if not is_secret:
                    stack.append(_Frame(places, None if part == "{" else 0, is_object=part == "{"))
                out.append(_QUOTED if is_secret else part)
            elif part in _CLOSING or part in (",", ":") or part.isspace():
                _pass(stack, part)
                out.append(part)
            elif stack and stack[-1].is_object and stack[-1].member is None:
                stack[-1].member = _unquoted(part)
                out.append(self._scalar(part, depth))
            else:
                is_secret = part not in ("null", '""') and self._at(stack)[1]
                out.append(_QUOTED if is_secret else self._scalar(part, depth))
        return "".join(out)

    def _at(self, stack: list[_Frame]) -> tuple[Places, bool]:
        """How far the paths lead to the member that is read, and whether it is a secret."""
        if not stack:
            return start(self._paths), False
        frame = stack[-1]
        member = "" if frame.member is None else frame.member
        places, ends = follow(self._paths, frame.places, member) if frame.places else (frame.places, False)
        return places, ends or (isinstance(member, str) and self.is_secret(member))

    def _scalar(self, token: str, depth: int) -> str:
        if not token.startswith('"'):
            return token if self.text(token) == token else _QUOTED
        said = _unquoted(token)
        masked = self._string(said, depth + 1)
        return token if masked == said else json.dumps(masked, ensure_ascii=False)


def _basic(found: re.Match[str]) -> str:
    """The login of an Authorization header, wherever it stands; another word that follows `basic` stays."""
    try:
        is_login = ":" in b64decode(found[2], validate=True).decode()
    except ValueError:
        is_login = False
    return f"{found[1]}{MASK}" if is_login else found[0]


def _key(name: str) -> str:
    return _SEPARATORS.sub("", name[:_LONGEST_KEY]).lower()


def _unquoted(token: str) -> str:
    """The string that a token of JSON stands for, or the token where it is none."""
    if "\\" not in token:
        return token.strip('"')
    try:
        said = json.loads(token, strict=False)
    except ValueError:
        return token.strip('"')
    return said if isinstance(said, str) else token


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=len, parse_float=len)
    except (ValueError, RecursionError):
        return False
    return True
