"""What can break at the two doors, storage and ledger, and a way to have it break at the n-th call.

`Doors` wraps the methods that everything passes through. Calls are counted, whichever thread makes them, and at one
of them one thing goes wrong:

    raise   it fails and nothing was done
    lost    it is done, and the answer is lost: the caller is told that it failed
    hang    it never comes back, with whatever lock it holds; somebody kills the process
    half    half of it is done (half an object, half of the objects, half a transaction), then the power goes;
            for a read: half of the bytes come, and nobody says so
    kill    the process is killed before it

Nothing here stands in for our code: what does not break is done by the real storage and the real ledger.
"""

import os
import posixpath
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

from unlearnd.errors import StorageError
from unlearnd.ledger import Ledger
from unlearnd.storage import Storage

STORES = ("raise", "lost", "hang", "half", "kill")
LOOKS = ("raise", "kill")
HOWS = {
    "write_many": STORES,
    "create_new": STORES,
    "destroy": STORES,
    "read": ("raise", "half", "kill"),
    "list": LOOKS,
    "versions": LOOKS,
    "sizes": LOOKS,
    "ledger.write": STORES,
    "ledger.load": STORES,
    "ledger.write_aside": STORES,
    "ledger.read": LOOKS,
    "ledger.peek": LOOKS,
    "ledger.scrub": ("raise", "lost", "hang", "kill"),
    "ledger.copy_file": ("raise", "lost", "hang", "kill"),
}
"""What can go wrong at each door."""
_TRANSACTIONS = ("ledger.write", "ledger.load", "ledger.write_aside")
"""These hang in the middle, with their locks."""


@dataclass
class Doors:
    """The doors, watched: `calls` has the name of every call so far; at number `at` it goes wrong as `how` says."""

    at: int = -1
    how: str = ""
    only: str = ""
    """Count only calls of this door; all, where empty."""
    breaking: Callable[[str, str], None] = lambda door, how: None
    """Called with door and way as it goes wrong; of what hangs, so that somebody comes and kills the process."""
    calls: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def wrap(self) -> None:
        """Stand in all doors of this process, until it ends."""
        for name in ("list", "versions", "sizes"):
            self._wrap_look(Storage, name, name)
        self._wrap_look(Ledger, "peek", "ledger.peek")
        self._wrap_look(Ledger, "scrub", "ledger.scrub")
        self._wrap_look(Ledger, "copy_file", "ledger.copy_file")
        self._wrap_read()
        for name, half in (("write_many", _half_write), ("create_new", _half_create), ("destroy", _half_destroy)):
            self._wrap_change(name, half)
        for name in ("write", "load", "write_aside", "read"):
            self._wrap_transaction(name)

    def _passes(self, name: str) -> str:
        """Count a call; return what is to go wrong with it, if anything; kill or hang where it is that."""
        if self.only not in ("", name):
            return ""
        with self._lock:
            self.calls.append(name)
            if len(self.calls) - 1 != self.at:
                return ""
        # Threads take turns as they like: another door than the one that was counted breaks in a way of its own.
        how = self.how if self.how in HOWS[name] else HOWS[name][self.at % len(HOWS[name])]
        if how == "kill":
            self._die(name, how)
        if how == "raise":
            self.breaking(name, how)
            raise StorageError(f"{name} failed, as the fault harness was asked to make it")
        if how == "hang" and name not in _TRANSACTIONS:
            self._hang(name)
        return how

    def _hang(self, name: str) -> NoReturn:
        self.breaking(name, "hang")
        time.sleep(600)
        _die()

    def _die(self, name: str, how: str) -> NoReturn:
        self.breaking(name, how)
        _die()

    def _lost(self, name: str) -> StorageError:
        self.breaking(name, "lost")
        return StorageError(f"the answer of {name} was lost, as the fault harness was asked to lose it")

    def _wrap_look(self, owner: type, method: str, name: str) -> None:
        real = getattr(owner, method)

        def look(this: Any, *arguments: Any, **options: Any) -> Any:
            how = self._passes(name)
            found = real(this, *arguments, **options)
            if how == "lost":
                raise self._lost(name)
            return found

        setattr(owner, method, look)

    def _wrap_read(self) -> None:
        real = Storage.read

        def read(this: Storage, name: str, version: str | None = None) -> bytes:
            how = self._passes("read")
            data = real(this, name, version)
            if how == "half":
                self.breaking("read", how)
                return data[: len(data) // 2]
            return data

        Storage.read = read  # type: ignore[method-assign]

    def _wrap_change(self, name: str, half: Callable[..., None]) -> None:
        real = getattr(Storage, name)

        def change(this: Storage, what: Any, *arguments: Any, **options: Any) -> Any:
            what = what if isinstance(what, str) else list(what)
            how = self._passes(name)
            if how == "half":
                half(real, this, what, *arguments, **options)
                self._die(name, how)
            done = real(this, what, *arguments, **options)
            if how == "lost":
                raise self._lost(name)
            return done

        setattr(Storage, name, change)

    def _wrap_transaction(self, method: str) -> None:
        real, name = getattr(Ledger, method), f"ledger.{method}"

        @contextmanager
        def transaction(this: Ledger) -> Iterator[Any]:
            how = self._passes(name)
            with real(this) as connection:
                yield connection
                if how == "hang":
                    self._hang(name)
                if how == "half":
                    self._die(name, how)
            if how == "lost":
                raise self._lost(name)

        setattr(Ledger, method, transaction)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def _half_write(real: Any, storage: Storage, objects: list[tuple[str, Any]]) -> None:
    middle = len(objects) // 2
    real(storage, objects[:middle])
    name, pieces = objects[middle]
    _half_object(storage, name, b"".join(pieces))


def _half_create(_real: Any, storage: Storage, name: str, data: bytes) -> None:
    _half_object(storage, name, data)


def _half_destroy(real: Any, storage: Storage, names: list[str], record: Any = None) -> None:
    real(storage, names[: (len(names) + 1) // 2], record)


def _half_object(storage: Storage, name: str, data: bytes) -> None:
    """Leave what a writer leaves that loses power in the middle of an object."""
    path = storage._full(name)
    if storage._local:
        folder, last = posixpath.split(path)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with open(f"{folder}/.{last}.{secrets.token_hex(4)}.part", "xb") as file:
            file.write(data[: len(data) // 2])
    elif storage._bucket:
        bucket, key = path.split("/", 1)
        upload = storage._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        part = {"Bucket": bucket, "Key": key, "UploadId": upload, "PartNumber": 1}
        storage._fs.call_s3("upload_part", **part, Body=data[: len(data) // 2])
