"""Back a store's ledger, keys and settings up into one file, and put them back.

Slices, checkpoints and receipts stay where they are: storage has copies of its own, or none, and what is erased must
not live on in ours. The ledger is copied as of one moment, while others write. The file is for its owner alone, since
whoever has the keys can sign as the store; with a passphrase it is encrypted, too.

A backup is of one moment, and erasures go on. An older ledger would list people who were erased since, and its log
would contradict tree heads that are signed and handed out. So before anything is put in place the ledger is brought up
to the log as it has gone on, and later erasures are carried out on it again; see `rollforward`.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, TypeVar

from unlearnd.config import FILE_NAME, Config, change_ledger, read_config
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.keys import draw_id, draw_nonce, make_private
from unlearnd.ledger import Ledger, backups, log, move
from unlearnd.storage import draw_backup_key
from unlearnd.storage.disk import sync_folder

MEDIA_TYPE = "application/vnd.unlearnd.backup.v1+json"
PASSPHRASE = "UNLEARND_BACKUP_PASSPHRASE"
MANIFEST, LEDGER, SLOT_KEY = "manifest.json", "ledger.sqlite", "slot.key"
"""`slot.key` is only in backups of encrypted stores. It opens what erasures rewrote since, and no store ever has it."""
_MAGIC = b"unlearnd-backup-1\n"
_CHUNK = 1 << 20
_TAG = 16
_NAME = re.compile(r"(keys|policies)/[A-Za-z0-9][A-Za-z0-9._-]*|unlearnd\.toml|ledger\.sqlite|slot\.key")
_MARKER = ".restoring"
T = TypeVar("T")


@dataclass(frozen=True)
class Backup:
    """What a backup is of."""

    store_id: str
    size: int
    """Leaves of the log."""
    root: str
    made_at: str
    encrypted: bool


def back_up(folder: Path, ledger: Ledger, config: Config, target: Path, at: str, passphrase: bytes | None) -> Backup:
    """Write a backup to a new file: whole or not at all, and durable when this returns."""
    if target.exists():
        raise RefusedError(f"there is a file at {target} already; a backup is never overwritten")
    try:
        with _workspace(target.parent) as work:
            return _back_up(work, folder, ledger, config, target, at, passphrase)
    except FileExistsError:
        raise RefusedError(f"there is a file at {target} already; a backup is never overwritten") from None
    except OSError as error:
        raise StorageError(f"the backup {target} cannot be written: {error.strerror or error}") from error


def _back_up(
    work: Path, folder: Path, ledger: Ledger, config: Config, target: Path, at: str, passphrase: bytes | None
) -> Backup:
    if config.wrapper == "none":
        return _copy_and_pack(work, folder, ledger, config, target, at, passphrase)
    private, public = draw_backup_key()
    with open(os.open(work / SLOT_KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    # Before the ledger is copied: what is rewritten after that moment has to be open to this backup.
    made = backups.Made(draw_id(), public)
    backups.enter(ledger, made, at)
    try:
        return _copy_and_pack(work, folder, ledger, config, target, at, passphrase)
    except BaseException:
        with suppress(UnlearndError):
            backups.forget(ledger, made)
        raise


def _copy_and_pack(
    work: Path, folder: Path, ledger: Ledger, config: Config, target: Path, at: str, passphrase: bytes | None
) -> Backup:
    copied = work / LEDGER
    # The ledger first: a key that is made meanwhile is then one too many, and never one too few.
    move.copy(ledger, copied)
    with closing(Ledger(f"sqlite:///{copied}")) as copy:
        size, root = log.size_and_root(copy)
    files = {LEDGER: copied, FILE_NAME: folder / FILE_NAME}
    files |= {SLOT_KEY: work / SLOT_KEY} if (work / SLOT_KEY).exists() else {}
    for part in ("keys", "policies"):
        # Those with a hidden name are what somebody was killed over, and of no use.
        listed = [path for path in sorted((folder / part).glob("[!.]*")) if path.is_file()]
        files |= {f"{part}/{path.name}": path for path in listed}
    made = Backup(config.store_id, size, root.hex(), at, passphrase is not None)
    with _writing(work / "whole", passphrase) as out:
        _pack(out, files, made)
    # Unlike a rename, a link never replaces what is there.
    os.link(work / "whole", target)
    sync_folder(str(target.parent))
    return made


@contextmanager
def _workspace(parent: Path) -> Iterator[Path]:
    """Make a folder to work in, for its owner alone, which is gone afterwards; those of the killed go first.

    What is copied there has everybody's keys: it must not stay, and whoever is erased later must not stay in it.
    """
    import fcntl  # not there on every system

    for left in parent.glob(".unlearnd-*.part"):
        with suppress(OSError), (left / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever is still at work holds it
            shutil.rmtree(left, ignore_errors=True)
    work = parent / f".unlearnd-{draw_id()[:16]}.part"
    work.mkdir(mode=0o700)
    try:
        with (work / "lock").open("xb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def restore(
    source: Path,
    folder: Path,
    passphrase: bytes | None,
    catch_up: Callable[[Path, Ledger, Config], T],
    ledger_of: Callable[[Config], str],
    ledger_url: str | None = None,
) -> tuple[Backup, T]:
    """Put ledger, keys and settings of a backup into `folder`, beside the storage that is there.

    Before anything is in place, `catch_up` is given the folder with keys and settings, the ledger and the settings: it
    brings the ledger up to what has happened since, or refuses. `ledger_of` says where a ledger goes, by the settings,
    which name `ledger_url` instead where one is given. Refuse a folder that has a store. Killed in the middle it can be
    run again; the folder is a store only once all is in place.
    """
    if (folder / FILE_NAME).exists():
        raise RefusedError(f"there is a store in {folder} already; a backup is never put in its place")
    ours = (folder / _MARKER).exists()
    for name in ("keys", LEDGER):
        if (folder / name).exists() and not ours:
            raise RefusedError(f"there is something at {folder / name} already, and a restore overwrites nothing")
    there = folder.exists()
    try:
        make_private(folder)
        with _workspace(folder) as work:
            return _restore(work, source, folder, passphrase, catch_up, ledger_of, ledger_url, ours)
    except OSError as error:
        raise StorageError(f"the backup cannot be put into {folder}: {error.strerror or error}") from error
    finally:
        if not there:
            with suppress(OSError):
                folder.rmdir()  # of a restore that was refused nothing is in it


def _restore(
    work: Path,
    source: Path,
    folder: Path,
    passphrase: bytes | None,
    catch_up: Callable[[Path, Ledger, Config], T],
    ledger_of: Callable[[Config], str],
    ledger_url: str | None,
    ours: bool,
) -> tuple[Backup, T]:
    made = _unpack(source, work, passphrase)
    if ledger_url is not None:
        change_ledger(work, ledger_url)
    config = read_config(work)
    place = ledger_of(config)
    if not ours and not place.startswith("sqlite:///"):
        with closing(Ledger(place)) as there:
            if there.tables():
                raise RefusedError(f"there are tables in {there.place} already, and a restore overwrites nothing")
    with closing(Ledger.open(f"sqlite:///{work / LEDGER}")) as ledger:
        size, root = log.size_and_root(ledger)
        if (size, root.hex()) != (made.size, made.root):
            raise DamagedStoreError("the backup's log is not the one its manifest names")
        caught_up = catch_up(work, ledger, config)
        # What was destroyed in it must not stay in the file, nor in its write-ahead log.
        ledger.scrub()
    _put_in_place(work, folder, place)
    return made, caught_up


def _put_in_place(work: Path, folder: Path, place: str) -> None:
    # From here on what lies in the folder is a restore's, and one that is run again may replace it.
    (folder / _MARKER).touch(mode=0o600)
    sync_folder(str(folder))
    Ledger.discard(place)
    if place.startswith("sqlite:///"):
        ledger = Path(place.removeprefix("sqlite:///"))
        os.replace(work / LEDGER, ledger)
        sync_folder(str(ledger.parent))
    else:
        move.move(f"sqlite:///{work / LEDGER}", place)
        move.finish(place)
    for part in ("keys", "policies"):
        if (work / part).is_dir():
            shutil.rmtree(folder / part, ignore_errors=True)
            os.replace(work / part, folder / part)
    sync_folder(str(folder))
    # Last, because with this file the folder is a store.
    os.replace(work / FILE_NAME, folder / FILE_NAME)
    sync_folder(str(folder))
    with suppress(FileNotFoundError):
        (folder / _MARKER).unlink()


def _pack(out: IO[bytes], files: dict[str, Path], made: Backup) -> None:
    manifest = {
        "mediaType": MEDIA_TYPE,
        "storeId": made.store_id,
        "size": made.size,
        "root": made.root,
        "madeAt": made.made_at,
        "files": {name: _digest_of_file(path) for name, path in files.items()},
    }
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        data = json.dumps(manifest, indent=2).encode() + b"\n"
        tar.addfile(_entry(MANIFEST, len(data)), io.BytesIO(data))
        for name, path in files.items():
            with path.open("rb") as file:
                tar.addfile(_entry(name, path.stat().st_size), file)


def _entry(name: str, size: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o600
    return entry


def _unpack(source: Path, work: Path, passphrase: bytes | None) -> Backup:
    """Write a backup's files below `work`, after checking that each is what the manifest says."""
    try:
        with _reading(source, passphrase) as (plain, encrypted), tarfile.open(fileobj=plain, mode="r|") as tar:
            manifest: dict[str, Any] = {}
            for entry in tar:
                file = tar.extractfile(entry)
                if file is None:
                    raise DamagedStoreError(f"{source} holds something that is not a file")
                if not manifest:
                    manifest = json.loads(file.read(_CHUNK)) if entry.name == MANIFEST else {}
                    if manifest.get("mediaType") != MEDIA_TYPE:
                        raise DamagedStoreError(f"{source} is not a backup of a store")
                    continue
                if not _NAME.fullmatch(entry.name) or entry.name not in manifest["files"]:
                    raise DamagedStoreError(f"{source} holds a file that no backup has")
                path = work / PurePosixPath(entry.name)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                if _write_private(path, file) != manifest["files"].pop(entry.name):
                    raise DamagedStoreError(f"{entry.name} in {source} is not what was backed up: its digest differs")
            if not manifest or manifest["files"]:
                raise DamagedStoreError(f"{source} ends too early")
            return Backup(
                manifest["storeId"], manifest["size"], manifest["root"], manifest["madeAt"], encrypted=encrypted
            )
    except FileNotFoundError:
        raise NotFoundError(f"there is no backup at {source}") from None
    except (tarfile.TarError, ValueError, KeyError, TypeError, EOFError):
        raise DamagedStoreError(f"{source} is not a backup of a store, or damaged") from None


def _write_private(path: Path, file: IO[bytes]) -> str:
    """Write a file that its owner alone can read; return its digest."""
    whole = hashlib.sha256()
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        while piece := file.read(_CHUNK):
            whole.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    return whole.hexdigest()


def _digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _writing(path: Path, passphrase: bytes | None) -> Iterator[IO[bytes]]:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        if passphrase is None:
            yield file
        else:
            sealed = _Sealed(file, passphrase)
            yield sealed  # type: ignore[misc]
            sealed.end()
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _reading(path: Path, passphrase: bytes | None) -> Iterator[tuple[IO[bytes], bool]]:
    with path.open("rb") as file:
        encrypted = file.read(len(_MAGIC)) == _MAGIC
        if not encrypted:
            file.seek(0)
            yield file, False
        elif passphrase is None:
            raise InputError(f"{path} is encrypted: give its passphrase in {PASSPHRASE}")
        else:
            yield io.BufferedReader(_Opened(file, passphrase)), True


def _cipher(passphrase: bytes, salt: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # heavy

    return AESGCM(hashlib.scrypt(passphrase, salt=salt, n=2**15, r=8, p=1, maxmem=2**26, dklen=32))


def _nonce(number: int, last: bool) -> bytes:
    # The key is of this file alone. The last chunk has a nonce of its own kind, so that a cut file does not open.
    return number.to_bytes(11, "big") + bytes([last])


class _Sealed:
    """Encrypts what is written to it, chunk by chunk: AES-256-GCM under a key of this file alone."""

    def __init__(self, file: IO[bytes], passphrase: bytes) -> None:
        salt = draw_nonce()
        self._file, self._cipher, self._number, self._held = file, _cipher(passphrase, salt), 0, bytearray()
        file.write(_MAGIC + salt)

    def write(self, data: bytes) -> int:
        self._held += data
        while len(self._held) > _CHUNK:
            self._seal(bytes(self._held[:_CHUNK]), last=False)
            del self._held[:_CHUNK]
        return len(data)

    def end(self) -> None:
        self._seal(bytes(self._held), last=True)

    def _seal(self, chunk: bytes, last: bool) -> None:
        self._file.write(self._cipher.encrypt(_nonce(self._number, last), chunk, _MAGIC))
        self._number += 1


class _Opened(io.RawIOBase):
    """Decrypts what is read from it."""

    def __init__(self, file: IO[bytes], passphrase: bytes) -> None:
        self._file, self._number, self._held = file, 0, b""
        self._cipher = _cipher(passphrase, file.read(32))
        self._next = file.read(_CHUNK + _TAG)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        from cryptography.exceptions import InvalidTag  # heavy

        if not self._held and self._next:
            chunk, self._next = self._next, self._file.read(_CHUNK + _TAG)
            try:
                self._held = self._cipher.decrypt(_nonce(self._number, not self._next), chunk, _MAGIC)
            except InvalidTag:
                raise DamagedStoreError("the backup does not open: another passphrase, or damaged") from None
            self._number += 1
        count = min(len(buffer), len(self._held))
        buffer[:count], self._held = self._held[:count], self._held[count:]
        return count
