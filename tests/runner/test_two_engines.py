"""Two engines of one process, with different settings, leave each other alone."""

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.config import EngineConfig
from dsv4.engine import Engine
from dsv4.errors import KernelError
from dsv4.formats import nvfp4
from dsv4.formats.quantized import Nvfp4Tensor
from dsv4.model.transformer import Transformer
from dsv4.ops import OPS, Kernel, engine_ops
from dsv4.ops.core.context import EngineOps, kernels_on_cpu, kernels_only, record
from dsv4.ops.core.workspace import freeze_workspaces, workspace, workspace_bytes
from dsv4.ops.gemm.weights.repack import repack
from dsv4.request import Request, SamplingParams
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.settings import resolve
from dsv4.runner.step.threads import StepThreads
from dsv4.testing import random_weights
from tests.models import write_quick_model
from tests.runner.test_steps import CONFIG

CPU = torch.device("cpu")


def runner_with(ops: str) -> Runner:
    choices = EngineConfig(
        device="cpu", dtype="float32", ops=ops, max_sequences=1, max_context=256, chunk_tokens=64
    )
    settings = resolve(choices, CONFIG, has_gpu=False, memory_bytes=2**32)
    return Runner(Transformer(CONFIG, random_weights(CONFIG, 5), torch.float32), settings)


def served(runner: Runner) -> set[str]:
    """What serves `embed` in a step of this runner."""
    found: set[str] = set()
    pages = runner.pages.open()
    with kernels_on_cpu(), record(lambda op, by: found.add(by) if op == "embed" else None):
        runner.step([Chunk(pages, [1, 2, 3], 1)])
    runner.pages.close(pages)
    return found


def test_each_runs_the_ops_it_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine forces every op but `embed`, another all of them; both also on other threads."""
    embed = OPS["embed"]
    monkeypatch.setattr(Kernel, "supports", lambda *_: None)
    monkeypatch.setattr(Kernel, "run", lambda _, arguments: embed.reference(**arguments))
    monkeypatch.setattr(Kernel, "label", lambda *_: "kernel")
    some = runner_with(",".join(OPS.keys() - {"embed"}))
    none = runner_with("reference")
    assert served(some) == {"kernel"}
    assert served(none) == {"reference"}
    assert served(some) == {"kernel"}
    found: dict[str, set[str]] = {}
    threads = [
        threading.Thread(target=lambda n=name, r=each: found.update({n: served(r)}))
        for name, each in (("some", some), ("none", none))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"some": {"kernel"}, "none": {"reference"}}


PROMPTS = [list(range(3, 3 + count)) for count in (5, 40, 140)]
SETTINGS: dict[str, dict[str, str | int | bool]] = {
    "exact": {"dtype": "float32", "chunk_tokens": 32},
    "small": {"dtype": "bfloat16", "kv_format": "fp8", "index_format": "fp4", "draft": "lookup"},
}


def test_engines_with_other_settings_answer_as_if_alone(tmp_path: Path) -> None:
    """Steps in turn, then both at once on threads of their own."""
    folder = str(write_quick_model(tmp_path))
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=2)

    def engine(name: str) -> Engine:
        return Engine.load(folder, device="cpu", max_sequences=3, max_context=256, **SETTINGS[name])

    def answers(one: Engine) -> list[tuple[object, object]]:
        return [(list(done.token_ids), done.logprobs) for done in one.generate(PROMPTS, params)]

    alone = {name: answers(engine(name)) for name in SETTINGS}
    assert alone["exact"] != alone["small"]
    both = {name: engine(name) for name in SETTINGS}
    for one in both.values():
        for number, prompt in enumerate(PROMPTS):
            one.add(Request(str(number), tuple(prompt), params))
    tokens: dict[str, dict[str, list[int]]] = {name: {} for name in both}
    while any(one.num_unfinished for one in both.values()):
        for name, one in both.items():
            for output in one.step() if one.num_unfinished else ():
                tokens[name].setdefault(output.request_id, []).extend(output.token_ids)
    for name, found in tokens.items():
        assert [found[str(n)] for n in range(len(PROMPTS))] == [ids for ids, _ in alone[name]]
    with ThreadPoolExecutor() as threads:
        assert dict(zip(both, threads.map(answers, both.values()), strict=True)) == alone


def test_a_small_model_leaves_the_threads_to_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread suits a small model, but only during its own steps."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(StepThreads, "_outside", 1)  # is 1 again after the test
    small = runner_with("auto")
    monkeypatch.setattr("dsv4.runner.settings.SMALL_HIDDEN", 0)
    large, before, seen = runner_with("auto"), torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        for runner in (small, large):
            pages = runner.pages.open()
            with record(lambda *_: seen.append(torch.get_num_threads())):
                runner.step([Chunk(pages, [1, 2, 3], 1)])
            assert set(seen) == {1 if runner is small else 2}
            assert torch.get_num_threads() == 2
            seen.clear()
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_begins_in_a_small_step_gets_all_threads_in_large_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch hands a new thread the count of whoever set it last, for good."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(StepThreads, "_outside", 1)  # is 1 again after the test
    small, another_small = runner_with("auto"), runner_with("auto")
    monkeypatch.setattr("dsv4.runner.settings.SMALL_HIDDEN", 0)
    large, before = runner_with("auto"), torch.get_num_threads()
    stepping, done = threading.Event(), threading.Event()
    seen: dict[str, set[int]] = {}

    def counts(name: str, runner: Runner, wait: bool = False) -> None:
        def recorded(*_: object) -> None:
            seen.setdefault(name, set()).add(torch.get_num_threads())
            if wait:
                stepping.set()
                assert done.wait(60)

        pages = runner.pages.open()
        with record(recorded):
            runner.step([Chunk(pages, [1, 2, 3], 1)])
        runner.pages.close(pages)

    def in_between() -> None:
        assert torch.get_num_threads() == 1
        counts("loaded elsewhere", large)
        counts("loaded here", runner_with("auto"))
        counts("small, too", another_small)

    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            small_step = first.submit(counts, "small", small, wait=True)
            assert stepping.wait(60)
            second.submit(in_between).result()
            done.set()
            small_step.result()
            second.submit(counts, "later", large).result()
            assert first.submit(torch.get_num_threads).result() == 2
        with ThreadPoolExecutor(1) as third:
            assert third.submit(torch.get_num_threads).result() == 2
    finally:
        done.set()
        torch.set_num_threads(before)
    assert seen == {
        "small": {1}, "small, too": {1}, "loaded elsewhere": {2}, "loaded here": {2}, "later": {2},
    }  # fmt: skip


def test_a_closed_engine_leaves_no_scratch() -> None:
    """What steps of few rows on a CPU keep belongs to the engine."""

    def refers() -> tuple[weakref.ref[object], ...]:
        runner = runner_with("auto")
        pages = runner.pages.open()
        runner.step([Chunk(pages, [1], 1)])
        kept = vars(runner.ops.scratch)
        assert {key[0] for key in kept} >= {"mix", "rotations"}
        found = (next(value for key, value in kept.items() if key[0] == "mix"), runner.ops)
        return tuple(map(weakref.ref, found))

    held = refers()
    gc.collect()
    assert [refer() for refer in held] == [None, None]


def test_a_second_warm_up_leaves_the_buffers_of_captured_graphs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = engine_ops("auto"), engine_ops("auto")
    with first.active():
        held = workspace(CPU, "partials", 2000, torch.float32)
        freeze_workspaces(CPU)
    with second.active():
        freeze_workspaces(CPU, False)
        assert workspace_bytes(CPU) == 0
        assert workspace(CPU, "partials", 5000, torch.float32).numel() == 5000
        freeze_workspaces(CPU)
    with first.active():
        assert workspace(CPU, "partials", 2000, torch.float32) is held
        assert workspace_bytes(CPU) == 4 * 2000
        assert not caplog.records
        workspace(CPU, "partials", 3000, torch.float32)
    assert "grows from 2000 to 3000" in caplog.text


def test_each_is_told_why_activations_stay_wide(caplog: pytest.LogCaptureFixture) -> None:
    """A second engine hears it too, and a strict one refuses although another was told."""
    packed, scale, factor = nvfp4.quantize(torch.randn(128, 256))
    weight = Nvfp4Tensor(packed, scale, factor.reshape(1), activations="a8")
    with caplog.at_level(logging.WARNING, "dsv4"):
        for _ in range(2):
            with EngineOps().active():
                repack("layers.0.attn.wq_a.weight", replace(weight))
                repack("layers.1.attn.wq_a.weight", replace(weight))
    assert len(caplog.records) == 2
    with kernels_only(), EngineOps().active(), pytest.raises(KernelError, match="powers of two"):
        repack("layers.0.attn.wq_a.weight", replace(weight))


def test_compiles_are_seen_by_the_thread_that_causes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton", reason="nothing is compiled")
    from types import SimpleNamespace

    from dsv4.ops.core.compile_triton import watch_compiles

    def compile_one(name: str) -> None:
        triton.knobs.compilation.listener(src=SimpleNamespace(name=name), cache_hit=False)

    users: list[str] = []  # of a profiler, say
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: users.append(src.name)
    )
    with watch_compiles() as outer:
        compile_one("a")
        other = threading.Thread(target=compile_one, args=("of another engine",))
        other.start()
        other.join()
        with watch_compiles() as inner:
            compile_one("b")
    compile_one("later")
    assert (outer, inner) == (["a", "b"], ["b"])
    assert users == ["a", "of another engine", "b", "later"]
