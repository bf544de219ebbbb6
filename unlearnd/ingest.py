"""Take points in: place them, write their slices, and enter all of it in the ledger at once.

Batches come checked from `sources`. Each is sorted by place and put away in an unnamed file beside the store, so
memory holds one batch however large the data is. Then every slice is gathered from there and written as a
segment, or as several if it is large, under names the ledger does not know; at last one transaction makes the
points exist. Killed before it, an ingest leaves objects that belong to nobody, and the next one destroys them.
"""

import itertools
import json
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from unlearnd.digests import digest_of
from unlearnd.errors import BusyError, DamagedStoreError, InputError, RefusedError, StorageError, UnlearndError
from unlearnd.hookspecs import PlacementRule, PriorPlacement
from unlearnd.keys import HANDLE_BYTES, Keys, draw_id, draw_user_keys
from unlearnd.layouts import Risk
from unlearnd.leases import Clock, hold
from unlearnd.ledger import Ledger, dockets, models, points
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.leases import ingest_lease
from unlearnd.ledger.points import Dataset, Generation, Ingest, NewSegment, Users
from unlearnd.packing import pack_many
from unlearnd.placement import numbers_of_points, numbers_of_users
from unlearnd.slices import Rows, encode_segment, folder_of, sealed
from unlearnd.sources import Batch, Column, as_labels, decide_labels
from unlearnd.statements import dataset_made
from unlearnd.steps import Step, reached
from unlearnd.storage import Record, Storage

BUFFER_BYTES = 1 << 30
"""How much slice data is written in one go."""
SEGMENT_BYTES = 4 << 20
"""A slice with more than this is cut into several segments."""
_WRITERS = 6
_BUCKETS = 64
_REMEMBERED = 150_000
MOST_SLICES = 10_000
MOST_PLACES = 1_000_000
MOST_LAYOUT = 40_000
"""How many bytes a frozen layout may take: it goes into one leaf of the log."""
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Layout:
    """How a dataset is cut up; the first ingest fixes it."""

    shards: int
    slices: int
    unit: str = "user"
    placement: str = "uniform"
    classes: tuple[int | str, ...] | None = None
    """The class labels, where they are declared and not taken from the data."""
    risks: tuple[Risk, ...] = ()
    """How likely each group is to leave, for a placement that is laid out by that."""


@dataclass(frozen=True)
class Added:
    """What an ingest added."""

    dataset: Dataset
    points: int
    first: int
    """The position of the first point added."""
    slices: tuple[int, int]
    """The first and last slice that took points."""
    left_out: int = 0
    """Rows of users who were erased for good, or are on hold: not taken in."""


def check_name(kind: str, name: str) -> None:
    """Raise `InputError` unless `name` may name a dataset or a model: names become folders."""
    if not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} cannot name a {kind}: use 1 to 63 lower-case letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit"
        )


def ingest(
    ledger: Ledger,
    storage: Storage,
    keys: Keys,
    name: str,
    batches: Iterable[Batch],
    layout: Layout,
    rules: Mapping[str, PlacementRule | PriorPlacement],
    clock: Clock,
    folder: Path | None = None,
    slices_asked: bool = False,
    on_progress: Callable[[int], None] = lambda rows: None,
    readmit: bool = False,
) -> Added:
    """Add points to the dataset `name`, creating it where it is new: all of them or none.

    What does not fit in memory is put away in `folder` until the end, in files without a name. Rows of users who
    were erased for good or are on hold are left out and counted; with `readmit`, the erased are let in again.
    """
    check_name("dataset", name)
    with hold(ledger, [ingest_lease(name)], clock):
        dockets.check_not_destroyed(ledger, name)
        destroy_leftovers(ledger, storage, name)
        before = points.find_dataset(ledger, name)
        check_layout(before, layout, rules)
        frozen, rule = _rule(before, layout, rules)
        generation = _generation(ledger, before, layout, slices_asked)
        ingest_id, intake = draw_id(), None
        points.open_ingest(ledger, ingest_id, name, clock())
        reached(Step.INGEST_OPENED)
        try:
            with tempfile.TemporaryFile(dir=folder) as users_file, tempfile.TemporaryFile(dir=folder) as rows_file:
                kept_out = dockets.kept_out(ledger, erased=not readmit)
                spool = _Spool(users_file)
                intake = _Intake(
                    *(ledger, storage, keys, name, before, layout, frozen, generation, rule, ingest_id, spool),
                    *(rows_file, kept_out),
                )
                for batch in batches:
                    intake.take(batch)
                    on_progress(len(batch.x))
                intake.write_segments()
                after = intake.dataset()
                reached(Step.INGEST_STAGED)
                entered = Ingest(ingest_id, before, after, generation, intake.segments)
                newly = dockets.kept_out(ledger, erased=not readmit) - kept_out
                if newly and any(handle in newly for some in spool.users() for handle, _ in some.keys):
                    raise BusyError("a user was erased, or put on hold, while their points were read; ingest again")
                now = clock()
                leaves = [_leaf(after, now)] if before is None else []
                dataset = points.commit_ingest(ledger, entered, spool.users(), leaves, now)
        except BaseException as error:
            if intake is not None:
                intake.stop()
            # What stops this from tidying up must not hide why it failed; the next ingest tidies up too.
            with suppress(UnlearndError):
                destroy_leftovers(ledger, storage, name)
            if isinstance(error, OSError):
                raise StorageError(f"the points cannot be put away in {folder}: {error.strerror}") from error
            raise
        reached(Step.INGEST_COMMITTED)
    return Added(
        dataset,
        intake.position - intake.first,
        intake.first,
        (generation.first_slice, generation.last_slice),
        intake.left_out,
    )


def destroy_leftovers(ledger: Ledger, storage: Storage, name: str, record: Record | None = None) -> None:
    """Destroy what ingests that never committed left in storage. The dataset's ingest lease must be held."""
    for ingest_id in points.unfinished_ingests(ledger, name):
        ending = f"-{ingest_id[:16]}.safetensors"
        left = [path for path in storage.list(f"data/{name}") if ending in path]
        storage.destroy(left, record)
        points.forget_ingest(ledger, ingest_id)


def check_layout(before: Dataset | None, layout: Layout, rules: Mapping[str, PlacementRule | PriorPlacement]) -> None:
    """Raise unless this layout can be used: a new dataset's must make sense, an old one's must not change."""
    if layout.shards < 1 or layout.slices < 1:
        raise InputError(f"a dataset has at least 1 shard and 1 slice, not {layout.shards} and {layout.slices}")
    if layout.slices > MOST_SLICES or layout.shards * layout.slices > MOST_PLACES:
        raise InputError(
            f"{layout.shards:,} shards of {layout.slices:,} slices are too many: at most {MOST_SLICES:,} slices, "
            f"and {MOST_PLACES:,} in all shards"
        )
    if layout.unit not in ("user", "point"):
        raise InputError(f"unit is 'user' or 'point', not '{layout.unit}'")
    if layout.placement not in rules:
        raise InputError(f"no placement '{layout.placement}'; installed: {', '.join(sorted(rules))}")
    check_risks(before, layout, rules[layout.placement])
    if before is None:
        return
    fixed = {"shards": before.shards, "unit": before.unit, "placement": before.placement}
    for what, value in fixed.items():
        if getattr(layout, what) != value:
            raise RefusedError(
                f"dataset '{before.name}' has {what} {value}, fixed by its first ingest; "
                f"it cannot become {getattr(layout, what)}"
            )
    if layout.classes is not None and set(layout.classes) != set(before.labels):
        raise RefusedError(f"the classes of dataset '{before.name}' were fixed by an earlier ingest")


def check_risks(before: Dataset | None, layout: Layout, rule: PlacementRule | PriorPlacement) -> None:
    """Raise unless a placement by risk has priors to be laid out by, and no other has; those of old never change."""
    if not isinstance(rule, PriorPlacement):
        if layout.risks:
            raise InputError(f"placement '{layout.placement}' takes no erasure probabilities; 'aware' does")
        return
    if before is not None:
        same = layout.placement == before.placement
        if same and layout.risks and rule.freeze(layout.risks, before.shards) != before.layout:
            raise RefusedError(
                f"the layout of dataset '{before.name}' was frozen by its first ingest; erasure probabilities "
                "cannot change it any more"
            )
        return
    if not layout.risks:
        raise InputError(
            f"placement '{layout.placement}' needs erasure probabilities by group, and the policy states none: "
            "give them as risks (--risk GROUP=P)"
        )
    size = len(json.dumps(rule.freeze(layout.risks, layout.shards)))
    if size > MOST_LAYOUT:
        raise InputError(
            f"the layout would take {size:,} bytes, more than the {MOST_LAYOUT:,} that the log holds: "
            "fewer groups or shards, please"
        )


def _rule(
    before: Dataset | None, layout: Layout, rules: Mapping[str, PlacementRule | PriorPlacement]
) -> tuple[Mapping[str, Any] | None, PlacementRule]:
    """Return the frozen layout of a dataset, if its placement has one, and the rule to place by."""
    chosen = rules[before.placement if before else layout.placement]
    if not isinstance(chosen, PriorPlacement):
        return None, chosen
    frozen = before.layout if before else chosen.freeze(layout.risks, layout.shards)
    if frozen is None:
        raise DamagedStoreError(f"dataset '{before.name if before else ''}' is placed by risk and has no layout")
    return frozen, chosen.rule(frozen)


def _generation(ledger: Ledger, before: Dataset | None, layout: Layout, asked: bool) -> Generation:
    """Return the slices that take new points: those still open, or new ones behind the sealed."""
    if before is None:
        return Generation(0, 1, layout.slices, False)
    last = points.generations(ledger, before.id)[-1]
    if not last.sealed:
        if asked and layout.slices != last.slices:
            raise RefusedError(
                f"dataset '{before.name}' has {last.slices} open slices, and points go there until a model is built; "
                f"it cannot get {layout.slices} now"
            )
        return last
    return Generation(last.number + 1, last.last_slice + 1, layout.slices, False)


def _only(column: Column, rows: NDArray[np.bool_]) -> Column:
    """Return a column of some rows, with no value that none of them has."""
    used, codes = np.unique(column.codes[rows], return_inverse=True)
    return Column(tuple(column.values[code] for code in used.tolist()), codes.astype(np.int64))


class _Intake:
    """Batches on their way into slices."""

    def __init__(
        self,
        ledger: Ledger,
        storage: Storage,
        keys: Keys,
        name: str,
        before: Dataset | None,
        layout: Layout,
        frozen: Mapping[str, Any] | None,
        generation: Generation,
        rule: PlacementRule,
        ingest_id: str,
        spool: "_Spool",
        file: IO[bytes],
        kept_out: frozenset[bytes] = frozenset(),
    ) -> None:
        self._kept_out, self.left_out = kept_out, 0
        self._spool, self._file = spool, file
        self._storage, self._keys, self._layout = storage, keys, layout
        self._name, self._before, self._rule, self._frozen = name, before, rule, frozen
        self._generation, self._ingest_id = generation, ingest_id
        self._shards = before.shards if before else layout.shards
        self._labels = {str(label): code for code, label in enumerate(_known_labels(before, layout))}
        self._labels_fixed = bool(layout.classes) or (before is not None and before.labels_declared)
        self._modelled = before is not None and bool(models.models(ledger, before.id))
        self._groups = {group: code for code, group in enumerate(before.groups if before else ())}
        self._like: Batch | None = None
        self._runs: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
        """For each batch the places it has points of, where those lie in the file, and how many."""
        self._record = np.dtype([])
        self._met: dict[str, tuple[bytes, int]] = {}
        self.first = before.points if before else 0
        self.position = self.first
        self.segments: list[NewSegment] = []
        self._gate = threading.Condition()
        self._writing, self._stopped = 0, False

    def take(self, batch: Batch) -> None:
        """Check a batch against the dataset, place its points and put them away."""
        assert batch.user is not None
        assert batch.label is not None
        self._check_like(batch)
        batch = self._let_in(batch)
        if not len(batch.x):
            return
        assert batch.user is not None
        assert batch.label is not None
        label = self._label_codes(batch, batch.label)
        group = None if batch.group is None else self._group_codes(batch.group)
        users = [str(value) for value in batch.user.values]
        handles, numbers = self._hash(users)
        codes = batch.user.codes
        if (self._before.unit if self._before else self._layout.unit) == "point":
            texts = [str(value) for value in batch.label.values]
            named = np.asarray(texts)[batch.label.codes]
            row_numbers = numbers_of_points(batch.x, named.tolist(), numbers[codes], self._keys.placement)
            of_rows = None if batch.group is None else _texts(batch.group)[batch.group.codes]
            shard, slice_ = self._place(batch, row_numbers, of_rows)
        elif batch.group is None:
            user_shard, user_slice = self._place(batch, numbers, None)
            shard, slice_ = user_shard[codes], user_slice[codes]
        else:
            # Somebody who is in two groups has a place for each: other points of theirs must not decide.
            count = len(batch.group.values)
            pairs, of_row = np.unique(codes * count + batch.group.codes, return_inverse=True)
            pair_shard, pair_slice = self._place(batch, numbers[pairs // count], _texts(batch.group)[pairs % count])
            shard, slice_ = pair_shard[of_row], pair_slice[of_row]
        slice_ = slice_ + (self._generation.first_slice - 1)
        position = np.arange(self.position, self.position + len(batch.x), dtype=np.int64)
        self.position += len(batch.x)
        self._spool.add(handles, codes, shard, slice_, position)
        place = shard * (self._generation.last_slice + 1) + slice_
        self._put_away(Rows(batch.x, label, position, handles[codes], group), place)

    def _place(
        self, batch: Batch, numbers: NDArray[np.uint64], groups: NDArray[np.str_] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return shards and slices of the generation that takes points, by the dataset's rule."""
        if self._frozen is not None and groups is None:
            placement = self._before.placement if self._before else self._layout.placement
            raise InputError(f"{batch.source}: placement '{placement}' places users by group: name the group column")
        try:
            # An array of text is a sequence of it; only its type does not say so.
            return self._rule(numbers, groups, self._shards, self._generation.slices)  # type: ignore[arg-type]
        except InputError as error:
            raise InputError(f"{batch.source}, from row {batch.first_row}: {error}") from None

    def _let_in(self, batch: Batch) -> Batch:
        """Return a batch without the rows of users who are kept out, and without any label only they had."""
        assert batch.user is not None
        if not self._kept_out:
            return batch
        handles, _ = self._hash([str(value) for value in batch.user.values])
        width, data = handles.shape[1], handles.tobytes()
        out = np.array([data[i : i + width] in self._kept_out for i in range(0, len(data), width)], bool)
        stays = ~out[batch.user.codes]
        if stays.all():
            return batch
        self.left_out += int((~stays).sum())
        user, label, group = (
            None if column is None else _only(column, stays) for column in (batch.user, batch.label, batch.group)
        )
        return replace(batch, x=batch.x[stays], user=user, label=label, group=group)

    def _put_away(self, rows: Rows, place: NDArray[np.int64]) -> None:
        """Write rows to the file, sorted by place, each as one record."""
        order = np.argsort(place, kind="stable")
        self._record = np.dtype(
            [
                ("x", rows.x.dtype, rows.x.shape[1:]),
                ("label", "<i4"),
                ("position", "<i8"),
                ("owner", "u1", (HANDLE_BYTES,)),
                ("group", "<i4"),
            ]
        )
        records = np.empty(len(order), self._record)
        records["x"], records["label"] = rows.x[order], rows.label[order]
        records["position"], records["owner"] = rows.position[order], rows.owner[order]
        records["group"] = -1 if rows.group is None else rows.group[order]
        places, begins, counts = np.unique(place[order], return_index=True, return_counts=True)
        start = self._file.seek(0, 2)
        self._file.write(records.data)
        self._runs.append((places, start + begins * self._record.itemsize, counts))

    def _hash(self, users: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Return the handle and the placing number of each user, remembering those met lately."""
        if len(self._met) > _REMEMBERED:
            self._met.clear()
        new = [user for user in users if user not in self._met]
        numbers = numbers_of_users(new, self._keys.placement).tolist()
        self._met.update(zip(new, zip(self._keys.handles(new), numbers, strict=True), strict=True))
        known = [self._met[user] for user in users]
        handles = np.frombuffer(b"".join([handle for handle, _ in known]), np.uint8)
        return handles.reshape(-1, HANDLE_BYTES), np.array([number for _, number in known], np.uint64)

    def write_segments(self) -> None:
        """Write every place that has points as one segment, a buffer's worth in one go."""
        if not self._runs and self.left_out:
            raise RefusedError(
                f"nothing was taken in: all {self.left_out:,} rows are of users who were erased for good or are on hold"
            )
        if not self._runs:
            raise InputError("there is nothing to ingest: the data has no rows")
        self._file.flush()
        with ThreadPoolExecutor(_WRITERS) as pool:
            lots = self._lots()
            while go := list(itertools.islice(lots, max(1, BUFFER_BYTES // SEGMENT_BYTES))):
                self.segments.extend(pool.map(self._write_segment, go))
                reached(Step.INGEST_SEGMENTS)

    def _lots(self) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield for each segment to write its place and the runs of records it is made of: (offset, count)."""
        places, offsets, counts = (np.concatenate(column) for column in zip(*self._runs, strict=True))
        # Batches are in order of arrival and the sort is stable, so positions stay ascending.
        order = np.argsort(places, kind="stable")
        runs = zip(places[order].tolist(), offsets[order].tolist(), counts[order].tolist(), strict=True)
        width = self._record.itemsize
        most = max(1, SEGMENT_BYTES // width)
        for place, here in itertools.groupby(runs, key=lambda run: run[0]):
            lot: list[tuple[int, int]] = []
            room = most
            for _, offset, count in here:
                while count:
                    taken = min(count, room)
                    lot.append((offset, taken))
                    offset, count, room = offset + taken * width, count - taken, room - taken
                    if not room:
                        yield place, lot
                        lot, room = [], most
            if lot:
                yield place, lot

    def stop(self) -> None:
        """Wait until nothing is being written and let nothing begin.

        The pool does not see to this: a Ctrl-C while it starts a thread leaves it with one it does not know.
        """
        with self._gate:
            self._stopped = True
            self._gate.wait_for(lambda: self._writing == 0)

    def _write_segment(self, lot: tuple[int, list[tuple[int, int]]]) -> NewSegment:
        """Write a segment, unless the ingest was stopped."""
        with self._gate:
            if self._stopped:
                raise BusyError("the ingest was stopped")
            self._writing += 1
        try:
            return self._gather_and_write(*lot)
        finally:
            with self._gate:
                self._writing -= 1
                self._gate.notify_all()

    def _gather_and_write(self, place: int, pieces: list[tuple[int, int]]) -> NewSegment:
        """Gather some records of a place and write them as a segment."""
        width, handle = self._record.itemsize, self._file.fileno()
        data = b"".join([os.pread(handle, count * width, offset) for offset, count in pieces])
        records = np.frombuffer(data, self._record)
        grouped = bool(self._groups)
        rows = Rows(
            x=np.ascontiguousarray(records["x"]),
            label=np.ascontiguousarray(records["label"]),
            position=np.ascontiguousarray(records["position"]),
            owner=np.ascontiguousarray(records["owner"]),
            group=np.ascontiguousarray(records["group"]) if grouped else None,
        )
        shard, slice_ = divmod(place, self._generation.last_slice + 1)
        encoded, first = encode_segment(rows), int(rows.position[0])
        path = f"{folder_of(self._name, shard, slice_)}/{first:012d}-{self._ingest_id[:16]}.safetensors"
        data, key = sealed(self._storage, path, encoded)
        self._storage.write(path, data)
        return NewSegment(shard, slice_, first, path, digest_of(data), len(rows), key)

    def dataset(self) -> Dataset:
        """Return the dataset as it will be once this ingest is entered."""
        values: tuple[int | str, ...] = tuple(self._labels)
        kind = self._before.label_kind if self._before else decide_labels(values)
        values = as_labels(values, "int" if kind == "int" else "str")
        if self._before is not None:
            return replace(self._before, labels=values, groups=tuple(self._groups), points=self.position)
        assert self._like is not None
        layout, like = self._layout, self._like
        return Dataset(
            id=0,
            name=self._name,
            unit=layout.unit,
            placement=layout.placement,
            shards=layout.shards,
            dtype=str(like.x.dtype),
            shape=tuple(like.x.shape[1:]),
            columns=like.columns,
            label_kind=kind,
            labels=values,
            labels_declared=self._labels_fixed,
            groups=tuple(self._groups),
            points=self.position,
            version=0,
            layout=self._frozen,
        )

    def _check_like(self, batch: Batch) -> None:
        """Raise `InputError` where a batch is unlike the dataset. (Files of one call are alike already.)"""
        if self._like is None:
            self._like = replace(batch, x=batch.x[:0], user=None, label=None, group=None)
        if self._before is None:
            return
        old, where = self._before, f"{batch.source}, row {batch.first_row}"
        if tuple(batch.x.shape[1:]) != old.shape or str(batch.x.dtype) != old.dtype:
            raise InputError(
                f"{where}: features are {batch.x.dtype} of shape {tuple(batch.x.shape[1:])}, "
                f"but dataset '{old.name}' has {old.dtype} of shape {old.shape}"
            )
        if batch.columns is not None and old.columns is not None and batch.columns != old.columns:
            raise InputError(f"{batch.source}: its feature columns are not those of dataset '{old.name}', in order")
        if (batch.group is not None) != bool(old.groups):
            has = "has" if old.groups else "has no"
            raise InputError(f"{batch.source}: dataset '{old.name}' {has} groups, so every ingest into it must agree")

    def _label_codes(self, batch: Batch, column: Column) -> NDArray[np.int32]:
        kind = self._before.label_kind if self._before else None
        codes = np.empty(len(column.values), np.int32)
        for index, value in enumerate(column.values):
            text = str(value)
            if text not in self._labels:
                problem = self._problem_with_new_label(text, kind)
                if problem:
                    row = batch.first_row + int(np.flatnonzero(column.codes == index)[0])
                    raise InputError(f"{batch.source}, row {row}, label column: {problem}")
            codes[index] = self._labels.setdefault(text, len(self._labels))
        return codes[column.codes]

    def _problem_with_new_label(self, text: str, kind: str | None) -> str | None:
        if kind == "int" and decide_labels([text]) != "int":
            return f"the label is text, but the labels of dataset '{self._name}' are integers"
        if self._labels_fixed:
            return f"the label is none of the {len(self._labels)} classes declared for dataset '{self._name}'"
        if self._modelled:
            return f"the label is new, but models were declared on dataset '{self._name}' with the classes it had"
        return None

    def _group_codes(self, column: Column) -> NDArray[np.int32]:
        known = [self._groups.setdefault(str(value), len(self._groups)) for value in column.values]
        return np.asarray(known, np.int32)[column.codes]


class _Spool:
    """Who holds which positions, on disk until the ledger takes it.

    Users are kept in buckets by the first bits of their handle, so that at the end each bucket is sorted and
    packed on its own, and the ledger gets its rows in ascending order.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._pieces: list[list[tuple[int, int]]] = [[] for _ in range(_BUCKETS)]
        self._record = np.dtype(
            [("high", ">u8"), ("low", ">u8"), ("shard", "<i4"), ("slice", "<i4"), ("position", "<i8")]
        )

    def add(
        self,
        handles: NDArray[np.uint8],
        codes: NDArray[np.int64],
        shard: NDArray[np.int64],
        slice_: NDArray[np.int64],
        position: NDArray[np.int64],
    ) -> None:
        """Put away one batch: handles of its distinct users, and for each row its user, place and position."""
        halves = np.ascontiguousarray(handles).view(">u8").astype(np.uint64)
        bucket = (halves[:, 0] >> np.uint64(64 - 6)).astype(np.int64)[codes]
        order = np.argsort(bucket, kind="stable")
        records = np.empty(len(order), self._record)
        owners = codes[order]
        records["high"], records["low"] = halves[owners, 0], halves[owners, 1]
        records["shard"], records["slice"], records["position"] = shard[order], slice_[order], position[order]
        edges = np.searchsorted(bucket[order], np.arange(_BUCKETS + 1)).tolist()
        start = self._file.seek(0, 2)
        self._file.write(records.data)
        size = self._record.itemsize
        for number in range(_BUCKETS):
            begin, end = edges[number], edges[number + 1]
            if end > begin:
                self._pieces[number].append((start + begin * size, end - begin))

    def users(self) -> Iterator[Users]:
        """Give everything back, bucket by bucket, packed."""
        for pieces in self._pieces:
            if pieces:
                yield self._bucket(pieces)

    def _bucket(self, pieces: list[tuple[int, int]]) -> Users:
        parts = []
        for offset, count in pieces:
            self._file.seek(offset)
            parts.append(np.frombuffer(self._file.read(count * self._record.itemsize), self._record))
        records = np.concatenate(parts)
        high, low = records["high"].astype(np.uint64), records["low"].astype(np.uint64)
        # Pieces are in order of arrival and the sort is stable, so positions stay ascending.
        order = np.lexsort((records["slice"], records["shard"], low, high))
        records, high, low = records[order], high[order], low[order]
        new_user = np.concatenate([[True], (np.diff(high) != 0) | (np.diff(low) != 0)])
        new_place = new_user.copy()
        new_place[1:] |= (np.diff(records["shard"]) != 0) | (np.diff(records["slice"]) != 0)
        starts = np.flatnonzero(new_place)
        packed = pack_many(records["position"], np.append(starts, len(records)))
        firsts = records[starts]
        owners = np.stack([firsts["high"], firsts["low"]], axis=1).astype(">u8").tobytes()
        handles = [owners[i : i + HANDLE_BYTES] for i in range(0, len(owners), HANDLE_BYTES)]
        distinct = [handle for handle, new in zip(handles, new_user[starts].tolist(), strict=True) if new]
        places = zip(
            handles,
            firsts["shard"].tolist(),
            firsts["slice"].tolist(),
            firsts["position"].tolist(),
            packed,
            strict=True,
        )
        return Users(list(zip(distinct, draw_user_keys(len(distinct)), strict=True)), list(places))


def _leaf(dataset: Dataset, now: datetime) -> bytes:
    return dataset_made(
        dataset.name,
        dataset.shards,
        dataset.unit,
        dataset.placement,
        dataset.layout,
        dataset.shape,
        dataset.dtype,
        len(dataset.labels),
        stamp(now),
    )


def _texts(column: Column) -> NDArray[np.str_]:
    return np.asarray([str(value) for value in column.values], np.str_)


def _known_labels(before: Dataset | None, layout: Layout) -> tuple[int | str, ...]:
    return before.labels if before else layout.classes or ()
