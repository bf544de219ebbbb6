"""A copy of the log in storage, beside the data it is about: what a ledger that was put back is held against.

Whenever a tree head is signed, the leaves since the last one are written to storage, with the head after them. The
copy is nobody's evidence: it lets a store notice at opening that its ledger is older than what was signed, and lets a
restored backup catch up with what happened since. Leaves hold no personal data. Beside them lies where in their slices
points stood that were erased, or that a hold took out of training or returned: with a ledger of before that, and with
nothing else, it says whose they were.

Several processes may write at once. Each chunk begins where a finished copy ended, so whatever head is there, all
leaves before it are there too; a slower process may put an older head in the place of a newer one, which the next
signature mends.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unlearnd.errors import DamagedStoreError, FormatError, NotFoundError
from unlearnd.ledger import Ledger, log, restrictions
from unlearnd.ledger.restrictions import Stood
from unlearnd.storage import Storage
from unlearnd.verify.exports import read_checkpoint, read_leaves
from unlearnd.verify.statements import read_statement
from unlearnd.verify.trust import read_head

FOLDER = "evidence/log"
HEAD = f"{FOLDER}/head"
PLACES, HOLDS = "places.json", "holds.json"
"""Where in an exported log the places are, of erased points and of those that holds moved."""
_CHUNK = re.compile(rf"{FOLDER}/(\d{{12}})-(\d{{12}})\.json")
_AT_ONCE = 5_000

Places = Mapping[str, Sequence[Sequence[int]]]
"""By request: of each erased point, in the order of the detail document, the slice in that document and the rank."""


@dataclass(frozen=True)
class Later:
    """What a copy of the log has beyond some leaf."""

    size: int
    note: str
    """The signed tree head."""
    leaves: Sequence[bytes] = ()
    places: Places = field(default_factory=dict)
    holds: Sequence[Stood] = ()
    """What holds moved, slice by slice; none in a copy that an older release wrote."""


def keep_copy(ledger: Ledger, storage: Storage, size: int, note: str) -> None:
    """Bring the copy in storage up to the tree head of `size` leaves, which is about to be kept."""
    begin = size_kept(storage)
    for start in range(begin, size, _AT_ONCE):
        end = min(start + _AT_ONCE, size)
        leaves = [base64.b64encode(leaf).decode() for leaf in log.leaves(ledger, start, end)]
        chunk: dict[str, Any] = {"leaves": leaves, "places": places_between(ledger, start, end)}
        if moved := holds_between(ledger, start, end):
            chunk["holds"] = moved
        storage.write(f"{FOLDER}/{start:012d}-{end:012d}.json", json.dumps(chunk).encode() + b"\n")
    if begin < size:
        storage.write(HEAD, note.encode())


def size_kept(storage: Storage) -> int:
    """Return how many leaves the tree head in storage is of; 0 where there is none, as in a store of 0.1."""
    try:
        return read_head(storage.read(HEAD))[1].size
    except NotFoundError:
        return 0
    except FormatError:
        raise DamagedStoreError(f"{HEAD} in storage is not a tree head") from None


def places_between(ledger: Ledger, begin: int, end: int) -> dict[str, Any]:
    """Return where erased points stood, of the receipts whose statements are leaves `begin` … `end - 1`."""
    return {
        request: outcome["places"]
        for request, outcome in log.outcomes_between(ledger, begin, end)
        if outcome.get("places")
    }


def holds_between(ledger: Ledger, begin: int, end: int) -> list[Any]:
    """Return what holds moved in the slices that leaves `begin` … `end - 1` say they changed, as JSON has it."""
    changed: set[tuple[str, int, int, str, str]] = set()
    for leaf in log.leaves(ledger, begin, end):
        # Few leaves are about a hold, and this is done whenever a tree head is signed.
        if any(kind in leaf for kind in (b"/restricted/", b"/returned/")):
            statement = read_statement(leaf)
            if statement.kind in ("restricted", "returned"):
                slices = statement.predicate["slices"]
                changed |= {(dataset, shard, slice_, was, is_) for dataset, shard, slice_, _, was, is_ in slices}
    if not changed:
        return []
    stood = (one for r in restrictions.all_restrictions(ledger) for one in (*r.taken, *r.returned))
    return restrictions.as_json([one for one in stood if (*one[0], one[1], one[2]) in changed])


def read_copy(storage: Storage, begin: int) -> Later:
    """Return what the copy in storage has from leaf `begin` on."""
    size = size_kept(storage)
    if size <= begin:
        return Later(size, storage.read(HEAD).decode() if size else "")
    leaves: dict[int, bytes] = {}
    places: dict[str, Any] = {}
    holds: list[Stood] = []
    for name, start, end in _chunks(storage):
        if end > begin and any(index not in leaves for index in range(max(start, begin), min(end, size))):
            try:
                chunk = json.loads(storage.read(name))
                leaves |= {start + n: base64.b64decode(leaf) for n, leaf in enumerate(chunk["leaves"])}
                places |= chunk["places"]
                holds += restrictions.from_json(chunk.get("holds", []))
            except (ValueError, KeyError, TypeError):
                raise DamagedStoreError(f"{name} in storage is not a copy of leaves of the log") from None
    lacking = [index for index in range(begin, size) if index not in leaves]
    if lacking:
        raise DamagedStoreError(f"the copy of the log in storage lacks leaf {lacking[0]}")
    return Later(size, storage.read(HEAD).decode(), [leaves[index] for index in range(begin, size)], places, holds)


def read_export(export: Storage, begin: int) -> Later:
    """Return what an exported log has from leaf `begin` on."""
    folder = _Exported(export)
    note = read_checkpoint(folder)
    size = read_head(note)[1].size
    places, holds = _read_json(export, PLACES), _read_json(export, HOLDS)
    try:
        moved = restrictions.from_json(holds or [])
    except (ValueError, TypeError):
        raise FormatError(f"{HOLDS} of the exported log does not say what holds moved") from None
    leaves = [leaf for index, leaf in enumerate(read_leaves(folder, size)) if index >= begin]
    return Later(size, note.decode(), leaves, places if isinstance(places, dict) else {}, moved)


def _read_json(export: Storage, name: str) -> Any:
    """Return a document of an exported log; None where there is none, or nothing to be read."""
    try:
        return json.loads(export.read(name))
    except (NotFoundError, ValueError):
        return None


class _Exported:
    """An exported log, wherever it lies."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def read(self, name: str, limit: int) -> bytes | None:
        try:
            data = self._storage.read(name)
        except NotFoundError:
            return None
        if len(data) > limit:
            raise FormatError(f"{name} of the exported log is larger than {limit:,} bytes")
        return data


def _chunks(storage: Storage) -> Iterator[tuple[str, int, int]]:
    for name in storage.list(FOLDER):
        if found := _CHUNK.fullmatch(name):
            yield name, int(found[1]), int(found[2])
