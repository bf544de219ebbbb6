from __future__ import annotations

import pytest
import torch
from unlearnd_torch.optimisers import learning_rate, make_optimiser
from unlearnd_torch.settings import TrainingSettings

KINDS = [
    ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.0}, torch.optim.SGD, {"lr": 0.1}),
    ({"optimizer": "sgd", "lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.8, "weight_decay": 0.1},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.1},
    ),
    (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    ({"optimizer": "adam", "lr": 0.01}, torch.optim.Adam, {"lr": 0.01}),
    (
        {"optimizer": "adam", "lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-3, "weight_decay": 0.1},
        torch.optim.Adam,
        {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1},
    ),
    ({"optimizer": "adamw", "lr": 0.01}, torch.optim.AdamW, {"lr": 0.01}),
    (
        {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.3},
        torch.optim.AdamW,
        {"lr": 0.01, "weight_decay": 0.3},
    ),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), KINDS)
@pytest.mark.parametrize("schedule", ["constant", "step"])
def test_an_optimiser_agrees_with_the_one_in_torch(ours, theirs, options, schedule):
    settings = TrainingSettings(**ours, schedule=schedule, decay_steps=5, gamma=0.5)
    start = torch.randn(3, 128)
    optimiser = make_optimiser(settings, start.clone())
    parameter = torch.nn.Parameter(start.clone())
    reference = theirs([parameter], **options)
    scheduler = torch.optim.lr_scheduler.StepLR(reference, 5 if schedule == "step" else 1000, 0.5)
    for _ in range(20):
        gradient = torch.randn(3, 128)
        optimiser.gradient.mul_(optimiser.carry).nan_to_num_(0, 0, 0).add_(gradient)
        optimiser.advance(3)
        parameter.grad = gradient.clone()
        reference.step()
        scheduler.step()
    assert torch.allclose(optimiser.weights, parameter.data, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("ours", "theirs", "options"), KINDS)
def test_clipping_agrees_with_torch_and_is_each_rows_own(ours, theirs, options):
    optimiser = make_optimiser(TrainingSettings(**ours, clip_norm=2.0), torch.zeros(2, 128))
    parameters = [torch.nn.Parameter(torch.zeros(128)) for _ in range(2)]
    references = [theirs([parameter], **options) for parameter in parameters]
    for step in range(6):
        gradients = torch.randn(2, 128) * torch.tensor([[0.05], [3.0 if step % 2 else 0.1]])
        optimiser.gradient.mul_(optimiser.carry).nan_to_num_(0, 0, 0).add_(gradients)
        optimiser.advance(2)
        for parameter, reference, gradient in zip(parameters, references, gradients, strict=True):
            parameter.grad = gradient.clone()
            torch.nn.utils.clip_grad_norm_([parameter], 2.0)
            reference.step()
    for row, parameter in zip(optimiser.weights, parameters, strict=True):
        assert torch.allclose(row, parameter.data, rtol=1e-4, atol=1e-6)


def test_a_row_counts_its_own_steps():
    settings = TrainingSettings(optimizer="adam", schedule="cosine", decay_steps=10)
    gradients = torch.randn(6, 1, 64)
    alone = make_optimiser(settings, torch.zeros(1, 64))
    pair = make_optimiser(settings, torch.zeros(2, 64))
    pair.steps[0] = 500
    for gradient in gradients:
        alone.gradient.copy_(gradient)
        alone.advance(1)
        pair.gradient.copy_(gradient.expand(2, 64))
        pair.advance(2)
    assert torch.equal(alone.weights[0], pair.weights[1])
    assert pair.steps == [506, 6]


def test_the_rate_depends_on_the_step_alone():
    warm = TrainingSettings(lr=1.0, warmup_steps=4)
    assert [learning_rate(warm, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = TrainingSettings(lr=1.0, schedule="cosine", decay_steps=10, warmup_steps=2)
    assert learning_rate(cosine, 2) == 1.0
    assert learning_rate(cosine, 7) == pytest.approx(0.5)
    assert learning_rate(cosine, 12) == learning_rate(cosine, 99) == 0.0
    steps = TrainingSettings(lr=1.0, schedule="step", decay_steps=3, gamma=0.5)
    assert [learning_rate(steps, step) for step in (0, 2, 3, 6)] == [1.0, 1.0, 0.5, 0.25]
