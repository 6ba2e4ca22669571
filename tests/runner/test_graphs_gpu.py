"""Graphs on a GPU: replayed steps against ordinary ones and against the CPU, and the guard."""

import random
from importlib import import_module

import pytest
import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import KernelError
from dsv4.model.transformer import Transformer
from dsv4.ops.gemm.weights.repack import repack
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.tools.speed.model import random_table, shape_config
from tests.runner.driver import check_alone, make_stories, ordinary_logits, tell

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def make_runner(device: str, config: ModelConfig, graphs: bool = True) -> Runner:
    choices = EngineConfig(
        device=device,
        dtype="bfloat16",
        kv_format="fp8",
        index_format="fp4",
        max_sequences=5,
        max_context=1024,
        chunk_tokens=128,
        cuda_graphs=graphs,
    )
    settings = resolve(choices, config, has_gpu=True, memory_bytes=2**32)
    torch.manual_seed(0)
    table = random_table(config, torch.device("cpu"))  # the same weights on both
    moved = {name: repack(name, weight.to(device)) for name, weight in table.items()}
    return Runner(Transformer(config, moved, torch.bfloat16), settings)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return shape_config("trial", None)


@pytest.fixture(scope="module")
def runner(config: ModelConfig) -> Runner:
    return make_runner("cuda", config)


@pytest.mark.parametrize("seed", range(5))
def test_two_thousand_steps(runner: Runner, seed: int) -> None:
    """Mixed steps, joins, ends and every option of drawing, queued ahead: over block closes, window
    wraps and page borders. Tokens and log-probabilities are those of each sequence alone, and
    nothing is compiled, added or waited for."""
    rng = random.Random(seed)
    stories = make_stories(rng, 100, runner.buffers.vocab_size, 700)
    torch.cuda.set_sync_debug_mode("error")
    try:
        reserved = torch.cuda.memory_reserved()
        with import_module("dsv4.ops.core.compile_triton").watch_compiles() as compiled:
            assert tell(runner, stories, rng, ahead=True) > 300
        assert torch.cuda.memory_reserved() == reserved
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not compiled
    for story in stories:
        check_alone(story, runner, 128)


def test_graph_logits_are_eager_logits(runner: Runner) -> None:
    """The same tokens for two sequences each: one through graphs, one through ordinary steps."""
    rng = random.Random(2)
    held, twins = ([runner.pages.open() for _ in range(2)] for _ in range(2))
    for counts in ((5, 100), (1, 1), (1, 16), (30, 1), (128, 0), (1, 1), (7, 64), (1, 1)):
        ids = [[rng.randrange(500) for _ in range(count)] for count in counts if count]
        runner.submit([Chunk(*pair, 1) for pair in zip(held, ids, strict=False)])
        replayed = runner.buffers.logits[: len(ids)].clone()
        eager = runner.step([Chunk(*pair, 1) for pair in zip(twins, ids, strict=False)])
        assert torch.equal(replayed, eager)
    for pages in (*held, *twins):
        runner.pages.close(pages)


def test_scores_are_replayed(runner: Runner) -> None:
    """Logits of all tokens of a prompt: those of steps without graphs, and nothing is compiled."""
    rng = random.Random(4)
    ids = rng.choices(range(runner.buffers.vocab_size), k=250)
    wanted = ordinary_logits(runner, ids, 100)
    pages, found = runner.pages.open(), []
    try:
        with import_module("dsv4.ops.core.compile_triton").watch_compiles() as compiled:
            for part in (ids[:40], ids[40:41], ids[41:169], ids[169:]):
                found.append(runner.step([Chunk(pages, part, len(part))]))
    finally:
        runner.pages.close(pages)
    assert not compiled
    assert torch.equal(torch.cat(found), wanted)


def test_the_cpu_agrees(runner: Runner, config: ModelConfig) -> None:
    """The same weights through the references: logits within bf16's reach."""
    rng = random.Random(3)
    ids = [rng.randrange(500) for _ in range(300)]
    there = ordinary_logits(runner, ids, 128).cpu()
    here = ordinary_logits(make_runner("cpu", config), ids, 128)
    error = (there - here).norm(dim=1) / here.norm(dim=1)
    assert float(error.median()) < 0.02, f"median {float(error.median()):.4f}"
    assert float(error.quantile(0.95)) < 0.1, "beyond what near ties in selection explain"


def test_the_guard(runner: Runner) -> None:
    """A compilation, memory, waiting: each inside a strict step after ready raises."""
    runner.guard.arm()
    embed_triton = import_module("dsv4.ops.gemm.embed_triton")
    ids = torch.zeros(3, dtype=torch.int64, device="cuda")
    new = torch.zeros(7, 333, device="cuda", dtype=torch.float16)  # a variant nobody asked for
    with pytest.raises(KernelError, match="compiled"), runner.guard.watch(strict=True):
        embed_triton.run(ids, new, 3, torch.float32)
    held = []
    with pytest.raises(KernelError, match="memory"), runner.guard.watch(strict=True):
        held.append(torch.empty(2**31, dtype=torch.uint8, device="cuda"))
    with pytest.raises(KernelError, match="waited"), runner.guard.watch(strict=True):
        ids.sum().item()


def test_no_reference_runs(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Every op of the warm-up had its kernel: nothing fell back."""
    make_runner("cuda", config)
    assert not [r for r in caplog.records if "slow reference" in r.getMessage()]
