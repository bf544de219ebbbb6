"""PyTorch backends for unlearnd: `mlp`, networks for images, and `TorchBackend` for a platform's own modules.

Importing this package imports no torch: `unlearnd plugins` only wants names. Torch is loaded by the first
method of a backend that trains or answers.
"""

from __future__ import annotations

from collections.abc import Callable

from unlearnd.hookspecs import Backend, hookimpl
from unlearnd_torch.backends import MlpBackend, NetworkBackend, TorchBackend

__all__ = ["MlpBackend", "NetworkBackend", "TorchBackend", "register_backends"]


@hookimpl
def register_backends(register: Callable[[Backend], None]) -> None:
    """Bring `mlp`, `convnet`, `resnet` and `wide_resnet`."""
    register(MlpBackend())
    for name in ("convnet", "resnet", "wide_resnet"):
        register(NetworkBackend(name))
