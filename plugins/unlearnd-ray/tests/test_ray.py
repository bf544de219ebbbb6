"""The executor `ray`: the same bits as `serial`, also when a node dies; and one sentence for whatever goes wrong."""

import fcntl
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unlearnd
from unlearnd.config import Config
from unlearnd.errors import InputError, NotFoundError, PluginError, RefusedError
from unlearnd.hookspecs import Task
from unlearnd.store import Store

# The tests run from a clone too, before the plugin is installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from unlearnd_ray import run_ray
from unlearnd_ray.cluster import Room, _check_there, check_reach
from unlearnd_ray.driving import _cut
from unlearnd_ray.settings import RaySettings, check_settings

STORY = Path(__file__).with_name("story.py")
SEED = 20210523
SHARDS = SLICES = 4
ERASED = ["u0", "u1", "u2"]


def make_store(folder: Path) -> Store:
    """Make a store with points of forty people and a placement key that all tests share."""
    key = folder.parent / "placement.key"
    key.write_text("5eed" * 16 + "\n")
    store = unlearnd.create_store(str(folder), placement_key=key)
    generator = np.random.default_rng(1)
    x = generator.normal(size=(240, 5)).astype(np.float32)
    users = [f"u{row % 40}" for row in range(240)]
    store.ingest("d", x, user=users, label=np.arange(240) % 3, shards=SHARDS, slices=SLICES)
    return store


def digests_of(store: Store, model: str) -> dict[tuple[int, int], str]:
    return {(one.shard, one.slice): one.tensors for one in store.checkpoints(model)}


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What happened on a cluster of two nodes, and the store it happened to. Once, however many processes test."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, told = shared / "ray-story", shared / "ray-story.json"
    with (shared / "ray-story.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            make_store(folder).close()
            ended = subprocess.run(
                [sys.executable, str(STORY), str(folder)], capture_output=True, text=True, timeout=240, check=False
            )
            assert ended.returncode == 0, ended.stderr
            told.write_text(ended.stdout.splitlines()[-1])
    return json.loads(told.read_text()), folder


@pytest.mark.ray
def test_shards_of_a_node_that_is_killed_go_on_elsewhere_and_end_in_the_bits_of_serial(
    story: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    told, folder = story
    assert told["nodes"] == 2
    assert told["killed"], "no node was killed while it trained"
    with make_store(tmp_path / "serial") as serial, unlearnd.open_store(str(folder)) as far:
        serial.train("linear", dataset="d", backend="linear", epochs=600, seed=SEED, settings={"batch_size": 8})
        serial.train("mlp", dataset="d", backend="mlp", epochs=2, seed=SEED, settings={"hidden": [16]})
        serial.erase(ERASED)
        for model in ("linear", "mlp"):
            assert len(digests_of(serial, model)) == SHARDS * SLICES
            assert digests_of(far, model) == digests_of(serial, model)


@pytest.mark.ray
def test_what_a_killed_node_had_saved_is_not_trained_again(story: tuple[dict[str, Any], Path]) -> None:
    told, folder = story
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
        # Of every step as many rows as recipes: nothing was entered twice.
        (doubled,) = ledger.execute("SELECT count(*) - count(DISTINCT path) FROM checkpoint").fetchone()
    assert doubled == 0
    # At most one slice of one shard was lost half-way.
    assert 0 < told["samples"] < 1.25 * told["scratch"]


@pytest.mark.ray
def test_progress_arrives_while_the_work_goes_on(story: tuple[dict[str, Any], Path]) -> None:
    told, _ = story
    assert told["words"] > SHARDS * SLICES
    assert told["saved at first"] < SHARDS * SLICES


@pytest.mark.ray
def test_what_goes_wrong_on_a_cluster_comes_back_as_its_own_kind_in_one_sentence(
    story: tuple[dict[str, Any], Path],
) -> None:
    told, _ = story
    kinds = {name: told[name][0] for name in ("lost", "no room", "unknown", "damaged")}
    assert kinds == {
        "lost": "BackendError",
        "no room": "InputError",
        "unknown": "InputError",
        "damaged": "DamagedStoreError",
    }
    assert "goes on where it stopped" in told["lost"][1]
    assert "has 1 CPU, 0.5 GPU for a task (nodes: 1 CPU)" in told["no room"][1]
    assert "[executor] colour is no setting of the executor 'ray'" in told["unknown"][1]
    assert "storage holds no data/d/" in told["damaged"][1]
    assert not any("\n" in told[name][1] for name in kinds)


def processes_with(mark: str) -> list[int]:
    """Return the processes that have some text in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and int(folder.name) != os.getpid():
            try:
                here = mark.encode() in (folder / "environ").read_bytes()
            except OSError:
                continue
            if here:
                found.append(int(folder.name))
    return found


def wait_until(there: Callable[[], bool], child: "subprocess.Popen[str]", seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not there():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.ray
def test_control_c_stops_a_build_on_ray_with_a_sentence_and_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with make_store(folder):
        pass
    mark = f"UNLEARND_TEST_MARK={folder}"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    child = subprocess.Popen(
        [
            *(sys.executable, "-m", "unlearnd", "train", "m", "--dataset", "d", "--backend", "linear"),
            *("--epochs", "20000", "--seed", "1", "--executor", "ray", "--store", str(folder)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, **dict([mark.split("=", 1)])},
        start_new_session=True,
    )

    def saved() -> int:
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
            return int(ledger.execute("SELECT count(*) FROM checkpoint").fetchone()[0])

    try:
        wait_until(lambda: saved() > 0, child)
        assert len(processes_with(mark)) > 3
        # A terminal sends it to everybody in the foreground, Ray's processes too.
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=60)
        assert child.returncode in (1, 130)
        assert (out, err) == ("", "unlearnd: stopped; nothing is lost, run the command again to go on\n")
        until = time.monotonic() + 20
        while processes_with(mark) and time.monotonic() < until:
            time.sleep(0.1)
        assert processes_with(mark) == []
    finally:
        for pid in processes_with(mark):
            os.kill(pid, signal.SIGKILL)
        child.wait()
    with unlearnd.open_store(str(folder)) as store:
        assert 0 < len(store.checkpoints("m")) < SHARDS * SLICES


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_gpus": -1}, "[executor] num_gpus cannot be -1"),
        ({"num_gpus": 1.5}, "[executor] num_gpus cannot be 1.5: above 1 it should be a whole number"),
        ({"num_cpus": "two"}, "[executor] num_cpus cannot be 'two'"),
        ({"shards": 0}, "[executor] shards cannot be 0"),
        ({"resources": {"a100": -1}}, "[executor] resources.a100 cannot be -1"),
        ({"retries": True}, "[executor] retries cannot be True"),
        ({"gpus": 1}, "[executor] gpus is no setting of the executor 'ray'; settings: address, "),
        ({"address": "ray://head:10001"}, "builds do not go through Ray Client"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_used_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        check_settings(given)
    assert says in str(caught.value)


def test_settings_that_cannot_be_used_are_told_before_anything_is_declared_or_erased(tmp_path: Path) -> None:
    with make_store(tmp_path / "store") as store:
        store.train("there", dataset="d", backend="linear", epochs=1, seed=SEED)
        store.config = replace(store.config, executor="ray", executor_options={"colour": "red"})
        store.plugins = replace(store.plugins, executors={**store.plugins.executors, "ray": run_ray})
        with pytest.raises(InputError, match="colour is no setting of the executor 'ray'"):
            store.train("m", dataset="d", backend="linear", epochs=1, seed=SEED)
        with pytest.raises(NotFoundError, match="no model 'm'"):
            store.checkpoints("m")
        with pytest.raises(InputError, match="colour is no setting"):
            store.erase(["u1"])
        assert store.where_user("u1")
        assert store.requests() == []


def test_a_fraction_of_a_gpu_may_be_asked_for() -> None:
    assert check_settings({"num_gpus": 0.25, "num_cpus": 0, "resources": {"fast": 1}}).needs == {"GPU": 0.25, "fast": 1}


def test_tasks_are_cut_to_one_shard_each_and_take_the_gpu_that_ray_gives_them() -> None:
    tasks = [Task("s", "m", (1, 3, 5), "cuda:0"), Task("s", "m", (2, 4), "cuda:1")]
    assert [task.shards for task in _cut(tasks, RaySettings())] == [(1,), (3,), (5,), (2,), (4,)]
    assert [task.shards for task in _cut(tasks, RaySettings(shards=2))] == [(1, 3), (5,), (2, 4)]
    assert {task.device for task in _cut(tasks, RaySettings(num_gpus=0.5))} == {"cuda"}
    assert {task.device for task in _cut(tasks, RaySettings())} == {"cuda:0", "cuda:1"}


class Nodes:
    """Stands in for a cluster that we do not have: what `ray.nodes()` says of machines elsewhere."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self._nodes = [{"Alive": True, "NodeManagerHostname": "far", "Resources": {"CPU": 4.0}, **n} for n in nodes]

    def nodes(self) -> list[dict[str, Any]]:
        return self._nodes


def test_a_ledger_in_a_file_is_refused_where_other_machines_would_have_to_open_it() -> None:
    config = Config("id", "sqlite:////srv/ledger.sqlite", "/srv/storage")
    with pytest.raises(RefusedError, match="keep the ledger in PostgreSQL"):
        check_reach(Nodes({}, {"NodeManagerHostname": "farther"}), config)
    check_reach(Nodes({}), Config("id", "postgresql+psycopg://db/x?schema=s", "s3://b/p"))
    check_reach(Nodes({"Alive": False}), config)


def test_a_cluster_that_may_grow_is_waited_for() -> None:
    small = Nodes({})
    with pytest.raises(InputError, match="no node of the Ray cluster has 1 CPU, 1 GPU for a task"):
        Room(small, RaySettings(num_gpus=1)).check()
    Room(small, RaySettings(num_gpus=1, wait=60)).check()
    Room(Nodes({"Resources": {"CPU": 1.0, "GPU": 1.0}}), RaySettings(num_gpus=1)).check()


def test_an_address_where_nobody_answers_is_named_at_once() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(PluginError, match=f"no Ray cluster answers at {address}"):
            _check_there(address)
    for known in ("", "auto", "local"):
        _check_there(known)


def test_ray_is_not_loaded_until_something_is_trained_with_it() -> None:
    code = (
        "import sys; from unlearnd.plugins import load_plugins as l; l().executor('ray'); print('ray' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
