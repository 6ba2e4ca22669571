"""Experts that do not all fit: the same answers, whatever stays and whatever moves."""

import random
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.checkpoint import reader
from dsv4.checkpoint.files.mapped import MappedFiles
from dsv4.engine import Engine
from dsv4.errors import CapacityError, CheckpointError, OptionError
from dsv4.request import SamplingParams
from dsv4.runner import load
from dsv4.runner.experts import host_memory, swapper
from dsv4.runner.experts.budget import ExpertBudget, check_host_memory, fit_experts
from dsv4.runner.experts.residency import Residency
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.experts.use import ExpertUse, read_profile, write_profile
from dsv4.testing import random_weights, small_config, write_checkpoint
from tests.checkpoint import writers
from tests.models import write_fast_model

GB = 3e-4  # 12 of the model's 18 experts
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fast_model(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[Any]:
    return answers(Engine.load(folder))


def answers(engine: Engine) -> list[Any]:
    """A batch, then a prompt whose beginning is cached, then a score."""
    long = list(range(1, 60))
    found = engine.generate([long, [5, 6, 7], [9] * 20], PARAMS)
    found += engine.generate([[*long, 3, 4]], PARAMS)
    scores = torch.cat(list(engine.score(long)))
    return [*((done.token_ids, done.logprobs) for done in found), scores.tolist()]


def swapper_of(engine: Engine) -> Swapper:
    swapper = engine._runner.swapper
    assert swapper is not None
    return swapper


def swap_at_random(swapper: Swapper) -> None:
    """Another expert leaves before every step; some swaps take several steps and pieces."""
    rng = random.Random(0)

    def between_steps() -> None:
        residency = swapper.residency
        if residency.is_moving:
            residency.copy_some(residency.layout.nbytes if rng.random() < 0.5 else 3000)
        if residency.is_moving and (rng.random() < 0.3 or not residency.finish_swap()):
            return
        inside, outside = (
            np.argwhere(m).tolist() for m in (residency.resident, ~residency.resident)
        )
        residency.begin_swap(tuple(rng.choice(inside)), tuple(rng.choice(outside)))
        residency.copy_some(residency.layout.nbytes if rng.random() < 0.5 else 1000)
        swapper.num_swaps += 1

    swapper.between_steps = between_steps  # type: ignore[method-assign]


@pytest.mark.parametrize("staged_rows", [1, 8, 10**6])
def test_answers_do_not_depend_on_places(folder: Path, wanted: list[Any], staged_rows: int) -> None:
    engine = Engine.load(folder, expert_memory=GB)
    swapper = swapper_of(engine)
    assert 0 < swapper.residency.budget.missing < swapper.residency.budget.total
    swapper.residency.staged_rows = staged_rows
    swap_at_random(swapper_of(engine))
    assert answers(engine) == wanted
    stats = engine.stats()
    assert stats.num_swaps == swapper.num_swaps > 10
    assert stats.experts_missing == swapper.residency.budget.missing
    assert int(swapper.residency.resident.sum()) == swapper.residency.budget.slots
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize(
    ("layout", "most", "activations"),
    [("official", 0, "a16"), ("modelopt-experts", 0, "a8"), ("official", 1 << 31, "a8")],
)
def test_stored_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, most: int, activations: str
) -> None:
    """Packed experts, with and without global scales, and unpacked ones with rounded inputs."""
    monkeypatch.setattr(load, "MOST_UNPACKED", most)
    writers.save(writers.made(layout), tmp_path)
    params, found = SamplingParams(max_tokens=5, temperature=0, logprobs=1, stop_ids=()), []
    for memory in ("all", 0.0016):
        engine = Engine.load(
            tmp_path, expert_memory=memory, activations=activations, max_context=128
        )
        if memory != "all":
            swapper_of(engine).residency.staged_rows = 5
            swap_at_random(swapper_of(engine))
        answers = engine.generate([[1, 2, 3, 4, 5, 6, 7], [3]], params)
        found.append([(done.token_ids, done.logprobs) for done in answers])
        engine.close()
    assert found[0] == found[1]


def test_blocks_are_found_by_the_offsets_that_kernels_read(folder: Path) -> None:
    engine = Engine.load(folder, expert_memory=GB)
    swap_at_random(swapper_of(engine))
    engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10))
    residency = swapper_of(engine).residency
    base = residency.pool[0].data_ptr()
    seen = set()
    for layer, table in enumerate(residency.tables):
        assert table.offsets.data_ptr() == residency.offsets[layer].data_ptr()
        for expert, block in enumerate(table.blocks):
            assert base + 2 * int(table.offsets[expert]) == block.data_ptr()
            in_pool = 0 <= block.data_ptr() - base < residency.pool.nbytes
            assert in_pool == residency.resident[layer, expert]
            seen.add(block.data_ptr())
    assert len(seen) == residency.budget.total
    area = weakref.ref(residency.host._areas[0])
    del table, block
    engine.close()
    assert area() is None  # nothing holds host memory any more


def test_what_is_visited_most_becomes_resident(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hash layers choose by token: one token alone visits the same experts in every step."""
    monkeypatch.setattr(swapper, "READ_EVERY", 8)
    path = tmp_path / "profile.json"
    engine = Engine.load(folder, expert_memory=2e-4, expert_profile=str(path), draft="off")
    found = swapper_of(engine)
    found._time_share = 1e9
    bias = SamplingParams(max_tokens=36, logit_bias={7: 100.0}, stop_ids=())
    engine.generate([[7]], bias)
    experts = engine._runner.model.blocks[0].ffn.gate.table
    assert experts is not None
    visited = experts[7].tolist()
    assert found.residency.resident[0, visited].all()
    assert found.num_swaps > 0
    engine.close()
    again = Engine.load(folder, expert_memory=2e-4, expert_profile=str(path))
    assert swapper_of(again).residency.resident[0, visited].all()
    assert read_profile(path, 3, 6)[0, visited].min() > 30
    again.close()


def test_even_over_the_layers_without_a_profile() -> None:
    found = ExpertUse(np.zeros((4, 8))).first_residents(14)
    assert sorted(found.sum(1)) == [3, 3, 4, 4]


def test_swaps_need_a_reason() -> None:
    use = ExpertUse(np.array([[9.0, 0.0, 5.0], [4.0, 8.0, 0.0]]))
    resident = np.array([[True, True, False], [False, False, True]])
    assert use.swaps(resident, 9) == [((0, 1), (1, 1)), ((1, 2), (0, 2))]  # 4 for 9: no
    assert use.swaps(resident, 1) == [((0, 1), (1, 1))]
    unused = ExpertUse(np.array([[0.0, 0.0, 0.0, 9.0, 9.0], [0.0, 0.0, 0.0, 9.0, 9.0]]))
    resident = unused.visits == 0
    assert [leaves for leaves, _ in unused.swaps(resident, 4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    counts = np.array([[2**31 - 1, 0, 0], [0, 0, 0]], dtype=np.int32)
    use.read(counts)
    before = use.visits[0, 0]
    counts[0, 0] = -(2**31) + 2  # three more: it has wrapped
    use.read(counts)
    assert use.visits[0, 0] == pytest.approx(before * 0.98 + 3)


def test_a_step_copies_only_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a pause before it; and a swap ends once all pieces are there."""
    engine = Engine.load(folder, expert_memory=GB)
    found = swapper_of(engine)
    residency, now, copied = found.residency, 0.0, []
    copy_some, nbytes = Residency.copy_some, residency.layout.nbytes
    monkeypatch.setattr(
        Residency, "copy_some", lambda self, n: (copied.append(n), copy_some(self, n))
    )
    monkeypatch.setattr(swapper.time, "perf_counter", lambda: now)
    found._last, found._step_s = now, 1e-3
    found._time_share = nbytes / 2.5 / 53e9 / 1e-3  # of a step of 1 ms: three for a swap
    leaves, comes = (tuple(np.argwhere(m)[0]) for m in (residency.resident, ~residency.resident))
    found._planned = [(leaves, comes)]
    for step_s in (1e-3, 1e-3, 60.0, 1e-3):
        now += step_s
        found.between_steps()
    assert copied == pytest.approx([nbytes / 2.5, nbytes / 2.5, 1.5 * nbytes / 2.5], abs=1)
    assert found.num_swaps == 1
    assert residency.resident[comes]
    assert not residency.resident[leaves]
    engine.close()


def test_profiles_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    visits = np.array([[0.5, 3.0], [1.0, 0.0]])
    assert not read_profile(path, 2, 2).any()  # none yet
    write_profile(path, visits)
    assert (read_profile(path, 2, 2) == visits).all()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    with pytest.raises(OptionError, match="another model: 2 layers of 2 experts"):
        read_profile(path, 43, 256)
    for text in ("{", "[]", '{"format": "other"}', path.read_text().replace("0.5", "NaN")):
        path.write_text(text)
        with pytest.raises(OptionError, match="is no profile of experts"):
            read_profile(path, 2, 2)


def test_as_many_stay_as_fit() -> None:
    budget = fit_experts(131 * 10**9, 43, 256, 13_369_344, 6)
    assert budget is not None
    assert budget.gpu_bytes <= 131 * 10**9 < budget.gpu_bytes + 2 * budget.block_bytes
    assert budget.slots + budget.missing == 43 * 256
    assert budget.staged * 43 >= 1.25 * budget.missing
    assert fit_experts(148 * 10**9, 43, 256, 13_369_344, 6) is None
    with pytest.raises(CapacityError, match="hold 7, expected at least the 6"):
        fit_experts(10**8, 43, 256, 13_369_344, 6)
    check_host_memory(budget, budget.host_bytes + 4 * 10**9)
    with pytest.raises(CapacityError, match="of host memory"):
        check_host_memory(budget, budget.host_bytes + 3 * 10**9)


@pytest.mark.parametrize("value", ["some", "0", "-3", "nan", "inf", None, "1e30"])
def test_expert_memory_is_checked(folder: Path, value: Any) -> None:
    with pytest.raises(OptionError, match="expected auto, all or GB"):
        Engine.load(folder, expert_memory=value)


def test_too_little_host_memory_ends_before_loading(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "free_host_memory", lambda: 10**9)
    monkeypatch.setattr(MappedFiles, "tensor", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(CapacityError, match="of host memory"):
        Engine.load(folder, expert_memory=GB)


def test_a_container_limits_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "CONTAINER", tmp_path)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1000)
    assert host_memory.free_host_memory() == 1000
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 150\nactive_file 250\n")
    for text, free in (("900", 600), ("max", 1000), ("5000", 1000)):
        (tmp_path / "memory.max").write_text(f"{text}\n")
        assert host_memory.free_host_memory() == free  # pages of files give way


def test_a_file_that_cannot_be_read_gives_memory_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Residency] = []
    real_close, real_tensor, count = Residency.close, MappedFiles.tensor, 0

    def failing(self: MappedFiles, info: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count > 60:
            raise CheckpointError(f"{info.file}: cannot be mapped")
        return real_tensor(self, info)

    def close(self: Residency) -> None:
        closed.append(self)
        real_close(self)

    monkeypatch.setattr(MappedFiles, "tensor", failing)
    monkeypatch.setattr(Residency, "close", close)
    with pytest.raises(CheckpointError, match="cannot be mapped"):
        Engine.load(folder, expert_memory=GB)
    assert len(closed) == 1
    assert not closed[0].host.blocks


def test_experts_are_read_some_at_a_time(folder: Path) -> None:
    most, seen = 0, []
    fill = Residency.fill

    def filled(self: Residency, layer: int, which: int, first: int, stack: Any) -> int:
        nonlocal most
        most = max(most, stack.shape[0])
        return fill(self, layer, which, first, stack)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residency, "fill", filled)
        patch.setattr(reader, "PIECE_BYTES", 40_000)
        engine = Engine.load(folder, expert_memory=GB, progress=lambda *at: seen.append(at))
    assert 1 <= most < 6
    assert seen[-1][0] == seen[-1][1]
    whole = Engine.load(folder)
    for ours, other in zip(engine._runner.model.blocks, whole._runner.model.blocks, strict=True):
        for name in ("w13", "w2"):
            found, wanted = (getattr(b.ffn.experts, name) for b in (ours, other))
            assert torch.equal(found.dequantize(), wanted)
    engine.close()


MEASURE = """
import sys
from pathlib import Path
from dsv4.checkpoint import reader
from dsv4.engine import Engine
from dsv4.runner.experts.residency import Residency

def anonymous():  # without pages of mapped files, which the kernel reclaims
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("RssAnon:") + 1]) * 1024

def filled(self, *args):
    global most
    most = max(most, anonymous() - before)
    return fill(self, *args)

folder, small, piece = sys.argv[1:]
Engine.load(small, expert_memory=3e-4).close()  # modules, threads
reader.PIECE_BYTES = int(piece)
fill, Residency.fill, most, before = Residency.fill, filled, 0, anonymous()
engine = Engine.load(folder, expert_memory=0.03, max_context=128)
residency = engine._runner.swapper.residency
print(most, residency.pool.nbytes + residency.budget.host_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_needs_little_besides_the_experts(tmp_path: Path, folder: Path) -> None:
    """Resident memory while experts are read: their places, and a few pieces at any time."""
    config = small_config(
        num_layers=2, num_hash_layers=1, compress_ratios=(0, 4), num_experts=32,
        moe_intermediate_size=1024,
    )  # fmt: skip
    write_checkpoint(tmp_path, config, random_weights(config, 0))
    more = []
    for piece in (10**6, 10**9):  # the second: a layer at a time
        command = [sys.executable, "-c", MEASURE, str(tmp_path), str(folder), str(piece)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        most, placed = map(int, run.stdout.split())
        assert placed > 50_000_000
        more.append(most - placed)
    assert more[0] < 6_000_000
    assert more[1] > more[0] + 8_000_000  # the measure sees a layer's matrix


def test_the_plan_of_experts_is_one_line() -> None:
    line = str(ExpertBudget(43, 256, 13_369_344, 9000, 59))
    assert line.startswith("experts: 9,000 of 11,008 (82 %) stay in 121.9")
    assert "\n" not in line
