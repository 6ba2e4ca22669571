"""The network that is trained is the model that the engine runs."""

import random
from dataclasses import replace

import pytest
import torch

from dsv4.checkpoint.names import draft_parameters
from dsv4.formats import nvfp4
from dsv4.ops.kv.pool import round_trip_index
from dsv4.testing import _random_tensor, random_weights, small_config
from tests.oracle.harness import exact_runner, run_schedule, whole
from tests.oracle.ties import TieBreaker
from tests.training.choices import recorded_choices
from training import rounding
from training.network import Network, Options

LENGTH = 451
PADDED = 512


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("most_scores", [1 << 28, 1 << 17])
def test_logits_equal_the_engine(seed: int, most_scores: int) -> None:
    config = small_config(index_num_heads=16)
    weights = random_weights(config, seed)
    ids = random.Random(seed).choices(range(config.vocab_size), k=LENGTH)
    padded = torch.tensor([ids + [0] * (PADDED - LENGTH)])
    options = Options(most_scores=most_scores)
    with torch.no_grad(), recorded_choices() as choices:
        result = Network(config).forward(weights, padded, options, torch.ones(1, PADDED))
    ours = result.hidden[0, :LENGTH] @ weights["head.weight"].T
    ties = TieBreaker(config, weights, [ids], [choices])
    expected = run_schedule(exact_runner(config, weights), [ids], whole(LENGTH), ties.step)[0]
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_gradients_reach_every_parameter() -> None:
    config = small_config(num_draft_layers=1, index_head_dim=32)
    weights = random_weights(config, 3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in draft_parameters(config).items():
        weights[name] = _random_tensor(name, parameter, config, generator)
    table = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in weights.items()}
    ids = torch.randint(0, config.vocab_size, (2, 256), generator=generator)
    options = Options(draft=True, rounded=True)
    result = Network(config).forward(table, ids, options, torch.ones(2, 256))
    assert result.draft is not None
    logits = result.hidden @ table["head.weight"].T
    (logits.square().mean() + result.draft.square().mean() + result.index_loss).backward()
    without = [n for n, t in table.items() if t.requires_grad and t.grad is None]
    assert all(name.endswith("gate.bias") for name in without), without


def test_weights_round_as_they_are_stored() -> None:
    generator = torch.Generator().manual_seed(5)
    stack = torch.randn(3, 32, 64, generator=generator)
    for ours, matrix in zip(rounding.nvfp4_values(stack), stack, strict=True):
        packed, scale, global_ = nvfp4.quantize(matrix)
        stored = nvfp4.dequantize(packed, scale, global_.reshape(1))
        torch.testing.assert_close(ours, stored, atol=1e-7, rtol=1e-6)


def test_index_vectors_round_as_the_engine_rounds() -> None:
    x = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(6))
    torch.testing.assert_close(rounding.index_round(x), round_trip_index(x, "fp4"))


def test_the_embedded_shape_is_valid() -> None:
    from training.shape import CONFIG

    assert set(CONFIG.kinds) == {"swa", "csa", "hca"}
    assert replace(CONFIG, num_layers=6) == CONFIG
