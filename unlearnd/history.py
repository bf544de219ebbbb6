"""What the log says should be there now: slice roots, models, checkpoints, live sets, receipts.

The log is read with the auditor's own parsers, not with what wrote it. A leaf that cannot be read says nothing here;
whoever replays the log reports it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from unlearnd.errors import FormatError
from unlearnd.verify.receipts import Erasure, read_erasure
from unlearnd.verify.statements import Fields, is_count, is_digest, is_digest_or_empty, is_text, read_statement

Slice = tuple[str, int, int]
"""Dataset, shard, slice."""


@dataclass(frozen=True)
class Root:
    """A slice root as it was logged."""

    leaf: int
    root: str
    points: int


@dataclass(frozen=True)
class Declared:
    """A model as it was logged."""

    dataset: str
    spec: str
    seed: str
    replay: str
    recipes: Mapping[int, str]
    """recipe(k, 0) by shard."""
    kept: tuple[int, ...] | None = None
    """The slices whose checkpoints are kept; None for all."""


@dataclass(frozen=True)
class Built:
    """A checkpoint as it was logged."""

    shard: int
    slice: int
    recipe: str
    parent: str
    slice_root: str
    file: str
    tensors: str
    size: int


@dataclass(frozen=True)
class LiveSet:
    """A list of all checkpoints of a model, or of some of its shards, as it was logged."""

    leaf: int
    count: int
    root: str
    detail: str


@dataclass(frozen=True)
class Change:
    """A slice root taking the place of another."""

    leaf: int
    before: Root
    after: Root


@dataclass(frozen=True)
class Restricted:
    """A hold that changed a slice: points taken out of training, or returned."""

    request: str
    points: int


@dataclass
class History:
    """What all leaves add up to."""

    datasets: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    slices: dict[Slice, list[Root]] = field(default_factory=dict)
    """Every root a slice has had, oldest first."""
    models: dict[str, Declared] = field(default_factory=dict)
    live: dict[tuple[str, str], Built] = field(default_factory=dict)
    """By model and recipe: built, and not destroyed since."""
    built: set[tuple[str, str]] = field(default_factory=set)
    """By model and recipe: ever built."""
    destroyed: dict[tuple[str, str], int] = field(default_factory=dict)
    """By model and recipe: the leaf that last said so."""
    live_sets: dict[str, dict[int | None, LiveSet]] = field(default_factory=dict)
    """By model: the newest list of all its shards (None), and by shard the newest since that lists only some."""
    requests: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Leaf and erasure by request; no erasure while it waits."""
    receipts: dict[str, tuple[int, Erasure]] = field(default_factory=dict)
    """Leaf and statement by request."""
    refused: set[str] = field(default_factory=set)
    """Requests that were closed without an erasure."""
    restricted: dict[tuple[Slice, str, str], list[Restricted]] = field(default_factory=dict)
    """What holds changed, by slice, root before and root after."""
    given_up: dict[Slice, list[list[Root]]] = field(default_factory=dict)
    """Roots that slices had before a restore that could not bring all of their rows back."""
    problems: list[str] = field(default_factory=list)

    @property
    def waiting(self) -> list[str]:
        """Requests that have neither a receipt nor a refusal."""
        return [request for request in self.requests if request not in self.receipts and request not in self.refused]

    @property
    def open(self) -> list[str]:
        """Those of them that are being carried out."""
        return [request for request in self.waiting if self.requests[request][1]]

    def newest_root(self, place: Slice) -> Root | None:
        """Return the root a slice has now, None where it has none."""
        return self.slices[place][-1] if place in self.slices else None

    def roots_of(self, dataset: str, shard: int) -> list[str]:
        """Return the roots of slices 1, 2, … of a shard, up to the first that has none."""
        roots: list[str] = []
        while (newest := self.newest_root((dataset, shard, len(roots) + 1))) is not None:
            roots.append(newest.root)
        return roots

    def changes(self) -> Iterator[tuple[Slice, Change]]:
        """Yield how every slice changed, oldest first."""
        lists = [(place, roots) for place, ended in self.given_up.items() for roots in ended]
        for place, roots in (*lists, *self.slices.items()):
            for before, after in pairwise(roots):
                yield place, Change(after.leaf, before, after)


def read_history(leaves: Iterable[bytes]) -> History:
    """Walk through all leaves of a log."""
    history = History()
    for index, leaf in enumerate(leaves):
        try:
            statement = read_statement(leaf)
            fields = Fields(statement.predicate, statement.kind)
            if statement.kind == "erasure":
                erasure = read_erasure(statement)
                history.receipts.setdefault(erasure.request_id, (index, erasure))
            elif statement.kind in _KINDS:
                _KINDS[statement.kind](history, index, fields)
        except FormatError as error:
            history.problems.append(f"leaf {index}: {error}")
    return history


def _dataset(history: History, index: int, fields: Fields) -> None:
    name = fields.text("dataset")
    if name in history.datasets:
        history.problems.append(f"leaf {index}: dataset '{name}' is made a second time")
    history.datasets.setdefault(name, fields.value)


def _slices(history: History, index: int, fields: Fields) -> None:
    dataset = fields.text("dataset")
    for shard, slice_, root, points in fields.rows("roots", is_count, is_count, is_digest, is_count):
        history.slices.setdefault((dataset, shard, slice_), []).append(Root(index, root, points))


def _model(history: History, index: int, fields: Fields) -> None:
    name, recipes = fields.text("model"), dict(map(tuple, fields.rows("recipes", is_count, is_digest)))
    said = (fields.text("dataset"), fields.digest("spec"), fields.text("seed"), fields.text("replay"))
    kept = tuple(fields.value["kept"]) if isinstance(fields.value.get("kept"), list) else None
    known = history.models.get(name)
    if known is not None:
        # A long list is cut into several leaves; they share all but the list.
        if (*said, kept) != (
            known.dataset,
            known.spec,
            known.seed,
            known.replay,
            known.kept,
        ) or recipes.keys() & known.recipes.keys():
            history.problems.append(f"leaf {index}: model '{name}' is declared a second time")
            return
        recipes = {**known.recipes, **recipes}
    history.models[name] = Declared(*said, recipes, kept)


def _built(history: History, index: int, fields: Fields) -> None:
    model = fields.text("model")
    kinds = (is_count, is_count, is_digest, is_digest_or_empty, is_digest_or_empty, is_digest, is_digest, is_count)
    for entry in fields.rows("checkpoints", *kinds):
        built = Built(*entry)
        history.live[model, built.recipe] = built
        history.built.add((model, built.recipe))


def _destroyed(history: History, index: int, fields: Fields) -> None:
    model = fields.text("model")
    for _, _, recipe, _ in fields.rows("checkpoints", is_count, is_count, is_digest, is_digest):
        history.destroyed[model, recipe] = index
        history.live.pop((model, recipe), None)
        if (model, recipe) not in history.built:
            history.problems.append(f"leaf {index}: a checkpoint of '{model}' is destroyed that was never built")


def _live_set(history: History, index: int, fields: Fields) -> None:
    listed = LiveSet(index, fields.count("count"), fields.digest("root"), fields.digest("detail"))
    if "shards" in fields.value:
        newest = history.live_sets.setdefault(fields.text("model"), {})
        newest.update(dict.fromkeys(fields.counts("shards"), listed))
    else:
        history.live_sets[fields.text("model")] = {None: listed}


def _request(history: History, index: int, fields: Fields) -> None:
    history.requests.setdefault(fields.text("requestId"), (index, fields.text_or_empty("erasureId")))


def _begun(history: History, index: int, fields: Fields) -> None:
    for request in fields.texts("requests"):
        if request in history.requests:
            history.requests[request] = (history.requests[request][0], fields.text("erasureId"))


def _restricted(history: History, index: int, fields: Fields) -> None:
    kinds = (is_text, is_count, is_count, is_count, is_digest_or_empty, is_digest_or_empty)
    for dataset, shard, slice_, points, before, after in fields.rows("slices", *kinds):
        if before:
            move = Restricted(fields.text("requestId"), points)
            history.restricted.setdefault(((dataset, shard, slice_), before, after), []).append(move)


def _refused(history: History, index: int, fields: Fields) -> None:
    history.refused.add(fields.text("requestId"))


def _restored(history: History, index: int, fields: Fields) -> None:
    for entry in fields.list("lost"):
        if not isinstance(entry, list) or len(entry) not in (2, 4) or not all(isinstance(e, str | int) for e in entry):
            raise FormatError("lost of restored is not what its format says")
        what, *which = entry
        if what == "dataset":
            history.datasets.pop(which[0], None)
            for place in [place for place in history.slices if place[0] == which[0]]:
                history.given_up.setdefault(place, []).append(history.slices.pop(place))
        elif what == "model":
            history.models.pop(which[0], None)
            history.live_sets.pop(which[0], None)
        elif what == "slice" and len(which) == 3 and (place := (which[0], which[1], which[2])) in history.slices:
            history.given_up.setdefault(place, []).append(history.slices.pop(place))
        elif what == "request" and which[0] in history.requests:
            history.requests[which[0]] = (history.requests[which[0]][0], "")


_KINDS = {
    "dataset": _dataset,
    "slices": _slices,
    "model": _model,
    "built": _built,
    "destroyed": _destroyed,
    "liveset": _live_set,
    "request": _request,
    "begun": _begun,
    "refused": _refused,
    "restricted": _restricted,
    "returned": _restricted,
    "restored": _restored,
}
