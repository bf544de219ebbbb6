"""What is open while a store is: ledger, storage, keys, plugins and log, and the clock it was given.

Every verb is a function of these and of what it is asked. A verb that needs another one is on a floor above it; this is
the floor that all of them share.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

from unlearnd import __version__
from unlearnd.config import Config, ledger_url, storage_url
from unlearnd.errors import RefusedError
from unlearnd.keys import check_private, open_keys
from unlearnd.leases import Clock, SteadyClock
from unlearnd.ledger import Ledger, log
from unlearnd.logcopy import size_kept
from unlearnd.plugins import load_plugins
from unlearnd.policy import Policy, load_policy
from unlearnd.storage import Storage, Vault
from unlearnd.translog import Translog, newest_moment


class Opened:
    """What is open. Use it in a `with` block, or close it."""

    behind: int = 0
    """How many leaves of the log storage has that the ledger lacks; never any, unless that was said to be fine."""

    def __init__(self, folder: Path, config: Config, clock: Clock, *, may_be_behind: bool = False) -> None:
        self.folder = folder
        self.config = config
        self.clock = SteadyClock(clock)
        # First, and whole: whoever may write to it could put other keys or another ledger there.
        check_private(folder)
        self.keys = open_keys(folder / "keys")
        self.ledger = Ledger.open(ledger_url(folder, config.ledger))
        self.clock.not_before(newest_moment(self.ledger))
        self.storage = Storage(storage_url(folder, config.storage), **config.storage_options)
        self.storage.check(config.store_id, encrypted=config.wrapper != "none")
        # Asked for before the ledger is looked at: meanwhile it can only grow.
        kept = size_kept(self.storage)
        if kept > (size := log.size_now(self.ledger)):
            self.behind = kept - size
        if self.behind and not may_be_behind:
            raise RefusedError(
                f"the ledger is older than its storage: its log has {size} leaves, and a tree head of {kept} was "
                "signed; an old copy was put in its place, and what was erased since would be back. Make a backup of "
                "that copy with `unlearnd backup`, or take a newer one, move the copy away and put the backup in place "
                "with `unlearnd restore`, which carries later erasures out again"
            )
        check_private(folder / "keys", *_private_files(folder, config))
        evidence = self.storage
        if config.receipts is not None:
            evidence = Storage(storage_url(folder, config.receipts), **config.storage_options)
            evidence.check(config.store_id)
        self.plugins = load_plugins()
        if config.wrapper != "none":
            self.storage.vault = Vault(self.plugins.wrapper(config.wrapper)(folder / "keys"))
        signer = self.plugins.signer(config.signer)
        self.translog = Translog(
            self.ledger, self.storage, folder / "keys", config.store_id, __version__, signer, evidence
        )

    def policy(self, name: str | None = None) -> Policy:
        """Return a policy by name, of those shipped or the store's own; by default the one that counts here."""
        return load_policy(name or self.config.policy, self.folder / self.config.policies)

    def close(self) -> None:
        """Let go of the ledger."""
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _private_files(folder: Path, config: Config) -> list[Path]:
    """Return what besides the keys is for the owner alone: a local storage, a ledger that is a file."""
    ledger = ledger_url(folder, config.ledger)
    files = [Path(ledger.removeprefix("sqlite:///"))] if ledger.startswith("sqlite:///") else []
    return files + ([] if "://" in config.storage else [folder / config.storage])
