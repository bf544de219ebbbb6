"""Hold the ledger against the log: where the two say different things, in sentences.

The ledger can be rewritten by whoever holds it, the log cannot without breaking a tree head that somebody kept. Both
are only read here; what is wrong is yielded rather than raised, because an auditor wants the list.
"""

from collections.abc import Iterator, Sequence

from unlearnd.digests import digest_of_json
from unlearnd.history import Declared, History, Slice
from unlearnd.ledger.models import Checkpoint, Model
from unlearnd.ledger.moments import Moment
from unlearnd.recipes import recipes
from unlearnd.statements import replay_class


def disagreements(moment: Moment, history: History) -> Iterator[str]:
    """Yield everything about which the ledger and the log differ."""
    yield from _datasets(moment, history)
    yield from _models(moment, history)
    yield from _roots(moment, history)
    yield from _checkpoints(moment, history)
    yield from _requests(moment, history)


def chain_of(model: Model, shard: int, roots: Sequence[str]) -> list[str]:
    """Return the recipes of a shard that these slice roots give, recipe(k, 0) first."""
    return list(recipes(model.spec, model.seed, shard, roots, model.sliceable))  # type: ignore[arg-type]


def name_of(place: Slice) -> str:
    """Return a slice as a sentence calls it."""
    return f"slice {place[2]} of shard {place[1]} of '{place[0]}'"


def _datasets(moment: Moment, history: History) -> Iterator[str]:
    datasets = {dataset.name: dataset for dataset in moment.datasets.values()}
    for name in sorted(datasets.keys() ^ history.datasets.keys()):
        yield f"only {'the ledger' if name in datasets else 'the log'} has a dataset '{name}'"
    for name in sorted(datasets.keys() & history.datasets.keys()):
        data, said = datasets[name], history.datasets[name]
        now = (data.shards, data.unit, data.placement, data.layout, list(data.shape), data.dtype)
        if now != tuple(said.get(key) for key in ("shards", "unit", "placement", "layout", "shape", "dtype")):
            yield f"dataset '{name}' has another layout in the ledger than in the log"


def _models(moment: Moment, history: History) -> Iterator[str]:
    for name in sorted(moment.models.keys() ^ history.models.keys()):
        yield f"only {'the ledger' if name in moment.models else 'the log'} has a model '{name}'"
    for name in sorted(moment.models.keys() & history.models.keys()):
        model = moment.models[name]
        first = {shard: chain_of(model, shard, [])[0] for shard in range(1, model.spec.shards + 1)}
        now = Declared(
            dataset=moment.datasets[model.dataset_id].name,
            spec=digest_of_json(model.spec.as_json()),
            seed=str(model.seed),
            replay=replay_class(model.deterministic),
            recipes=first,
            kept=model.kept,
        )
        if now != history.models[name]:
            yield f"model '{name}' has another spec or seed in the ledger than in the log"


def _roots(moment: Moment, history: History) -> Iterator[str]:
    now = {
        (moment.datasets[dataset_id].name, shard, slice_): root
        for (dataset_id, shard, slice_), root in moment.slices.items()
    }
    logged = {place: roots[-1].root for place, roots in history.slices.items()}
    for place in sorted(now.keys() | logged.keys()):
        if now.get(place) != logged.get(place):
            yield f"{name_of(place)} has another root in the ledger than in the log"


def _checkpoints(moment: Moment, history: History) -> Iterator[str]:
    rows: dict[tuple[str, str], Checkpoint] = {}
    for name, row in moment.live():
        same = rows.setdefault((name, row.recipe), row)
        if (same.shard, same.slice, same.path, same.file) != (row.shard, row.slice, row.path, row.file):
            yield f"the ledger has a checkpoint of '{name}' twice, and differently: {row.path}"
    for model, recipe in sorted(rows.keys() | history.live.keys()):
        found, built = rows.get((model, recipe)), history.live.get((model, recipe))
        if found is None:
            yield f"a checkpoint of '{model}' was built, never destroyed, and is not in the ledger"
        elif built is None:
            what = "the log has destroyed" if (model, recipe) in history.destroyed else "the log never built"
            yield f"the ledger has a checkpoint of '{model}' that {what}: {found.path}"
        elif (found.shard, found.slice) != (built.shard, built.slice):
            yield f"{found.path} is of another shard or slice in the ledger than in the log"


def _requests(moment: Moment, history: History) -> Iterator[str]:
    begun = {request.id: request.erasure_id for request in moment.requests}
    rows = {entry.id: (entry.leaf, begun.get(entry.id, "")) for entry in moment.entries}
    for request in sorted(rows.keys() | history.requests.keys()):
        if rows.get(request) != history.requests.get(request):
            yield f"request {request} is not the same in the ledger and in the log"
    closed = {entry.id for entry in moment.entries if entry.state in ("refused", "withdrawn", "duplicate")}
    for request in sorted(closed ^ (history.refused & rows.keys())):
        where = "the ledger" if request in closed else "the log"
        yield f"request {request} is closed without an erasure only in {where}"
    entries = {entry.request_id: (entry.leaf, entry.detail) for entry in moment.receipts}
    logged = {request: (leaf, said.detail_digest) for request, (leaf, said) in history.receipts.items()}
    for request in sorted(entries.keys() | logged.keys()):
        if entries.get(request) != logged.get(request):
            yield f"the receipt of request {request} is not the same in the ledger and in the log"
