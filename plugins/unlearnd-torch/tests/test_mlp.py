from __future__ import annotations

import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from sklearn.datasets import load_digits
from unlearnd_torch import MlpBackend, mlp, mlp_batches
from unlearnd_torch.harness import cut_into_batches, draw_order, points_per_epoch
from unlearnd_torch.mlp_batches import Stream
from unlearnd_torch.settings import MlpSettings

from unlearnd.errors import InputError
from unlearnd.hookspecs import Backend, Job, Points

BACKEND = MlpBackend()
VARIANTS = [
    {},
    {"momentum": 0.0, "hidden": []},
    {"nesterov": True, "weight_decay": 0.01, "hidden": [37, 11], "activation": "tanh"},
    {"optimizer": "adam", "hidden": [16], "activation": "sigmoid", "batch_size": 7},
    {"optimizer": "adamw", "dropout": 0.3, "hidden": [21, 13], "batch_size": 16},
    {"optimizer": "adam", "schedule": "cosine", "warmup_steps": 3, "activation": "gelu", "hidden": [9]},
    {"batch_size": 256, "dropout": 0.5, "standardize": "off", "lr": 0.0001},
    {"batch_size": 64, "hidden": [1]},
    {"clip_norm": 0.3, "label_smoothing": 0.1, "hidden": [16]},
    {"clip_norm": 0.05, "optimizer": "adam", "batch_size": 16, "hidden": [16], "dropout": 0.2},
]


def ignore(samples):
    pass


def grow(job, state, epochs=None, seed=None):
    return Job(state, job.points, epochs or job.epochs, job.seed if seed is None else seed)


@pytest.mark.parametrize("given", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_company_does_not_change_a_bit(given, dtype, make_job, same):
    settings = BACKEND.settings(given)
    lengths = [
        (90, Fraction(2)),
        (33, Fraction(5, 2)),
        (64, Fraction(1, 3)),
        (1, Fraction(3)),
        (57, Fraction(7, 4)),
    ]
    jobs = [
        make_job(BACKEND, settings, n=n, epochs=epochs, seed=seed, dtype=dtype)
        for seed, (n, epochs) in enumerate(lengths)
    ]
    alone = [BACKEND.train(settings, job, "cpu", ignore) for job in jobs]
    for size in (2, 3, 5):
        for chosen in itertools.islice(itertools.permutations(range(5), size), 0, None, 23):
            together = BACKEND.train_many(settings, [jobs[p] for p in chosen], "cpu", ignore)
            assert all(same(state, alone[p]) for p, state in zip(chosen, together, strict=True))


@pytest.mark.parametrize("stack", [4 << 20, 1 << 30])
def test_twenty_shards_at_the_usual_size_equal_one_by_one(stack, make_job, same, monkeypatch):
    monkeypatch.setattr(mlp, "stack_bytes", lambda device: stack)
    settings = BACKEND.settings({})
    jobs = [
        make_job(BACKEND, settings, n=70 + seed, shape=(600,), classes=2, epochs=Fraction(1), seed=seed)
        for seed in range(20)
    ]
    together = BACKEND.train_many(settings, jobs, "cpu", ignore)
    for job, state in zip(jobs, together, strict=True):
        assert same(state, BACKEND.train(settings, job, "cpu", ignore))


def test_memory_bounds_do_not_change_a_bit(make_job, same, monkeypatch):
    settings = BACKEND.settings({"dropout": 0.2, "optimizer": "adam"})
    jobs = [make_job(BACKEND, settings, n=200 - 30 * seed, seed=seed) for seed in range(4)]
    before = BACKEND.train_many(settings, jobs, "cpu", ignore)
    monkeypatch.setattr(mlp_batches, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(mlp, "stack_bytes", lambda device: 100_000)
    after = BACKEND.train_many(settings, jobs, "cpu", ignore)
    assert all(same(one, other) for one, other in zip(before, after, strict=True))


def test_where_stacks_change_bits_constituents_train_one_by_one(make_job, same, monkeypatch):
    settings = BACKEND.settings({})
    jobs = [make_job(BACKEND, settings, seed=seed) for seed in range(3)]
    alone = [BACKEND.train(settings, job, "cpu", ignore) for job in jobs]
    sizes = []
    train_group = mlp._train_group
    monkeypatch.setattr(mlp, "stacking_keeps_bits", lambda *form: False)
    monkeypatch.setattr(mlp, "_train_group", lambda *a: sizes.append(len(a[1])) or train_group(*a))
    together = BACKEND.train_many(settings, jobs, "cpu", ignore)
    assert sizes == [1, 1, 1]
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


def test_a_device_that_gives_stacks_other_bits_is_found_out(make_job, same, monkeypatch):
    # Stands in for a GPU whose batched product sums up in another order than its single one.
    multiply = torch.baddbmm

    def multiply_otherwise(bias, left, right, *, out):
        multiply(bias, left, right, out=out)
        return out.mul_(1 + 2**-20) if len(left) > 1 else out

    settings = BACKEND.settings({"hidden": [64]})
    jobs = [make_job(BACKEND, settings, seed=seed) for seed in range(3)]
    alone = [BACKEND.train(settings, job, "cpu", ignore) for job in jobs]
    monkeypatch.setattr(torch, "baddbmm", multiply_otherwise)
    mlp.stacking_keeps_bits.cache_clear()
    try:
        together = BACKEND.train_many(settings, jobs, "cpu", ignore)
    finally:
        mlp.stacking_keeps_bits.cache_clear()
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))


@pytest.mark.parametrize("given", VARIANTS)
def test_a_step_from_a_saved_state_equals_going_through(given, make_job, same):
    settings = BACKEND.settings(given)
    job = make_job(BACKEND, settings)
    through = saved = job.state
    for seed in (5, 6, 7):
        through = BACKEND.train(settings, grow(job, through, Fraction(3, 2), seed), "cpu", ignore)
        saved = BACKEND.train(settings, grow(job, load(save(dict(saved))), Fraction(3, 2), seed), "cpu", ignore)
    assert same(through, saved)
    assert all(array.flags.c_contiguous for array in through.values())
    assert through["optimizer.step"][0] == 3 * sum(
        -(-points // settings["batch_size"]) for points in points_per_epoch(90, Fraction(3, 2))
    )


def test_another_process_gives_the_same_bits(make_job):
    settings = BACKEND.settings({"dropout": 0.1})
    job = make_job(BACKEND, settings)
    here = BACKEND.train(settings, job, "cpu", ignore)
    code = (
        "import sys, hashlib, numpy as np; from fractions import Fraction\n"
        "from unlearnd_torch import MlpBackend; from unlearnd.hookspecs import Job, Points\n"
        "b = MlpBackend(); s = b.settings({'dropout': 0.1}); r = np.random.default_rng(1)\n"
        "x = (r.standard_normal((90, 20)) * 40 + 120).clip(0, 255).astype(np.float32)\n"
        "job = Job(b.initial_state(s, (20,), 3, 1), Points(x, r.integers(0, 3, 90)), Fraction(2), 1)\n"
        "after = b.train(s, job, 'cpu', lambda n: None)\n"
        "sys.stdout.write(hashlib.sha256(b''.join(after[k].tobytes() for k in sorted(after))).hexdigest())"
    )
    import hashlib

    expected = hashlib.sha256(b"".join(here[name].tobytes() for name in sorted(here))).hexdigest()
    assert run_fresh(code) == expected


def test_neither_state_nor_points_are_written_to(make_job):
    settings = BACKEND.settings({"optimizer": "adam"})
    job = make_job(BACKEND, settings)
    before = {name: array.copy() for name, array in job.state.items()}
    x, y = job.points.x.copy(), job.points.y.copy()
    after = BACKEND.train(settings, job, "cpu", ignore)
    assert all(np.array_equal(before[name], job.state[name]) for name in before)
    assert np.array_equal(x, job.points.x)
    assert np.array_equal(y, job.points.y)
    assert not any(np.shares_memory(after[name], job.state[name]) for name in after)


@pytest.mark.parametrize("by", [8, 16, 40])
def test_where_points_lie_in_memory_does_not_change_a_bit(by, make_job, same, shifted):
    settings = BACKEND.settings({})
    job = make_job(BACKEND, settings, shape=(37,))
    here, there = shifted(job, 0), shifted(job, by)
    after = BACKEND.train(settings, here, "cpu", ignore)
    assert same(after, BACKEND.train(settings, there, "cpu", ignore))
    predictor = BACKEND.predictor(settings, [after, after], "cpu")
    assert np.array_equal(predictor(here.points.x[:7]), predictor(there.points.x[:7]))


def test_no_points_pass_the_state_on(make_job, same):
    settings = BACKEND.settings({})
    empty = make_job(BACKEND, settings, n=0, seed=3)
    full = make_job(BACKEND, settings, n=10, seed=4)
    said = []
    states = BACKEND.train_many(settings, [empty, full], "cpu", said.append)
    assert same(states[0], empty.state)
    assert same(states[1], BACKEND.train(settings, full, "cpu", ignore))
    assert sum(said) == 20
    assert same(BACKEND.train(settings, empty, "cpu", ignore), empty.state)


def test_progress_adds_up_to_the_samples_trained(make_job):
    settings = BACKEND.settings({})
    jobs = [make_job(BACKEND, settings, n=n, epochs=Fraction(7, 3), seed=n) for n in (1, 40, 100)]
    said = []
    BACKEND.train_many(settings, jobs, "cpu", said.append)
    assert sum(said) == (2 + 1) + (80 + 14) + (200 + 34)


def test_what_progress_raises_passes_through(make_job):
    class StopHereError(Exception):
        pass

    def stop(samples):
        raise StopHereError

    settings = BACKEND.settings({})
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(StopHereError):
            BACKEND.train(settings, make_job(BACKEND, settings), "cpu", stop)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid", "gelu"])
def test_the_backward_pass_agrees_with_autograd(activation, make_job):
    settings = BACKEND.settings(
        {
            "hidden": [17, 9],
            "activation": activation,
            "standardize": "off",
            "batch_size": 32,
            "momentum": 0.5,
            "lr": 0.1,
        }
    )
    job = make_job(BACKEND, settings, n=45, epochs=Fraction(2), seed=8)
    job = Job(job.state, Points((job.points.x - 120) / 40, job.points.y), job.epochs, job.seed)
    ours = BACKEND.train(settings, job, "cpu", ignore)
    weights = [
        torch.tensor(job.state[f"layers.{layer}.{kind}"], dtype=torch.float64, requires_grad=True)
        for layer in range(3)
        for kind in ("weight", "bias")
    ]
    optimiser = torch.optim.SGD(weights, lr=0.1, momentum=0.5)
    activate = {**vars(torch), "gelu": torch.nn.functional.gelu}[activation]
    x, y = torch.tensor(job.points.x, dtype=torch.float64), torch.tensor(job.points.y)
    for epoch in range(2):
        order = torch.tensor(draw_order(8, epoch, 45, 45).copy())
        for rows in (order[:32], order[32:]):
            hidden = activate(activate(x[rows] @ weights[0] + weights[1]) @ weights[2] + weights[3])
            loss = torch.nn.functional.cross_entropy(hidden @ weights[4] + weights[5], y[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for place, weight in enumerate(weights):
        name = f"layers.{place // 2}.{'bias' if place % 2 else 'weight'}"
        assert np.allclose(ours[name], weight.detach().numpy(), atol=2e-6)


def test_dropout_drops_its_share_and_keeps_the_mean():
    settings = MlpSettings(dropout=0.25, hidden=(64,), batch_size=50)
    points = Points(np.ones((500, 4), np.float32), np.zeros(500, np.int64))
    stream = Stream(settings, Job({}, points, Fraction(1), 3))
    _, _, draws = stream.take(10)
    kept = (draws >= 0.25).float().mean()
    assert abs(float(kept) - 0.75) < 0.02
    other = Stream(settings, Job({}, points, Fraction(1), 3))
    assert torch.equal(draws, torch.cat([other.take(3)[2], other.take(7)[2]]))


@pytest.mark.parametrize("standardize", ["auto", "feature", "global", "off"])
@pytest.mark.parametrize("hidden", [[], [16], [16, 8]])
@pytest.mark.parametrize("n", [0, 1, 5, 200])
def test_stacked_answers_equal_those_of_each(standardize, hidden, n, make_job):
    settings = BACKEND.settings({"standardize": standardize, "hidden": hidden, "lr": 1e-3})
    jobs = [make_job(BACKEND, settings, seed=seed) for seed in range(4)]
    states = [*BACKEND.train_many(settings, jobs[:3], "cpu", ignore), jobs[3].state]
    x = np.random.default_rng(0).normal(120, 40, (n, 20)).astype(np.float32)
    together = BACKEND.predictor(settings, states, "cpu")(x)
    assert together.shape == (4, n, 3)
    assert together.dtype == np.float32
    for state, answer in zip(states, together, strict=True):
        assert np.allclose(answer, forward(state, x), atol=2e-5)
        assert np.allclose(answer, BACKEND.predictor(settings, [state], "cpu")(x)[0], atol=2e-5)


def test_many_rows_are_answered_in_chunks(make_job, monkeypatch):
    settings = BACKEND.settings({"activation": "gelu"})
    job = make_job(BACKEND, settings, shape=(4, 5), dtype=np.uint8)
    state = BACKEND.train(settings, job, "cpu", ignore)
    predictor = BACKEND.predictor(settings, [state] * 3, "cpu")
    x = np.random.default_rng(0).integers(0, 256, (300, 4, 5)).astype(np.uint8)
    whole = predictor(x)
    predictor._chunk = 64
    assert np.allclose(whole, predictor(x), atol=1e-6)
    assert np.allclose(whole.sum(2), 1, atol=1e-5)


def test_inputs_are_scaled_by_the_first_step_and_never_again(make_job):
    settings = BACKEND.settings({})
    job = make_job(BACKEND, settings)
    assert job.state["input.count"][0] == 0
    first = BACKEND.train(settings, job, "cpu", ignore)
    assert np.allclose(first["input.mean"], job.points.x.mean(0), rtol=1e-5)
    assert np.allclose(first["input.scale"], job.points.x.std(0), rtol=1e-4)
    other = make_job(BACKEND, settings, seed=9)
    second = BACKEND.train(settings, Job(first, other.points, other.epochs, 2), "cpu", ignore)
    assert np.array_equal(first["input.mean"], second["input.mean"])
    assert second["input.count"][0] == 90


def test_bytes_are_scaled_together_and_constants_left_alone(make_job):
    settings = BACKEND.settings({})
    job = make_job(BACKEND, settings, dtype=np.uint8)
    after = BACKEND.train(settings, job, "cpu", ignore)
    assert len(set(after["input.scale"])) == 1
    x = np.full((40, 20), 0.1, np.float32)
    flat = BACKEND.train(
        settings, grow(Job(job.state, Points(x, job.points.y[:40]), job.epochs, 1), job.state), "cpu", ignore
    )
    assert set(flat["input.scale"]) == {1.0}


def test_epochs_may_be_fractions():
    assert points_per_epoch(10, Fraction(5, 2)) == [10, 10, 5]
    assert points_per_epoch(10, Fraction(1, 100)) == [1]
    assert points_per_epoch(7, Fraction(78, 100)) == [6]
    assert points_per_epoch(0, Fraction(5, 2)) == []
    assert points_per_epoch(7, Fraction(0)) == []
    assert points_per_epoch(3, Fraction(2)) == [3, 3]


def test_a_single_last_point_joins_the_batch_before():
    cut = lambda points, size: [(b.start, b.stop) for b in cut_into_batches(points, size)]  # noqa: E731
    assert cut(9, 4) == [(0, 4), (4, 9)]
    assert cut(8, 4) == [(0, 4), (4, 8)]
    assert cut(6, 4) == [(0, 4), (4, 6)]
    assert cut(1, 4) == [(0, 1)]
    assert cut(3, 1) == [(0, 1), (1, 2), (2, 3)]


def test_a_label_out_of_range_is_refused(make_job):
    settings = BACKEND.settings({})
    job = make_job(BACKEND, settings)
    wrong = Job(job.state, Points(job.points.x, job.points.y + 1), job.epochs, 1)
    with pytest.raises(InputError, match="3 classes"):
        BACKEND.train(settings, wrong, "cpu", ignore)


def test_an_absent_device_is_named_with_those_there_are():
    with pytest.raises(InputError, match="no device 'tpu' here; devices: auto,"):
        BACKEND.environment("tpu")


def test_the_environment_says_what_changes_bits():
    found = BACKEND.environment("cpu")
    assert found["torch"] == torch.__version__
    assert found["threads"] == "1"
    assert {"cpu_capability", "device", "device_name", "mkldnn", "numpy"} <= found.keys()
    assert all(isinstance(value, str) for value in found.values())


def test_it_learns():
    digits = load_digits()
    x, y = digits.data.astype(np.float32), digits.target.astype(np.int64)
    settings = BACKEND.settings({"hidden": [64]})
    state = BACKEND.initial_state(settings, (64,), 10, 1)
    job = Job(state, Points(x[:1200], y[:1200]), Fraction(10), 1)
    answers = BACKEND.predictor(settings, [BACKEND.train(settings, job, "cpu", ignore)], "cpu")(x[1200:])
    assert (answers[0].argmax(1) == y[1200:]).mean() > 0.9


def test_it_is_a_backend():
    assert isinstance(BACKEND, Backend)


def test_loading_the_plugin_loads_no_torch():
    code = (
        "import sys, unlearnd_torch\n"
        "found = []; unlearnd_torch.register_backends(found.append)\n"
        "heavy = {'torch', 'numpy', 'pydantic'} & sys.modules.keys()\n"
        "sys.stdout.write(f'{[b.name for b in found]} {sorted(heavy)}')"
    )
    assert run_fresh(code) == "['mlp', 'convnet', 'resnet', 'wide_resnet'] []"


def run_fresh(code):
    plugin = Path(__file__).parents[1]
    path = f"import sys; sys.path[:0] = [{str(plugin)!r}, {str(plugin.parents[1])!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + code], capture_output=True, text=True, check=True)
    return done.stdout


def forward(state, x):
    values = x.astype(np.float64)
    if "input.mean" in state:
        values = (values - state["input.mean"]) / state["input.scale"]
    layers = sum(name.endswith(".weight") and name.startswith("layers") for name in state)
    for layer in range(layers):
        values = values @ state[f"layers.{layer}.weight"].astype(np.float64) + state[f"layers.{layer}.bias"]
        if layer < layers - 1:
            values = np.maximum(values, 0)
    values = np.exp(values - values.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)
