"""Experts in host memory on a GPU: graphs, staged prompts and swaps beside them keep every bit."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.formats.quantized import Weight
from dsv4.model.transformer import Transformer
from dsv4.ops.moe.placed import BlockLayout
from dsv4.runner.experts.budget import ExpertBudget
from dsv4.runner.experts.place import PlacedWeights, make_swapper
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.runner import Runner
from dsv4.runner.settings import resolve
from dsv4.tools.bench_ops import random_fp4
from dsv4.tools.speed.model import random_table, shape_config
from tests.runner.driver import make_stories, tell
from tests.runner.test_experts import swap_at_random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CHUNK, STAGED = 256, 100


def make_table(config: ModelConfig) -> dict[str, Weight]:
    """Random weights; routed experts as MXFP4."""
    torch.manual_seed(0)
    table = random_table(config, torch.device("cuda"))
    for name, weight in table.items():
        if ".ffn.experts." in name:
            count, rows, columns = weight.shape
            table[name] = random_fp4(rows, columns, count, name.endswith("w13"), mx=True)
    return table


def placed(table: dict[str, Weight], config: ModelConfig) -> tuple[dict[str, Weight], Swapper]:
    """The same weights, half of the experts in host memory."""
    w13, w2 = (table[f"layers.0.ffn.experts.{name}"] for name in ("w13", "w2"))
    layout, count = BlockLayout.of(w13[0], w2[0]), config.num_layers * config.num_experts
    sizes = config.num_layers, config.num_experts, layout.nbytes
    budget = ExpertBudget(*sizes, count // 2, config.num_experts // 3)
    found = PlacedWeights(make_swapper(layout, budget, None, torch.device("cuda", 0)))
    kept = {name: weight for name, weight in table.items() if not found.take(name, weight)}
    return kept | found.weights(), found.swapper


def make_runner(
    config: ModelConfig, table: dict[str, Weight], swapper: Swapper | None = None
) -> Runner:
    choices = EngineConfig(
        device="cuda", kv_format="fp8", index_format="fp4", max_sequences=5, max_context=1024,
        chunk_tokens=CHUNK,
    )  # fmt: skip
    settings = resolve(choices, config, has_gpu=True, memory_bytes=2**33)
    model = Transformer(config, table, torch.bfloat16)
    return Runner(model, settings, swapper=swapper)


@pytest.mark.parametrize("shape", ["trial", "flash"])
def test_stories_do_not_depend_on_places(shape: str) -> None:
    config = shape_config(shape, 4)
    table = make_table(config)
    whole = make_runner(config, table)
    others, swapper = placed(table, config)
    swapper.residency.staged_rows = STAGED
    runner = make_runner(config, others, swapper)
    assert runner._graphs is not None
    captured = [key for key in runner._graphs._graphs if getattr(key, "tokens", 0) >= STAGED]
    assert not captured
    swap_at_random(swapper)
    told = []
    for each in (whole, runner):
        stories = make_stories(random.Random(1), 40, each.buffers.vocab_size, 700)
        assert tell(each, stories, random.Random(2), ahead=True) > 100
        told.append([(story.token_ids, story.results) for story in stories])
    assert told[0] == told[1]
    assert swapper.num_swaps > 30
    swapper.close()


def test_counts_and_swaps_follow_use() -> None:
    """The policy itself, on counts that kernels made."""
    config = replace(shape_config("trial", 2), num_hash_layers=2)
    others, swapper = placed(make_table(config), config)
    for layer in range(2):
        name = f"layers.{layer}.ffn.gate.tid2eid"
        others[name] = torch.tensor([[6, 7]], device="cuda").expand(config.vocab_size, 2).clone()
    swapper._time_share = 1e9
    runner = make_runner(config, others, swapper)
    assert not swapper.residency.resident[:, 6:8].any()
    before = swapper.residency.counts[:, :8].cpu().numpy()
    stories = make_stories(random.Random(3), 20, config.vocab_size, 128)
    steps = tell(runner, stories, random.Random(4), ahead=True)
    new = swapper.residency.counts[:, :8].cpu().numpy() - before
    assert (new[:, 6:8] == steps).all()
    assert (new[:, :6] == 0).all()
    assert swapper.residency.settled[:, 6:8].all()
    assert np.count_nonzero(swapper.residency.resident) == swapper.residency.budget.slots
    swapper.close()
