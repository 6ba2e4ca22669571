"""Experts that do not all fit: the same answers, whatever stays and whatever moves."""

import json
import random
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.engine import Engine
from dsv4.errors import OptionError
from dsv4.request import SamplingParams
from dsv4.runner import load
from dsv4.runner.experts import place, swapper
from dsv4.runner.experts.budget import ExpertBudget
from dsv4.runner.experts.residency import Residency
from dsv4.runner.experts.swapper import Swapper
from dsv4.runner.experts.usage import ExpertProfile, ExpertUse, read_profile, write_profile
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
    profile = swapper_of(again).profile
    assert profile is not None
    assert profile.model == folder.name
    assert read_profile(profile, 3, 6)[0, visited].min() > 30
    again.close()


def test_a_profile_without_use_is_named(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    Engine.load(folder, expert_profile=str(path)).close()
    assert f"expert_profile {path} is not used: all experts stay" in caplog.text
    assert not path.exists()


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
    found._time_share = (
        nbytes / 2.5 / (swapper.COPY_GBS * 1e9) / 1e-3
    )  # of a step of 1 ms: three for a swap
    leaves, comes = (tuple(np.argwhere(m)[0]) for m in (residency.resident, ~residency.resident))
    found._planned = [(leaves, comes)]
    for step_s in (1e-3, 1e-3, 60.0, 1e-3):
        now += step_s
        found.between_steps()
    assert copied == pytest.approx([nbytes / 2.5, nbytes / 2.5, 1.5 * nbytes / 2.5], abs=1)
    assert found.num_swaps == 1
    assert residency.resident[comes]
    assert not residency.resident[leaves]
    # missing experts that take the bus for as long as a step leave half as much to copies
    found._planned, found._step_s = [(comes, leaves)], 1e-3
    found._counts.copy_(residency.counts)
    visits = round(1e-3 * swapper.COPY_GBS * 1e9 / nbytes * swapper.READ_EVERY)
    found._counts[leaves] += visits
    found.use.visits = found.use.visits * 0
    found.use.read(residency.counts[:, : residency.budget.num_experts].numpy())
    found._read()
    found._planned, now = [(comes, leaves)], now + 1e-3
    found.between_steps()
    assert copied[-1] == pytest.approx(nbytes / 5, rel=0.02)
    # also if a prompt among the counted steps missed far more than a step has time for
    found._missing_s, now = 1.0, now + 1e-3
    found.between_steps()
    assert copied[-1] == pytest.approx(nbytes / 5, rel=0.02)
    # a clock that stands still once does not end swaps
    found.between_steps()
    assert found._step_s > 0
    for _ in range(20):
        now += 1e-3
        found.between_steps()
    assert found._step_s == pytest.approx(1e-3)
    assert found.num_swaps == 2
    engine.close()


@pytest.mark.parametrize(
    ("card", "gbs"),
    [
        ("NVIDIA H200", 51), ("NVIDIA A100-SXM4-80GB", 25.5), ("NVIDIA GH200 480GB", 300),
        ("NVIDIA GeForce RTX 4090", 25.5), ("NVIDIA GB200", 300), ("NVIDIA GB10", 273),
        ("Tesla T4", 25.5),
    ],
)  # fmt: skip
def test_copies_take_their_share_of_the_cards_own_bus(
    card: str, gbs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long on a slow bus as on a fast one, so that a step gets at most 2 % longer on each."""
    now, copied = 0.0, list[int]()
    moved = SimpleNamespace(
        counts=torch.zeros(2, 4, dtype=torch.int32), on_gpu=False, is_moving=True,
        finish_swap=lambda: False, copy_some=copied.append,
    )  # fmt: skip
    monkeypatch.setattr(place, "Residency", lambda *_: moved)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: card)
    monkeypatch.setattr(swapper.time, "perf_counter", lambda: now)
    layout: Any = SimpleNamespace(nbytes=1 << 20)
    budget = ExpertBudget(2, 4, layout.nbytes, 4, 1)
    found = place.make_swapper(layout, budget, None, torch.device("cuda"))
    found._arriving = SimpleNamespace(query=lambda: False)  # no counts
    for _ in range(100):
        now += 0.01
        found.between_steps()
    assert 0.017 < copied[-1] / (gbs * 1e9) / 0.01 < 0.02


def test_counts_that_arrive_late_are_of_more_steps(folder: Path) -> None:
    engine = Engine.load(folder, expert_memory=GB)
    found = swapper_of(engine)
    for step in range(1, 3 * swapper.READ_EVERY + 1):
        if step == swapper.READ_EVERY + 1:
            found._arriving = SimpleNamespace(query=lambda: False)
        if step == 2 * swapper.READ_EVERY + 1:
            found._arriving = None
        found.between_steps()
    assert found._span == 2 * swapper.READ_EVERY
    missing = np.argwhere(~found.residency.settled)[0]
    found._counts[tuple(missing)] += 640
    found._read()
    expected = 10 * found.residency.layout.nbytes / (swapper.COPY_GBS * 1e9)
    assert found._missing_s == pytest.approx(expected)
    engine.close()


def test_a_swap_that_fails_loses_no_request(
    folder: Path,
    wanted: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine.load(folder, expert_memory=GB)
    found = swapper_of(engine)
    residency = found.residency
    leaves, comes = (tuple(np.argwhere(m)[0]) for m in (residency.resident, ~residency.resident))
    found._planned = [(leaves, comes)] * 9

    def failing(self: Residency, nbytes: int) -> None:
        self._spare_slot.fill_(255)  # a copy that ended half-way
        raise RuntimeError("planted error")

    monkeypatch.setattr(Residency, "copy_some", failing)
    assert answers(engine) == wanted
    lines = [line for line in caplog.messages if "planted error" in line]
    assert lines == ["experts are no longer swapped, answers go on (RuntimeError: planted error)"]
    engine.check_integrity()
    engine.close()


def test_a_profile_that_fails_gives_memory_back(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.load(folder, expert_memory=GB, expert_profile=str(tmp_path / "profile.json"))
    found = swapper_of(engine)

    def failing(*args: Any) -> None:
        raise RuntimeError("planted error")

    monkeypatch.setattr(swapper, "write_profile", failing)
    with pytest.raises(RuntimeError, match="planted error"):
        found.close()
    assert not found.residency.host.blocks


def test_profiles_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    visits = np.array([[0.5, 3.0], [1.0, 0.0]])
    profile = ExpertProfile(path, "flash", "1234")
    assert not read_profile(profile, 2, 2).any()  # none yet
    write_profile(profile, visits)
    assert (read_profile(profile, 2, 2) == visits).all()
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    with pytest.raises(OptionError, match="another model: 2 layers of 2 experts"):
        read_profile(profile, 43, 256)
    for text in ("{", "[]", '{"format": "other"}', path.read_text().replace("0.5", "NaN")):
        path.write_text(text)
        with pytest.raises(OptionError, match="is no profile of experts"):
            read_profile(profile, 2, 2)


def test_a_profile_of_other_weights_is_refused(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another model of the same shape differs in its values alone; an older profile names none."""
    path, other = tmp_path / "profile.json", tmp_path / "tuned"
    choices: dict[str, Any] = {"expert_memory": 2e-4, "expert_profile": str(path), "draft": "off"}
    Engine.load(folder, **choices).close()
    shutil.copytree(folder, other)
    Engine.load(other, **choices).close()  # the same files elsewhere
    [weights] = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2 :] = bytes(value ^ 1 for value in data[len(data) // 2 :])
    weights.write_bytes(data)
    before = path.read_text()
    with pytest.raises(OptionError) as refused:
        Engine.load(other, **choices)
    assert "of another model, 'tuned'; this one, 'tuned', has other weights" in str(refused.value)
    assert path.read_text() == before
    found = json.loads(before)
    path.write_text(json.dumps({k: v for k, v in found.items() if k not in ("model", "digest")}))
    caplog.clear()
    Engine.load(folder, **choices).close()
    says = f"does not say of which model it is; it is used, and will say {folder.name!r}"
    assert says in caplog.text
    assert json.loads(path.read_text())["model"] == folder.name
