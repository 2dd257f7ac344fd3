"""What goes into the package for AWS Lambda."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scripts import lambda_zip

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_databases_authority_is_taken_along_and_no_other_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("handler.py", "application.properties", "key.pem", "secret.json"):
        (tmp_path / name).touch()
    monkeypatch.setattr(lambda_zip, "ROOT", tmp_path)
    lambda_zip._copy_program(tmp_path / "before")
    assert {path.name for path in (tmp_path / "before").iterdir()} == {"handler.py", "application.properties"}
    (tmp_path / "ca.pem").touch()
    lambda_zip._copy_program(tmp_path / "after")
    assert {path.name for path in (tmp_path / "after").iterdir()} == {"handler.py", "application.properties", "ca.pem"}
