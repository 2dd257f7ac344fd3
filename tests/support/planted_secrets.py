"""Secrets that are easy to find again, and what others see of a process that knows them.

Every part of a secret between two characters that an address treats specially holds the word, so that a piece of it is
found too; and it is looked for in the forms in which a program writes a secret without meaning to.
"""

from __future__ import annotations

import base64
import gzip
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

WORD = "c4n4ry"
SECRET = f"{WORD}-b@{WORD}/{WORD}:{WORD}?{WORD}#{WORD}&{WORD}%25 {WORD}ü"
"""As a password; a program that decodes it once too often turns %25 into %."""
ENCODED = quote(SECRET, safe="")
PLAIN = f"{WORD}Wordf00"
"""For what takes letters and digits only."""


def _in_base64(word: bytes) -> Iterator[bytes]:
    """What every text that holds the word holds in base64, wherever the word begins."""
    for before in range(3):
        whole = base64.b64encode(bytes(before) + word)
        yield whole[-(-before * 8 // 6) : (before + len(word)) * 8 // 6]


FORMS = (WORD.encode(), *_in_base64(WORD.encode()), WORD.encode().hex().encode(), repr(WORD.encode())[2:-1].encode())


def leaks(text: bytes | str, context: int = 150) -> list[bytes]:
    """Where a secret is in it, with what stands around; packed files are unpacked."""
    data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    if data.startswith(b"\x1f\x8b"):
        data = gzip.decompress(data)
    low = data.lower()
    found = []
    for form in FORMS:
        # Base64 knows upper and lower case; a host's name does not.
        at = (low if form.islower() else data).find(form.lower() if form.islower() else form)
        if at >= 0:
            found.append(data[max(at - context, 0) : at + context])
    return found


def shown_of(pid: int) -> bytes:
    """What every user of the machine sees of a process and of those that it started."""
    seen = b""
    for one in [pid, *_children(pid)]:
        for name in ("cmdline", "comm", "status"):
            try:
                seen += Path(f"/proc/{one}/{name}").read_bytes() + b"\n"
            except (FileNotFoundError, ProcessLookupError):
                continue
    return seen


def _children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found.append(int(folder.name))
    return found
