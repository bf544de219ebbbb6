"""Objects as files of a local disk: whole or not at all, and durable when a write returns.

Each goes to a temporary name, is flushed, and is renamed. Several files are written in rounds (all flushed,
then all renamed, then their folders flushed), so that a journal commits once for many. This runs beside the
training, and the interpreter time it takes, training waits for: hence few calls, and the pieces of a file
handed to the kernel as they lie in memory.
"""

import errno
import os
import posixpath
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

Pieces = Sequence[bytes | memoryview]

# Linux takes 1,024 pieces in one call.
_AT_ONCE = 512
# From so many files on, so many are written at a time: more than the checkpoints of a step, which are written while
# the next one trains and must not take the interpreter from it.
_MANY, _AT_A_TIME = 64, 8


def write_files(files: Sequence[tuple[str, Pieces]]) -> None:
    """Write files, replacing what is there; raise `OSError`, with the file's name, at the first that fails."""
    temporary: list[tuple[str, str]] = []
    folders: dict[str, None] = {}
    try:
        for path, _ in files:
            folder, name = posixpath.split(path)
            if folder not in folders:
                # A new folder is durable once the one above it is.
                folders.update(dict.fromkeys([folder, *_make_folder(folder)]))
            temporary.append((f"{folder}/.{name}.{secrets.token_hex(4)}.part", path))
        whole = [(part, path, pieces) for (part, path), (_, pieces) in zip(temporary, files, strict=True)]
        if len(files) < _MANY:
            for one in whole:
                _write_whole(*one)
        else:
            # Each waits for the disk, and what waits together is made durable together.
            with ThreadPoolExecutor(_AT_A_TIME) as pool:
                list(pool.map(lambda one: _write_whole(*one), whole))
        while temporary:
            part, path = temporary[-1]
            os.replace(part, path)
            temporary.pop()
    except BaseException:
        for part, _ in temporary:
            with suppress(OSError):
                os.unlink(part)
        raise
    for folder in folders:
        sync_folder(folder)


def write_file_once(path: str, data: bytes) -> bool:
    """Write a file unless something has its name; say whether it was written. It appears whole or not at all."""
    folder, name = posixpath.split(path)
    above = _make_folder(folder)
    done = _link_nameless(folder, path, data)
    if done is None:
        part = f"{folder}/.{name}.{secrets.token_hex(4)}.part"
        try:
            _write_whole(part, path, [data])
            done = _link(part, path)
        finally:
            with suppress(OSError):
                os.unlink(part)
    if done:
        for changed in (folder, *above):
            sync_folder(changed)
    return done


def _link_nameless(folder: str, path: str, data: bytes) -> bool | None:
    """Write a file that has no name until it is whole, so that a kill leaves none; None: not possible here."""
    if not hasattr(os, "O_TMPFILE"):
        return None
    try:
        handle = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            return None
        raise
    try:
        named = f"/proc/self/fd/{handle}"
        if not os.path.exists(named):
            return None
        _write_pieces(handle, [data])
        os.fsync(handle)
        # Python follows the link in /proc only if it is given a folder to start from, which an absolute path ignores.
        start = os.open(folder, os.O_RDONLY)
        try:
            return _link(named, path, src_dir_fd=start)
        finally:
            os.close(start)
    finally:
        os.close(handle)


def _link(source: str, path: str, src_dir_fd: int | None = None) -> bool:
    try:
        # Unlike a rename, a link never replaces what is there.
        os.link(source, path, src_dir_fd=src_dir_fd, follow_symlinks=True)
    except FileExistsError:
        return False
    return True


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable; one that is gone has none."""
    with suppress(FileNotFoundError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _write_whole(part: str, path: str, pieces: Pieces) -> None:
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for at in range(0, len(pieces), _AT_ONCE):
                _write_pieces(handle, list(pieces[at : at + _AT_ONCE]))
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error


def _write_pieces(handle: int, pieces: list[bytes | memoryview]) -> None:
    while pieces:
        done = os.writev(handle, pieces)
        while pieces and done >= len(pieces[0]):
            done -= len(pieces.pop(0))
        if done:
            pieces[0] = memoryview(pieces[0])[done:]


def _make_folder(folder: str) -> list[str]:
    """Make a folder and those above it; return the folders that got a new one in them."""
    made = []
    missing = folder
    while not os.path.isdir(missing):
        made.append(missing)
        missing = posixpath.dirname(missing)
    for new in reversed(made):
        with suppress(FileExistsError):
            os.mkdir(new, 0o700)
    return [posixpath.dirname(new) for new in made]
