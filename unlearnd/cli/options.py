"""Options that several commands share, and opening the store they name."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from unlearnd.config import find_store
from unlearnd.errors import InputError

if TYPE_CHECKING:
    from unlearnd.store import Store

F = TypeVar("F", bound=Callable[..., Any])

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def store_option(command: F) -> F:
    """Add `--store` and `--json`."""
    option = click.option(
        "--store", "folder", metavar="DIR", help="The store; else UNLEARND_STORE, else the nearest folder with one."
    )
    return as_json(option(command))


def building(command: F) -> F:
    """Add what every command that may train takes."""
    for option in (
        click.option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:1, mps; by default what the store says."),
        click.option("--executor", metavar="NAME", help="Where to train: serial, processes, or a plugin's."),
        click.option(
            "--workers", type=click.IntRange(min=1), metavar="N", help="Train in N processes; the bits stay the same."
        ),
    ):
        command = option(command)
    return command


def store_named(folder: str | None) -> Path | None:
    """Return the store that was named, here or before the command or in the environment; None where none was."""
    named = folder or click.get_current_context().find_root().obj or os.environ.get("UNLEARND_STORE")
    return Path(named) if named else None


def read_pairs(option: str, given: Sequence[str]) -> dict[str, object]:
    """Read `key=value` pairs; a value that is JSON is taken as such, anything else as text."""
    pairs: dict[str, object] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InputError(f"{option} takes key=value, not '{pair}'")
        try:
            pairs[key] = json.loads(value)
        except json.JSONDecodeError:
            pairs[key] = value
    return pairs


@contextmanager
def opened(folder: str | None, *, may_be_behind: bool = False) -> "Iterator[Store]":
    """Open the store a command is about; one whose ledger is older than its storage only where that is fine."""
    path = store_named(folder) or find_store(Path.cwd())
    from unlearnd.store import Store  # heavy: sqlmodel, numpy

    with Store.open(path, may_be_behind=may_be_behind) as store:
        yield store
