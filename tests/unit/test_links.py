"""Links between the pages lead to files and headings that there are, and so do the names of pages in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(page.relative_to(ROOT))
    for folder in (".", "docs", "docs/clients", "sql")
    for page in (ROOT / folder).glob("*.md")
)
FOLDERS = ("dlqbatch", "tests", "benchmarks", "scripts", "deploy", "examples", "sql")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]*))?\)")


def slugs(page: Path) -> set[str]:
    """The names that GitHub gives to the headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    lost = []
    for file, heading in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        target = (ROOT / page).parent / file if file else ROOT / page
        if not target.exists() or (heading and target.suffix == ".md" and heading not in slugs(target)):
            lost.append(f"{file}#{heading}")
    assert lost == []


def test_pages_that_the_code_names_are_there() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file()]
    texts = {file: file.read_bytes().decode(errors="replace") for file in files if file.suffix != ".pyc"}
    named = {(file, page) for file, text in texts.items() for page in re.findall(r"\bdocs/[\w-]+\.(?:md|json)\b", text)}
    assert {(str(file), page) for file, page in named if not (ROOT / page).exists()} == set()
