"""`SisaClassifier` is an estimator like others, and forgets."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from unlearnd_sklearn import SisaClassifier

import unlearnd


def blobs(rows: int = 120, people: int = 30):
    random = np.random.default_rng(3)
    y = random.integers(0, 3, rows)
    x = random.normal(size=(rows, 4)) + 3 * np.eye(3, 4)[y]
    return x, np.array(["high", "low", "middle"])[y], np.array([f"p{row % people}" for row in range(rows)])


def digests(model: SisaClassifier) -> dict[tuple[int, int], str]:
    return {(c.shard, c.slice): c.tensors for c in model.store_.checkpoints("model")}


def test_scikit_learn_finds_nothing_wrong() -> None:
    model = SisaClassifier(shards=2, slices=1, epochs=20)
    results = check_estimator(model, on_fail=None, on_skip=None)
    assert {result["check_name"]: str(result["exception"]) for result in results if result["status"] == "failed"} == {}
    assert len([result for result in results if result["status"] == "passed"]) > 40


@pytest.mark.parametrize("backend", ["sgd", "forest", "linear"])
def test_forgetting_equals_never_having_met_them(backend: str) -> None:
    x, y, people = blobs()
    options = {"settings": {"n_estimators": 5}} if backend == "forest" else {}
    met = SisaClassifier(backend, shards=2, slices=2, epochs=3, random_state=7, **options).fit(x, y, groups=people)
    before = digests(met)
    receipts = met.forget(["p3", "p11"])
    assert len(receipts) == 2
    keep = ~np.isin(people, ["p3", "p11"])
    never = clone(met).fit(x[keep], y[keep], groups=people[keep])
    assert digests(met) == digests(never) != before
    assert np.array_equal(met.predict_proba(x), never.predict_proba(x))


def test_a_receipt_can_be_verified_by_somebody_else(tmp_path: Path) -> None:
    x, y, people = blobs()
    model = SisaClassifier(shards=2, slices=2, folder=str(tmp_path / "kept")).fit(x, y, groups=people)
    (tmp_path / "r.json").write_bytes(model.forget("p3")[0])
    command = [sys.executable, "-m", "unlearnd", "verify", "r.json", "--trust", "kept/keys/trust.json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_whoever_is_not_there_cannot_be_forgotten_and_nobody_else_is() -> None:
    x, y, people = blobs()
    model = SisaClassifier(shards=2, slices=1).fit(x, y, groups=people)
    with pytest.raises(ValueError, match="1 of 2 groups are not in the store"):
        model.forget(["p3", "nobody"])
    model.forget(["p3"])
    with pytest.raises(ValueError, match="forgotten before"):
        model.forget(["p3"])
    assert model.store_.status().datasets[0].points == 116


def test_without_groups_rows_are_people() -> None:
    x, y, _ = blobs()
    model = SisaClassifier(shards=2, slices=1).fit(x, y)
    assert len(model.forget([5, 6, 5])) == 2
    assert model.store_.status().datasets[0].points == 118


def test_it_works_in_pipelines_and_searches() -> None:
    x, y, people = blobs()
    pipe = make_pipeline(FunctionTransformer(np.abs), SisaClassifier(shards=2, slices=1, random_state=1))
    pipe.fit(x, y, sisaclassifier__groups=people)
    assert pipe.predict_proba(x).shape == (120, 3)
    pipe[-1].forget(["p1"])
    search = GridSearchCV(
        SisaClassifier(slices=1, random_state=1), {"shards": [1, 2]}, cv=GroupKFold(2), error_score="raise"
    )
    assert search.fit(x, y, groups=people).best_score_ > 0.8
    assert search.best_estimator_.get_params()["shards"] in (1, 2)


def test_a_temporary_store_goes_with_its_estimator_and_a_copy_says_so() -> None:
    x, y, people = blobs()
    model = SisaClassifier(shards=2, slices=1).fit(x, y, groups=people)
    folder, expected = Path(model.folder_), model.predict(x)
    copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]  # noqa: S301 - our own bytes
    for twin in copies:
        assert np.array_equal(twin.predict(x), expected)
    # A copy is the same store: what one forgets, the other does not know any more.
    model.forget(["p3"])
    with pytest.raises(ValueError, match="not in the store"):
        copies[0].forget(["p3"])
    late = pickle.dumps(model)
    del model
    gc.collect()
    assert not folder.exists()
    with pytest.raises(ValueError, match="goes with the estimator"):
        pickle.loads(late).predict(x)  # noqa: S301 - our own bytes


def test_fitting_again_leaves_nothing_of_the_last_fit() -> None:
    x, y, people = blobs()
    model = SisaClassifier(shards=2, slices=1).fit(x, y, groups=people)
    first = Path(model.folder_)
    model.fit(x[:, :2], y)
    assert not first.exists()
    assert model.predict(x[:5, :2]).shape == (5,)


def test_a_given_folder_stays_and_is_not_overwritten(tmp_path: Path) -> None:
    x, y, people = blobs()
    model = SisaClassifier(shards=2, slices=1, folder=str(tmp_path / "kept")).fit(x, y, groups=people)
    expected = model.predict(x).tolist()
    with pytest.raises(ValueError, match="there is a store in"):
        clone(model).fit(x, y, groups=people)
    del model
    gc.collect()
    with unlearnd.open_store(str(tmp_path / "kept")) as store:
        assert store.model("model").predict(x.astype(np.float32), "mean").labels.tolist() == expected


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "no-such"}, "no backend 'no-such'"),
        ({"settings": {"lss": 1}}, "no setting 'lss'"),
        ({"shards": 0}, "shard"),
        ({"epochs": -1}, "epochs must be more than 0"),
    ],
)
def test_what_cannot_be_used_is_a_value_error_and_leaves_nothing(
    options: dict[str, object], said: str, tmp_path: Path
) -> None:
    x, y, _ = blobs()
    model = SisaClassifier(**options, folder=str(tmp_path / "new"))
    with pytest.raises(ValueError, match=said):
        model.fit(x, y)
    assert not (tmp_path / "new").exists()
    with pytest.raises(NotFittedError):
        model.predict(x)


def test_wrong_groups_and_an_unfitted_estimator_are_told() -> None:
    x, y, people = blobs()
    with pytest.raises(ValueError, match="one person for each of 120 rows"):
        SisaClassifier().fit(x, y, groups=people[:5])
    for call in (lambda: SisaClassifier().forget(["p1"]), lambda: SisaClassifier().store_):
        with pytest.raises(NotFittedError):
            call()
    model = SisaClassifier(aggregate="median", shards=1, slices=1).fit(x, y)
    with pytest.raises(ValueError, match="no aggregator 'median'"):
        model.predict(x)


def test_the_example_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    exec(text.split("```python\n")[1].split("```")[0], {})
    said = capsys.readouterr().out
    assert float(said.split()[0]) > 0.8
    assert "1 receipt, 295 points left" in said


def test_importing_the_package_loads_no_scikit_learn() -> None:
    code = "import sys, unlearnd_sklearn; sys.exit('sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
