"""Receipts of every release are kept once and verified for ever: each `receipts/<version>/` is an exported log."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from unlearnd.verify import LocalFolder, Result, verify_receipt

RELEASES = sorted(path for path in (Path(__file__).parent / "receipts").iterdir() if path.is_dir())
RECEIPTS = [path for release in RELEASES for path in sorted(release.glob("receipts/*.json"))]
NOW = datetime(2027, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize("path", RECEIPTS, ids=lambda path: f"{path.parts[-3]}-{path.name[:8]}")
def test_a_receipt_of_an_earlier_release_verifies_still(path: Path) -> None:
    release = path.parent.parent
    report = verify_receipt(
        path.read_bytes(),
        (release / "trust.json").read_bytes(),
        now=NOW,
        older_head=(release / "older-head.txt").read_bytes(),
        export=LocalFolder(release),
    )
    results = {check.id: check.result for check in report.checks}
    assert [name for name, result in results.items() if result is Result.FAIL] == []
    assert all(results[name] is Result.PASS for name in ("R1", "R2", "R3", "R4", "R6", "L1", "L2", "L3", "D1"))


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: str(release.name))
def test_an_opening_of_an_earlier_release_opens_one_receipt_alone(release: Path) -> None:
    (opening,) = release.glob("*.opening.json")
    trust = (release / "trust.json").read_bytes()
    opened = [
        path.name
        for path in release.glob("receipts/*.json")
        if verify_receipt(path.read_bytes(), trust, now=NOW, opening=opening.read_bytes())["D0"].result is Result.PASS
    ]
    assert len(opened) == 1


def test_there_are_receipts_of_this_release() -> None:
    assert len(RECEIPTS) >= 4
