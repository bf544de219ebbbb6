"""Notices for recipients as files, for somebody to deliver: in the box, until a plugin does it by mail or a service.

A file in the store's folder `notices` says what a recipient has to know and do. Writing it is not sending it, so the
outcome is `written`, and whoever delivers it records that. Written again it is the same file.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

FOLDER = "notices"
_TEXT = (
    "People were erased from the model named here, or the model was destroyed. You were given a copy made before. Stop "
    "using that copy, destroy it, and take a newer one where there is one. Tell us when it is done."
)


def write_notice(folder: Path, recipient: str, model: str, erasure: str, receipts: Sequence[str]) -> str:
    """Write a notice, whole or not at all; return the outcome."""
    notice = {"to": recipient, "model": model, "erasure": erasure, "receipts": list(receipts), "text": _TEXT}
    name = f"{erasure}-{hashlib.sha256(f'{recipient}/{model}'.encode()).hexdigest()[:12]}.json"
    path = folder / FOLDER / name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fresh = path.with_name(f".{name}.new")
    fresh.write_text(json.dumps(notice, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    fresh.replace(path)
    return "written"
