"""Make a store so that a kill in the middle leaves nothing that stands in the way of the next try.

Before anything is made, a file says which store is being made and where. Until the settings are written the folder is
no store, and whoever tries again takes back first what that store had: its claims on storage, its ledger, its keys.
Only what is its own by its id, and a ledger only while nothing is in it.
"""

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from unlearnd.config import Config, ledger_url, storage_url
from unlearnd.errors import DamagedStoreError, NotFoundError, RefusedError, StorageError, UnlearndError
from unlearnd.keys import discard_keys
from unlearnd.ledger import Ledger, log
from unlearnd.logcopy import FOLDER
from unlearnd.storage import CLAIM, Storage
from unlearnd.storage.disk import write_files

FILE_NAME = ".making.json"


def begin_making(folder: Path, config: Config) -> Callable[[], None]:
    """Say in the folder which store is being made; return what takes that back."""
    places = [config.storage, *([config.receipts] if config.receipts is not None else [])]
    about = {"store": config.store_id, "ledger": config.ledger, "storage": places, "options": config.storage_options}
    try:
        write_files([(str(folder / FILE_NAME), [json.dumps(about).encode()])])
    except OSError as error:
        raise StorageError(f"the folder {folder} cannot be written to: {error.strerror}") from error
    return lambda: end_making(folder)


def end_making(folder: Path) -> None:
    """Say that a store is made, or will not be."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def undo_killed(folder: Path) -> None:
    """Take back what a killed process left of a store it was making; nothing where there was none.

    Refuse keys that no such process made: they are somebody's.
    """
    about = _read(folder / FILE_NAME)
    if about is None:
        for path in (folder / "keys").glob("*.key"):
            raise RefusedError(f"there is a key at {path} already, and no store to it; a key is never overwritten")
        return
    for place in about["storage"]:
        storage = Storage(storage_url(folder, place), **about["options"])
        let_go(storage, about["store"])
        with suppress(UnlearndError):
            _clear_half_a_claim(storage)
    discard_ledger(ledger_url(folder, about["ledger"]), about["store"])
    if (folder / "keys").is_dir():
        discard_keys(folder / "keys")
    end_making(folder)


def let_go(storage: Storage, store_id: str) -> None:
    """Take back a store's claim on storage, if it has it, and the first tree head it may have put there."""
    with suppress(UnlearndError, ValueError, KeyError, TypeError):
        if json.loads(storage.read(CLAIM))["storeId"] == store_id:
            storage.destroy(storage.list(FOLDER))
            storage.unclaim()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DamagedStoreError(f"{path} cannot be read: {error}") from None


def _clear_half_a_claim(storage: Storage) -> None:
    """Destroy what is left of a claim that was being written, where there is none."""
    names = storage.list("")
    if not names or all(name == CLAIM or name.startswith(f".{CLAIM}.") for name in names):
        try:
            storage.read(CLAIM)
        except NotFoundError:
            storage.destroy([CLAIM, *names])


def is_free(url: str) -> bool:
    """Say whether there is nothing where a ledger is to be made."""
    try:
        Ledger.check(url)
    except UnlearndError as error:
        return isinstance(error, NotFoundError)
    return False


def discard_ledger(url: str, store_id: str) -> None:
    """Remove a ledger that is this store's, or has nothing in it yet."""
    with closing(Ledger(url)) as ledger:
        if not ledger.tables():
            Ledger.discard(url)
            return
        first = log.leaves(ledger, 0, 1)
    if not first or json.loads(first[0])["predicate"]["storeId"] == store_id:
        Ledger.discard(url)
