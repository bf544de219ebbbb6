"""What each kind of leaf says: from our values to payloads, as docs/reference/evidence.md lays them down."""

import hmac
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from unlearnd.digests import Digest, digest_of_json
from unlearnd.merkle import root_of
from unlearnd.receipts import Detail, canonical, make_payload, make_payloads, root_of_lines, to_the_minute
from unlearnd.recipes import Spec

SOFTWARE = "unlearnd"
CLAIMS = ("training-data", "checkpoints", "ledger")
NOT_CLAIMED = ("copies-outside-store", "backups", "other-users-data")


@dataclass(frozen=True)
class ErasureStatement:
    """All that a receipt says, before it is canonical bytes."""

    store_id: str
    request_id: str
    erasure_id: str
    asked: str
    request_leaf: int
    received_at: str
    due_at: str
    policy: tuple[str, str]
    """Name and digest; empty for a request older than policies."""
    influence_removed_at: str
    user_commitment: str | None
    erased: Sequence[str]
    """Commitments of the erased points, sorted."""
    slices: Sequence[tuple[str, int, int, int, str, str]]
    """(dataset, shard, slice, points, root before, root after); empty text where there was no root."""
    destroyed: Sequence[tuple[str, int, int, str, str, str]]
    """(model, shard, slice, recipe, file, tensors)."""
    serving: Sequence[tuple[str, int, int, str]]
    """(model, shard, slices in service, recipe) of every constituent of the models concerned."""
    models: Sequence[tuple[str, str, str, str, int, int]]
    """(model, dataset, spec digest, replay, samples to retrain, samples from scratch)."""
    plugins: Mapping[str, str]
    version: str
    gone: Sequence[tuple[str, str]] = ()
    """(object, version) of every version destroyed, where storage keeps versions."""
    kept: Sequence[tuple[str, str, str]] = ()
    """(object, version, why) of every version that storage did not let go."""
    remnants: Sequence[str] = ()
    """What of the ledger is not claimed either."""
    cipher: str | None = None
    """How destroyed objects were encrypted, each under a key that was destroyed with it; None: they were not."""


def origin_of(store_id: str) -> str:
    """Return the name of a store's log."""
    return f"unlearnd.dev/log/{store_id}"


def moment_of(payload: bytes) -> datetime | None:
    """Return when a leaf was made, to the minute; None where it does not say, or is damaged: an audit tells that."""
    try:
        said = json.loads(payload)["predicate"]
        told = [said[name] for name in ("at", "createdAt", "receivedAt", "influenceRemovedAt") if name in said]
        return max(datetime.strptime(at, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC) for at in told)
    except (ValueError, KeyError, TypeError):
        return None


def commit_to_user(nonce: bytes, user: str) -> str:
    """Return the commitment by which a user can later show that a receipt is theirs."""
    return hmac.digest(nonce, b"unlearnd/user/v1\n" + user.encode(), "sha256").hex()


def genesis(store_id: str, version: str, at: str) -> bytes:
    """Return the first leaf of a log."""
    software = {"name": SOFTWARE, "version": version}
    predicate = {"storeId": store_id, "origin": origin_of(store_id), "createdAt": to_the_minute(at)}
    return make_payload("genesis", {**predicate, "software": software})


def key_changed(role: str, action: str, key_id: str, public: str, at: str, since: int | None = None) -> bytes:
    """Return the leaf that adds or revokes a key; `public` is base64."""
    predicate: dict[str, Any] = {"role": role, "action": action, "keyId": key_id, "publicKey": public}
    if since is not None:
        predicate["since"] = since
    return make_payload("key", {**predicate, "at": to_the_minute(at)})


def dataset_made(
    name: str,
    shards: int,
    unit: str,
    placement: str,
    layout: Mapping[str, Any] | None,
    shape: Sequence[int],
    dtype: str,
    classes: int,
    at: str,
) -> bytes:
    """Return the leaf of a new dataset; with its layout, where that was frozen from priors."""
    predicate: dict[str, Any] = {
        "dataset": name,
        "shards": shards,
        "unit": unit,
        "placement": placement,
        "shape": list(shape),
        "dtype": dtype,
        "classes": classes,
        "at": to_the_minute(at),
    }
    return make_payload("dataset", predicate if layout is None else {**predicate, "layout": dict(layout)})


def slices_sealed(dataset: str, roots: Iterable[tuple[int, int, Digest, int]], at: str) -> list[bytes]:
    """Return the leaves of newly computed slice roots: (shard, slice, root, points)."""
    entries = [list(entry) for entry in roots]
    return make_payloads("slices", {"dataset": dataset, "at": to_the_minute(at)}, "roots", entries)


def model_declared(
    name: str,
    dataset: str,
    spec: Spec,
    seed: int,
    deterministic: bool,
    kept: Sequence[int] | None,
    first: Sequence[tuple[int, Digest]],
    at: str,
) -> list[bytes]:
    """Return the leaves of a new model: its seed is fixed from here on, and which checkpoints are kept, if not all."""
    predicate: dict[str, Any] = {
        "model": name,
        "dataset": dataset,
        "spec": digest_of_json(spec.as_json()),
        "seed": str(seed),
        "replay": replay_class(deterministic),
        "at": to_the_minute(at),
    }
    if kept is not None:
        predicate["kept"] = list(kept)
    return make_payloads("model", predicate, "recipes", [list(pair) for pair in first])


def checkpoints_built(model: str, entries: Sequence[Sequence[Any]], at: str) -> list[bytes]:
    """Return the leaves of new checkpoints: (shard, slice, recipe, parent, slice root, file, tensors, size)."""
    return make_payloads("built", {"model": model, "at": to_the_minute(at)}, "checkpoints", [list(e) for e in entries])


def checkpoints_destroyed(model: str, erasure_id: str, entries: Sequence[Sequence[Any]], at: str) -> list[bytes]:
    """Return the leaves of destroyed checkpoints: (shard, slice, recipe, file)."""
    predicate = {"model": model, "erasureId": erasure_id, "at": to_the_minute(at)}
    return make_payloads("destroyed", predicate, "checkpoints", [list(entry) for entry in entries])


def live_set(
    model: str, shards: Sequence[int] | None, entries: Sequence[Sequence[Any]], at: str
) -> tuple[bytes, Detail]:
    """Return the leaf and the document that list every checkpoint in force, complete; of some shards, or of all.

    Whoever puts together the newest list of every shard has the complete list of the model, and an erasure need not
    say again what it did not change. Entries are (shard, slice, recipe, file, tensors, path, size).
    """
    listed = [list(entry) for entry in entries]
    detail = Detail(canonical({"model": model, "checkpoints": listed}))
    predicate = {
        "model": model,
        "count": len(listed),
        "root": root_of_lines(listed),
        "detail": detail.digest,
        "at": to_the_minute(at),
    }
    if shards is not None:
        predicate["shards"] = list(shards)
    return make_payload("liveset", predicate), detail


def policy_applied(name: str, digest: str, at: str) -> bytes:
    """Return the leaf of a policy that is applied from here on: a new one, or one that has changed."""
    return make_payload("policy", {"policy": name, "digest": digest, "at": to_the_minute(at)})


def request_received(
    request_id: str, erasure_id: str, asked: str, received_at: str, due_at: str, policy_digest: str
) -> bytes:
    """Return the leaf that says a request came in, and when it is due; no erasure where it is yet to be decided on."""
    predicate = {
        "requestId": request_id,
        "erasureId": erasure_id,
        "kind": asked,
        "receivedAt": to_the_minute(received_at),
        "dueAt": to_the_minute(due_at),
        "policy": policy_digest,
    }
    return make_payload("request", predicate)


def erasure_begun(erasure_id: str, request_ids: Sequence[str], at: str) -> list[bytes]:
    """Return the leaves that say which requests that waited are carried out together: from here no way back."""
    predicate = {"erasureId": erasure_id, "at": to_the_minute(at)}
    return make_payloads("begun", predicate, "requests", list(request_ids))


def request_extended(request_id: str, due_at: str, at: str) -> bytes:
    """Return the leaf that says a request has more time."""
    return make_payload("extended", {"requestId": request_id, "dueAt": to_the_minute(due_at), "at": to_the_minute(at)})


def request_paused(request_id: str, reason: str, until: str, at: str) -> bytes:
    """Return the leaf that says a clock stands still: until somebody looks again, or, empty, until it goes on."""
    return make_payload(
        "paused",
        {"requestId": request_id, "reason": reason, "until": to_the_minute(until), "at": to_the_minute(at)},
    )


def request_resumed(request_id: str, due_at: str, at: str) -> bytes:
    """Return the leaf that says a clock goes on, and when the request is due now."""
    return make_payload("resumed", {"requestId": request_id, "dueAt": to_the_minute(due_at), "at": to_the_minute(at)})


def request_closed(request_id: str, reason: str, at: str) -> bytes:
    """Return the leaf that says a request is closed without an erasure."""
    return make_payload("refused", {"requestId": request_id, "reason": reason, "at": to_the_minute(at)})


def points_restricted(
    kind: str, request_id: str, slices: Sequence[tuple[str, int, int, int, str, str]], at: str
) -> list[bytes]:
    """Return the leaves that say whose hold changed which slices: `restricted` out of training, `returned` into it.

    Entries are (dataset, shard, slice, points, root before, root after); empty text where there was no root.
    """
    predicate = {"requestId": request_id, "at": to_the_minute(at)}
    return make_payloads(kind, predicate, "slices", [list(entry) for entry in slices])


def erasure_done(said: ErasureStatement) -> tuple[bytes, Detail]:
    """Return the receipt's payload and its detail document."""
    gone = [[_shown(name), version] for name, version in said.gone]
    kept = [[_shown(name), version, why] for name, version, why in said.kept]
    detail = Detail(
        canonical(
            {
                "requestId": said.request_id,
                "erased": list(said.erased),
                "slices": [list(entry) for entry in said.slices],
                "destroyed": [list(entry) for entry in said.destroyed],
                "serving": [list(entry) for entry in said.serving],
                "models": [list(entry) for entry in said.models],
                **({"objects": {"destroyed": gone, "kept": kept}} if gone or kept else {}),
            }
        )
    )
    before = tuple((dataset, shard, slice_, root) for dataset, shard, slice_, _, root, _ in said.slices)
    after = tuple((dataset, shard, slice_, root) for dataset, shard, slice_, _, _, root in said.slices)
    predicate: dict[str, Any] = {
        "storeId": said.store_id,
        "requestId": said.request_id,
        "erasureId": said.erasure_id,
        "asked": said.asked,
        "found": bool(said.destroyed if said.asked == "model" else said.erased),
        "request": {
            "leafIndex": said.request_leaf,
            "receivedAt": to_the_minute(said.received_at),
            "dueAt": to_the_minute(said.due_at),
        },
        "policy": {"name": said.policy[0], "digest": said.policy[1]} if said.policy[1] else None,
        "influenceRemovedAt": to_the_minute(said.influence_removed_at),
        "userCommitment": said.user_commitment,
        "erased": {"points": len(said.erased), "root": root_of(map(bytes.fromhex, said.erased)).hex()},
        "slices": {"count": len(said.slices), "before": _root_once(before), "after": _root_once(after)},
        "checkpoints": {
            "destroyed": {"count": len(said.destroyed), "root": _root_once(tuple(said.destroyed))},
            "serving": {"count": len(said.serving), "root": _root_once(tuple(said.serving))},
        },
        "models": {"count": len(said.models), "root": _root_once(tuple(said.models))},
        "samples": {
            "retrain": sum(entry[4] for entry in said.models),
            "fromScratch": sum(entry[5] for entry in said.models),
        },
        "replay": "none" if any(entry[3] == "none" for entry in said.models) else "bit-exact",
        "detail": {"digest": {"sha256": detail.digest}, "size": len(detail.data)},
        "scope": _scope(said),
        "software": {"name": SOFTWARE, "version": said.version, "plugins": dict(said.plugins)},
    }
    if said.cipher:
        predicate["encryption"] = {"cipher": said.cipher, "keys": "destroyed"}
    if gone or kept:
        predicate["objects"] = {
            "destroyed": {"count": len(gone), "root": root_of_lines(gone)},
            "kept": {"count": len(kept), "root": root_of_lines(kept)},
        }
    return make_payload("erasure", predicate, ("detail", detail.digest)), detail


@lru_cache(maxsize=256)
def _root_once(entries: tuple[tuple[str | int, ...], ...]) -> Digest:
    """Return the root over entries; requests that are carried out together have most of their lists in common."""
    return root_of_lines(map(list, entries))


def _shown(name: str) -> str:
    """Return an object as a receipt names it: of slice data only the folder, since names hold digests of content."""
    return name.rpartition("/")[0] if name.startswith("data/") else name


def _scope(said: ErasureStatement) -> dict[str, list[str]]:
    """Return what is claimed and what is not: of what storage kept, nothing; with a model, no data goes."""
    kept = {"training-data" if name.startswith("data/") else "checkpoints" for name, _, _ in said.kept}
    claimed = ("checkpoints",) if said.asked == "model" else CLAIMS
    return {
        "claims": [*(claim for claim in claimed if claim not in kept), *(["object-keys"] if said.cipher else [])],
        "notClaimed": [*NOT_CLAIMED, *(["object-versions-kept"] if kept else []), *said.remnants],
    }


def models_rebuilt(erasure_id: str, receipts: Sequence[int], models: Sequence[tuple[str, int, int]], at: str) -> bytes:
    """Return the second statement after an erasure: models are at full strength again."""
    return make_payload(
        "rebuilt",
        {
            "erasureId": erasure_id,
            "receipts": list(receipts),
            "models": [list(entry) for entry in models],
            "at": to_the_minute(at),
        },
    )


def store_restored(size: int, lost: Sequence[Sequence[Any]], at: str) -> list[bytes]:
    """Return the leaves that say a store went back to a backup of `size` leaves, and what of later leaves it gave up.

    Entries are ("dataset", name), ("model", name), ("slice", dataset, shard, slice) and ("request", id).
    """
    predicate = {"size": size, "at": to_the_minute(at)}
    entries = [list(entry) for entry in lost]
    return make_payloads("restored", predicate, "lost", entries) or [
        make_payload("restored", {**predicate, "lost": []})
    ]


def replay_class(deterministic: bool) -> str:
    """Return what a replay of a model can show."""
    return "bit-exact" if deterministic else "none"
