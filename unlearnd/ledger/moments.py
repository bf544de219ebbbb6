"""The whole ledger as it stood at one moment, without its points: what an audit holds against the log and storage.

One short transaction, because a reader that stays keeps an erasure from scrubbing the ledger's files. The leaves
themselves are not in it: they never change, and are read afterwards.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection

from unlearnd.ledger import dockets, log, models, points, restrictions
from unlearnd.ledger.connection import Ledger
from unlearnd.ledger.dockets import Entry
from unlearnd.ledger.erasures import Request, all_requests
from unlearnd.ledger.features import Kept, kept_features
from unlearnd.ledger.log import ReceiptEntry, SigningKey
from unlearnd.ledger.models import Checkpoint, Model
from unlearnd.ledger.points import Dataset, Segment
from unlearnd.ledger.restrictions import Restriction


@dataclass(frozen=True)
class Moment:
    """How the ledger stood."""

    pulse: tuple[object, ...]
    """Differs from that of another moment when anything else in here may differ."""
    size: int
    """Leaves in the log."""
    root: bytes
    """Their root by the hashes that the ledger keeps."""
    heads: Mapping[int, str]
    """Every signed tree head kept, by size."""
    keys: tuple[SigningKey, ...]
    datasets: Mapping[int, Dataset]
    slices: Mapping[tuple[int, int, int], str]
    """Roots by dataset, shard and slice."""
    segments: Mapping[tuple[int, int, int], tuple[Segment, ...]]
    """Segments in force, in the order they are read."""
    doomed: frozenset[str]
    """Objects of segments that were replaced, and of their features, that are not known to be destroyed."""
    features: Mapping[int, tuple[Kept, ...]]
    """By segment: what is kept of its features."""
    models: Mapping[str, Model]
    checkpoints: Mapping[str, tuple[Checkpoint, ...]]
    """By model: those that are not destroyed."""
    last_slices: Mapping[int, int]
    """By dataset: the number of the last slice."""
    requests: tuple[Request, ...]
    entries: tuple[Entry, ...]
    """Every request that ever came in, and how it stands."""
    restrictions: tuple[Restriction, ...]
    receipts: tuple[ReceiptEntry, ...]
    unfinished: tuple[str, ...]
    """Ingests that were announced and never committed."""
    leases: tuple[tuple[str, float], ...]
    """All leases that somebody has taken and not given back, and when each runs out."""

    def live(self) -> Iterator[tuple[str, Checkpoint]]:
        """Yield every checkpoint that is not destroyed, with its model's name."""
        for name, listed in self.checkpoints.items():
            for checkpoint in listed:
                yield name, checkpoint


def look_at(ledger: Ledger) -> Moment:
    """Return how the ledger stands now."""
    with ledger.read() as connection:
        still = _Still(connection)
        size, root = log.size_and_root(still)
        datasets = {dataset.id: dataset for dataset in points.datasets(still)}
        segments: dict[tuple[int, int, int], list[Segment]] = {}
        for dataset in datasets.values():
            for shard in range(1, dataset.shards + 1):
                for segment in points.segments_of(still, dataset.id, shard):
                    segments.setdefault((dataset.id, shard, segment.slice), []).append(segment)
        features: dict[int, list[Kept]] = {}
        for dataset in datasets.values():
            for shard in range(1, dataset.shards + 1):
                for kept in kept_features(still, dataset.id, shard):
                    features.setdefault(kept.segment_id, []).append(kept)
        in_force = {segment.id for listed in segments.values() for segment in listed}
        found = {model.name: model for model in models.models(still, retired=True)}
        return Moment(
            pulse=_pulse(connection),
            size=size,
            root=root,
            heads=dict(log.all_heads(still)),
            keys=tuple(log.signing_keys(still)),
            datasets=datasets,
            slices={(i, *place): root for i in datasets for place, root in points.roots_of(still, i).items()},
            segments={place: tuple(listed) for place, listed in segments.items()},
            doomed=frozenset(
                segment.path
                for dataset in datasets.values()
                for shard in range(1, dataset.shards + 1)
                for segment in points.replaced_segments(still, dataset.id, shard)
            )
            | {kept.path for segment, listed in features.items() if segment not in in_force for kept in listed},
            features={segment: tuple(listed) for segment, listed in features.items() if segment in in_force},
            models=found,
            checkpoints={name: tuple(models.checkpoints_of(still, model.id)) for name, model in found.items()},
            last_slices={i: points.generations(still, i)[-1].last_slice for i in datasets},
            requests=tuple(all_requests(still)),
            entries=tuple(dockets.entries(still)),
            restrictions=tuple(restrictions.all_restrictions(still)),
            receipts=tuple(log.receipt_entries(still)),
            unfinished=tuple(
                ingest for name in points.datasets_left_over(still) for ingest in points.unfinished_ingests(still, name)
            ),
            leases=tuple((row[0], row[1]) for row in connection.exec_driver_sql("SELECT name, expires FROM lease")),
        )


def pulse_of(ledger: Ledger) -> tuple[object, ...]:
    """Return what differs from a moment's `pulse` when something has happened since."""
    with ledger.read() as connection:
        return _pulse(connection)


class _Still(Ledger):
    """A ledger all of whose reads are in the same transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        yield self._connection


def _pulse(connection: Connection) -> tuple[object, ...]:
    asked = (
        "SELECT count(*), max(number) FROM leaf",
        "SELECT count(*), max(size) FROM tree_head",
        "SELECT count(*), sum(version), sum(points) FROM dataset",
        "SELECT count(*), max(id), count(replaced_at), count(destroyed_at), sum(live) FROM segment",
        "SELECT count(*), max(id), count(destroyed_at) FROM checkpoint",
        "SELECT count(*), max(segment_id), max(digest) FROM feature",
        "SELECT count(*), count(key_id) FROM receipt",
        "SELECT count(*), count(committed_at) FROM ingest",
        "SELECT count(*), sum(moves) FROM docket",
        "SELECT count(*), count(returned_at), count(cleaned_at) FROM restriction",
        "SELECT count(*), max(holder) FROM lease",
    )
    return tuple(tuple(connection.exec_driver_sql(sql).one()) for sql in asked)
