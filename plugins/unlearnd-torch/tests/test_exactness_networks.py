"""The exactness contract for the networks: erase, build, and every digest is that of a store never given the erased.

One store holds the three cases side by side, a shard each: somebody in the first slice, in the middle, in the last.
"""

from __future__ import annotations

import numpy as np
import pytest

import unlearnd
from unlearnd.audit import audit

SHARDS, SLICES, SEED = 3, 3, 20210523
LEARNERS = {
    "convnet": ("convnet", {"channels": [3, 4], "kernel": 3, "hidden": 8, "dropout": 0.2, "clip_norm": 1.0}),
    "resnet": ("resnet", {"width": 2, "optimizer": "adam", "label_smoothing": 0.1}),
    "resnet-50": ("resnet", {"width": 1, "depth": 50, "stem": "large", "nesterov": True}),
    "wide_resnet": ("wide_resnet", {"depth": 10, "width": 1, "dropout": 0.1, "schedule": "cosine"}),
    "channels last, bfloat16": (
        "wide_resnet",
        {"depth": 10, "width": 1, "channels_last": True, "mixed_precision": "bfloat16", "optimizer": "adamw"},
    ),
}


@pytest.fixture
def images():
    """Images of bytes of sixty people, two each, with labels."""
    x = np.random.default_rng(1).integers(0, 256, (120, 8, 8, 3)).astype(np.uint8)
    return x, np.arange(120) % 3, np.array([f"u{number // 2}" for number in range(120)])


@pytest.fixture
def make(tmp_path, images):
    """Return a function that makes a store of everybody but some, and trains a model in it."""
    key = tmp_path / "placement.key"
    key.write_text("5eed" * 16 + "\n")
    stores = []

    def make_store(name, learner, without=(), **how):
        x, y, user = (array[~np.isin(images[2], without)] for array in images)
        store = unlearnd.create_store(str(tmp_path / name), placement_key=key)
        stores.append(store)
        store.ingest("d", x, user=user, label=y, classes=3, shards=SHARDS, slices=SLICES)
        backend, settings = LEARNERS[learner]
        varied = {"batch_size": 8, "crop_padding": 2, "flip": True, **settings}
        store.train("m", dataset="d", backend=backend, epochs=1.5, seed=SEED, settings=varied, **how)
        return store

    yield make_store
    for store in stores:
        store.close()


@pytest.mark.parametrize("learner", LEARNERS)
def test_erasing_gives_the_bits_of_a_store_that_never_met_them(learner, make, images):
    met = make("met", learner)
    before, users = digests(met), pick(met, images)
    met.erase(users)
    never = make("never", learner, users)
    assert digests(met) == digests(never)
    changed = {place for place, digest in digests(met).items() if digest != before[place]}
    assert changed == {(shard, slice_) for shard in (1, 2, 3) for slice_ in range(shard, SLICES + 1)}
    x = images[0]
    assert np.array_equal(met.model("m").predict(x, "mean").scores, never.model("m").predict(x, "mean").scores)


def test_two_worker_processes_give_the_bits_of_one(make, images):
    met = make("met", "wide_resnet")
    users = pick(met, images)
    met.erase(users, executor="processes", workers=2)
    assert digests(met) == digests(make("never", "wide_resnet", users))


def test_an_audit_replays_a_network_to_the_bit(make):
    report = audit(make("store", "resnet"), replay="all")
    (replayed,) = (check for check in report.checks if check.id == "P1")
    assert replayed.result.value == "PASS", replayed.sentence


def digests(store):
    found = {(c.shard, c.slice): c.tensors for c in store.checkpoints("m")}
    assert len(found) == SHARDS * SLICES
    return found


def pick(store, images):
    """Return one user from slice 1 of shard 1, slice 2 of shard 2 and slice 3 of shard 3."""
    chosen = {}
    for user in sorted(set(images[2].tolist())):
        (where,) = store.where_user(user)
        if where.shard == where.slice:
            chosen[where.shard] = user
    assert len(chosen) == 3
    return sorted(chosen.values())
