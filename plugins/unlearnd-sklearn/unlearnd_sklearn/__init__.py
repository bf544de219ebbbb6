"""scikit-learn for unlearnd: the backends `sgd` and `forest`, and `SisaClassifier`, an estimator that can forget.

Importing this package imports no scikit-learn: `unlearnd plugins` only wants names. It is loaded by the first method
of a backend that trains, or by asking for the estimator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unlearnd.hookspecs import Backend, hookimpl
from unlearnd_sklearn.backends import ForestBackend, SgdBackend

if TYPE_CHECKING:
    from unlearnd_sklearn.estimator import SisaClassifier

__all__ = ["ForestBackend", "SgdBackend", "SisaClassifier", "register_backends"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Bring `sgd` and `forest`."""
    register(SgdBackend())
    register(ForestBackend())


def __getattr__(name: str) -> Any:
    if name == "SisaClassifier":
        from unlearnd_sklearn.estimator import SisaClassifier  # heavy: scikit-learn

        return SisaClassifier
    raise AttributeError(f"module 'unlearnd_sklearn' has no attribute {name!r}")
