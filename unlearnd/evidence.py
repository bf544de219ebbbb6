"""What an auditor is handed: the pack of one receipt, proofs, the log as a folder of files."""

import base64
import os
from pathlib import Path

from unlearnd.dossier import summary_page
from unlearnd.errors import NotFoundError, RefusedError, StorageError
from unlearnd.keys import public_pem
from unlearnd.ledger import log
from unlearnd.ledger.log import ReceiptEntry
from unlearnd.opened import Opened
from unlearnd.storage import Storage
from unlearnd.translog import export, read_detail, read_receipt, sign_head, trust


def export_receipt(store: Opened, request_id: str, folder: str | os.PathLike[str]) -> list[str]:
    """Write the evidence pack of a receipt to a new folder; return the names of its files."""
    entry = receipt_named(store, request_id)
    data = read_receipt(store.translog, entry)
    size, head = sign_head(store.translog)
    name = f"{entry.request_id}.receipt.json"
    command = f"unlearnd verify {name} --trust trust.json --detail detail.json"
    files = {
        name: data,
        "detail.json": read_detail(store.translog, entry.detail),
        "tree-head.txt": head.encode(),
        "trust.json": trust(store.translog),
        # The keys that this receipt and this tree head were signed with, which need not be those in use now.
        "receipt.pub": public_pem(_key_of(store, "receipt", entry.leaf)),
        "log.pub": public_pem(_key_of(store, "log", size - 1)),
        "summary.html": summary_page(data, command),
        "verify.txt": f"{command}\n".encode(),
    }
    target = Path(folder)
    try:
        target.mkdir(mode=0o700, parents=True)
        for file, content in files.items():
            (target / file).write_bytes(content)
    except FileExistsError:
        raise RefusedError(f"{target} is there already; name a new folder") from None
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error
    return list(files)


def log_consistency(store: Opened, old: int, new: int | None) -> tuple[int, list[str]]:
    """Return a size of the log and the proof that `old` leaves are its prefix, in base64."""
    size = sign_head(store.translog)[0]
    wanted = size if new is None else new
    if not 0 < old <= wanted <= size:
        raise NotFoundError(f"the log has {size} leaves: no proof from {old} to {wanted}")
    path = log.consistency(store.ledger, old, wanted)
    return wanted, [base64.b64encode(part).decode() for part in path]


def export_log(store: Opened, target: str) -> int:
    """Write the log, its documents and receipts to a folder or URL; return its size."""
    url = target if "://" in target else str(Path(target).absolute())
    options = store.config.storage_options if url.startswith(("s3://", "s3a://")) else {}
    return export(store.translog, Storage(url, **options))


def receipt_named(store: Opened, request_id: str) -> ReceiptEntry:
    entries = log.receipt_entries(store.ledger)
    found = [entry for entry in entries if request_id and entry.request_id.startswith(request_id)]
    if len(found) != 1:
        raise NotFoundError(f"{'no' if not found else 'more than one'} receipt begins with '{request_id}'")
    return found[0]


def _key_of(store: Opened, role: str, leaf: int) -> bytes:
    keys = [key for key in log.signing_keys(store.ledger, role) if key.since <= leaf]
    return keys[-1].public
