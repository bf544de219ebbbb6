from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from unlearnd_torch import NetworkBackend
from unlearnd_torch.images import Image, draw_variation, image_of
from unlearnd_torch.settings import ConvNetSettings

from unlearnd.errors import InputError
from unlearnd.hookspecs import Job, Points


def ignore(samples):
    pass


@pytest.mark.parametrize(
    ("shape", "layout", "image"),
    [
        ((28, 20), "auto", Image("hw", 1, 28, 20)),
        ((28, 20), "hw", Image("hw", 1, 28, 20)),
        ((32, 30, 3), "auto", Image("hwc", 3, 32, 30)),
        ((3, 32, 30), "auto", Image("chw", 3, 32, 30)),
        ((1, 8, 8), "auto", Image("chw", 1, 8, 8)),
        ((8, 8, 1), "auto", Image("hwc", 1, 8, 8)),
        ((4, 8, 12), "hwc", Image("hwc", 12, 4, 8)),
        ((12, 8, 4), "chw", Image("chw", 12, 8, 4)),
        ((5, 8, 5), "chw", Image("chw", 5, 8, 5)),
    ],
)
def test_the_shape_says_which_axis_is_which_unless_it_is_set(shape, layout, image):
    assert image_of(shape, layout) == image
    assert tuple(image.turn(torch.zeros(2, *shape)).shape) == (2, *image.shape)


@pytest.mark.parametrize(
    ("shape", "layout", "message"),
    [
        ((784,), "auto", "are no images: layout 'auto' needs two axes"),
        ((2, 3, 4, 5), "auto", "are no images"),
        ((5, 8, 5), "auto", "may be images of two kinds: set layout to 'hwc' or 'chw'"),
        ((3, 8, 8), "hw", "layout 'hw' needs two axes"),
        ((8, 8), "chw", "layout 'chw' needs three axes"),
    ],
)
def test_what_is_no_image_is_refused(shape, layout, message):
    with pytest.raises(InputError) as raised:
        image_of(shape, layout)
    assert message in str(raised.value)


@pytest.mark.parametrize(("padding", "flip"), [(2, False), (0, True), (3, True)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crops_and_flips_are_what_they_say(padding, flip, dtype):
    settings = ConvNetSettings(crop_padding=padding, flip=flip)
    x = torch.randint(1, 255, (20, 3, 6, 7)).to(dtype)
    variation = draw_variation(settings, 5, 0, 20)
    batch = slice(4, 15)
    varied = variation.apply(x[batch], batch)
    for place, image in enumerate(varied, start=4):
        padded = torch.zeros(3, 6 + 2 * padding, 7 + 2 * padding, dtype=dtype)
        padded[:, padding : padding + 6, padding : padding + 7] = x[place]
        down, right = variation.down[place] if padding else (0, 0)
        expected = padded[:, down : down + 6, right : right + 7]
        if flip and variation.flipped[place]:
            expected = expected.flip(2)
        assert torch.equal(image, expected)
    assert varied.dtype == dtype


def test_variation_is_drawn_from_the_seed_and_the_epoch():
    settings = ConvNetSettings(crop_padding=2, flip=True)
    one, same = draw_variation(settings, 5, 0, 400), draw_variation(settings, 5, 0, 400)
    assert torch.equal(one.down, same.down)
    assert torch.equal(one.flipped, same.flipped)
    for other in (draw_variation(settings, 6, 0, 400), draw_variation(settings, 5, 1, 400)):
        assert not torch.equal(one.down, other.down)
        assert not torch.equal(one.flipped, other.flipped)
    assert (one.down.min(), one.down.max()) == (0, 4)
    assert 150 < one.flipped.sum() < 250
    assert draw_variation(ConvNetSettings(), 5, 0, 400) is None


def test_variation_changes_what_is_trained_and_not_what_is_answered(make_job, same):
    backend = NetworkBackend("convnet")
    states = []
    for given in ({}, {"crop_padding": 2}, {"flip": True}):
        settings = backend.settings({**given, "channels": [3, 4], "batch_size": 8})
        job = make_job(backend, settings, n=16, shape=(8, 8, 3), dtype=np.uint8)
        states.append(backend.train(settings, job, "cpu", ignore))
        predictor = backend.predictor(settings, states[-1:], "cpu")
        assert np.array_equal(predictor(job.points.x), predictor(job.points.x))
    assert not same(states[0], states[1])
    assert not same(states[0], states[2])


@pytest.mark.parametrize(("shape", "axis"), [((6, 5, 3), 2), ((3, 6, 5), 0)])
def test_each_channel_is_scaled_by_its_own_mean_and_spread(shape, axis):
    backend = NetworkBackend("convnet")
    settings = backend.settings({"channels": [2, 2], "layout": "hwc" if axis == 2 else "chw"})
    x = np.random.default_rng(0).normal(100, 20, (50, *shape)).clip(0, 255).astype(np.uint8)
    job = Job(backend.initial_state(settings, shape, 2, 1), Points(x, np.arange(50) % 2), Fraction(1), 1)
    after = backend.train(settings, job, "cpu", ignore)
    others = tuple(place for place in range(4) if place != axis + 1)
    expected = np.broadcast_to(x.mean(others, keepdims=True)[0], shape)
    assert np.allclose(after["input.mean"].reshape(shape), expected, rtol=1e-6)
    expected = np.broadcast_to(x.std(others, keepdims=True)[0], shape)
    assert np.allclose(after["input.scale"].reshape(shape), expected, rtol=1e-5)
    # What was fitted stays.
    again = backend.train(settings, Job(after, Points(x[:20] // 2, job.points.y[:20]), Fraction(1), 2), "cpu", ignore)
    assert np.array_equal(again["input.mean"], after["input.mean"])


@pytest.mark.parametrize("shape", [(4, 5, 3), (3, 4, 5), (4, 5)])
def test_numbers_that_are_set_are_not_fitted(shape):
    backend = NetworkBackend("convnet")
    colours = len(shape) == 3
    mean, std = ([10.0, 20.0, 30.0], [1.0, 2.0, 3.0]) if colours else (10.0, 2.0)
    given = {"standardize": "fixed", "mean": mean, "std": std, "channels": [2, 2]}
    settings = backend.settings({**given, "layout": "auto" if len(shape) == 2 else "hwc" if shape[2] == 3 else "chw"})
    x = np.random.default_rng(0).integers(0, 255, (9, *shape)).astype(np.uint8)
    state = backend.initial_state(settings, shape, 2, 1)
    after = backend.train(settings, Job(state, Points(x, np.arange(9) % 2), Fraction(1), 1), "cpu", ignore)
    where = [1, 1, 3] if colours and shape[2] == 3 else [3, 1, 1]
    expected = np.broadcast_to(np.reshape(mean, where), shape) if colours else np.full(shape, 10.0)
    assert np.array_equal(after["input.mean"].reshape(shape), expected)
    settings = backend.settings({"standardize": "fixed", "mean": [1, 2], "std": [1, 2]})
    with pytest.raises(InputError, match="mean and std have 2 numbers; the images have"):
        backend.initial_state(settings, shape, 2, 1)


def test_smoothing_and_mixed_precision_change_what_is_trained(make_job, same):
    backend = NetworkBackend("convnet")
    states = []
    for given in ({}, {"label_smoothing": 0.2}, {"mixed_precision": "bfloat16"}, {"clip_norm": 0.01}):
        settings = backend.settings({"channels": [3, 4], "batch_size": 8, **given})
        job = make_job(backend, settings, n=16, shape=(8, 8))
        states.append(backend.train(settings, job, "cpu", ignore))
        assert all(array.dtype in (np.float32, np.int64) for array in states[-1].values())
    assert not any(same(states[0], other) for other in states[1:])
    assert all(np.allclose(states[0][name], states[2][name], atol=0.1) for name in states[0])
