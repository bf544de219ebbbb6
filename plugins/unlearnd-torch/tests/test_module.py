from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from torch import nn
from unlearnd_torch import MlpBackend, TorchBackend

from unlearnd.errors import InputError
from unlearnd.hookspecs import Backend, Job, Points


def build(shape, classes, channels: int = 6, drop: float = 0.2):
    return nn.Sequential(
        nn.Conv2d(shape[0], channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(drop),
        nn.Linear(4 * channels, 12),
        nn.BatchNorm1d(12),
        nn.ReLU(),
        nn.Linear(12, classes),
    )


BACKEND = TorchBackend("net", "1.0", build=build)
SHAPE = (1, 6, 6)
VARIANTS = [
    {},
    {"optimizer": "adam", "batch_size": 8},
    {"optimizer": "adamw", "schedule": "cosine", "channels": 3},
]


def ignore(samples):
    pass


@pytest.mark.parametrize("given", VARIANTS)
@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_a_step_from_a_saved_state_equals_going_through(given, dtype, make_job, same):
    settings = BACKEND.settings(given)
    job = make_job(BACKEND, settings, n=33, shape=SHAPE, dtype=dtype)
    through = saved = job.state
    for seed in (5, 6):
        torch.rand(seed)  # where the global generator stands must not matter
        through = BACKEND.train(settings, Job(through, job.points, Fraction(3, 2), seed), "cpu", ignore)
        again = Job(load(save(dict(saved))), job.points, Fraction(3, 2), seed)
        saved = BACKEND.train(settings, again, "cpu", ignore)
    assert same(through, saved)
    assert through["module.1.num_batches_tracked"] > 0
    assert not np.array_equal(through["module.1.running_mean"], job.state["module.1.running_mean"])
    assert all(array.flags.c_contiguous for array in through.values())


def test_training_leaves_global_randomness_and_inputs_alone(make_job):
    settings = BACKEND.settings({})
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    job = make_job(BACKEND, settings, shape=SHAPE)
    before = {name: array.copy() for name, array in job.state.items()}
    BACKEND.predictor(settings, [BACKEND.train(settings, job, "cpu", ignore)], "cpu")(job.points.x)
    assert torch.equal(torch.rand(1), expected)
    assert all(np.array_equal(before[name], job.state[name]) for name in before)


@pytest.mark.parametrize(("n", "batch_size"), [(1, 8), (9, 8), (3, 1)])
def test_single_points_train_through_batch_norm(n, batch_size, make_job):
    settings = BACKEND.settings({"batch_size": batch_size})
    job = make_job(BACKEND, settings, n=n, shape=SHAPE, epochs=Fraction(2))
    said = []
    after = BACKEND.train(settings, job, "cpu", said.append)
    assert sum(said) == 2 * n
    assert all(np.isfinite(array).all() for array in after.values())


@pytest.mark.parametrize("by", [8, 16, 40])
def test_where_points_lie_in_memory_does_not_change_a_bit(by, make_job, same, shifted):
    settings = BACKEND.settings({})
    job = make_job(BACKEND, settings, shape=SHAPE)
    here, there = shifted(job, 0), shifted(job, by)
    after = BACKEND.train(settings, here, "cpu", ignore)
    assert same(after, BACKEND.train(settings, there, "cpu", ignore))
    predictor = BACKEND.predictor(settings, [after, after], "cpu")
    assert np.array_equal(predictor(here.points.x[:7]), predictor(there.points.x[:7]))


def test_no_points_pass_the_state_on(make_job, same):
    settings = BACKEND.settings({})
    job = make_job(BACKEND, settings, n=0, shape=SHAPE)
    assert same(BACKEND.train(settings, job, "cpu", ignore), job.state)


def test_answers_use_the_statistics_learned(make_job):
    settings = BACKEND.settings({"standardize": "off"})
    jobs = [make_job(BACKEND, settings, shape=SHAPE, seed=seed) for seed in (1, 2)]
    states = [BACKEND.train(settings, job, "cpu", ignore) for job in jobs]
    x = jobs[0].points.x
    answers = BACKEND.predictor(settings, states, "cpu")(x)
    assert answers.shape == (2, 90, 3)
    for state, answer in zip(states, answers, strict=True):
        module = build(SHAPE, 3)
        module.load_state_dict(
            {n.removeprefix("module."): torch.from_numpy(np.array(a)) for n, a in state.items() if n[:2] == "mo"}
        )
        assert np.allclose(torch.softmax(module.eval()(torch.tensor(x)), 1).detach(), answer, atol=1e-5)
    assert np.allclose(answers[:, :1], BACKEND.predictor(settings, states, "cpu")(x[:1]), atol=1e-5)


def test_a_module_trains_as_torch_would(make_job):
    def plain(shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, classes))

    backend = TorchBackend("plain", "1", build=plain)
    settings = backend.settings({"standardize": "off", "lr": 0.01, "batch_size": 30})
    job = make_job(backend, settings, shape=SHAPE, epochs=Fraction(1))
    job = Job(job.state, Points((job.points.x - 120) / 40, job.points.y), job.epochs, job.seed)
    ours = backend.train(settings, job, "cpu", ignore)
    module = plain(SHAPE, 3)
    names = [name for name, _ in module.named_parameters()]
    module.load_state_dict({n: torch.tensor(job.state[f"module.{n}"]) for n in names})
    optimiser = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    from unlearnd_torch.harness import draw_order

    order = draw_order(job.seed, 0, 90, 90)
    for at in range(0, 90, 30):
        rows = order[at : at + 30]
        optimiser.zero_grad()
        x, y = torch.tensor(job.points.x[rows]), torch.tensor(job.points.y[rows])
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    for name, parameter in module.named_parameters():
        assert np.allclose(ours[f"module.{name}"], parameter.detach(), atol=1e-6)


def test_tied_and_frozen_parameters_survive(make_job, same):
    class Tied(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.base = nn.Linear(20, 20).requires_grad_(False)
            self.one = nn.Linear(20, 20, bias=False)
            self.two = nn.Linear(20, 20, bias=False)
            self.two.weight = self.one.weight
            self.head = nn.Linear(20, classes)

        def forward(self, x):
            return self.head(self.two(self.one(self.base(x))))

    backend = TorchBackend("tied", "1", build=lambda shape, classes: Tied(classes))
    settings = backend.settings({})
    job = make_job(backend, settings)
    after = backend.train(settings, job, "cpu", ignore)
    assert np.array_equal(after["module.base.weight"], job.state["module.base.weight"])
    assert "module.two.weight" not in after
    assert not np.array_equal(after["module.one.weight"], job.state["module.one.weight"])
    assert backend.predictor(settings, [after], "cpu")(job.points.x).shape == (1, 90, 3)


def test_parameters_must_be_float32(make_job):
    backend = TorchBackend("double", "1", build=lambda shape, classes: nn.Linear(20, classes).double())
    with pytest.raises(InputError, match="float64"):
        make_job(backend, backend.settings({}))


def test_what_progress_raises_passes_through(make_job):
    def stop(samples):
        raise KeyboardInterrupt

    settings = BACKEND.settings({})
    with pytest.raises(KeyboardInterrupt):
        BACKEND.train(settings, make_job(BACKEND, settings, shape=SHAPE), "cpu", stop)


def test_it_is_a_backend_and_does_not_claim_to_stack():
    assert isinstance(BACKEND, Backend)
    assert not hasattr(BACKEND, "train_many")
    assert hasattr(MlpBackend(), "train_many")


def test_the_example_in_the_readme_trains(make_job):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    names: dict[str, object] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    found = []
    names["register_backends"](found.append)
    settings = found[0].settings({"channels": 4})
    job = make_job(found[0], settings, shape=(1, 8, 8))
    assert "module.1.running_var" in found[0].train(settings, job, "cpu", ignore)


def test_layers_that_rest_on_purpose_stay_at_rest():
    class Frozen(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.norm = nn.BatchNorm1d(20)
            self.head = nn.Linear(20, classes)

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return self.head(self.norm(x))

    backend = TorchBackend("frozen", "1", build=lambda shape, classes: Frozen(classes))
    settings = backend.settings({"batch_size": 1})
    x = np.random.default_rng(0).standard_normal((5, 20), dtype=np.float32)
    job = Job(backend.initial_state(settings, (20,), 2, 1), Points(x, np.arange(5) % 2), Fraction(2), 1)
    after = backend.train(settings, job, "cpu", ignore)
    assert np.array_equal(after["module.norm.running_mean"], np.zeros(20, np.float32))
