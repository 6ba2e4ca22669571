"""Warm-up, guard and the graph path of `Runner`, with graphs that only pretend to be captured."""

import random
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.model.transformer import Transformer
from dsv4.ops.core.workspace import freeze_workspaces, workspace
from dsv4.runner import runner as runner_module
from dsv4.runner.compile_guard import CompileGuard
from dsv4.runner.cost import StepCosts
from dsv4.runner.graphs import Graphs
from dsv4.runner.plan import StepPlan
from dsv4.runner.runner import Chunk, Runner
from dsv4.runner.step.shape import StepShape
from dsv4.testing import random_weights, small_config
from tests.runner.driver import check_alone, make_stories, tell
from tests.runner.test_steps import make_runner

CPU = torch.device("cpu")


class PretendGraphs:
    """As `Graphs`, but a replay runs the step; a shape that was not captured is an error."""

    def __init__(self) -> None:
        self.steps: dict[Any, Callable[[], None]] = {}
        self.replays = 0

    def __contains__(self, key: Any) -> bool:
        assert key in self.steps, f"{key} was not captured"
        return True

    def capture(
        self, steps: Iterable[tuple[Any, Callable[[], None]]], done: Callable[[], None]
    ) -> None:
        for key, step in steps:
            self.steps[key] = step
            done()

    def run(self, key: Any) -> None:
        self.replays += 1
        self.steps[key]()


@pytest.fixture
def warm(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Runner, list[tuple[int, int]]]]:
    pytest.importorskip("triton", reason="warm-ups compile")
    monkeypatch.setattr(runner_module, "Graphs", PretendGraphs)
    monkeypatch.setattr(StepCosts, "measure", lambda buffers, run: StepCosts([16, 64], [1, 2]))
    runner, progress = make_runner(sequences=2, context=256, pads=True), []
    runner.warm_up(lambda done, total: progress.append((done, total)))
    yield runner, progress
    freeze_workspaces(CPU, False)


def test_every_piece_is_counted(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    runner, progress = warm
    total = progress[0][1]
    assert progress == [(done, total) for done in range(total + 1)]
    shapes = runner.buffers.shapes()
    assert runner._graphs.steps.keys() == {*shapes, *runner.buffers.batches}
    assert len(shapes) == len(set(shapes))
    runner.pages.check_integrity()
    assert runner.pages.num_free_slots == 2


def test_the_warm_up_plans_every_shape(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    """On a CPU references and their variants for few rows serve them all."""
    runner = warm[0]
    assert runner.plan.served.keys() == {*runner.buffers.shapes(), *runner.buffers.batches}
    assert runner.plan.served[2] == {"sample": ("cpu",), "accept": ("reference",)}
    steps, sampling = runner.plan.summary()
    assert sampling == "every sampling: sample by cpu; accept by reference"
    assert steps.startswith("every step: begin_step, embed")
    servers = {
        name for ops in runner.plan.served.values() for found in ops.values() for name in found
    }
    assert servers == {"reference", "cpu"}


def test_a_plan_names_ranges_of_shapes() -> None:
    plan = StepPlan()
    for context in (4096, 16384):
        for rows in (1, 2, 4, 8, 16):
            server = "few" if rows in (1, 4, 8) or context > 4096 else "many"
            ops = {"embed": ("embed_triton",), "experts": (server, "other")}
            plan.served[StepShape(rows, rows, context, True)] = ops
        plan.served[StepShape(64, 4, context, False)] = {"embed": ("embed_triton",)}
    assert plan.summary() == [
        "every step: embed by embed_triton",
        "every decode: experts by other",
        "decode of 1, 4-8 rows at context 4096 and of 1-16 rows at context 16384: experts by few",
        "decode of 2, 16 rows at context 4096: experts by many",
    ]


def test_scores_come_from_graphs(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    """Logits of all tokens of a chunk, padded or not, have the bits of a step without graphs."""
    runner, plain = warm[0], make_runner(sequences=2, context=256, pads=False)
    rng = random.Random(5)
    pages, others = runner.pages.open(), plain.pages.open()
    for replays, count in enumerate((3, 64, 1, 40)):
        ids = rng.choices(range(plain.model.config.vocab_size), k=count)
        assert count <= runner.scored_tokens
        found = runner.step([Chunk(pages, ids, count)])
        wanted = plain.step([Chunk(others, ids, count)])
        assert torch.equal(found, wanted)
        assert runner._graphs.replays == replays + 1
    runner.pages.close(pages)
    runner.pages.check_integrity()


def test_every_step_has_its_graph(warm: tuple[Runner, list[tuple[int, int]]]) -> None:
    """Whatever traffic there is: prompts, mixed steps, every option."""
    runner, rng = warm[0], random.Random(3)
    stories = make_stories(rng, 6, 61, 70)
    steps = tell(runner, stories, rng, ahead=True)
    sampled = runner._graphs.replays - steps
    assert 0 < sampled <= steps
    for story in stories:
        check_alone(story, runner, 64)


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


@pytest.mark.parametrize(
    ("error", "captured"),
    [(RuntimeError("no capture"), [1, 3]), (torch.cuda.OutOfMemoryError("full"), [1])],
)
def test_a_step_without_a_graph_is_said_once(
    error: Exception,
    captured: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def capture(step: Callable[[], None]) -> str:
        step()
        return "graph"

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs = object.__new__(Graphs)
    graphs._graphs = {}
    graphs._capture = capture  # type: ignore[method-assign,assignment]
    steps = [(key, Mock(side_effect=error if key == 2 else None)) for key in (1, 2, 3)]
    graphs.capture(steps, lambda: None)
    assert list(graphs._graphs) == captured
    assert len(caplog.records) == 1
    assert "one launch at a time" in caplog.text


def test_layers_that_are_alike_are_compiled_once() -> None:
    config = small_config(num_layers=5, compress_ratios=(0, 4, 4, 128, 4), num_hash_layers=2)
    model = Transformer(config, random_weights(config, 1), torch.float32)
    few, layers = model.distinct()
    assert layers == [0, 1, 2, 3]  # 4 is as 2: scored, with ratio 4
    assert few.blocks == [model.blocks[layer] for layer in layers]
    assert len(model.blocks) == 5


def test_costs_bound_the_prompt_tokens_of_a_step() -> None:
    costs = StepCosts([16, 1024, 2048], [10.0, 50.0, 100.0])
    assert costs.at(16) == 10.0
    assert costs.at(1536) == 75.0
    assert costs.budget(0, 50.0) == 1024
    assert costs.budget(10, 50.0) == 896
    assert costs.budget(10, 1.0) == 128  # prompts get on all the same
    assert costs.budget(0, 1e6) == 2048


@pytest.mark.parametrize("fits", [True, False])
def test_the_largest_step_takes_its_memory_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fits: bool
) -> None:
    """Else memory kept for small steps is in pieces that a long prompt cannot use."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    buffers, ran = make_runner(sequences=2, context=4096, pads=True).buffers, list[StepShape]()
    buffers.contexts = [1024, 4096]

    def run(shape: StepShape) -> None:
        ran.append(shape)
        if shape.context == 4096 and not fits:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    costs = StepCosts.measure(buffers, run)
    assert (ran[0].tokens, ran[0].context) == (buffers.tokens[-1], 4096)
    assert len(ran) == 1 + 2 * len(costs.tokens)
    assert {shape.context for shape in ran[1:]} == {1024}
    said = f"{ran[0]} does not fit the GPU: CUDA out of memory; lower chunk_tokens"
    assert (said in caplog.text) != fits


def test_the_guard_sees_compilations() -> None:
    triton = pytest.importorskip("triton", reason="nothing to compile")
    guard = CompileGuard(CPU)
    with guard.watch(strict=True):  # not armed yet: anything goes
        pass
    guard.arm()
    with guard.watch(strict=True):  # sets the hook
        pass

    def compile_something() -> None:
        triton.knobs.compilation.listener(src=SimpleNamespace(name="_new_kernel"))

    try:
        compile_something()  # outside a step
        with pytest.raises(KernelError, match="_new_kernel"), guard.watch(strict=True):
            compile_something()
        with guard.watch(strict=False):
            compile_something()  # no graph: a warning
        assert guard.num_surprises == 2
    finally:
        triton.knobs.compilation.listener = None


def test_the_guard_sees_memory_grow() -> None:
    triton = pytest.importorskip("triton", reason="arming hooks the compiler")
    held = [100]
    guard = CompileGuard(CPU, lambda: held[-1])
    guard.arm()
    with guard.watch(strict=True):
        pass
    with pytest.raises(KernelError, match="50 bytes of memory"), guard.watch(strict=True):
        held.append(150)
    triton.knobs.compilation.listener = None
