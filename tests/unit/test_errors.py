from __future__ import annotations

import ast

import pytest
from program import ROOT

from dlqbatch.amqp.masking import Masking
from dlqbatch.errors import ChannelRefused


def test_no_sentence_of_ours_is_taken_for_a_secret() -> None:
    """What is said goes through the masking, which takes `token: put` for a token with its value."""
    masking, changed = Masking(), []
    for file in sorted((ROOT / "dlqbatch").rglob("*.py")):
        every = list(ast.walk(ast.parse(file.read_text())))
        docstrings = {id(each.value) for each in every if isinstance(each, ast.Expr)}
        for each in every:
            said = each.value if isinstance(each, ast.Constant) and id(each) not in docstrings else None
            if isinstance(said, str) and " " in said and "://" not in said and masking.text(said) != said:
                changed.append(f"{file.name}: {masking.text(said)}")
    assert changed == []


@pytest.mark.parametrize(
    ("code", "text", "is_gone"),
    [
        (404, "NOT_FOUND - no queue 'orders' in vhost '/'", True),
        (404, "NOT_FOUND - no exchange 'shop' in vhost '/'", True),
        # A name is anybody's choice: this queue is there, and comes back with its node.
        (404, "NOT_FOUND - home node 'rabbit@b' of durable queue 'casino queue' in vhost '/' is down", False),
        (404, "NOT_FOUND - queue 'no exchange 'x'' in vhost '/' process is stopped by supervisor", False),
        (404, "NOT_FOUND - queue 'NOT_FOUND - no queue 'x'' in vhost '/' is down", False),
        (403, "NOT_FOUND - no queue 'orders' in vhost '/'", False),
    ],
)
def test_only_what_the_broker_says_is_not_there_is_gone(code: int, text: str, *, is_gone: bool) -> None:
    assert ChannelRefused(code, text).is_gone is is_gone
