"""A compressed or base64 body, unpacked for a person to read; what is stored and sent stays as it is.

The work is bounded, for a megabyte may unpack to a thousand: only so much is read and made that its head can be shown.
"""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from typing import Final, NamedTuple

LARGEST_UNPACKED: Final = 1024 * 1024
"""Bytes that are unpacked at most; what comes after them is not looked at."""
_LARGEST_READ: Final = 2 * LARGEST_UNPACKED
"""Bytes of a packed body that are read at most; what needs more for so little is made to cost time."""
_MOST_LAYERS: Final = 4
"""Layers that are taken off: base64 around gzip is two."""
_MOST_MEMBERS: Final = 64
"""Members that are read of a gzip file, which may hold any number of them."""
_SHORTEST_BASE64: Final = 16
_BEGINS: Final = re.compile(rb"\s*[\w+/-]{16}")

GZIP: Final = b"\x1f\x8b\x08"
_ZLIB: Final = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS
BASE64: Final = re.compile(r"(?:[\w+/-]{60,76}\r?\n)+[\w+/-]{0,76}={0,2}\s{0,2}|[\w+/-]{16,}={0,2}", re.ASCII)
"""Also the letters that are safe in a URL, without padding, and in the lines of a mail."""
FROM_URL: Final = str.maketrans("-_", "+/")
_LINE_ENDS: Final = str.maketrans("", "", "\r\n \t")
_ENCODINGS: Final = {
    **dict.fromkeys(("gzip", "x-gzip", "deflate", "zlib", "compress"), "deflate"),
    "base64": "base64",
}
"""What may be written in `content_encoding`, and what takes it off; gzip and deflate are often taken for each other."""


class Unpacked(NamedTuple):
    body: bytes
    """The body before it was packed, only its head if it is not whole; the body itself if it was not packed."""
    packings: tuple[str, ...] = ()
    """How it was packed, the outermost first: gzip, deflate, base64."""
    is_whole: bool = True
    encoding: str | None = None
    """What `content_encoding` says that was not taken off."""


def unpack(body: bytes, encoding: object = None) -> Unpacked:
    """Take the packings off; never raises. A packing that is not what it seems stays on."""
    words = re.split(r"[,\s]+", encoding.strip().lower()) if isinstance(encoding, str) and encoding.strip() else []
    packings: list[str] = []
    is_whole = True
    while len(packings) < _MOST_LAYERS:
        wanted = _ENCODINGS.get(words[-1]) if words else None
        found = _inflated(body, says_deflate=wanted == "deflate") or _from_base64(body, says_so=wanted == "base64")
        if found is None:
            break
        body, packing, is_all = found
        packings.append(packing)
        is_whole = is_whole and is_all
        if wanted == ("base64" if packing == "base64" else "deflate"):
            words.pop()
    return Unpacked(body, tuple(packings), is_whole, ", ".join(words) or None)


class _Layer(NamedTuple):
    body: bytes
    packing: str
    is_whole: bool


def _inflated(body: bytes, *, says_deflate: bool) -> _Layer | None:
    if body.startswith(GZIP):
        ways: tuple[int, ...] = (_GZIP_BITS,)
    elif body.startswith(_ZLIB):
        ways = (_ZLIB_BITS, _RAW_BITS) if says_deflate else (_ZLIB_BITS,)
    elif says_deflate and body:
        ways = (_RAW_BITS,)
    else:
        return None
    for bits in ways:
        try:
            return _Layer(*_members(body, bits))
        except zlib.error:
            continue
    return None


def _members(body: bytes, bits: int) -> tuple[bytes, str, bool]:
    """At most so many bytes of what all members of a gzip file hold, or the only one of anything else."""
    rest, made, is_over = body[:_LARGEST_READ], bytearray(), False
    for _ in range(_MOST_MEMBERS):
        inflate = zlib.decompressobj(bits)
        made += inflate.decompress(rest, LARGEST_UNPACKED - len(made) + 1)
        rest, is_over = inflate.unused_data, inflate.eof
        # Behind the last member there may be zeros, or anything.
        if not is_over or bits != _GZIP_BITS or not rest.startswith(GZIP) or len(made) > LARGEST_UNPACKED:
            break
    is_head = len(body) >= LARGEST_UNPACKED or len(made) > LARGEST_UNPACKED
    if not is_over and not is_head and bits != _GZIP_BITS:
        # Any bytes may look like the beginning of it; the checksum at its end says that it is.
        raise zlib.error
    is_whole = is_over and not rest and len(made) <= LARGEST_UNPACKED and len(body) <= _LARGEST_READ
    return _head(bytes(made), is_whole=is_whole), "gzip" if bits == _GZIP_BITS else "deflate", is_whole


def _head(data: bytes, *, is_whole: bool) -> bytes:
    """Without the letter of UTF-8 that the cut goes through."""
    data = data[:LARGEST_UNPACKED]
    for end in range(1, 4) if not is_whole else ():
        last = data[-end : len(data) - end + 1]
        if last >= b"\xc0":
            return data[:-end] if data[-end:].decode(errors="ignore") == "" else data
    return data


def _from_base64(body: bytes, *, says_so: bool) -> _Layer | None:
    """Without the property only what holds a document or something compressed: many ids look like base64, too."""
    if not says_so and _BEGINS.match(body) is None:
        return None
    try:
        head = body[:_LARGEST_READ].decode("ascii")
    except UnicodeDecodeError:
        return None
    text = head.translate(_LINE_ENDS)
    if not (says_so and text) and (len(text) < _SHORTEST_BASE64 or BASE64.fullmatch(head.strip()) is None):
        return None
    text = text.translate(FROM_URL).rstrip("=")
    is_whole = len(body) <= _LARGEST_READ
    text = text if is_whole else text[: len(text) // 4 * 4]
    try:
        data = b64decode(text + "=" * (-len(text) % 4), validate=True)
    except ValueError:
        return None
    if not says_so and not any(_is_worth(data, is_whole=is_whole)):
        return None
    is_whole = is_whole and len(data) <= LARGEST_UNPACKED
    return _Layer(_head(data, is_whole=is_whole), "base64", is_whole)


def _is_worth(data: bytes, *, is_whole: bool) -> Iterator[bool]:
    yield data.startswith((GZIP, *_ZLIB)) and _inflated(data, says_deflate=False) is not None
    if data[:1] in (b"{", b"["):
        try:
            json.loads(data, parse_int=len, parse_float=len)
        except (ValueError, RecursionError):
            # Of a large document only the head is here.
            yield not is_whole
        else:
            yield True
