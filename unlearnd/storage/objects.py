"""Bytes over fsspec: objects under one root, the door to all storage.

Objects have names with forward slashes under one root. A write is all or nothing and durable when it returns:
on a local disk it goes to a temporary name, is flushed, and is renamed; elsewhere one request stores the
whole object. Destroying looks again afterwards, because a claim of destruction ends up in evidence.
"""

import errno
import json
import os
import posixpath
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from unlearnd.errors import DamagedStoreError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.storage.disk import Pieces, sync_folder, write_file_once, write_files
from unlearnd.storage.s3 import ATTEMPTS, Abilities, Bucket, Kept, Version, options_for
from unlearnd.storage.vault import Vault

CLAIM = "store.json"
CLAIM_TYPE = "application/vnd.unlearnd.storage.v1+json"
# Requests wait for the other side: let them wait together, but not so many that training feels it.
_AT_ONCE, _AHEAD = 8, 2


class Record(Protocol):
    """Whoever writes down what becomes of the versions of objects, so that a kill in between loses none of it."""

    def doomed(self, versions: Sequence[Version]) -> None:
        """Called before these are destroyed."""

    def destroyed(self, versions: Sequence[Version], kept: Sequence[Kept]) -> None:
        """Called after storage was listed again: what is gone, and what is still there."""


class Overlooked:
    """For sweeps that claim nothing: what cannot be destroyed is left to whoever claims, and to the audit."""

    def doomed(self, versions: Sequence[Version]) -> None:
        pass

    def destroyed(self, versions: Sequence[Version], kept: Sequence[Kept]) -> None:
        pass


class Storage:
    """A place for objects: a local folder, a bucket with a prefix, or whatever else fsspec opens.

    `settings` are those of `[storage]` in a store's settings file; credentials come from the environment.
    """

    def __init__(self, url: str, **settings: Any) -> None:
        s3 = url.partition("://")[0] in ("s3", "s3a")
        given = {**(options_for(settings) if s3 else {}), **settings.get("options", {})}
        try:
            self._fs, self._root = fsspec.url_to_fs(url, **given)
        except (ImportError, ValueError, TypeError) as error:
            what = f"storage {url} cannot be opened: {error}"
            raise StorageError(f"{what} (pip install 'unlearnd[s3]')" if s3 else what) from error
        except OSError as error:
            raise StorageError(f"storage {url} cannot be opened: {error}") from error
        self._root = posixpath.normpath(self._root)
        self.url = url
        self._local = isinstance(self._fs, LocalFileSystem)
        self._bucket = Bucket(self._fs, settings.get("attempts", ATTEMPTS)) if s3 else None
        self._abilities = Abilities(exclusive=self._local, versioning="off", object_lock=False)
        # A file system that is not made for several at a time may have one line to the other side.
        self._turn: AbstractContextManager[Any] = (
            nullcontext() if self._local or self._fs.async_impl else threading.RLock()
        )
        self._ahead: dict[str, Future[bytes]] = {}
        self.vault: Vault | None = None
        """What seals slice data and checkpoints before they get here; None: they are kept as they are."""

    @property
    def local(self) -> bool:
        """Whether objects are files of this machine, and not behind a network."""
        return self._local

    @property
    def exclusive(self) -> bool:
        """Whether `create_new` lets exactly one of two writers of a name succeed."""
        return self._abilities.exclusive

    @property
    def abilities(self) -> Abilities:
        """What the place was found to be able to do when it was claimed."""
        return self._abilities

    def create(self) -> None:
        """Make the root, readable by its owner alone where that means something."""
        with _translated("storage root"):
            if self._bucket:
                self._bucket.check(self._root)
                return
            self._fs.makedirs(self._root, exist_ok=True)
            if self._local:
                os.chmod(self._root, 0o700)

    def claim(self, store_id: str, *, lock_allowed: bool = False, encrypted: bool = False) -> None:
        """Take the root for one store, after finding out what it can do; refuse what cannot serve or is taken."""
        with _translated("storage root"):
            self._check_free()
            if self._bucket:
                self._abilities = self._bucket.probe(self._root, f"probe-{secrets.token_hex(8)}")
        if self._abilities.object_lock and not lock_allowed:
            raise RefusedError(
                f"the bucket of {self.url} has object lock: what is erased could not be destroyed there; "
                "name another for slices and checkpoints (receipts may live in this one)"
            )
        about = {"exclusive": self._abilities.exclusive, "versioning": self._abilities.versioning}
        about |= {"objectLock": self._abilities.object_lock, "encrypted": encrypted}
        document = {"mediaType": CLAIM_TYPE, "storeId": store_id, **about}
        if not self.create_new(CLAIM, json.dumps(document, indent=2).encode() + b"\n"):
            raise self._taken()

    def unclaim(self) -> None:
        """Let go of a root that was claimed for a store that then was not made."""
        self.destroy([CLAIM])

    def check(self, store_id: str | None = None, *, encrypted: bool | None = None) -> None:
        """Raise unless the root is there and is this store's: an absent volume must not pass for an empty one."""
        if self._local and not os.path.isdir(self._root):
            raise StorageError(f"the storage {self._root} is not there; is it mounted?")
        if self._bucket:
            with _translated("storage root"):
                self._bucket.check(self._root)
        try:
            said = json.loads(self.read(CLAIM))
            owner, found = said["storeId"], (said["exclusive"], said["versioning"], said["objectLock"])
        except NotFoundError:
            if not self._local:
                raise StorageError(
                    f"there is no store at {self.url}: it has no {CLAIM}; is it the right place?"
                ) from None
            said, owner, found = {}, store_id, (True, "off", False)  # a store of 0.1, which made none
        except (ValueError, KeyError, TypeError):
            raise DamagedStoreError(f"{CLAIM} at {self.url} cannot be read") from None
        if store_id is not None and owner != store_id:
            raise RefusedError(f"the storage {self.url} belongs to another store, {owner}")
        if encrypted is not None and encrypted != bool(said.get("encrypted")):
            was = "encrypted" if said.get("encrypted") else "not encrypted"
            raise RefusedError(f"the objects at {self.url} are {was} since the store was made, and stay so")
        self._abilities = Abilities(*found)

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
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(lambda named: self._send(*named), objects):
                pass

    def _send(self, name: str, pieces: Pieces) -> None:
        with _translated(name):
            path, data = self._full(name), pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if self._bucket:
                self._bucket.put(path, bytes(data), self._abilities.object_lock)
            else:
                with self._turn:
                    # There are file systems that have folders, and want them made.
                    self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
                    self._fs.pipe_file(path, data)

    def create_new(self, name: str, data: bytes) -> bool:
        """Store `data` under `name` unless something is there; say whether it was stored.

        Of two writers exactly one succeeds, where the place is `exclusive`; elsewhere whoever calls holds a lock.
        """
        with _translated(name):
            if self._local:
                return write_file_once(self._full(name), data)
            if self._bucket and self.exclusive:
                return self._bucket.create(self._full(name), data)
            there = self._exists(self._full(name))
        if not there:
            self.write(name, data)
        return not there

    @contextmanager
    def reading_ahead(self, names: Iterable[str]) -> Iterator[None]:
        """Over a network, fetch objects while the block does something else, for whoever reads each next.

        For objects that never change under their names. What nobody has read when this is called again is forgotten.
        """
        if self._local:
            yield
            return
        pool = ThreadPoolExecutor(_AHEAD)
        self._ahead = {name: pool.submit(self._fetch, name) for name in names}
        try:
            yield
        finally:
            pool.shutdown(cancel_futures=True)

    def read(self, name: str, version: str | None = None) -> bytes:
        """Return the bytes under `name`, or of one version of it; raise `NotFoundError` where there are none."""
        ahead = self._ahead.pop(name, None) if version is None else None
        if ahead is not None and not ahead.cancel():
            with suppress(UnlearndError, CancelledError):
                return ahead.result()
        return self._fetch(name, version)

    def _fetch(self, name: str, version: str | None = None) -> bytes:
        with _translated(name):
            if self._local:
                return Path(self._full(name)).read_bytes()
            if self._bucket:
                return self._bucket.get(self._full(name), version)
            with self._turn:
                return bytes(self._fs.cat_file(self._full(name)))

    def read_many(self, names: Sequence[str]) -> Iterator[bytes]:
        """Yield the bytes under each name, in order; over a network, fetch the next ones meanwhile."""
        if self._local or len(names) < 2:
            yield from map(self.read, names)
            return
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            # A window, not all of them: what is fetched waits in memory until it is taken.
            waiting = [pool.submit(self.read, name) for name in names[:_AT_ONCE]]
            for following in range(_AT_ONCE, len(names) + _AT_ONCE):
                if not waiting:
                    return
                data = waiting.pop(0).result()
                if following < len(names):
                    waiting.append(pool.submit(self.read, names[following]))
                yield data

    def list(self, prefix: str) -> list[str]:
        """Return the names of all objects below the folder `prefix`, sorted.

        Unfinished ones count too, and those of which a bucket keeps nothing but older versions.
        """
        with _translated(prefix):
            top = self._full(prefix)
            if self._local:
                found: Iterable[str] = [
                    posixpath.join(where, name) for where, _, names in os.walk(top) for name in names
                ]
            elif self._bucket:
                found = {version.name for version in self._bucket.versions(top)}
            else:
                with self._turn:
                    self._fs.invalidate_cache()
                    found = self._fs.find(top)
        return sorted(posixpath.relpath(path, self._root) for path in found)

    def list_many(self, prefixes: Sequence[str]) -> Sequence[Sequence[str]]:
        """Return what `list` does for each of several folders; over a network, they are asked for together."""
        if self._local or len(prefixes) < 2:
            return [self.list(prefix) for prefix in prefixes]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return [*pool.map(self.list, prefixes)]

    def versions(self, prefix: str) -> Sequence[Version]:
        """Return every version below the folder `prefix` that a bucket keeps; none where there is no such thing."""
        if not self._bucket:
            return []
        with _translated(prefix):
            return [self._named(version) for version in self._bucket.versions(self._full(prefix))]

    def sizes(self, prefix: str) -> dict[str, int]:
        """Return the names of all objects below the folder `prefix` with their sizes."""
        with _translated(prefix):
            if self._local:
                sizes = {}
                for name in self.list(prefix):
                    with suppress(FileNotFoundError):
                        sizes[name] = os.stat(self._full(name)).st_size
                return sizes
            if self._bucket:
                found = self._bucket.sizes(self._full(prefix))
                return {posixpath.relpath(path, self._root): size for path, size in found.items()}
            with self._turn:
                self._fs.invalidate_cache()
                listed = self._fs.find(self._full(prefix), detail=True)
            return {posixpath.relpath(path, self._root): int(info["size"]) for path, info in listed.items()}

    def destroy(self, names: Iterable[str], record: Record | None = None) -> None:
        """Destroy objects, every version of them; those already gone are fine.

        What is still there after is told to `record`; without one it is a `StorageError`.
        """
        names = list(names)
        if self._bucket:
            self._destroy_versions(names, record)
            return
        for name in names:
            with suppress(NotFoundError), _translated(name):
                if self._local:
                    os.unlink(self._full(name))
                else:
                    with self._turn:
                        self._fs.rm_file(self._full(name))
        for folder in {posixpath.dirname(name) for name in names}:
            if self._local:
                sync_folder(self._full(folder))
            left = set(self.list(folder)).intersection(names)
            if left:
                raise StorageError(f"{len(left)} objects below {folder} are still there after destroying them")

    def _destroy_versions(self, names: Sequence[str], record: Record | None) -> None:
        assert self._bucket
        if not names:
            return
        with _translated(f"{names[0]}, which is to be destroyed"):
            doomed = self._bucket.versions_of([self._full(name) for name in names])
            if record:
                record.doomed([self._named(version) for version in doomed])
            gone, kept = self._bucket.destroy(doomed)
        still = [replace(one, name=posixpath.relpath(one.name, self._root)) for one in kept]
        if record:
            record.destroyed([self._named(version) for version in gone], still)
        elif still:
            raise StorageError(
                f"{len(still)} versions of objects are still there after destroying them, the first of "
                f"{still[0].name}: {still[0].why}"
            )

    def _check_free(self) -> None:
        """Raise unless nobody has claimed the root, a folder above or below it; below it a bucket must have nothing."""
        above = self._root
        while above.strip("/"):
            # What lies above may be closed to us; then it cannot be looked at, and is taken to be free.
            with suppress(PermissionError):
                if self._is_claimed(above):
                    raise self._taken()
            above = posixpath.dirname(above)
        if self._local and any(CLAIM in names and self._is_claimed(where) for where, _, names in os.walk(self._root)):
            raise self._taken()
        if self._bucket and not self._bucket.is_empty(self._root):
            raise RefusedError(f"there is something below {self.url} already, older versions count too: name another")

    def _is_claimed(self, folder: str) -> bool:
        if not self._local:
            return self._exists(f"{folder}/{CLAIM}")
        try:
            # On a disk that is not all ours, somebody else may have a file of that name.
            return bool(json.loads(Path(folder, CLAIM).read_bytes())["mediaType"] == CLAIM_TYPE)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _exists(self, path: str) -> bool:
        if self._bucket:
            return self._bucket.exists(path)
        with self._turn:
            return bool(self._fs.exists(path))

    def _taken(self) -> RefusedError:
        return RefusedError(
            f"the storage {self.url} belongs to a store already: two stores in one place would destroy each "
            "other's objects; name another"
        )

    def _named(self, version: Version) -> Version:
        return replace(version, name=posixpath.relpath(version.name, self._root))

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
    except UnlearndError:
        raise
    except FileNotFoundError:
        raise NotFoundError(f"storage holds no {name}") from None
    except ConnectionError as error:
        raise _out_of_reach(name, error) from error
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise StorageError(f"storage cannot handle {name}: {what}") from error
    except Exception as error:
        # File systems are fsspec's plugins, and each raises errors of its own.
        if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
            raise StorageError(
                "there are no credentials for the storage: give them in the environment (AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile, or a role of the machine)"
            ) from error
        if type(error).__name__ in ("EndpointConnectionError", "ConnectTimeoutError", "ConnectionClosedError"):
            raise _out_of_reach(name, error) from error
        raise StorageError(f"storage cannot handle {name}: {type(error).__name__}: {error}") from error


def _out_of_reach(name: str, error: Exception) -> StorageError:
    return StorageError(f"storage cannot handle {name}: its server cannot be reached, or hung up ({error})")
