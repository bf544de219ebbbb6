"""Make a store, and bring one to another schema, another database, or back from a backup.

A store exists once its settings file does, which is therefore written last: what fails before is undone, and what is
killed before leaves a folder that is no store.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unlearnd.backup import Backup, restore
from unlearnd.config import (
    FILE_NAME,
    Config,
    change_ledger,
    check_no_secret,
    check_storage_options,
    ledger_url,
    read_config,
    storage_url,
    write_config,
)
from unlearnd.errors import InputError, RefusedError, StorageError
from unlearnd.keys import create_keys, create_wrapper, discard_keys, draw_id
from unlearnd.leases import Clock, check_idle
from unlearnd.ledger import Ledger
from unlearnd.ledger import move as ledger_move
from unlearnd.ledger.connection import MOVED, stamp
from unlearnd.ledger.migrate import migrate
from unlearnd.opened import Opened
from unlearnd.plugins import load_plugins
from unlearnd.policy import load_policy
from unlearnd.steps import Step, reached
from unlearnd.storage import Storage
from unlearnd.translog import begin
from unlearnd.verify.trust import read_head


def found(
    folder: Path,
    *,
    ledger: str,
    storage: str,
    storage_options: Mapping[str, Any] | None,
    receipts: str | None,
    encrypt: str | None,
    placement_key: str | os.PathLike[str] | None,
    policy: str,
    signer: str,
    clock: Clock,
) -> None:
    """Make a store in a folder, or leave it as it was."""
    load_policy(policy, folder / Config.policies)
    load_plugins().signer(signer)
    if (folder / FILE_NAME).exists():
        raise RefusedError(f"there is a store in {folder} already")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the folder {folder} cannot be made: {error.strerror}") from error
    if storage.startswith("memory:"):
        raise InputError("storage in memory:// would be lost with the process; name a folder or a bucket")
    options = dict(storage_options or {})
    check_storage_options(options)
    check_no_secret(options, storage, receipts or "")
    config = Config(
        store_id=draw_id(),
        ledger=ledger,
        storage=storage,
        policy=policy,
        storage_options=options,
        receipts=receipts,
        signer=signer,
        wrapper=encrypt or "none",
    )
    if encrypt:
        load_plugins().wrapper(encrypt)
    with ExitStack() as undo:
        _claim(undo, Storage(storage_url(folder, storage), **options), config.store_id, encrypted=bool(encrypt))
        if receipts is not None:
            _claim(undo, Storage(storage_url(folder, receipts), **options), config.store_id, lock_allowed=True)
        Ledger.create(ledger_url(folder, ledger)).close()
        undo.callback(Ledger.discard, ledger_url(folder, ledger))
        create_keys(folder / "keys", Path(placement_key) if placement_key else None)
        undo.callback(discard_keys, folder / "keys")
        if encrypt == "file":
            create_wrapper(folder / "keys")
        with Opened(folder, config, clock) as store:
            begin(store.translog, stamp(store.clock()))
        # Last, because with this file the folder is a store.
        write_config(folder, config)
        undo.pop_all()


def migrate_store(directory: str | os.PathLike[str]) -> tuple[str | None, str]:
    """Bring the ledger of the store in `directory` to this release's schema; return it before and after."""
    folder = Path(directory).absolute()
    url = ledger_url(folder, read_config(folder).ledger)
    # What is not a ledger at all must not become an empty one.
    Ledger.check(url)
    return migrate(url)


def restore_store(
    file: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    passphrase: bytes | None = None,
    *,
    head: bytes | None = None,
) -> Backup:
    """Put a backup into `directory`, where the storage is and no store; refuse one that erasures have overtaken.

    `head` is the newest tree head that anybody kept: the backup must be as new.
    """
    folder = Path(directory).absolute()

    def reach(config: Config, place: str) -> Storage:
        storage = Storage(storage_url(folder, place), **config.storage_options)
        storage.check(config.store_id)
        return storage

    return restore(
        Path(file),
        folder,
        passphrase,
        lambda config: (reach(config, config.storage), reach(config, config.receipts or config.storage)),
        lambda config: ledger_url(folder, config.ledger),
        0 if head is None else read_head(head)[1].size,
    )


def copy_ledger(
    directory: str | os.PathLike[str], url: str, *, clock: Clock = lambda: datetime.now(UTC)
) -> ledger_move.Moved:
    """Move the ledger of the store in `directory` to the database at `url`, where nothing is yet.

    Log, receipts and digests stay as they are. Killed anywhere, called again it goes on. Nobody may be at work.
    """
    folder = Path(directory).absolute()
    config = read_config(folder)
    here, there = ledger_url(folder, config.ledger), ledger_url(folder, url)
    if here == there:
        if not ledger_move.is_unfinished(there):
            raise RefusedError("the ledger is there already")
    else:
        if Ledger.check(here) != MOVED:
            with closing(Ledger.open(here)) as ledger:
                check_idle(ledger, clock)
        ledger_move.move(here, there)
        change_ledger(folder, url)
        reached(Step.LEDGER_SWITCHED)
    return ledger_move.finish(there)


def _claim(
    undo: ExitStack, storage: Storage, store_id: str, lock_allowed: bool = False, encrypted: bool = False
) -> None:
    """Take a place for a store that is being made; it is let go again when the making fails."""
    storage.create()
    storage.claim(store_id, lock_allowed=lock_allowed, encrypted=encrypted)
    undo.callback(storage.unclaim)
