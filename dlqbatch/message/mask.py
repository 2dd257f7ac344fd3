"""A message without its variable parts, so that equal failures have equal texts."""

from __future__ import annotations

import re
from typing import Final

_READ: Final = 8192
"""Characters of a message that are looked at."""
_KEPT: Final = 512
"""Characters of the result: where a message says what failed, and far from where reading ended."""

# Every quantifier is bounded, or its class cannot match what follows it, so that the work grows with the text alone.
_STATUS: Final = (
    r"\b(?:http(?:/\d(?:\.\d)?)?|status(?:[ _-]?code)?|response(?:[ _-]code)?|code|success)[ :=]{1,3}[1-5]\d\d\b"
)
_KEEP: Final = (
    _STATUS,
    r"\b[1-5]\d\d (?:client|server) error|\bora-\d{5}\b|\berrno \d+|\bsqlstate[ :=\[(]{1,3}\w{5}\b",
)
"""What looks like a number and is a name: it tells two failures apart."""
_PARTS: Final = "[0-9a-f]{1,4}(?::[0-9a-f]{1,4}){0,6}"
_IPV6: Final = rf"(?:{_PARTS})?::(?:{_PARTS})?(?:\.\d{{1,3}}){{0,3}}|[0-9a-f]{{1,4}}(?::[0-9a-f]{{1,4}}){{7}}"
_DOMAIN: Final = "(?:com|net|org|io|internal|local|localdomain|lan|corp|svc|cloud|dev)"
_DAY: Final = "(?:mon|tue|wed|thu|fri|sat|sun)"
_MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_CLOCK: Final = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d{1,9})?)?(?: ?[ap]m\b)?"
_ZONE: Final = r"(?: ?(?:z\b|utc\b|gmt\b|[+-]\d\d:?\d\d\b))?"
_MASK: Final = (
    # Addresses
    r"\b[a-z][a-z0-9+.-]{1,20}://[^\s\"'<>)\]},;]+",
    r"\b[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    # Times
    rf"\b\d{{4}}[-/]\d\d[-/]\d\d(?:[t ]{_CLOCK})?{_ZONE}",
    rf"\b\d{{1,2}}[/.]\d{{1,2}}[/.]\d{{4}}(?: {_CLOCK})?",
    rf"\b(?:{_DAY},? )?(?:\d{{1,2}} )?{_MONTH} \d{{1,4}}\b(?:,? \d{{4}}\b)?(?: {_CLOCK})?{_ZONE}(?: \d{{4}}\b)?",
    rf"\b{_CLOCK}{_ZONE}",
    # Hosts
    r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d{1,5})?\b",
    rf"(?<![\w:])\[?(?:{_IPV6})\]?(?::\d{{1,5}})?(?![\w:])",
    r"\b[a-z][\w-]{0,62}(?:\.[\w-]{1,63}){0,6}:\d{2,5}\b",
    rf"\b[a-z0-9][\w-]{{0,62}}(?:\.[\w-]{{1,63}}){{0,6}}\.{_DOMAIN}\b",
    # What is quoted; an apostrophe within a word is no quote.
    r"\"(?:[^\"\\\n]|\\.){0,4000}\"|(?<!\w)'[^'\n]{0,500}'(?!\w)|`[^`\n]{0,500}`",
    r"\u201c[^\u201d]{0,500}\u201d|\u2018[^\u2019]{0,500}\u2019|\u00ab[^\u00bb]{0,500}\u00bb",
    # Paths, then ids and numbers in their many shapes.
    r"(?<![\w.])(?:[a-z]:)?(?:[\\/][\w.@~+%=-]{1,255}){2,40}[\\/]?",
    r"\b(?=[a-f]{0,60}\d)[0-9a-f]{8,128}\b",
    r"\b[a-z_][\w-]{0,200}?\d[\w-]{0,400}",
    r"[+-]?\b\d+(?:[.,:_]\d+)*%?(?:[\w-]*\w)?",
)
_VARIABLE: Final = re.compile(f"(?P<keep>{'|'.join(_KEEP)})|{'|'.join(_MASK)}")
_AGAIN: Final = re.compile(r"(<\*>)(?:[,;:|/ ]{1,3}(?:and )?<\*>)+")
_OPEN_DATA: Final = re.compile(r"\{|(?<!\w)\[(?=\s{0,3}[\[{\"'\d-]|[^\[\]]{1,200},)")


def masked(message: str) -> str:
    """In small letters, with `<*>` for whatever varies; the same in every process."""
    text = " ".join(message[:_READ].split())
    text = _VARIABLE.sub(_mask, _without_data(text).lower())
    return _AGAIN.sub(r"\1", text)[:_KEPT].rstrip()


def _mask(found: re.Match[str]) -> str:
    return found[0] if found.lastgroup == "keep" else "<*>"


def _without_data(text: str) -> str:
    """Objects and lists out of JSON, or out of what a language prints for them, become one mask each."""
    kept: list[str] = []
    at = 0
    while (opening := _OPEN_DATA.search(text, at)) is not None:
        kept.append(text[at : opening.start()])
        kept.append("<*>")
        at = _end_of_data(text, opening.start())
    kept.append(text[at:])
    return "".join(kept)


_BRACKETS: Final = re.compile(r"[\[\]{}]|\"(?:[^\"\\]|\\.)*\"")


def _end_of_data(text: str, start: int) -> int:
    """Behind the bracket that closes what opens here; the end of the text if none does, as where it was cut off."""
    depth = 0
    for bracket in _BRACKETS.finditer(text, start):
        if bracket[0] in {"[", "{"}:
            depth += 1
        elif bracket[0] in {"]", "}"}:
            depth -= 1
            if depth == 0:
                return bracket.end()
    return len(text)
