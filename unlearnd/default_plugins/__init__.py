"""What comes in the box, registered through the same hooks as everybody else's."""

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from unlearnd.hookspecs import (
    Aggregator,
    Backend,
    Executor,
    KeyWrapperMaker,
    Petition,
    PlacementRule,
    PriorPlacement,
    SignerMaker,
    Veto,
    hookimpl,
)


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    from unlearnd.default_plugins.linear import LinearBackend  # numpy

    register(LinearBackend())


@hookimpl
def register_placements(register: Callable[[str, PlacementRule | PriorPlacement], None]) -> None:
    from unlearnd.layouts import KINDS, ByRisk  # numpy
    from unlearnd.placement import place

    register("uniform", lambda numbers, groups, shards, slices: place(numbers, shards, slices))
    for name, (ordered, power) in KINDS.items():
        register(name, ByRisk(ordered, power))


@hookimpl
def register_executors(register: Callable[[str, Executor], None]) -> None:
    from unlearnd.executors import run_processes, run_serial

    register("serial", run_serial)
    register("processes", run_processes)


@hookimpl
def register_signers(register: Callable[[str, SignerMaker], None]) -> None:
    from unlearnd.keys import open_signer

    register("file", open_signer)


@hookimpl
def register_wrappers(register: Callable[[str, KeyWrapperMaker], None]) -> None:
    from unlearnd.keys import open_wrapper

    register("file", open_wrapper)


@hookimpl
def register_aggregators(register: Callable[[str, Aggregator], None]) -> None:
    from unlearnd.aggregation import mean, vote  # numpy

    register("vote", vote)
    register("mean", mean)


@hookimpl
def erasure_requested(petitions: Sequence[Petition], folder: Path, today: date) -> Sequence[Veto]:
    from unlearnd.default_plugins.exemptions import vetoes

    return vetoes(petitions, folder, today)


@hookimpl(trylast=True)
def recipient_told(recipient: str, model: str, erasure: str, receipts: Sequence[str], folder: Path) -> str:
    from unlearnd.default_plugins.notices import write_notice

    return write_notice(folder, recipient, model, erasure, receipts)
