"""Make a store, and bring one to another schema, another database, or back from a backup.

A store exists once its settings file does, which is therefore written last: what fails before is undone, and what is
killed before leaves a folder that is no store.
"""

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unlearnd import __version__
from unlearnd.backup import SLOT_KEY, Backup, restore
from unlearnd.config import (
    FILE_NAME,
    Config,
    change_ledger,
    check_address,
    check_no_secret,
    check_storage_options,
    ledger_url,
    read_config,
    storage_url,
    write_config,
)
from unlearnd.errors import InputError, RefusedError, StorageError, UnlearndError
from unlearnd.keys import create_keys, create_wrapper, discard_keys, draw_id, make_private
from unlearnd.leases import Clock, SteadyClock, check_idle
from unlearnd.ledger import Ledger, log
from unlearnd.ledger import move as ledger_move
from unlearnd.ledger.connection import MOVED, stamp
from unlearnd.ledger.migrate import migrate
from unlearnd.logcopy import read_copy, read_export
from unlearnd.making import begin_making, discard_ledger, end_making, is_free, let_go, undo_killed
from unlearnd.opened import Opened
from unlearnd.plugins import load_plugins
from unlearnd.policy import Policy, load_policy
from unlearnd.rollforward import Rolled, check_covers, roll_forward
from unlearnd.steps import Step, reached
from unlearnd.storage import Storage, Vault
from unlearnd.translog import Translog, begin, newest_moment


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
    if storage.startswith("memory:"):
        raise InputError("storage in memory:// would be lost with the process; name a folder or a bucket")
    options = dict(storage_options or {})
    check_storage_options(options)
    check_no_secret(options, storage, receipts or "")
    for address in filter(None, (storage, receipts)):
        check_address(address)
    try:
        make_private(folder)
    except OSError as error:
        raise StorageError(f"the folder {folder} cannot be made: {error.strerror}") from error
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
    undo_killed(folder)
    with ExitStack() as undo:
        undo.callback(begin_making(folder, config))
        _claim(undo, Storage(storage_url(folder, storage), **options), config.store_id, encrypted=bool(encrypt))
        if receipts is not None:
            _claim(undo, Storage(storage_url(folder, receipts), **options), config.store_id, lock_allowed=True)
        url = ledger_url(folder, ledger)
        if is_free(url):
            undo.callback(discard_ledger, url, config.store_id)
        Ledger.create(url).close()
        create_keys(folder / "keys", Path(placement_key) if placement_key else None)
        undo.callback(discard_keys, folder / "keys")
        if encrypt == "file":
            create_wrapper(folder / "keys")
        with Opened(folder, config, clock) as store:
            begin(store.translog, stamp(store.clock()))
        # Last, because with this file the folder is a store.
        write_config(folder, config)
        undo.pop_all()
    end_making(folder)


def migrate_store(directory: str | os.PathLike[str]) -> tuple[str | None, str]:
    """Bring the ledger of the store in `directory` to this release's schema; return it before and after."""
    folder = Path(directory).absolute()
    url = ledger_url(folder, read_config(folder).ledger)
    # What is not a ledger at all must not become an empty one.
    Ledger.check(url)
    return migrate(url)


def restore_folder(
    file: Path,
    folder: Path,
    passphrase: bytes | None,
    *,
    head: bytes | None,
    exported: str | None,
    ledger: str | None,
    accept_losses: bool,
    clock: Clock,
) -> tuple[Backup, Rolled]:
    """Put a backup into a folder, where the storage is and no store, after bringing it up to what happened since.

    What happened is read from the copy of the log in storage, or from `exported`, where that is newer.
    """
    steady, plugins = SteadyClock(clock), load_plugins()

    def catch_up(work: Path, restored: Ledger, config: Config) -> Rolled:
        def reach(place: str) -> Storage:
            storage = Storage(storage_url(folder, place), **config.storage_options)
            storage.check(config.store_id)
            return storage

        def policy(name: str) -> Policy | None:
            with suppress(UnlearndError):
                return load_policy(name, work / config.policies)
            return None

        storage = reach(config.storage)
        if config.wrapper != "none":
            storage.vault = Vault(plugins.wrapper(config.wrapper)(work / "keys"))
        shelf = storage if config.receipts is None else reach(config.receipts)
        begin_at = log.size_now(restored)
        later, given = read_copy(storage, begin_at), None
        if exported is not None:
            url = exported if "://" in exported else str(Path(exported).absolute())
            given = Storage(url, **(config.storage_options if url.startswith(("s3://", "s3a://")) else {}))
            newer = read_export(given, begin_at)
            later = newer if newer.size > later.size else later
        steady.not_before(newest_moment(restored))
        signer = plugins.signer(config.signer)
        translog = Translog(restored, storage, work / "keys", config.store_id, __version__, signer, shelf)
        check_covers(translog, later, head)
        slot_key = work / SLOT_KEY
        private = slot_key.read_bytes() if slot_key.exists() else None
        return roll_forward(translog, later, given, policy, steady(), accept_losses, private)

    return restore(file, folder, passphrase, catch_up, lambda config: ledger_url(folder, config.ledger), ledger)


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
    # Before it is made: an answer that is lost on the way leaves a claim behind, too.
    undo.callback(let_go, storage, store_id)
    storage.claim(store_id, lock_allowed=lock_allowed, encrypted=encrypted)
