"""What the backends compute is what scikit-learn computes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import SGDClassifier
from unlearnd_sklearn import ForestBackend, SgdBackend

from unlearnd.digests import derive_seed
from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, Points


def points(n: int = 80, classes: int = 3, missing: int | None = None) -> Points:
    random = np.random.default_rng(2)
    x = random.normal(size=(n, 5)).astype(np.float32)
    y = (x[:, :classes] + random.normal(size=(n, classes)) * 0.5).argmax(axis=1)
    if missing is not None:
        y[y == missing] = (missing + 1) % classes
    return Points(x, y)


def trained(backend, settings, given, classes, epochs=Fraction(1)):
    start = backend.initial_state(settings, (5,), classes, 1)
    return backend.train(settings, Job(start, given, epochs, 5), "cpu", lambda samples: None)


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("kind", ["random_forest", "gradient_boosting"])
def test_arrays_answer_as_the_forest_they_were_made_of(kind: str, classes: int) -> None:
    backend, given, rows = ForestBackend(), points(classes=classes), points(37).x
    settings = backend.settings({"kind": kind, "n_estimators": 19})
    answers = backend.predictor(settings, [trained(backend, settings, given, classes)], "cpu")(rows)
    if kind == "random_forest":
        own = RandomForestClassifier(n_estimators=19, random_state=5)
    else:
        own = GradientBoostingClassifier(n_estimators=19, random_state=5)
    assert np.allclose(answers[0], own.fit(given.x, given.y).predict_proba(rows), atol=1e-6)


@pytest.mark.parametrize("kind", ["random_forest", "gradient_boosting"])
@pytest.mark.parametrize("classes", [3, 4])
def test_a_class_that_a_shard_lacks_is_never_answered(kind: str, classes: int) -> None:
    backend, given = ForestBackend(), points(classes=classes, missing=1)
    settings = backend.settings({"kind": kind, "n_estimators": 30})
    state = trained(backend, settings, given, classes)
    answers = backend.predictor(settings, [state], "cpu")(given.x)
    assert answers.shape == (1, 80, classes)
    assert not answers[0, :, 1].any()
    assert np.mean(answers[0].argmax(axis=1) == given.y) > 0.9
    assert all(np.isfinite(array).all() for array in state.values())


def test_many_rows_are_answered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, given = ForestBackend(), points()
    settings = backend.settings({"n_estimators": 9})
    predictor = backend.predictor(settings, [trained(backend, settings, given, 3)], "cpu")
    whole = predictor(given.x)
    monkeypatch.setattr("unlearnd_sklearn.forest._STEPS_AT_A_TIME", 100)
    assert np.array_equal(predictor(given.x), whole)


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("loss", ["log_loss", "modified_huber"])
def test_sgd_answers_as_scikit_learn_does(loss: str, classes: int) -> None:
    backend, given = SgdBackend(), points(classes=classes)
    settings = backend.settings({"loss": loss, "standardize": False, "alpha": 0.01})
    state = trained(backend, settings, given, classes)
    own = SGDClassifier(loss=loss, alpha=0.01)
    own.classes_, own.coef_, own.intercept_ = np.arange(classes), state["coef"], state["intercept"]
    assert np.allclose(
        backend.predictor(settings, [state], "cpu")(given.x)[0], own.predict_proba(given.x.astype(float)), atol=1e-6
    )


@pytest.mark.parametrize("loss", ["log_loss", "hinge", "modified_huber", "squared_hinge", "perceptron"])
def test_sgd_learns_with_every_loss(loss: str) -> None:
    random = np.random.default_rng(4)
    y = random.integers(0, 3, 300)
    given = Points((random.normal(size=(300, 5)) + 4 * np.eye(3, 5)[y]).astype(np.float32), y)
    backend = SgdBackend()
    settings = backend.settings({"loss": loss, "learning_rate": "constant", "eta0": 0.005})
    state = trained(backend, settings, given, 3, Fraction(20))
    assert np.mean(backend.predictor(settings, [state], "cpu")(given.x)[0].argmax(axis=1) == given.y) > 0.95


def test_an_epoch_of_sgd_is_one_partial_fit_over_our_order_and_its_counter_is_state() -> None:
    backend, given = SgdBackend(), points()
    settings = backend.settings({"standardize": False})
    state = trained(backend, settings, given, 3, Fraction(3, 2))
    assert state["t"].tolist() == [1 + 80 + 40]
    own = SGDClassifier(loss="log_loss", shuffle=False)
    for epoch, take in ((0, 80), (1, 40)):
        order = np.random.Generator(np.random.PCG64(derive_seed(5, epoch, "order"))).permutation(80)[:take]
        own.partial_fit(given.x[order].astype(float), given.y[order], classes=[0, 1, 2])
    assert np.array_equal(own.coef_, state["coef"])
    again = backend.train(settings, Job(state, given, Fraction(1, 4), 6), "cpu", lambda samples: None)
    assert again["t"].tolist() == [1 + 80 + 40 + 20]
    assert not np.array_equal(again["coef"], state["coef"])


@pytest.mark.parametrize(
    ("backend", "given", "said"),
    [
        (SgdBackend(), {"alpha": 0}, "needs an alpha above 0"),
        (SgdBackend(), {"alpha": -1}, "'alpha'"),
        (SgdBackend(), {"loss": "huber"}, "'loss'"),
        (ForestBackend(), {"kind": "oak"}, "'kind'"),
        (ForestBackend(), {"n_estimators": 0}, "'n_estimators'"),
        (ForestBackend(), {"trees": 3}, "no setting 'trees'; settings: bootstrap, kind"),
    ],
)
def test_settings_are_refused_in_one_line(backend, given, said) -> None:
    with pytest.raises(InputError, match=said):
        backend.settings(given)


def test_gradient_boosting_has_defaults_of_its_own() -> None:
    backend = ForestBackend()
    assert backend.settings({"kind": "gradient_boosting"})["max_depth"] == 3
    assert backend.settings({"kind": "gradient_boosting", "max_depth": None})["max_depth"] is None
    assert backend.settings({})["max_features"] == "sqrt"


def test_sgd_wants_two_classes() -> None:
    with pytest.raises(InputError, match="two at least"):
        SgdBackend().initial_state(SgdBackend().settings({}), (5,), 1, 1)
