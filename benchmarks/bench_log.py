"""The log: appending in batches, proofs at a million leaves, and a verdict against a bare import."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.lines import Line, seconds_in_turns
from unlearnd.ledger import Ledger, log
from unlearnd.store import Store


def run(quick: bool) -> list[Line]:
    """Append leaves in batches of 1,000, prove some, and verify a receipt in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        return [*_log(Path(folder), quick), _verdict(Path(folder), quick)]


def _log(folder: Path, quick: bool) -> list[Line]:
    ledger = Ledger.create(f"sqlite:///{folder / 'log.sqlite'}")
    leaf = b'{"some":"statement of a few hundred bytes"}' * 8
    appended = 20_000 if quick else 100_000
    begun = time.perf_counter()
    for start in range(0, appended, 1000):
        log.append_alone(ledger, [b"%d %b" % (start + n, leaf) for n in range(1000)])
    batched = time.perf_counter() - begun
    begun = time.perf_counter()
    for n in range(500):
        log.append_alone(ledger, [b"alone %d %b" % (n, leaf)])
    alone = (time.perf_counter() - begun) / 500
    size = 100_000 if quick else 1_000_000
    while log.size_and_root(ledger)[0] < size:
        log.append_alone(ledger, [b"%d" % n for n in range(20_000)])
    size = log.size_and_root(ledger)[0]
    begun = time.perf_counter()
    for index in range(0, size, size // 500):
        log.inclusion(ledger, index, size)
    proof = (time.perf_counter() - begun) / 500
    ledger.close()
    ratio = alone / (batched / appended)
    detail: dict[str, float | str] = {
        "leaves": appended,
        "batches, s": batched,
        "leaves/s": appended / batched,
        f"proof at {size:,} leaves, ms": 1000 * proof,
    }
    return [Line("log: leaves/s in batches of 1,000 / one by one", ratio, "", None, detail)]


def _verdict(folder: Path, quick: bool) -> Line:
    """Compare `unlearnd verify` from process start to verdict with `python -c "import cryptography"`.

    That import loads nothing of the library and is as quick as bare Python, so the ratio to the import of what a
    signature needs is told beside it. The command is measured both ways it can be called, and the slower one counts.
    All run from bytecode, as an installed package does, whatever this environment says about writing it.
    """
    generator = np.random.Generator(np.random.PCG64(6))
    x = generator.random((300, 4), dtype=np.float32)
    with Store.create(folder / "store") as store:
        store.ingest("points", x, label=generator.integers(0, 2, 300), user=np.arange(300) // 3, shards=2, slices=2)
        store.train("model", dataset="points", backend="linear", epochs=1)
        request = store.erase([1]).outcomes[0].request
        receipt = folder / "receipt.json"
        receipt.write_bytes(store.receipt(request))
    words = ["verify", str(receipt), "--trust", str(folder / "store" / "keys" / "trust.json")]
    runs = (
        [sys.executable, "-c", "import cryptography"],
        [sys.executable, "-c", "import cryptography.hazmat.primitives.asymmetric.ed25519"],
        [str(Path(sysconfig.get_path("scripts")) / "unlearnd"), *words],
        [sys.executable, "-m", "unlearnd", *words],
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    plain, ed25519, script, module = seconds_in_turns(
        10 if quick else 40,
        *(partial(subprocess.run, run, check=True, capture_output=True, env=environment) for run in runs),
    )
    ratio = max(script, module) / plain
    detail: dict[str, float | str] = {
        "unlearnd verify, ms": 1000 * script,
        "python -m unlearnd verify, ms": 1000 * module,
        "import cryptography, ms": 1000 * plain,
        "verify / import of cryptography's Ed25519": max(script, module) / ed25519,
    }
    return Line("verify, start to verdict / import cryptography", ratio, "≤ 3", ratio <= 3, detail)
