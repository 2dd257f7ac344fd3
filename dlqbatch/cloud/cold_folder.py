"""Cold storage in a folder: a file is there whole or not at all, never overwritten, and its owner's alone."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from dlqbatch.message.cold import ArchiveDamaged, ColdStorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK a pipe that somebody put there would be waited for.
_OLD_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OURS_ALONE_FOLDER: Final = 0o700
_OURS_ALONE: Final = 0o600
_UNFINISHED: Final = ".tmp"


class ColdFolder:
    """Names are paths below it, with `/` between their parts; a symbolic link on the way is followed nowhere."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    def names(self) -> Iterator[str]:
        """Every file, the oldest day first; also what a cut run has left behind."""
        if not self._root.exists():
            return
        for folder, below, files in os.walk(self._root, onerror=self._raise):
            below.sort()
            for file in sorted(files):
                yield str((Path(folder) / file).relative_to(self._root))

    def write(self, name: str, data: bytes) -> None:
        """On the disk when this returns; a name that is taken already is an error."""
        with self._translated(name), self._parent(name, make=True) as folder:
            final = _last(name)
            begun = f".{final}.{secrets.token_hex(4)}{_UNFINISHED}"
            number = os.open(begun, _NEW_FILE, _OURS_ALONE, dir_fd=folder)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                # A rename would replace what is there; a link cannot.
                os.link(begun, final, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.unlink(begun, dir_fd=folder)
            os.fsync(folder)

    def read(self, name: str, most: int) -> bytes:
        """From the disk, as far as the system lets us ask for that; ArchiveDamaged if it is not there or too large."""
        with self._translated(name):
            if not self._root.is_dir():
                # A disk that is not mounted is no damage: what it holds is not to be written anew elsewhere.
                raise ColdStorageFailed(str(self._root), self._absence())
            try:
                with self._parent(name, make=False) as folder:
                    number = os.open(_last(name), _OLD_FILE, dir_fd=folder)
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

    def remove(self, name: str) -> None:
        """No error if it is gone already."""
        with self._translated(name), suppress(FileNotFoundError), self._parent(name, make=False) as folder:
            os.unlink(_last(name), dir_fd=folder)
            os.fsync(folder)

    @contextmanager
    def _parent(self, name: str, *, make: bool) -> Iterator[int]:
        """The folder of a file, reached step by step from the root: no part of a name leads out of it."""
        steps = name.split("/")
        if any(step in ("", ".", "..") or "\0" in step for step in steps):
            raise ArchiveDamaged(name, "its name leads out of cold storage")
        if make:
            # Its parent has to be there: a disk that is not mounted shall not be replaced by a folder.
            try:
                self._root.mkdir(mode=_OURS_ALONE_FOLDER)
                _sync(self._root.parent)
            except FileExistsError:
                pass
            except FileNotFoundError as error:
                raise ColdStorageFailed(str(self._root), self._absence()) from error
        # The root itself may be a link: the operator named it.
        here = os.open(self._root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            for step in steps[:-1]:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(step, _OURS_ALONE_FOLDER, dir_fd=here)
                        os.fsync(here)
                below = os.open(step, _FOLDER, dir_fd=here)
                os.close(here)
                here = below
            yield here
        finally:
            os.close(here)

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
            self._raise(error, name)

    def _raise(self, error: OSError, name: str = "") -> NoReturn:
        why = error.strerror or type(error).__name__
        raise ColdStorageFailed(str(self._root), f"{name}: {why}" if name else why) from error


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _sync(folder: Path) -> None:
    number = os.open(folder, _FOLDER & ~os.O_NOFOLLOW)
    try:
        os.fsync(number)
    finally:
        os.close(number)
