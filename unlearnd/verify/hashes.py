"""SHA-256, without waiting for OpenSSL.

`hashlib` loads OpenSSL before it hashes anything, a good part of the time to a verdict. Python has SHA-256 built in,
too, as its own `random` uses it; where it was built without, `hashlib` has to do. In a process that has loaded
`hashlib` anyway, as every store has, its SHA-256 is taken: it is the quicker of the two, byte for byte.
"""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING or "hashlib" in sys.modules:
    from hashlib import sha256
else:
    try:
        if sys.version_info >= (3, 12):
            from _sha2 import sha256
        else:
            from _sha256 import sha256
    except ImportError:
        from hashlib import sha256

__all__ = ["sha256"]
