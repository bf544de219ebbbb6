"""Membership inference: its arithmetic, and what it finds on models that learned, forgot, and never met."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from unlearnd.cli import main
from unlearnd.membership import distances, log_odds, tell_apart
from unlearnd.shadows import FALSE_ALARM
from unlearnd.store import Store

FEATURES, LEARNED, GONE = 200, 160, 40
SHADOWS = 6


@pytest.fixture(scope="module")
def rows() -> tuple[Any, Any]:
    """Rows whose labels mean nothing: a model can only learn them by heart."""
    generator = np.random.default_rng(4)
    x = generator.normal(size=(LEARNED + 80, FEATURES)).astype(np.float32)
    return x, generator.integers(0, 2, len(x))


@pytest.fixture
def store(tmp_path: Path, rows: tuple[Any, Any]) -> Store:
    """A store with a model that has learned its rows by heart; user i has row i."""
    return _make(tmp_path, "store", rows, range(LEARNED))


def _make(folder: Path, name: str, rows: tuple[Any, Any], users: range) -> Store:
    (folder / "placement.key").write_text("5eed" * 16 + "\n")
    store = Store.create(folder / name, placement_key=folder / "placement.key")
    x, y = (column[users.start : users.stop] for column in rows)
    store.ingest("people", x, user=np.array(users), label=y, classes=2, shards=1, slices=2)
    store.train("model", dataset="people", backend="linear", epochs=60, seed=7)
    return store


def _attack(store: Store, rows: tuple[Any, Any]) -> Any:
    x, y = rows
    gone, never = slice(0, GONE), slice(LEARNED, None)
    return store.attack_membership(
        "model", erased=x[gone], held_out=x[never], label=(y[gone], y[never]), shadows=SHADOWS
    )


def _write(folder: Path, rows: tuple[Any, Any]) -> list[str]:
    """Write the erased and the held-out rows, and return the command that asks about them."""
    for name, some in (("gone", slice(0, GONE)), ("never", slice(LEARNED, None))):
        np.savez(folder / f"{name}.npz", x=rows[0][some], y=rows[1][some])
    return [
        *("--store", str(folder / "store"), "audit", "--membership", "model", "--label", "y"),
        *("--erased", str(folder / "gone.npz"), "--held-out", str(folder / "never.npz"), "--shadows", str(SHADOWS)),
    ]


def test_a_model_gives_away_what_it_learned_by_heart_and_nothing_once_it_was_erased(
    store: Store, rows: tuple[Any, Any], tmp_path: Path
) -> None:
    with store:
        before = _attack(store, rows)
        assert before.failed
        assert before.copies == GONE
        assert before.erased.auc.low > 0.6
        store.erase(range(GONE), build=True)
        after = _attack(store, rows)
    assert not after.failed
    assert after.has_power
    assert after.copies == 0
    assert after.erased.auc.low < 0.5 < after.learned.auc.low
    # Exactness, seen from outside: an attacker finds what they would find had the rows never been there.
    with _make(tmp_path, "never", rows, range(GONE, LEARNED)) as never:
        assert _attack(never, rows) == after


def test_the_command_says_so_and_leaves_the_store_as_it_was(
    store: Store, rows: tuple[Any, Any], tmp_path: Path
) -> None:
    command = _write(tmp_path, rows)
    store.close()
    before = _everything(tmp_path / "store")
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 3, found.output
    assert "FAILED: the model tells rows given as erased from rows it was never given." in found.output
    assert f"{GONE} have an equal among the live ones" in found.output
    assert _everything(tmp_path / "store") == before
    with Store.open(tmp_path / "store") as again:
        again.erase(range(GONE), build=True)
    found = CliRunner().invoke(main, command)
    assert found.exit_code == 0, found.output
    assert "FAILED" not in found.output
    assert "does not tell the erased rows from rows it was never given, though it does tell" in found.output
    said = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert said["failed"] is False
    assert said["hasPower"] is True
    assert said["erased"]["auc"]["low"] < 0.5


def test_a_test_without_power_says_that_it_says_little(tmp_path: Path) -> None:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(900, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    with Store.create(tmp_path / "store") as store:
        store.ingest("people", x[:800], user=np.arange(800), label=y[:800], shards=4, slices=1)
        store.train("model", dataset="people", backend="linear", epochs=1, seed=7)
        store.erase(range(30), build=True)
        found = store.attack_membership("model", erased=x[:30], held_out=x[800:], label=(y[:30], y[800:]), shadows=4)
    assert not found.has_power
    assert any("this says little" in line for line in found.lines())


def test_what_is_wrong_with_the_question_is_said_in_a_sentence(
    store: Store, rows: tuple[Any, Any], tmp_path: Path
) -> None:
    store.close()
    command = _write(tmp_path, rows)
    few = tmp_path / "few.npz"
    np.savez(few, x=rows[0][:5], y=rows[1][:5])
    odd = tmp_path / "odd.npz"
    np.savez(odd, x=rows[0][:20], y=np.full(20, 9))
    narrow = tmp_path / "narrow.npz"
    np.savez(narrow, x=rows[0][:20, :3], y=rows[1][:20])

    def said(replace: dict[str, str], exit_code: int = 1) -> str:
        result = CliRunner().invoke(main, [replace.get(word, word) for word in command])
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        return result.output

    gone = str(tmp_path / "gone.npz")
    assert "no model 'modell'" in said({"model": "modell"})
    assert "lost.npz: no such file" in said({gone: str(tmp_path / "lost.npz")})
    assert "5 rows erased are too few to tell: give 10 or more" in said({gone: str(few)})
    assert "knows no class '9'" in said({gone: str(odd)})
    assert "takes features of shape (n, 200), not (20, 3)" in said({gone: str(narrow)})
    assert "no array 'yy'" in said({"y": "yy"})
    said({str(SHADOWS): "1"}, 2)
    for wrong in (
        command[:5] + command[7:],  # no --label
        [*command, "--replay", "2"],
        ["--store", str(tmp_path / "store"), "audit", "--erased", gone],
    ):
        result = CliRunner().invoke(main, wrong)
        assert result.exit_code == 2, result.output
        assert "--membership" in result.output


def test_log_odds_keep_apart_what_is_almost_certain() -> None:
    scores = np.array([[1 - 1e-9, 1e-9], [1.0, 1e-11], [0.25, 0.75], [0.0, 1.0]])
    found = log_odds(scores, np.array([0, 0, 0, 0]))
    assert found[1] > found[0] > 20
    assert found[2] == pytest.approx(np.log(1 / 3))
    assert np.isfinite(found).all()


def test_a_row_is_measured_against_models_that_never_saw_it_and_not_against_other_rows() -> None:
    generator = np.random.default_rng(1)
    easy, hard = np.full(500, 8.0), np.full(500, -3.0)
    shadows = np.concatenate([easy, hard]) + generator.normal(size=(8, 1000))
    attacked = np.concatenate([easy, hard]) + generator.normal(size=1000)
    attacked[500:] += 3  # the hard rows were learned from
    far = distances(attacked, shadows)
    assert abs(far[:500].mean()) < 0.2
    assert far[:500].std() == pytest.approx(1, abs=0.15)
    assert far[500:].mean() > 2


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_the_measures_are_those_of_their_definitions(shift: float) -> None:
    generator = np.random.default_rng(2)
    members, others = generator.normal(shift, size=150).round(1), generator.normal(size=200).round(1)
    found = tell_apart(members, others, seed=3, draws=200)
    pairs = members[:, None] - others[None]
    assert found.auc.value == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())
    rates = [((members >= t).mean(), (others >= t).mean()) for t in np.unique([*members, *others])]
    assert found.advantage.value == pytest.approx(max(true - false for true, false in rates))
    assert found.caught.value == pytest.approx(max([0.0, *(true for true, false in rates if false <= 0.01)]), abs=0.03)
    for estimate in (found.auc, found.advantage, found.caught):
        assert estimate.low <= estimate.high
    if shift:
        assert found.chance <= FALSE_ALARM
        assert found.auc.low > 0.6
        assert found.advantage.value > found.advantage_by_chance
    else:
        assert found.chance > 0.05
        assert found.auc.low < 0.5 < found.auc.high
        assert 0 < found.advantage.value < found.advantage_by_chance


def test_guessing_is_found_out_seldom() -> None:
    generator = np.random.default_rng(6)
    drawn: Callable[[], Any] = lambda: generator.normal(size=40)  # noqa: E731
    chances = [tell_apart(drawn(), drawn(), seed=n, draws=50).chance for n in range(40)]
    assert 0.3 < float(np.mean(chances)) < 0.7


def _everything(folder: Path) -> dict[str, bytes]:
    # SQLite's own files beside the ledger come and go with whoever reads it.
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal")))
    return {str(path): path.read_bytes() for path in files}
