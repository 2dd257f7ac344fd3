"""The options of what a message holds: which of its secrets are hidden where it is shown."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator

from dlqbatch.amqp import json_path
from dlqbatch.amqp.masking import NAMES
from dlqbatch.settings.values import Options, option, printable, words


def regular_expressions(value: object) -> object:
    """Split at white space: a comma may belong to a pattern."""
    return tuple(value.split()) or value if isinstance(value, str) else value


def path(value: str) -> str:
    json_path.parse(value)
    return value


_UNBOUNDED: Final = re.compile(r"[*+]|\{\d*,\}")
_REPEATED_GROUP: Final = re.compile(r"\)\{")
_NOT_SYNTAX: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")
_OPTIONAL: Final = re.compile(r"(?<!\()\?")
_RANGE: Final = re.compile(r"\{(\d*),?(\d*)\}")
_MOST_WAYS: Final = 100_000


def check_pattern(text: str) -> str:
    """Refuse a pattern that could take very long on some text; a ValueError continues a sentence that names it."""
    try:
        compiled = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"has '{text}', which is no regular expression: {error}") from None
    if compiled.fullmatch(""):
        raise ValueError(f"has '{text}', which matches nothing at all, and so everywhere")
    syntax = _NOT_SYNTAX.sub("x", text)
    ways = 2 ** min(len(_OPTIONAL.findall(syntax)), 64)
    for least, most in _RANGE.findall(syntax):
        ways *= max(int(most or least or 0) - int(least or 0), 0) + 1
    if _UNBOUNDED.search(syntax) or _REPEATED_GROUP.search(syntax) or ways > _MOST_WAYS:
        raise ValueError(
            f"has '{text}', which can take very long: write {{1,64}} in place of + or *, repeat no group, and let the "
            "ranges be small"
        )
    return text


_Printable = Annotated[str, AfterValidator(printable)]
_Names = Annotated[tuple[_Printable, ...], BeforeValidator(words)]


class ContentOptions(Options):
    """Part of `Settings`."""

    masking_headers: _Names = option(
        (),
        "Headers whose values are hidden wherever a message is shown, with those whose names are built in; "
        "`*` stands for any text.",
        "names or wildcards with commas between them",
    )
    masking_paths: Annotated[tuple[Annotated[_Printable, AfterValidator(path)], ...], BeforeValidator(words)] = option(
        (),
        "What is hidden of a JSON body, beside members with such a name.",
        "JSON paths with commas between them, such as $.customer.iban, $.lines[*].note or $..email",
    )
    masking_patterns: Annotated[
        tuple[Annotated[_Printable, AfterValidator(check_pattern)], ...],
        BeforeValidator(regular_expressions),
    ] = option(
        (),
        "Texts that are hidden in bodies, headers and errors, beside card numbers, tokens and the like.",
        r"regular expressions with a space between them and bounded repeats, such as DE\d{20} or \w{1,64}@\w{1,64}",
    )
    masking_shown: _Names = option(
        (),
        f"Names that are shown although they hold one of the built-in words: {NAMES}.",
        "names or wildcards with commas between them",
    )
