"""What happens on a Ray cluster of two nodes, as a process of its own: `python story.py STORE`.

A node is killed while a model is trained; then other things go wrong on purpose. What was seen is printed as JSON.
Ray stays out of the tests' own process.
"""

import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import unlearnd
from unlearnd.errors import UnlearndError
from unlearnd.store import Store, Watch

SEED = 20210523
STORE = Path(sys.argv[1])
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"


def children_of(pid: int) -> list[int]:
    """Return the processes below one, its children's children too."""
    below = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                below += [int(folder.name), *children_of(int(folder.name))]
    return below


def ask(sql: str) -> list[tuple[Any, ...]]:
    """Look into the store's ledger from outside."""
    with closing(sqlite3.connect(STORE / "ledger.sqlite")) as ledger:
        return ledger.execute(sql).fetchall()


def holders() -> set[int]:
    """Return the processes that hold leases of the store: whoever trains a shard."""
    return {int(holder.split("/")[1]) for (holder,) in ask("SELECT holder FROM lease WHERE name LIKE 'build%'")}


def saved() -> int:
    """Return how many checkpoints there are."""
    return int(ask("SELECT count(*) FROM checkpoint")[0][0])


def kill(pids: Iterable[int]) -> None:
    """End processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class Assassin(threading.Thread):
    """Kills a node, raylet and all, as soon as it trains a shard and something has been saved."""

    def __init__(self, node: Any) -> None:
        super().__init__(daemon=True)
        self.roots = [info.process.pid for infos in node.all_processes.values() for info in infos]
        self.done = self.over = False

    def run(self) -> None:
        while not self.done and not self.over:
            time.sleep(0.01)
            at_work = holders()
            if at_work and saved() >= 2:
                pids = [pid for root in self.roots for pid in (root, *children_of(root))]
                if at_work & set(pids):
                    kill(pids)
                    self.done = True


class Listen(Watch):
    """Counts what was said, and how much was saved when the first word came."""

    def __init__(self) -> None:
        self.words, self.saved_at_first = 0, 0

    def progressed(self, progress: Any) -> None:
        if not self.words:
            self.saved_at_first = saved()
        self.words += 1


class KillWorkers(Watch):
    """Kill every process that trains, whenever there is one."""

    def progressed(self, progress: Any) -> None:
        kill(holders())


def failure(call: Any) -> list[str]:
    """Return the kind and the message of what a call raises."""
    try:
        call()
    except UnlearndError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def tell(store: Store, **settings: Any) -> None:
    """Write the section `[executor]`."""
    path = STORE / "unlearnd.toml"
    kept = path.read_text().partition("\n[executor]")[0]
    path.write_text(kept + "\n[executor]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))


def main() -> dict[str, Any]:
    import ray
    from ray.cluster_utils import Cluster

    quick = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3, "health_check_timeout_ms": 3000}
    common = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    cluster = Cluster(True, head_node_args={**common, "node_ip_address": "127.0.0.2", "_system_config": quick})
    told: dict[str, Any] = {}

    try:
        doomed = cluster.add_node(**common, node_ip_address="127.0.0.3")
        ray.init(cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="ERROR")
        told["nodes"] = len(ray.nodes())
        with unlearnd.open_store(str(STORE)) as store:
            assassin, watch = Assassin(doomed), Listen()
            how: dict[str, Any] = {"dataset": "d", "seed": SEED, "executor": "ray"}
            assassin.start()
            small = {"batch_size": 8}
            built = store.train("linear", backend="linear", epochs=600, settings=small, watch=watch, **how)
            assassin.over = True
            assassin.join()
            told |= {"killed": assassin.done, "words": watch.words, "saved at first": watch.saved_at_first}
            told |= {"samples": built.samples, "scratch": built.from_scratch}
            tell(store, shards=2)
            store.train("mlp", backend="mlp", epochs=2, settings={"hidden": [16]}, **how)
            users = [f"u{number}" for number in range(3)]
            told["erased"] = len(store.erase(users, executor="ray").outcomes)
            tell(store, retries=0)
            declared = {**how, "watch": KillWorkers()}
            told["lost"] = failure(lambda: store.train("lost", backend="linear", epochs=4000, **declared))
            tell(store, num_gpus=0.5)
            told["no room"] = failure(lambda: store.train("gpu", backend="linear", epochs=1, **how))
            tell(store, colour='"red"')
            told["unknown"] = failure(lambda: store.train("red", backend="linear", epochs=1, **how))
            tell(store)
            next((STORE / "storage" / "data").rglob("*.safetensors")).unlink()
            told["damaged"] = failure(lambda: store.train("damaged", backend="linear", epochs=1, **how))
    finally:
        ray.shutdown()
        cluster.shutdown()
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
