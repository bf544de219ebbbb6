"""Models, their checkpoints, and what each build cost."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from unlearnd.digests import Digest
from unlearnd.errors import BusyError, NotFoundError, RefusedError
from unlearnd.ledger.connection import Ledger, hold_rows, many, stamp
from unlearnd.ledger.leases import build_lease
from unlearnd.ledger.log import append
from unlearnd.recipes import Spec


@dataclass(frozen=True)
class Model:
    """A declared model: it never changes."""

    id: int
    name: str
    dataset_id: int
    spec: Spec
    sliceable: bool
    deterministic: bool
    seed: int
    kept: tuple[int, ...] | None = None
    """The slices whose checkpoints are kept, of those there were when it was declared; None for all."""
    retired_at: str | None = None
    """When an order had it destroyed, for good; None: it is in service."""

    def keeps(self, slice_: int) -> bool:
        """Say whether the state after a slice is saved; after slices added later it always is."""
        if self.kept is None or slice_ > self.spec.slices:
            return True
        return slice_ == self.kept[bisect_left(self.kept, slice_)]


@dataclass(frozen=True)
class NewCheckpoint:
    """A checkpoint that has been written and is not in the ledger yet."""

    shard: int
    slice: int
    recipe: Digest
    file: Digest
    tensors: Digest
    path: str
    size: int
    samples: int
    seconds: float
    key: bytes | None
    """What opens the object, wrapped; None: it is not encrypted."""


@dataclass(frozen=True)
class Checkpoint(NewCheckpoint):
    """A checkpoint that the ledger knows."""

    id: int
    environment: Mapping[str, str]
    built_at: str


@dataclass(frozen=True)
class Build:
    """What a build did: samples trained, against all that training from scratch would take."""

    id: str
    model: str
    samples: int
    from_scratch: int
    checkpoints: int
    seconds: float
    damaged: int = 0
    """Checkpoints that were found damaged, or made from such, and were put away first; told once, not recorded."""


_MODEL = "SELECT id, name, dataset_id, spec, sliceable, deterministic, seed, kept, retired_at FROM model"
_CHECKPOINT = (
    "SELECT shard, slice, recipe, file, tensors, path, size, samples, seconds, key, id, environment, built_at "
    "FROM checkpoint WHERE destroyed_at IS NULL AND model_id = ?"
)


def models(ledger: Ledger, dataset_id: int | None = None, retired: bool = False) -> list[Model]:
    """Return all models by name, or those of one dataset; those that an order had destroyed only when asked for."""
    with ledger.read() as connection:
        found = [
            _model(row)
            for row in connection.exec_driver_sql(_MODEL)
            if dataset_id in (None, row.dataset_id) and (retired or row.retired_at is None)
        ]
    # Sorted here: how a database sorts text depends on how it was set up.
    return sorted(found, key=lambda model: model.name)


def find_model(ledger: Ledger, name: str) -> Model | None:
    """Return the model of that name, or None where there is none."""
    with ledger.read() as connection:
        row = connection.exec_driver_sql(f"{_MODEL} WHERE name = ?", (name,)).one_or_none()
    return _model(row) if row else None


def model_named(ledger: Ledger, name: str) -> Model:
    """Return the model of that name, retired or not, or raise `NotFoundError`."""
    found = find_model(ledger, name)
    if found is None:
        names = ", ".join(model.name for model in models(ledger)) or "none"
        raise NotFoundError(f"no model '{name}'; there are: {names}")
    return found


def model_in_service(ledger: Ledger, name: str) -> Model:
    """Return the model of that name; raise `RefusedError` where an order had it destroyed."""
    found = model_named(ledger, name)
    if found.retired_at is not None:
        raise RefusedError(
            f"model '{name}' was destroyed by an order on {found.retired_at[:10]} and is retired: it can neither be "
            "asked nor trained, and its name stays taken"
        )
    return found


def declare_model(
    ledger: Ledger,
    name: str,
    dataset_id: int,
    spec: Spec,
    *,
    sliceable: bool,
    deterministic: bool,
    seed: int,
    kept: Sequence[int] | None,
    leaves: Sequence[bytes],
    now: datetime,
) -> Model:
    """Record a model under a name that is free; its seed is fixed from here on, and so are the slices it has.

    Slices that still take points are closed in the same transaction. The dataset's ingest lease must be held.
    """
    with ledger.write() as connection:
        append(connection, leaves)
        connection.exec_driver_sql(
            "UPDATE generation SET sealed_at = ? WHERE dataset_id = ? AND sealed_at IS NULL", (stamp(now), dataset_id)
        )
        connection.exec_driver_sql(
            "INSERT INTO model (name, dataset_id, spec, sliceable, deterministic, seed, declared_at, kept) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                *(name, dataset_id, json.dumps(spec.as_json()), sliceable, deterministic, seed, stamp(now)),
                None if kept is None else json.dumps(list(kept)),
            ),
        )
    return model_named(ledger, name)


def checkpoints_of(
    ledger: Ledger, model_id: int, shard: int | None = None, in_service: bool = False
) -> list[Checkpoint]:
    """Return the checkpoints that are not destroyed, by shard and slice; with `in_service`, none of a retired model."""
    sql, values = (_CHECKPOINT, (model_id,)) if shard is None else (f"{_CHECKPOINT} AND shard = ?", (model_id, shard))
    if in_service:
        sql += " AND EXISTS (SELECT 1 FROM model WHERE model.id = model_id AND retired_at IS NULL)"
    with ledger.read() as connection:
        return [_checkpoint(row) for row in connection.exec_driver_sql(f"{sql} ORDER BY shard, slice, id", values)]


def enter_checkpoints(
    ledger: Ledger,
    model: Model,
    written: Sequence[NewCheckpoint],
    environment: Mapping[str, str],
    lease_holder: str,
    leaves: Sequence[bytes],
    now: datetime,
) -> None:
    """Enter checkpoints whose bytes are durable.

    The writer must still hold the lease of each shard: whoever took it over may have destroyed what these
    were made from, and sweeps the shard's folder while holding it.
    """
    with ledger.write() as connection:
        names = {build_lease(model.name, c.shard): c.shard for c in written}
        sql = f"SELECT name, holder FROM lease WHERE name IN ({','.join('?' * len(names))}) ORDER BY name"
        rows = connection.exec_driver_sql(sql + hold_rows(connection), tuple(names)) if names else ()
        mine = {row[0] for row in rows if row[1] == lease_holder}
        for name, shard in names.items():
            if name not in mine:
                raise BusyError(f"another process took over shard {shard} of the model '{model.name}'")
        append(connection, leaves)
        many(
            connection,
            "INSERT INTO checkpoint (model_id, shard, slice, recipe, file, tensors, path, size, samples, seconds, "
            "key, environment, built_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    *(
                        model.id,
                        c.shard,
                        c.slice,
                        c.recipe,
                        c.file,
                        c.tensors,
                        c.path,
                        c.size,
                        c.samples,
                        c.seconds,
                        c.key,
                    ),
                    *(json.dumps(dict(environment), sort_keys=True), stamp(now)),
                )
                for c in written
            ],
        )
        connection.exec_driver_sql("UPDATE dataset SET version = version + 1 WHERE id = ?", (model.dataset_id,))


def checkpoints_destroyed(
    ledger: Ledger,
    dataset_id: int,
    ids: Iterable[int],
    erasure_id: str | None,
    leaves: Sequence[bytes],
    now: datetime,
) -> None:
    """Record that the bytes of these checkpoints are gone, and by which erasure."""
    with ledger.write() as connection:
        append(connection, leaves)
        many(
            connection,
            "UPDATE checkpoint SET destroyed_at = ?, destroyed_by = ?, key = NULL WHERE id = ?",
            [(stamp(now), erasure_id, checkpoint_id) for checkpoint_id in ids],
        )
        connection.exec_driver_sql("UPDATE dataset SET version = version + 1 WHERE id = ?", (dataset_id,))


def destroyed_by(ledger: Ledger, erasure_id: str) -> list[dict[str, Any]]:
    """Return what an erasure had destroyed: model, dataset, shard, slice, recipe, digests."""
    sql = (
        "SELECT model.name AS model, dataset.name AS dataset, shard, slice, recipe, file, tensors FROM checkpoint "
        "JOIN model ON model.id = model_id JOIN dataset ON dataset.id = model.dataset_id "
        "WHERE destroyed_by = ? ORDER BY shard, slice, checkpoint.id"
    )
    with ledger.read() as connection:
        found = [dict(row._mapping) for row in connection.exec_driver_sql(sql, (erasure_id,))]
    return sorted(found, key=lambda checkpoint: checkpoint["model"])


def is_checkpoint(ledger: Ledger, file: Digest, tensors: Digest) -> bool:
    """Say whether a file, or what is in it, is or ever was a checkpoint of this store."""
    sql = "SELECT count(*) FROM checkpoint WHERE file = ? OR tensors = ?"
    with ledger.read() as connection:
        return bool(connection.exec_driver_sql(sql, (file, tensors)).scalar_one())


def count_build(ledger: Ledger, model: Model, build: Build, started: datetime, now: datetime) -> None:
    """Record what a build cost."""
    with ledger.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO build (id, model_id, started_at, ended_at, samples, from_scratch, checkpoints, seconds, "
            "number) SELECT ?, ?, ?, ?, ?, ?, ?, ?, coalesce(max(number), 0) + 1 FROM build",
            (
                *(build.id, model.id, stamp(started), stamp(now)),
                *(build.samples, build.from_scratch, build.checkpoints, build.seconds),
            ),
        )


def builds_of(ledger: Ledger, model: Model) -> list[Build]:
    """Return what every build of a model cost, oldest first."""
    sql = (
        "SELECT id, samples, from_scratch, checkpoints, seconds FROM build WHERE model_id = ? "
        "ORDER BY started_at, number"
    )
    with ledger.read() as connection:
        return [Build(row[0], model.name, *row[1:]) for row in connection.exec_driver_sql(sql, (model.id,))]


def _model(row: Any) -> Model:
    spec = Spec.from_json(json.loads(row.spec))
    kept = None if row.kept is None else tuple(json.loads(row.kept))
    promises = (bool(row.sliceable), bool(row.deterministic))
    return Model(row.id, row.name, row.dataset_id, spec, *promises, row.seed, kept, row.retired_at)


def _checkpoint(row: Any) -> Checkpoint:
    return Checkpoint(**{**row._mapping, "environment": json.loads(row.environment)})
