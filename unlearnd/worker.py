"""A build worker: `python -m unlearnd.worker`, started by an executor.

Reads one task as a line of JSON, opens ledger and storage by itself, builds, and says in lines of JSON how it
goes. Its input stays open for as long as somebody wants the work: when it closes, the worker ends at once.
Nothing is lost by that; every checkpoint already entered stays.

A worker does without the store's keys: it places nobody, names nobody and signs nothing. On another machine the
settings file is all that it needs of the store's folder, and the key that wraps, if the store is encrypted under a
key file.
"""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from unlearnd.build import build_task
from unlearnd.config import Config, read_config
from unlearnd.errors import UnlearndError
from unlearnd.executors import read_task
from unlearnd.hookspecs import Progress, Task
from unlearnd.keys import check_private
from unlearnd.leases import SteadyClock
from unlearnd.ledger import Ledger
from unlearnd.plugins import load_plugins
from unlearnd.storage import Storage, Vault
from unlearnd.translog import newest_moment


def work(config: Config, task: Task, report: Callable[[Progress], None]) -> None:
    """Carry out a task with the store's settings alone, as `Config.seen_from` gives them."""
    clock = SteadyClock(lambda: datetime.now(UTC))
    plugins = load_plugins()
    ledger = Ledger.open(config.ledger)
    try:
        clock.not_before(newest_moment(ledger))
        storage = Storage(config.storage, **config.storage_options)
        storage.check(config.store_id, encrypted=config.wrapper != "none")
        if config.wrapper != "none":
            keys = Path(task.store) / "keys"
            check_private(keys)
            storage.vault = Vault(plugins.wrapper(config.wrapper)(keys))
        build_task(ledger, storage, plugins, task, clock, report)
    finally:
        ledger.close()


def main() -> None:
    task = read_task(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    # Whatever a library prints must not get between our lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(progress: Progress) -> None:
        answers.write(json.dumps(asdict(progress)) + "\n")

    try:
        folder = Path(task.store)
        work(read_config(folder).seen_from(folder), task, report)
    except UnlearndError as error:
        answers.write(json.dumps({"error": type(error).__name__, "message": str(error)}) + "\n")
    else:
        answers.write(json.dumps({"done": True}) + "\n")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
