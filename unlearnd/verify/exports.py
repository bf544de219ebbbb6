"""Read an exported log: C2SP tlog-tiles in a folder (c2sp.org/tlog-tiles).

Only names computed here are ever opened, and each with a bound on its size.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import Protocol

from unlearnd.errors import FormatError, InputError
from unlearnd.verify.notes import MAX_NOTE
from unlearnd.verify.receipts import MAX_DETAIL
from unlearnd.verify.statements import MAX_PAYLOAD

TILE = 256


class Folder(Protocol):
    """Where an exported log lies."""

    def read(self, name: str, limit: int) -> bytes | None:
        """Return a file's bytes, None when there is no such file; raise FormatError when it is larger than `limit`."""


class LocalFolder:
    """An exported log on disk."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def read(self, name: str, limit: int) -> bytes | None:
        path = os.path.join(self._path, name)
        try:
            # A pipe would wait for ever, and opening one already does.
            with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise FormatError(f"{name} of the exported log is not a file")
                data = file.read(limit + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise FormatError(f"{name} of the exported log is not a file") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        if len(data) > limit:
            raise FormatError(f"{name} of the exported log is larger than {limit:,} bytes")
        return data


def tile_path(level: int | str, number: int, width: int = TILE) -> str:
    """Return where a tile lies; `level` is a number, or `entries` for the leaves themselves."""
    groups = [f"{number % 1000:03}"]
    while number := number // 1000:
        groups.insert(0, f"x{number % 1000:03}")
    return f"tile/{level}/{'/'.join(groups)}" + ("" if width == TILE else f".p/{width}")


def read_checkpoint(folder: Folder) -> bytes:
    """Return the newest tree head of an exported log, a signed note."""
    note = folder.read("checkpoint", MAX_NOTE)
    if note is None:
        raise FormatError("the exported log has no checkpoint")
    return note


def read_leaves(folder: Folder, size: int) -> Iterator[bytes]:
    """Yield the first `size` leaves of an exported log, in order."""
    for number in range(-(-size // TILE)):
        width = min(TILE, size - number * TILE)
        limit = TILE * (MAX_PAYLOAD + 2)
        whole = width
        name = tile_path("entries", number, width)
        bundle = folder.read(name, limit)
        if bundle is None and width < TILE:
            # A log that has grown since may have put the full bundle in the partial one's place.
            bundle, whole = folder.read(tile_path("entries", number), limit), TILE
        if bundle is None:
            raise FormatError(f"the exported log lacks {name}")
        yield from read_bundle(bundle, whole, name)[:width]


def read_bundle(bundle: bytes, width: int, name: str = "the bundle") -> list[bytes]:
    """Return the entries of a bundle: each led by its length in two bytes, and exactly `width` of them."""
    entries = []
    at = 0
    for _ in range(width):
        end = at + 2 + int.from_bytes(bundle[at : at + 2], "big")
        if at + 2 > len(bundle) or end > len(bundle):
            raise FormatError(f"{name} of the exported log ends within an entry")
        entries.append(bundle[at + 2 : end])
        at = end
    if at != len(bundle):
        raise FormatError(f"{name} of the exported log holds more than {width} entries")
    return entries


def read_detail(folder: Folder, digest: str) -> bytes | None:
    """Return a detail document of an exported log by its digest, None when it is not there."""
    return folder.read(f"detail/{digest}.json", MAX_DETAIL)
