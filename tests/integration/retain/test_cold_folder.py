"""A folder of cold copies on a real disk: whole files or none, never overwritten, and no way out of it."""

from __future__ import annotations

import os
import resource
import stat
from typing import TYPE_CHECKING

import pytest

from dlqbatch.retain.folder import ColdFolder
from dlqbatch.retain.format import ArchiveDamaged, ColdStorageFailed

if TYPE_CHECKING:
    from pathlib import Path

NAME = "2030/06/01/part.jsonl.gz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cold"


@pytest.fixture
def cold(folder: Path) -> ColdFolder:
    return ColdFolder(folder)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_was_written_is_read_again_and_only_its_owner_may(cold: ColdFolder, folder: Path) -> None:
    before = os.umask(0)
    try:
        cold.write(NAME, b"\0data")
    finally:
        os.umask(before)
    assert cold.read(NAME, 5) == b"\0data"
    assert list(cold.names()) == [NAME]
    assert mode(folder / NAME) == 0o600
    assert {mode(each) for each in (folder, folder / "2030", folder / "2030/06", folder / "2030/06/01")} == {0o700}


def test_days_are_listed_in_order_and_nothing_is_listed_where_nothing_is(cold: ColdFolder) -> None:
    assert list(cold.names()) == []
    names = ["2030/06/01/a", "2030/06/01/b", "2030/06/02/a", "2031/01/01/a"]
    for name in reversed(names):
        cold.write(name, b"x")
    assert list(cold.names()) == names


def test_nothing_is_ever_overwritten(cold: ColdFolder) -> None:
    cold.write(NAME, b"first")
    with pytest.raises(ColdStorageFailed, match="nothing is overwritten"):
        cold.write(NAME, b"second")
    assert cold.read(NAME, 99) == b"first"
    assert list(cold.names()) == [NAME]


def test_a_file_that_is_missing_or_too_large_is_damage(cold: ColdFolder) -> None:
    with pytest.raises(ColdStorageFailed, match="no such folder"):
        cold.read(NAME, 99)
    cold.write(NAME, b"12345")
    with pytest.raises(ArchiveDamaged, match="5 bytes"):
        cold.read(NAME, 4)
    with pytest.raises(ArchiveDamaged, match="not there"):
        cold.read("2030/06/01/other", 99)
    cold.remove(NAME)
    cold.remove(NAME)
    with pytest.raises(ArchiveDamaged, match="not there"):
        cold.read(NAME, 99)


@pytest.mark.parametrize("name", ["../x", "2030/../../x", "/etc/passwd", "2030//x", "./x", "", "2030/\0/x"])
def test_no_name_leads_out_of_it(cold: ColdFolder, folder: Path, name: str) -> None:
    cold.write(NAME, b"x")
    (folder.parent / "x").write_bytes(b"secret")
    for use in (lambda: cold.read(name, 99), lambda: cold.write(name, b"y"), lambda: cold.remove(name)):
        with pytest.raises(ArchiveDamaged):
            use()
    assert (folder.parent / "x").read_bytes() == b"secret"


def test_no_symbolic_link_is_followed(cold: ColdFolder, folder: Path, tmp_path: Path) -> None:
    cold.write(NAME, b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    (folder / "2030/06/01/link").symlink_to(outside / "file")
    (folder / "2030/07").symlink_to(outside)
    for name in ("2030/06/01/link", "2030/07/file"):
        with pytest.raises(ArchiveDamaged, match="symbolic link"):
            cold.read(name, 99)
    with pytest.raises(ArchiveDamaged, match="symbolic link"):
        cold.write("2030/07/new", b"y")
    assert sorted(each.name for each in outside.iterdir()) == ["file"]
    assert "2030/07/file" not in list(cold.names())


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(cold: ColdFolder, folder: Path) -> None:
    cold.write(NAME, b"x")
    os.mkfifo(folder / "2030/06/01/pipe")
    with pytest.raises(ArchiveDamaged, match="no file"):
        cold.read("2030/06/01/pipe", 99)


def test_a_write_that_does_not_fit_leaves_nothing_behind(cold: ColdFolder) -> None:
    cold.write("2030/06/01/small", b"x")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        with pytest.raises(ColdStorageFailed, match="File too large"):
            cold.write(NAME, b"x" * 2_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(cold.names()) == ["2030/06/01/small"]


def test_the_disk_of_a_folder_has_to_be_there(tmp_path: Path) -> None:
    away = ColdFolder(tmp_path / "not mounted" / "cold")
    for use in (lambda: away.write(NAME, b"x"), lambda: away.read(NAME, 99)):
        with pytest.raises(ColdStorageFailed, match="not mounted, is not there"):
            use()
    assert not (tmp_path / "not mounted").exists()


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "cold").write_bytes(b"")
    with pytest.raises(ColdStorageFailed, match="Not a directory"):
        ColdFolder(tmp_path / "cold").write(NAME, b"x")
