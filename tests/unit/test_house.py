"""The house: ARCHITECTURE.md is true to it, and it keeps the rules of its size and its language."""

from __future__ import annotations

import ast
import functools
import itertools
import re

from program import ROOT

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
PACKAGE = ROOT / "dlqbatch"


def test_every_module_that_it_names_is_there() -> None:
    named = set(re.findall(r"\b[a-z]+/[a-z_]+(?:\.py)?\b(?=[`<])", PAGE))
    assert len(named) > 30
    assert {one for one in named if not (PACKAGE / one).exists()} == set()


def test_every_folder_is_in_the_drawing_of_the_house() -> None:
    folders = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}
    house = PAGE[PAGE.index("```mermaid") : PAGE.index("Imports go down only")]
    assert set(re.findall(r"<b>(\w+)</b>", house)) == folders


MODULES = {
    path.relative_to(PACKAGE).as_posix(): path.read_text()
    for path in sorted(PACKAGE.rglob("*.py"))
    if "versions" not in path.parts
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in MODULES.items()}


FRAGMENT = re.compile(r"(Of|By|That|Those|In which|And|So|As|To|From) ")


def test_no_module_is_longer_than_four_hundred_lines() -> None:
    lengths = {name: len(text.splitlines()) for name, text in MODULES.items()}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_a_protocol_is_an_exception() -> None:
    protocols = [
        f"{name}: {node.name}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
    ]
    assert len(protocols) <= 12, protocols


def test_the_docstring_of_a_constant_or_a_field_can_be_read_without_its_name() -> None:
    """It does not go on with what stands above it: "The queues by name", not "Those by name"."""
    found = []
    for name, tree in trees().items():
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for before, after in itertools.pairwise(body if isinstance(body, list) else []):
                if isinstance(before, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    text = ast.literal_eval(after.value) if isinstance(after.value, ast.Constant) else None
                    if isinstance(text, str) and FRAGMENT.match(text):
                        found.append(f"{name}:{after.lineno}: {text[:60]}")
    assert found == []


def test_no_reason_for_an_exception_to_a_rule_refers_to_another_one() -> None:
    assert [name for name, text in MODULES.items() if "(the same)" in text] == []
