"""Cold storage in a folder: files are whole, never overwritten, and readable by their owner only."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from dlqbatch.retain.format import ArchiveDamaged, ColdStorageFailed, steps_of

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# Without O_NONBLOCK, a pipe in the place of a file would be waited for.
_OLD_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600


class ColdFolder:
    """Names are paths below the folder, with `/` between their steps."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def names(self) -> Iterator[str]:
        """All files, the oldest day first, also the unfinished ones of killed runs."""
        if not self._root.exists():
            return
        for folder, below, files in os.walk(self._root, onerror=self._fail):
            below.sort()
            for file in sorted(files):
                yield str((Path(folder) / file).relative_to(self._root))

    def write(self, name: str, data: bytes) -> None:
        """Write a file and sync it to the disk; ColdStorageFailed if the name is taken."""
        with self._translated(name):
            path = self._path(name)
            self._make_folders(path.parent)
            begun = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
            number = os.open(begun, _NEW_FILE, _FILE_MODE)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(number)
                # A rename would replace a file that is there; a link cannot.
                os.link(begun, path)
            finally:
                begun.unlink()
            _sync(path.parent)

    def read(self, name: str, most: int) -> bytes:
        """Read from the disk, as far as the system allows that; ArchiveDamaged if it is not there or too large."""
        with self._translated(name):
            path = self._path(name)
            if not self._root.is_dir():
                # A disk that is not mounted is no damage: its copies must not be written anew elsewhere.
                raise ColdStorageFailed(str(self._root), self._absence())
            try:
                number = os.open(path, _OLD_FILE)
            except FileNotFoundError:
                raise ArchiveDamaged(name, "it is not there") from None
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise ArchiveDamaged(name, "a symbolic link is in its place") from None
                raise
            with os.fdopen(number, "rb") as file:
                found = os.fstat(number)
                if not stat.S_ISREG(found.st_mode):
                    raise ArchiveDamaged(name, "it is no file")
                if found.st_size > most:
                    raise ArchiveDamaged(name, f"it has {found.st_size:,} bytes, which is too many")
                if hasattr(os, "posix_fadvise"):
                    # What was just written is in memory, and would be read from there.
                    with suppress(OSError):
                        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                return file.read(most + 1)

    def remove(self, name: str) -> str:
        """No error if it is gone already; nothing of it is kept but by snapshots and backups of the disk."""
        with self._translated(name), suppress(FileNotFoundError):
            path = self._path(name)
            path.unlink()
            _sync(path.parent)
        return ""

    def _path(self, name: str) -> Path:
        """ArchiveDamaged if the name leads out of the folder, by its steps or by a link that somebody put there."""
        steps = steps_of(name)
        path = self._root.joinpath(*steps)
        # The root itself may be a link: the operator named it.
        if path.parent.resolve() != self._root.resolve().joinpath(*steps[:-1]):
            raise ArchiveDamaged(name, "a symbolic link is in its place")
        return path

    def _make_folders(self, folder: Path) -> None:
        if folder != self._root:
            self._make_folders(folder.parent)
        try:
            folder.mkdir(_FOLDER_MODE)
            _sync(folder.parent)
        except FileExistsError:
            pass
        except FileNotFoundError as error:
            # The parent of the root has to be there: a folder must not take the place of a disk that is not mounted.
            raise ColdStorageFailed(str(self._root), self._absence()) from error

    def _absence(self) -> str:
        parent = self._root.parent
        if parent.is_dir():
            return "there is no such folder"
        return f"the folder that it is to be in, {parent}, is not there; make it, or mount its disk, and run again"

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            raise ColdStorageFailed(str(self._root), f"{name} is there already, and nothing is overwritten") from error
        except OSError as error:
            self._fail(error, name)

    def _fail(self, error: OSError, name: str = "") -> NoReturn:
        why = error.strerror or type(error).__name__
        raise ColdStorageFailed(str(self._root), f"{name}: {why}" if name else why) from error


def _sync(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
