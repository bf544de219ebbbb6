"""What happens on a Ray cluster of two nodes, as a process of its own: `python story.py STORE`.

A node is killed while a model is trained; then other things go wrong on purpose. What was seen is printed as JSON.
Ray stays out of the tests' own process.
"""

import json
import os
import signal
import sqlite3
import sys
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


def holders() -> set[int]:
    """Return the processes that hold leases of the store: whoever trains a shard."""
    with closing(sqlite3.connect(STORE / "ledger.sqlite")) as ledger:
        rows = ledger.execute("SELECT holder FROM lease WHERE name LIKE 'build%'").fetchall()
    return {int(holder.split("/")[1]) for (holder,) in rows}


def kill(pids: Iterable[int]) -> None:
    """End processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class KillNode(Watch):
    """Kill a node, raylet and all, while it trains a shard of which something has been saved."""

    def __init__(self, pids: list[int]) -> None:
        self.roots, self.killed = pids, False
        self.words = self.samples = self.steps = 0

    def progressed(self, progress: Any) -> None:
        self.words, self.samples = self.words + 1, self.samples + progress.samples
        self.steps += progress.steps
        if self.steps < 4 or self.killed:
            return
        pids = [pid for root in self.roots for pid in (root, *children_of(root))]
        if holders() & set(pids):
            self.killed = True
            kill(pids)


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
            roots = [info.process.pid for infos in doomed.all_processes.values() for info in infos]
            watch = KillNode(roots)
            how: dict[str, Any] = {"dataset": "d", "seed": SEED, "executor": "ray"}
            built = store.train("linear", backend="linear", epochs=600, watch=watch, **how)
            told |= {"killed": watch.killed, "words": watch.words}
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
