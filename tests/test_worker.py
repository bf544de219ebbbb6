"""A build worker needs the settings file of a store and nothing else of its folder; executors are told what to run."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unlearnd.config import FILE_NAME, read_config, write_config
from unlearnd.errors import NotFoundError
from unlearnd.executors import run_processes
from unlearnd.hookspecs import Progress, Task
from unlearnd.training import how_to_build


def test_a_worker_builds_where_the_keys_of_the_store_are_not(
    people: Callable[..., Any],
    new_store: Callable[..., Any],
    add: Callable[..., Any],
    fit: Callable[..., Any],
    digests: Callable[..., Any],
    tmp_path: Path,
) -> None:
    near, far = new_store("near"), new_store("far")
    for store in (near, far):
        add(store, people(20, 60), shards=2, slices=2)
    fit(near)
    fit(far)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    write_config(elsewhere, read_config(far.folder).seen_from(far.folder))
    far.erase(["u1", "u2", "u3"], build=False)
    near.erase(["u1", "u2", "u3"])
    shutil.rmtree(far.folder / "keys")
    said: list[Progress] = []
    run_processes([Task(str(elsewhere), "m", (1, 2), "auto")], lambda *_: None, said.append, 1)
    assert digests(far) == digests(near)
    assert sum(word.steps for word in said) > 0


def test_a_command_goes_in_front_of_a_worker(
    people: Callable[..., Any], new_store: Callable[..., Any], add: Callable[..., Any], tmp_path: Path
) -> None:
    store = new_store()
    add(store, people(20, 60), shards=2, slices=2)
    launch = tmp_path / "launch"
    launch.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/launched\nexec "$@"\n')
    launch.chmod(0o700)
    with pytest.raises(NotFoundError, match="no model 'nope'"):
        run_processes(
            [Task(str(store.folder), "nope", (1,), "auto")],
            lambda *_: None,
            lambda progress: None,
            1,
            python=(str(launch), sys.executable),
        )
    assert (tmp_path / "launched").read_text() == f"{sys.executable} -m unlearnd.worker\n"


def test_more_workers_do_not_overrule_the_executor_that_a_store_names(
    people: Callable[..., Any], new_store: Callable[..., Any]
) -> None:
    store = new_store()
    assert how_to_build(store, None, 2, None).executor == "processes"
    assert how_to_build(store, None, None, None).executor == "serial"
    if "ray" not in store.plugins.executors:
        pytest.skip("the plugin unlearnd-ray is not installed, and no other executor is there to name")
    write_config(store.folder, replace(read_config(store.folder), executor="ray"))
    with type(store).open(store.folder) as again:
        assert (again.folder / FILE_NAME).exists()
        assert how_to_build(again, None, 2, None).executor == "ray"
        assert how_to_build(again, "serial", 2, None).executor == "serial"
