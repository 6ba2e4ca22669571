"""The layout that an engine takes: as asked, or what `plan` recommends for the GPUs it finds."""

from dataclasses import replace

import pytest

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import CapacityError, OptionError
from dsv4.request import SamplingParams
from dsv4.runner import load
from dsv4.runner.ranks.choose import Devices, LayoutChoice, choose_layout, stage_rooms
from dsv4.runner.ranks.cluster import Cluster
from dsv4.runner.ranks.forecast import WeightSizes
from dsv4.runner.settings import resolve
from dsv4.tools.plan_weights import parameter_bytes, scheme_named

GB = 10**9
FLASH = WeightSizes(
    ModelConfig.builtin("flash"),
    parameter_bytes(ModelConfig.builtin("flash"), scheme_named("official")),
)
H200 = Devices(2, "NVIDIA H200", 149 * GB)


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        (None, (1, 1)),
        (replace(H200, count=1), (1, 1)),
        (H200, (2, 1)),
        (replace(H200, count=8), (8, 1)),
        (Devices(4, "NVIDIA H100 PCIe", 84 * GB), (4, 1)),
        (Devices(3, "Some GPU", 84 * GB), (1, 3)),  # two would leave one idle; three are stages
    ],
)
def test_auto_takes_what_plan_recommends(devices: Devices | None, wanted: tuple[int, int]) -> None:
    choice = choose_layout(EngineConfig(), FLASH, devices)
    assert (choice.tp, choice.pp) == wanted
    said = devices is not None and devices.count > 1
    assert choice.why.startswith(f"chosen tp {wanted[0]}, pp {wanted[1]} on ") == said


def test_what_is_asked_for_is_taken() -> None:
    assert choose_layout(EngineConfig(tp=2), FLASH, H200) == LayoutChoice(2, 1)
    assert choose_layout(EngineConfig(tp=1), FLASH, H200) == LayoutChoice(1, 1)
    four = replace(H200, count=4)
    assert choose_layout(EngineConfig(pp=2), FLASH, four).tp == 2  # stages as asked
    assert choose_layout(EngineConfig(pp=3), FLASH, None) == LayoutChoice(1, 3)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (H200, "the layout has 4 ranks on this node, 2 GPUs are visible; lower tp or pp"),
        (replace(H200, mask="1,3"), "2 GPUs are visible (CUDA_VISIBLE_DEVICES is '1,3'); lower tp"),
        (replace(H200, count=1, mask="0"), "1 GPUs are visible (CUDA_VISIBLE_DEVICES is '0')"),
    ],
)
def test_more_ranks_than_gpus(devices: Devices, words: str) -> None:
    with pytest.raises(OptionError) as error:
        choose_layout(EngineConfig(tp=4), FLASH, devices)
    assert words in str(error.value)


def test_too_little_memory() -> None:
    with pytest.raises(CapacityError, match=r"no layout fits: .* 79.7. GB a GPU .* has 40.00 GB"):
        choose_layout(EngineConfig(), FLASH, replace(H200, memory=40 * GB))
    with pytest.raises(OptionError, match="pp is 3, 2 GPUs cannot be shared so; give tp, too"):
        choose_layout(EngineConfig(pp=3), FLASH, H200)
    cluster = replace(Cluster.of("h200", 2), memory=40 * GB)
    with pytest.raises(CapacityError, match=r"a rank of stage 0 has 80.[45]. GB of weights"):
        stage_rooms(FLASH, FLASH.layout(2, 1), cluster)


def test_state_is_sized_for_each_stage() -> None:
    """A stage keeps the state of its own layers: two of them have room for more sequences."""
    cluster = replace(Cluster.of("h200", 2), memory=95 * GB)
    choices = EngineConfig(device="cuda", max_context=1_000_000)
    found = []
    for tp, pp in ((2, 1), (1, 2)):
        rooms = stage_rooms(FLASH, FLASH.layout(tp, pp), cluster)
        settings = resolve(choices, FLASH.config, has_gpu=True, memory_bytes=0, stages=rooms)
        geometry = settings.geometry(FLASH.config)
        for layers, room in rooms:
            held = replace(geometry, layers=layers)
            assert held.state_bytes(settings.max_context, settings.max_sequences) <= room
        found.append(settings.max_sequences)
    assert found[1] >= 2 * found[0]


def test_an_engine_without_options_uses_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, each too small for the embedded model: they share it, and the plan says so."""
    memory = 3 * GB
    monkeypatch.setattr(load, "find_devices", lambda device: Devices(2, "NVIDIA H200", memory))
    assert load.prepare("tiny", EngineConfig()).layout.world == 1  # it fits one
    memory = 2 * GB  # a step alone takes that
    while memory < 3 * GB:
        memory += 2 * 10**6
        try:
            prepared = load.prepare("tiny", EngineConfig(max_context=512, max_sequences=2))
            break
        except CapacityError:
            continue
    assert prepared.layout.world == 2
    assert "; chosen tp " in str(prepared)
    engine = Engine.load(prepared)
    try:
        [answer] = engine.generate(["hi"], SamplingParams(max_tokens=2))
        assert len(answer.token_ids) == 2
    finally:
        engine.close()
