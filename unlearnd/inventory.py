"""What storage holds, looked at without believing the ledger: checkpoints, slice data, and what else lies around."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from posixpath import dirname

import numpy as np

from unlearnd.agreement import chain_of
from unlearnd.bases import FOLDER as BASES
from unlearnd.bases import base_of, read_base
from unlearnd.bases import path_of as base_path
from unlearnd.checkpoints import encode_state, path_of
from unlearnd.digests import Digest, digest_of
from unlearnd.errors import DamagedStoreError, InputError, NotFoundError
from unlearnd.history import Built, History, Slice
from unlearnd.ledger import Ledger
from unlearnd.ledger.models import Checkpoint
from unlearnd.ledger.moments import Moment
from unlearnd.ledger.points import Dataset, Segment
from unlearnd.slices import Rows, commitments, out_of_use, read_features
from unlearnd.storage import Storage, opened
from unlearnd.tensors import read_tensors


@dataclass
class SliceData:
    """What reading all slice data showed."""

    wrong: list[str] = field(default_factory=list)
    """Segments that are not what the ledger recorded, or cannot be read."""
    committed: dict[Slice, list[bytes] | str] = field(default_factory=dict)
    """Commitments of the live rows of each slice that has a root, in order; or why there are none."""
    owned: int = 0
    """Rows of the user in question, erased or not."""
    rows: int = 0
    unread: int = 0
    """Segments in which nobody's rows could be looked for."""


def read_slice_data(
    ledger: Ledger, storage: Storage, moment: Moment, history: History, wanted: bytes | None
) -> SliceData:
    """Read every segment in force once; `wanted` is the handle of the user whose rows to count."""
    found = SliceData(committed={place: [] for place in history.slices})
    for (dataset_id, shard, slice_), segments in moment.segments.items():
        dataset = moment.datasets[dataset_id]
        place = (dataset.name, shard, slice_)
        for segment in segments:
            problem = _read_segment(found, ledger, storage, dataset, segment, place, wanted)
            if problem:
                found.wrong.append(f"{segment.path} {problem}")
                found.unread += 1
                if place in found.committed:
                    found.committed[place] = f"{segment.path} {problem}"
    return found


def problem_of(storage: Storage, checkpoint: Checkpoint, built: Built | None) -> str | None:
    """Return what is wrong with a checkpoint in force, given what the log says was built."""
    if built is None:
        return "is a checkpoint that the log does not have as built and not destroyed"
    if (checkpoint.file, checkpoint.tensors, checkpoint.size) != (built.file, built.tensors, built.size):
        return "has other digests in the ledger than in the log"
    try:
        data = storage.read(checkpoint.path)
    except NotFoundError:
        return "is not there"
    if (digest_of(data), len(data)) != (built.file, built.size):
        return "is not the file that was logged: its digest or size differs"
    try:
        plain = opened(storage.vault, checkpoint.path, data, checkpoint.key)
        tensors = encode_state(read_tensors(plain, checkpoint.path)).tensors
    except (DamagedStoreError, ValueError, TypeError, KeyError):
        return "cannot be read"
    return None if tensors == built.tensors else "does not hold the tensors that were logged"


def known_names(moment: Moment) -> set[str]:
    """Return the names of all checkpoints, slice data with its features, and bases in force."""
    segments = {segment.path for listed in moment.segments.values() for segment in listed}
    features = {kept.path for listed in moment.features.values() for kept in listed}
    bases = {base_path(digest) for digest in _bases(moment)}
    return segments | features | bases | {checkpoint.path for _, checkpoint in moment.live()}


def wrong_features(storage: Storage, moment: Moment) -> list[str]:
    """Return what is wrong with kept features: each must be as recorded, and of the rows of its segment and no other.

    Whether they are what the base makes of those rows only a replay shows: it computes them anew.
    """
    wrong = []
    for segment in (segment for listed in moment.segments.values() for segment in listed):
        for kept in moment.features.get(segment.id, ()):
            rows = read_features(storage, kept)
            if rows is None:
                wrong.append(f"{kept.path} is not what the ledger recorded, or cannot be read")
                continue
            try:
                plain = opened(storage.vault, segment.path, storage.read(segment.path), segment.key)
                held = read_tensors(plain, segment.path)["position"]
            except (NotFoundError, DamagedStoreError, KeyError):
                continue  # said of the segment itself
            if not np.array_equal(held, rows.position) or len(rows.x) != len(held):
                wrong.append(f"{kept.path} has features of other rows than its slice data")
    return wrong


def wrong_bases(storage: Storage, moment: Moment) -> list[str]:
    """Return what is wrong with the bases that models stand on; one that is missing is said elsewhere."""
    wrong = []
    there = set(storage.list(BASES))
    for digest in sorted(_bases(moment)):
        try:
            if base_path(digest) in there:
                read_base(storage, digest)
        except (DamagedStoreError, InputError) as error:
            wrong.append(str(error))
    return wrong


def excuses(moment: Moment, history: History, names: Iterable[str], now: float) -> dict[str, str | None]:
    """Return for objects that nobody knows which work that goes on, or was cut off, may have left them; None: none.

    An excuse is no proof of innocence: what it is offered for counts as not checked.
    """
    at_work = [lease for lease, expires in moment.leases if expires > now]
    segments = [segment for listed in moment.segments.values() for segment in listed]
    beside = {segment.path.removesuffix(".safetensors") for segment in segments}
    rewritten = {dirname(segment.path) for segment in segments if segment.dropped}
    expected = {
        _stem(path_of(name, shard, Digest(recipe)))
        for name, model in moment.models.items()
        if model.retired_at is None
        for shard in range(1, model.spec.shards + 1)
        for recipe in chain_of(model, shard, history.roots_of(moment.datasets[model.dataset_id].name, shard))[1:]
    }

    def excuse(name: str) -> str | None:
        if any(_covers(lease, name) for lease in at_work):
            return "somebody is at work there, try again later"
        if history.open and (name in moment.doomed or dirname(name) in rewritten):
            return "an erasure has not ended, the next `unlearnd erase` or `build` goes on with it"
        if name.startswith("data/") and any(ingest[:16] in name for ingest in moment.unfinished):
            return "an ingest was cut off, the next one clears it away"
        if _stem(name) in expected or (name.endswith(".features") and name.rsplit(".", 2)[0] in beside):
            return "a build was cut off, `unlearnd build` goes on with it"
        if name.startswith(f"{BASES}/"):
            return "a declaration was cut off, the next `unlearnd train` with a base clears it away"
        return None

    return {name: excuse(name) for name in names}


def _read_segment(
    found: SliceData,
    ledger: Ledger,
    storage: Storage,
    dataset: Dataset,
    segment: Segment,
    place: Slice,
    wanted: bytes | None,
) -> str | None:
    """Take a segment's rows into account as far as they can be read; return what is wrong beyond its digest."""
    try:
        data = storage.read(segment.path)
    except NotFoundError:
        return "is not there"
    if digest_of(data) != segment.digest:
        # Read on: what is in it now is what would be trained on.
        found.wrong.append(f"{segment.path} is not what the ledger recorded: its digest differs")
    try:
        columns = read_tensors(opened(storage.vault, segment.path, data, segment.key), segment.path)
        x, label, position, owner = (columns[name] for name in ("x", "label", "position", "owner"))
        rows = Rows(x, label, position, owner, columns.get("group"))
        if wanted is not None:
            found.owned += sum(handle == wanted for handle in _handles(rows))
        found.rows += len(rows)
        so_far = found.committed.get(place)
        if isinstance(so_far, list):
            live = rows.keep(~np.isin(rows.position, out_of_use(segment)))
            so_far.extend(commitments(ledger, dataset, live))
    except DamagedStoreError as error:
        return f"cannot be compared: {error}"
    except (LookupError, ValueError, TypeError) as error:
        return f"cannot be read ({type(error).__name__})"
    return None


def _bases(moment: Moment) -> set[Digest]:
    in_service = (model for model in moment.models.values() if model.retired_at is None)
    return {digest for model in in_service if (digest := base_of(model.spec.settings))}


def _stem(name: str) -> str:
    """Return the name of a checkpoint without what follows its recipe: encrypted ones have more of it."""
    folder, _, last = name.rpartition("/")
    return f"{folder}/{last.partition('.')[0]}"


def _handles(rows: Rows) -> Iterable[bytes]:
    width, data = rows.owner.shape[1], rows.owner.tobytes()
    return (data[i : i + width] for i in range(0, len(data), width))


def _covers(lease: str, name: str) -> bool:
    """Say whether whoever holds a lease may be writing an object of this name."""
    kind, _, rest = lease.partition("/")
    if kind == BASES:
        return name.startswith(f"{BASES}/")
    if kind == "ingest":
        return name.startswith(f"data/{rest}/")
    what, _, shard = rest.rpartition("/")
    folder = {"data": "data", "build": "checkpoints"}.get(kind)
    return folder is not None and shard.isdigit() and name.startswith(f"{folder}/{what}/{int(shard):04d}/")
