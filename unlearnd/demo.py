"""The whole story on handwritten digits, told on standard output.

A surface, like the command line: it calls the store and prints. It ends with the comparison that matters: a
second store that was never given the erased person has the same checkpoints, bit for bit.
"""

import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from unlearnd.errors import DamagedStoreError, NotFoundError, VerificationError
from unlearnd.plugins import load_plugins
from unlearnd.store import Store
from unlearnd.verify import verify_receipt

_PERSON = 17
_PEOPLE = 120
_HELD_OUT = 297


def run(folder: str | None) -> None:
    """Tell the story in `folder`, or in a new temporary one."""
    home = Path(folder).absolute() if folder else Path(tempfile.mkdtemp(prefix="unlearnd-demo-"))
    x, y, people = _digits()
    backend = "mlp" if "mlp" in load_plugins().backends else "linear"
    train, test = slice(0, len(x) - _HELD_OUT), slice(len(x) - _HELD_OUT, len(x))
    with Store.create(home / "store") as store:
        added = store.ingest("digits", x[train], label=y[train], user=people[train], shards=5, slices=8)
        click.echo(f"1. {added.points:,} digits of {_PEOPLE} people, placed in 5 shards of 8 slices.")
        built = store.train("reader", dataset="digits", backend=backend, epochs=15)
        click.echo(
            f"2. Trained 5 constituents of `{backend}`: {built.samples:,} samples, {built.checkpoints} checkpoints, "
            f"{built.seconds:.1f} s; {_accuracy(store, x[test], y[test])} right on digits it never saw."
        )
        plan = store.plan_erasure([_PERSON])
        place = plan.places[0]
        click.echo(
            f"3. Person {_PERSON} asks to be erased: {plan.points} digits, all in shard {place.shard}, "
            f"slice {place.slice}; {plan.models[0].checkpoints} checkpoints have seen them."
        )
        outcome = store.erase([_PERSON], build=False).outcomes[0]
        click.echo(
            f"4. Erased. Data rewritten, {len(outcome.checkpoints)} checkpoints and the person's key destroyed. "
            f"The model goes on answering from what is clean: {_accuracy(store, x[test], y[test])} right."
        )
        receipt = store.receipt(outcome.request)
        report = verify_receipt(receipt, (home / "store" / "keys" / "trust.json").read_bytes(), now=datetime.now(UTC))
        if report.failed:
            raise VerificationError("the receipt does not hold")
        held = [check.id for check in report.checks if check.result.value == "PASS"]
        click.echo(f"   Its receipt is signed and in the log: checks {' '.join(held)} hold, offline.")
        rebuilt = store.build()[0]
        click.echo(
            f"5. Rebuilt: {rebuilt.samples:,} of {rebuilt.from_scratch:,} samples, "
            f"{rebuilt.from_scratch / rebuilt.samples:.1f}× less than from scratch; "
            f"{_accuracy(store, x[test], y[test])} right."
        )
        bits = {(c.shard, c.slice): c.tensors for c in store.checkpoints("reader")}
        seed = store.seed_of("reader")
    with Store.create(home / "never", placement_key=home / "store" / "keys" / "placement.key") as never:
        others = np.flatnonzero(people[train] != _PERSON)
        never.ingest("digits", x[others], label=y[others], user=people[others], shards=5, slices=8)
        never.train("reader", dataset="digits", backend=backend, epochs=15, seed=seed)
        same = {(c.shard, c.slice): c.tensors for c in never.checkpoints("reader")}
    if same != bits:
        raise DamagedStoreError("the rebuilt checkpoints differ from those of a store that never met the person")
    click.echo(
        f"6. A second store that was never given person {_PERSON} has the same {len(bits)} checkpoints, bit for bit."
    )
    click.echo(f"The store is in {home / 'store'}: try `unlearnd --store {home / 'store'} status`.")


def _digits() -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise NotFoundError("the demo needs the digits that scikit-learn carries: pip install scikit-learn") from None
    digits = load_digits()
    x = np.ascontiguousarray(digits.data, np.float32)
    return x, digits.target, np.arange(len(x)) % _PEOPLE


def _accuracy(store: Store, x: NDArray[Any], y: NDArray[Any]) -> str:
    return f"{100 * store.evaluate('reader', x, label=y).top1:.1f} %"
