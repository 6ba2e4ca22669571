"""Graphs on a GPU: replayed steps against ordinary ones and against the CPU, and the guard."""

import random
from importlib import import_module

import pytest
import torch

from dsv4.config import EngineConfig, ModelConfig
from dsv4.errors import KernelError
from dsv4.model.transformer import Transformer
from dsv4.ops.gemm.packed import repack
from dsv4.request import SamplingParams
from dsv4.runner.decode import AHEAD, Row
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.sampling import Draw, sample_batch
from dsv4.tools.speed.model import random_table, shape_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEPS = 600


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
    return shape_config("tiny", None)


@pytest.fixture(scope="module")
def runner(config: ModelConfig) -> Runner:
    return make_runner("cuda", config)


def prefill(runner: Runner, ids: list[int]):  # type: ignore[no-untyped-def]
    """Pages that hold all but the last token, which comes next."""
    pages = runner.pages.open()
    for start in range(0, len(ids) - 1, 128):
        runner.step([Chunk(pages, ids[start : min(start + 128, len(ids) - 1)], 0)])
    return pages


def teacher_forced(runner: Runner, ids: list[int], first: int) -> torch.Tensor:
    pages = runner.pages.open()
    parts = []
    for start in range(0, len(ids), 128):
        chunk = ids[start : start + 128]
        parts.append(runner.step([Chunk(pages, chunk, len(chunk))]).clone())
    runner.pages.close(pages)
    return torch.cat(parts)[first:]


def test_six_hundred_replays(runner: Runner) -> None:
    """Tokens and log-probabilities of queued replays are those of prompts, bit for bit: over
    block closes, window wraps and page borders, three sequences in a bucket of four."""
    rng = random.Random(1)
    prompts = [[rng.randrange(500) for _ in range(n)] for n in (3, 61, 127)]
    params = SamplingParams(temperature=0.9, top_p=0.9)
    rows = [
        Row(prefill(runner, ids), ids[-1], Draw(params, seed, ids, []))
        for seed, ids in enumerate(prompts)
    ]
    decoder = runner.decoder
    decoder.place(rows)
    results: list[list] = []  # type: ignore[type-arg]
    for step in range(STEPS + AHEAD - 1):
        if step < STEPS:
            torch.cuda.set_sync_debug_mode("error")  # pages and tables included
            decoder.submit()
            torch.cuda.set_sync_debug_mode("default")
        if step >= AHEAD - 1:
            results.append(decoder.read())
    for place, ids in enumerate(prompts):
        tokens = [result[place].token_id for result in results]
        logits = teacher_forced(runner, ids + tokens[:-1], len(ids) - 1)
        draws = [Draw(params, place, ids, tokens[:count]) for count in range(STEPS)]
        again = sample_batch(logits, draws)
        assert [r.token_id for r in again] == tokens
        assert [r.logprob for r in again] == [result[place].logprob for result in results]
        runner.pages.close(rows[place].pages)
    runner.pages.check_integrity()


def test_graph_logits_are_eager_logits(runner: Runner) -> None:
    rng = random.Random(2)
    prompts = [[rng.randrange(500) for _ in range(n)] for n in (5, 130)]
    held = [prefill(runner, ids) for ids in prompts]
    for _ in range(9):
        chunks = [Chunk(pages, [7], 1) for pages in held]
        lengths = [pages.length for pages in held]
        replayed = runner.step(chunks).clone()
        for pages, length in zip(held, lengths, strict=True):
            pages.length = length
        graphs, runner._graphs = runner._graphs, None
        eager = runner.step(chunks)
        runner._graphs = graphs
        assert torch.equal(replayed, eager)
    for pages in held:
        runner.pages.close(pages)


def test_the_cpu_agrees(runner: Runner, config: ModelConfig) -> None:
    """The same weights through the references: logits within bf16's reach."""
    rng = random.Random(3)
    ids = [rng.randrange(500) for _ in range(300)]
    there = teacher_forced(runner, ids, 0).cpu()
    here = teacher_forced(make_runner("cpu", config), ids, 0)
    error = (there - here).norm(dim=1) / here.norm(dim=1)
    assert float(error.median()) < 0.02, f"median {float(error.median()):.4f}"
    assert float(error.quantile(0.95)) < 0.1, "beyond what near ties in selection explain"


def test_a_thousand_joins_and_leaves(runner: Runner) -> None:
    rng = random.Random(4)
    params = SamplingParams(temperature=0.0)
    prompts = [[rng.randrange(500) for _ in range(rng.randint(1, 40))] for _ in range(40)]
    live: dict[int, list] = {}  # type: ignore[type-arg]
    finished: dict[int, list[int]] = {}
    waiting, events = list(range(40)), 0
    while (waiting or live) and events < 3000:
        events += 1
        if waiting and len(live) < 5 and rng.random() < 0.7:
            number = waiting.pop()
            live[number] = [prefill(runner, prompts[number]), []]
        chosen = rng.sample(sorted(live), len(live))
        if not chosen:
            continue
        rows = []
        for number in chosen:
            pages, tokens = live[number]
            newest = (prompts[number] + tokens)[-1]
            rows.append(Row(pages, newest, Draw(params, 0, prompts[number], list(tokens))))
        runner.decoder.place(rows)
        count = rng.randint(1, AHEAD)
        for _ in range(count):
            runner.decoder.submit()
        for _ in range(count):
            for number, result in zip(chosen, runner.decoder.read(), strict=True):
                live[number][1].append(result.token_id)
        for number in chosen:
            if len(live[number][1]) > 50 or rng.random() < 0.05:
                pages, finished[number] = live.pop(number)
                runner.pages.close(pages)
    for number, tokens in finished.items():
        ids = prompts[number]
        logits = teacher_forced(runner, ids + tokens[:-1], len(ids) - 1)
        assert logits.argmax(1).tolist() == tokens, number
    runner.pages.check_integrity()


def test_the_guard(runner: Runner) -> None:
    """A compilation, memory, waiting: each inside a decode step after ready raises."""
    embed_triton = import_module("dsv4.ops.gemm.embed_triton")
    ids = torch.zeros(3, dtype=torch.int64, device="cuda")
    new = torch.zeros(7, 333, device="cuda", dtype=torch.float16)  # a variant nobody asked for
    with pytest.raises(KernelError, match="compiled"), runner.guard.watch(decoding=True):
        embed_triton.run(ids, new, 3, torch.float32)
    held = []
    with pytest.raises(KernelError, match="memory"), runner.guard.watch(decoding=True):
        held.append(torch.empty(2**31, dtype=torch.uint8, device="cuda"))
    with pytest.raises(KernelError, match="waited"), runner.guard.watch(decoding=True):
        ids.sum().item()


def test_no_reference_runs(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Every op of the warm-up had its kernel: nothing fell back."""
    make_runner("cuda", config)
    assert not [r for r in caplog.records if "slow reference" in r.getMessage()]
