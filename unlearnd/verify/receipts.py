"""Read receipts, detail documents and openings. Reading checks their form and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

from unlearnd.errors import FormatError
from unlearnd.verify.envelopes import Envelope, read_envelope
from unlearnd.verify.statements import (
    Fields,
    Statement,
    canonical,
    is_count,
    is_digest,
    is_digest_or_empty,
    is_text,
    read_canonical,
    read_json,
)
from unlearnd.verify.texts import read_digest
from unlearnd.verify.trees import root_of_leaves
from unlearnd.verify.values import Value

MAX_RECEIPT = 1_200_000
MAX_OPENING = 65_536
MAX_DETAIL = 2**30
RECEIPT_TYPE = "application/vnd.unlearnd.receipt.v1+json"
OPENING_TYPE = "application/vnd.unlearnd.opening.v1+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"


class Receipt(Value):
    """The outside of a receipt."""

    envelope: Envelope
    proof: bytes


class Listed(Value):
    """A list behind a root: how long it is, and the root."""

    count: int
    root: str


class Erasure(Value):
    """What a receipt states."""

    store_id: str
    request_id: str
    erasure_id: str
    asked: str
    found: bool
    request_leaf: int
    received_at: datetime
    due_at: datetime
    influence_removed_at: datetime
    user_commitment: str | None
    erased: Listed
    slices_before: Listed
    slices_after: Listed
    destroyed: Listed
    serving: Listed
    models: Listed
    retrain: int
    from_scratch: int
    replay: str
    detail_digest: str
    detail_size: int
    objects_destroyed: Listed
    objects_kept: Listed
    """Versions of objects that storage did not let go: the receipt says so itself."""
    policy: tuple[str, str] | None
    """Name and digest of the policy it was carried out under; None in receipts older than policies."""


class Detail(Value):
    """The lists behind the roots of a receipt."""

    request_id: str
    erased: Sequence[str]
    slices: Sequence[Sequence[Any]]
    destroyed: Sequence[Sequence[Any]]
    serving: Sequence[Sequence[Any]]
    models: Sequence[Sequence[Any]]
    objects_destroyed: Sequence[Sequence[Any]]
    objects_kept: Sequence[Sequence[Any]]


class Opening(Value):
    """What a user was given to show that a receipt is theirs."""

    request_id: str
    user: str
    nonce: bytes


def read_receipt(data: bytes) -> Receipt:
    """Return envelope and proof of a receipt."""
    fields = Fields(read_json(data, "the receipt", MAX_RECEIPT), "the receipt")
    if fields.text("mediaType") != RECEIPT_TYPE:
        raise FormatError(f"the receipt is not of type {RECEIPT_TYPE}")
    envelope = read_envelope(fields.within("envelope").value)
    return Receipt(envelope, fields.text("proof").encode())


def read_erasure(statement: Statement) -> Erasure:
    """Return what the statement of a receipt says."""
    if statement.kind != "erasure":
        raise FormatError("the payload is not the statement of an erasure")
    said = Fields(statement.predicate, "the receipt")
    request, slices, checkpoints = said.within("request"), said.within("slices"), said.within("checkpoints")
    erased, samples, detail = said.within("erased"), said.within("samples"), said.within("detail")
    scope, software = said.within("scope"), said.within("software")
    scope.texts("claims")
    scope.texts("notClaimed")
    software.text("name")
    software.text("version")
    if not all(isinstance(version, str) for version in software.within("plugins").value.values()):
        raise FormatError("plugins of the receipt is not names and versions")
    erasure = Erasure(
        store_id=said.text("storeId"),
        request_id=said.text("requestId"),
        erasure_id=said.text("erasureId"),
        asked=said.choice("asked", "user", "point", "dataset", "model"),
        found=said.truth("found"),
        request_leaf=request.count("leafIndex"),
        received_at=request.moment("receivedAt"),
        due_at=request.moment("dueAt"),
        influence_removed_at=said.moment("influenceRemovedAt"),
        user_commitment=_digest_or_null(said.value, "userCommitment"),
        erased=Listed(erased.count("points"), erased.digest("root")),
        slices_before=Listed(slices.count("count"), slices.digest("before")),
        slices_after=Listed(slices.count("count"), slices.digest("after")),
        destroyed=_listed(checkpoints.within("destroyed")),
        serving=_listed(checkpoints.within("serving")),
        models=_listed(said.within("models")),
        retrain=samples.count("retrain"),
        from_scratch=samples.count("fromScratch"),
        replay=said.choice("replay", "bit-exact", "none"),
        detail_digest=detail.within("digest").digest("sha256"),
        detail_size=detail.count("size"),
        objects_destroyed=_listed_or_empty(said, "destroyed"),
        objects_kept=_listed_or_empty(said, "kept"),
        policy=_policy(said),
    )
    if statement.subject != (("detail", erasure.detail_digest),):
        raise FormatError("the subject of the receipt is not the detail document it names")
    if (erasure.asked == "user") != (erasure.user_commitment is not None):
        raise FormatError("a receipt for a user commits to one, and a receipt for a point does not")
    # Nobody's points are erased with a model: it is found when it had checkpoints to destroy.
    counted = erasure.destroyed if erasure.asked == "model" else erasure.erased
    if erasure.found != (counted.count > 0):
        raise FormatError("the receipt contradicts itself about whether anything was found")
    return erasure


def read_detail(data: bytes, limit: int) -> Detail:
    """Return the lists of a detail document."""
    said = Fields(read_canonical(data, "the detail document", limit), "the detail document")
    erased = said.texts("erased")
    if not all(map(is_digest, erased)) or any(a >= b for a, b in pairwise(erased)):
        raise FormatError("the erased points of the detail document are not commitments in order, each once")
    root, text, count = is_digest_or_empty, is_text, is_count
    # Receipts of stores whose storage keeps no versions have none of this.
    objects = said.within("objects") if "objects" in said.value else Fields({"destroyed": [], "kept": []}, "objects")
    return Detail(
        said.text("requestId"),
        erased,
        said.rows("slices", text, count, count, count, root, root),
        said.rows("destroyed", text, count, count, is_digest, is_digest, is_digest),
        said.rows("serving", text, count, count, root),
        said.rows("models", text, text, is_digest, lambda cell: cell in ("bit-exact", "none"), count, count),
        objects.rows("destroyed", text, is_version),
        objects.rows("kept", text, is_version, text),
    )


def read_opening(data: bytes) -> Opening:
    """Return the parts of an opening."""
    said = Fields(read_json(data, "the opening", MAX_OPENING), "the opening")
    if said.text("mediaType") != OPENING_TYPE:
        raise FormatError(f"the opening is not of type {OPENING_TYPE}")
    return Opening(said.text("requestId"), said.text("user"), read_digest(said.text("nonce"), "nonce of the opening"))


def lists_of(detail: Detail) -> Mapping[str, Listed]:
    """Return the roots over the lists of a detail document, by their names in `Erasure`."""
    return {
        "erased": Listed(len(detail.erased), root_of_leaves(map(bytes.fromhex, detail.erased)).hex()),
        "slices_before": _root_of_lines([[*entry[:3], entry[4]] for entry in detail.slices]),
        "slices_after": _root_of_lines([[*entry[:3], entry[5]] for entry in detail.slices]),
        "destroyed": _root_of_lines(detail.destroyed),
        "serving": _root_of_lines(detail.serving),
        "models": _root_of_lines(detail.models),
        "objects_destroyed": _root_of_lines(detail.objects_destroyed),
        "objects_kept": _root_of_lines(detail.objects_kept),
    }


def is_version(value: Any) -> bool:
    """Say whether a cell is what a bucket calls a version: a text, empty where it has none."""
    return isinstance(value, str)


def _listed_or_empty(said: Fields, name: str) -> Listed:
    return _listed(said.within("objects").within(name)) if "objects" in said.value else _root_of_lines([])


def _policy(said: Fields) -> tuple[str, str] | None:
    if said.value.get("policy") is None:
        return None
    policy = said.within("policy")
    return policy.text("name"), policy.digest("digest")


def _root_of_lines(lines: Sequence[Sequence[Any]]) -> Listed:
    return Listed(len(lines), root_of_leaves(map(canonical, lines)).hex())


def _listed(fields: Fields) -> Listed:
    return Listed(fields.count("count"), fields.digest("root"))


def _digest_or_null(value: Mapping[str, Any], name: str) -> str | None:
    if name not in value:
        raise FormatError(f"the receipt has no {name}")
    return None if value[name] is None else read_digest(value[name], name).hex()
