"""Warm-up, guard and the graph path of `Runner`, with graphs that only pretend to be captured."""

import random
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from dsv4.cache.geometry import Geometry
from dsv4.errors import KernelError
from dsv4.formats.entry import kv_entry
from dsv4.ops.attention.attention import Compressed
from dsv4.ops.kv.pool import allocate_pool
from dsv4.ops.workspace import freeze_workspaces, workspace
from dsv4.request import SamplingParams
from dsv4.runner import runner as runner_module
from dsv4.runner.buffers import Bucket, DecodeBuffers, context_sizes
from dsv4.runner.guard import Guard
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.warmup import Forms, prompt_lengths, prompt_shapes
from dsv4.sampling import Draw, sample_batch
from dsv4.tools.speed.model import shape_config
from tests.runner.test_decode import make_runner

CPU = torch.device("cpu")


class PretendGraphs:
    """As `Graphs`, but a replay runs the step; a bucket that was not captured is an error."""

    def __init__(self, step: Callable[[Bucket], None]) -> None:
        self.step, self.captured, self.replays = step, set(), 0

    def capture(self, buckets: list[Bucket], done: Callable[[], None]) -> None:
        for bucket in buckets:
            self.captured.add(bucket)
            done()

    def run(self, bucket: Bucket) -> None:
        assert bucket in self.captured
        self.replays += 1
        self.step(bucket)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="warm-ups compile, forms are those of kernels")
    module = import_module("dsv4.ops.attention.attention_triton")
    monkeypatch.setattr(module, "capability", lambda: 90)


@pytest.fixture
def warm(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Runner, list[tuple[int, int]]]]:
    monkeypatch.setattr(runner_module, "Graphs", PretendGraphs)
    runner, progress = make_runner(sequences=2, context=256), []
    runner.warm_up(5, lambda done, total: progress.append((done, total)))
    yield runner, progress
    freeze_workspaces(CPU, False)


def test_every_piece_is_counted(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    runner, progress = warm
    total = progress[0][1]
    assert progress == [(done, total) for done in range(1, total + 1)]
    assert runner._graphs.captured == set(runner.decoder.buffers.buckets())
    runner.pages.check_integrity()
    assert runner.pages.num_free_slots == 2


def test_a_workspace_that_grows_late_leaves_the_old_one_to_the_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    old = workspace(CPU, "late", 2000, torch.float32)
    address = old.data_ptr()
    del old
    freeze_workspaces(CPU)
    try:
        assert workspace(CPU, "late", 10, torch.float32).data_ptr() == address
        assert not caplog.records
        new = workspace(CPU, "late", 5000, torch.float32)
    finally:
        freeze_workspaces(CPU, False)
    assert "grows from 2000 to 5000" in caplog.text
    assert new.numel() == 5000
    others = [torch.zeros(2000) for _ in range(20)]  # nobody gets the memory graphs write to
    assert address not in [other.data_ptr() for other in others]


def test_steps_through_graphs(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    """Logits and tokens of decode steps come from replays and are those of ordinary steps."""
    runner, plain = warm[0], make_runner(sequences=2, context=256)
    rng = random.Random(0)
    prompts = [[rng.randrange(61) for _ in range(n)] for n in (3, 70)]
    plans = (
        [SamplingParams(temperature=0.8, top_p=0.9)] * 2,  # drawn inside the step
        [SamplingParams(temperature=0.8), SamplingParams(presence_penalty=0.5, logprobs=3)],
    )
    for params in plans:
        results = []
        for each in (runner, plain):
            held, tokens = [each.pages.open() for _ in prompts], [list(p) for p in prompts]
            for pages, ids in zip(held, prompts, strict=True):
                for start in range(0, len(ids) - 1, 64):
                    each.step([Chunk(pages, ids[start : min(start + 64, len(ids) - 1)], 0)])
            drawn = []
            for _ in range(6):
                draws = [
                    Draw(p, 7, prompt, ids[len(prompt) :])
                    for p, prompt, ids in zip(params, prompts, tokens, strict=True)
                ]
                chunks = [Chunk(p, ids[-1:], 1) for p, ids in zip(held, tokens, strict=True)]
                drawn.append(each.step_tokens(chunks, draws))
                for ids, result in zip(tokens, drawn[-1], strict=True):
                    ids.append(result.token_id)
            for pages in held:
                each.pages.close(pages)
            results.append(drawn)
        assert results[0] == results[1]
    assert runner._graphs.replays == 13  # one was queued for sequences that then ended


def test_a_mixed_step_is_ordinary(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    runner, plain = warm[0], make_runner(sequences=2, context=256)
    logits = []
    for each in (runner, plain):
        first, second = each.pages.open(), each.pages.open()
        each.step([Chunk(first, [1, 2, 3], 0)])
        logits.append(each.step([Chunk(first, [4], 1), Chunk(second, [5, 6, 7], 1)]))
    assert torch.equal(*logits)
    assert runner._graphs.replays == 0


def test_sampled_rows_match_sample_batch() -> None:
    runner = make_runner(sequences=1, context=256)
    pages = runner.pages.open()
    draws = [Draw(SamplingParams(temperature=0.7), 3, [1, 2, 3], [])]
    found = runner.step_tokens([Chunk(pages, [1, 2, 3], 1)], draws)
    runner.pages.close(pages)
    again = runner.pages.open()
    assert found == sample_batch(runner.step([Chunk(again, [1, 2, 3], 1)]), draws)


@pytest.mark.parametrize(("shape", "chunk"), [("flash", 8192), ("pro", 2048), ("tiny", 300)])
def test_prompts_need_every_form_that_any_prompt_needs(
    hopper: None, shape: str, chunk: int
) -> None:
    config = shape_config(shape, 4)
    geometry = Geometry(config, "fp8", "fp8", chunk_tokens=chunk)
    contexts = context_sizes(65536)
    forms = Forms(geometry, torch.bfloat16)
    shapes = prompt_shapes(chunk, chunk + 31, contexts, forms)
    assert shapes[0] == (chunk + 31, contexts[-1])
    assert len(shapes) == len(set(shapes)) < 60
    seen = set().union(*(forms(*each) for each in shapes))
    rng = random.Random(chunk)
    for _ in range(2000):
        tokens = rng.randint(1, rng.choice((40, 300, chunk)))
        assert forms(tokens, rng.choice(contexts)) <= seen


def test_forms_are_those_that_attention_chooses_for_the_tables_of_a_step(hopper: None) -> None:
    module = import_module("dsv4.ops.attention.attention_triton")
    config = shape_config("flash", 4)
    geometry = Geometry(config, "fp8", "fp8", chunk_tokens=512)
    forms = Forms(geometry, torch.bfloat16)
    pool = allocate_pool("fp8", False, kv_entry("fp8", 512, 64), (1, 32), "cpu")
    seen = set()
    for context, tables in DecodeBuffers(geometry, 1, 65536, CPU).tables.items():
        for tokens in (1, 8, 32, 64, 500):
            q = torch.empty(tokens, config.num_heads, config.head_dim, dtype=torch.bfloat16)
            for ratio, name in ((4, "csa"), (128, "hca")):
                table = tables[name]
                chosen = torch.empty(tokens, min(config.index_topk, 32 * table.shape[1]))
                compressed = Compressed(pool, table, ratio, chosen if ratio == 4 else None)
                found = module.config_of(
                    q, pool, tables["window"], compressed, config.sliding_window, 64
                )
                assert (ratio, found) in forms(tokens, context)
                seen.add(found)
    assert len(seen) >= 4


def test_prompt_lengths_pass_every_power_of_two() -> None:
    assert prompt_lengths(2048) == [2, 5, 9, 17, 33, 65, 129, 257, 513, 1025, 2048]
    assert prompt_lengths(2) == [2]
    assert prompt_lengths(1) == [1]


def test_the_guard_sees_compilations() -> None:
    triton = pytest.importorskip("triton", reason="nothing to compile")
    guard = Guard(CPU)
    with guard.watch(decoding=True):  # not armed yet: anything goes
        pass
    guard.arm()

    def compile_something() -> None:
        triton.knobs.runtime.jit_cache_hook(fn=SimpleNamespace(name="_new_kernel"))

    try:
        compile_something()  # outside a step
        with pytest.raises(KernelError, match="_new_kernel"), guard.watch(decoding=True):
            compile_something()
        with guard.watch(decoding=False):
            compile_something()  # a prompt's shape: a warning
        assert guard.num_surprises == 2
    finally:
        triton.knobs.runtime.jit_cache_hook = None


def test_the_guard_sees_memory_grow() -> None:
    triton = pytest.importorskip("triton", reason="arming hooks the compiler")
    held = [100]
    guard = Guard(CPU, lambda: held[-1])
    guard.arm()
    with guard.watch(decoding=True):
        pass
    with pytest.raises(KernelError, match="50 bytes of memory"), guard.watch(decoding=True):
        held.append(150)
    triton.knobs.runtime.jit_cache_hook = None
