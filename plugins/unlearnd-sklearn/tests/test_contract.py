"""Both backends keep the contract, forests of either kind."""

from __future__ import annotations

import pytest
from unlearnd_sklearn import ForestBackend, SgdBackend

from unlearnd.testing import BackendContract


class TestSgd(BackendContract):
    @pytest.fixture
    def backend(self):
        return SgdBackend()


class TestSgdOfTwoClasses(BackendContract):
    @pytest.fixture
    def backend(self):
        return SgdBackend()

    @pytest.fixture
    def settings(self):
        return {"loss": "hinge", "learning_rate": "invscaling", "penalty": "elasticnet"}

    @pytest.fixture
    def classes(self):
        return 2

    @pytest.fixture
    def dtype(self):
        return "uint8"

    @pytest.fixture
    def shape(self):
        return (2, 3)


class TestForest(BackendContract):
    @pytest.fixture
    def backend(self):
        return ForestBackend()

    @pytest.fixture
    def settings(self):
        return {"n_estimators": 11}


class TestBoosting(BackendContract):
    @pytest.fixture
    def backend(self):
        return ForestBackend()

    @pytest.fixture
    def settings(self):
        return {"kind": "gradient_boosting", "n_estimators": 5, "max_depth": 2, "subsample": 0.8}
