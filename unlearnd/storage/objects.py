"""Bytes over fsspec: objects under one root, the door to all storage.

Objects have names with forward slashes under one root. A write is all or nothing and durable when it returns:
on a local disk it goes to a temporary name, is flushed, and is renamed; elsewhere one request stores the
whole object. Destroying looks again afterwards, because a claim of destruction ends up in evidence.
"""

import errno
import os
import posixpath
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unlearnd.errors import NotFoundError, StorageError
from unlearnd.storage.disk import Pieces, sync_folder, write_files

# Requests wait for the other side: let them wait together, but not so many that training feels it.
_WRITERS = 8


class Storage:
    """A place for objects."""

    def __init__(self, url: str, **options: Any) -> None:
        try:
            self._fs, self._root = fsspec.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise StorageError(f"storage {url} cannot be opened: {error}") from error
        self._root = posixpath.normpath(self._root)
        self.url = url
        self._local = isinstance(self._fs, LocalFileSystem)

    def create(self) -> None:
        """Make the root, readable by its owner alone where that means something."""
        with _translated("storage root"):
            self._fs.makedirs(self._root, exist_ok=True)
            if self._local:
                os.chmod(self._root, 0o700)

    def check(self) -> None:
        """Raise `StorageError` unless the root is there: an absent volume must not pass for an empty one."""
        if self._local and not os.path.isdir(self._root):
            raise StorageError(f"the storage {self._root} is not there; is it mounted?")

    def write(self, name: str, data: bytes) -> None:
        """Store `data` under `name`, replacing what is there, whole or not at all."""
        self.write_many([(name, [data])])

    def write_many(self, objects: Iterable[tuple[str, Pieces]]) -> None:
        """Store several objects, given in pieces; all are durable when this returns, in no particular order."""
        if self._local:
            files = {self._full(name): (name, pieces) for name, pieces in objects}
            try:
                write_files([(path, pieces) for path, (_, pieces) in files.items()])
            except OSError as error:
                name, _ = files.get(str(error.filename2 or error.filename), (posixpath.basename(self._root), ()))
                with _translated(name):
                    raise
            return
        with ThreadPoolExecutor(_WRITERS) as pool:
            for _ in pool.map(lambda named: self._send(*named), objects):
                pass

    def _send(self, name: str, pieces: Pieces) -> None:
        with _translated(name):
            self._fs.pipe_file(self._full(name), pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def read(self, name: str) -> bytes:
        """Return the bytes under `name`; raise `NotFoundError` where there are none."""
        with _translated(name):
            if self._local:
                return Path(self._full(name)).read_bytes()
            return bytes(self._fs.cat_file(self._full(name)))

    def list(self, prefix: str) -> list[str]:
        """Return the names of all objects below the folder `prefix`, unfinished ones too, sorted."""
        with _translated(prefix):
            top = self._full(prefix)
            if self._local:
                found = [posixpath.join(where, name) for where, _, names in os.walk(top) for name in names]
            else:
                self._fs.invalidate_cache()
                found = self._fs.find(top)
        return sorted(posixpath.relpath(path, self._root) for path in found)

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the names of all objects below the folder `prefix` with their sizes."""
        with _translated(prefix):
            if self._local:
                sizes = {}
                for name in self.list(prefix):
                    with suppress(FileNotFoundError):
                        sizes[name] = os.stat(self._full(name)).st_size
                return sizes
            self._fs.invalidate_cache()
            found = self._fs.find(self._full(prefix), detail=True)
            return {posixpath.relpath(path, self._root): int(info["size"]) for path, info in found.items()}

    def destroy(self, names: Iterable[str]) -> None:
        """Destroy objects; those already gone are fine. Raise `StorageError` if any is still there after."""
        names = list(names)
        for name in names:
            with suppress(NotFoundError), _translated(name):
                if self._local:
                    os.unlink(self._full(name))
                else:
                    self._fs.rm_file(self._full(name))
        for folder in {posixpath.dirname(name) for name in names}:
            if self._local:
                sync_folder(self._full(folder))
            left = set(self.list(folder)).intersection(names)
            if left:
                raise StorageError(f"{len(left)} objects below {folder} are still there after destroying them")

    def _full(self, name: str) -> str:
        path = posixpath.normpath(posixpath.join(self._root, name))
        if path != self._root and not path.startswith(self._root.rstrip("/") + "/"):
            raise StorageError(f"the name '{name}' leads out of the storage root")
        return path


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Turn what storage raises into our errors, where it enters."""
    try:
        yield
    except FileNotFoundError:
        raise NotFoundError(f"storage holds no {name}") from None
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise StorageError(f"storage cannot handle {name}: {what}") from error
    except (StorageError, NotFoundError):
        raise
    except Exception as error:
        # File systems are fsspec's plugins, and each raises errors of its own.
        raise StorageError(f"storage cannot handle {name}: {type(error).__name__}: {error}") from error
