"""The layout that an engine takes: as asked, or what `plan` recommends for the GPUs it finds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine import Engine
from dsv4.errors import CapacityError, OptionError
from dsv4.parallel.layout import RankLayout
from dsv4.request import SamplingParams
from dsv4.runner import load
from dsv4.runner.ranks.choose_layout import Devices, LayoutChoice, choose_layout, stage_memory
from dsv4.runner.ranks.cluster import GPUS, Cluster, published_rates
from dsv4.runner.ranks.devices import check_devices, check_own_gpu
from dsv4.runner.ranks.forecast import WeightSizes
from dsv4.runner.settings import StageMemory, resolve
from dsv4.tools.plan_weights import parameter_bytes, scheme_named

GB = 10**9
FLASH = WeightSizes(
    ModelConfig.builtin("flash"),
    parameter_bytes(ModelConfig.builtin("flash"), scheme_named("official")),
)
PRO = ModelConfig.builtin("pro")
H200 = Devices(2, "NVIDIA H200", 149 * GB)


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [
        (None, (1, 1)),
        (replace(H200, count=1), (1, 1)),
        (H200, (2, 1)),
        (replace(H200, count=8), (8, 1)),
        (Devices(4, "NVIDIA H100 PCIe", 84 * GB), (1, 4)),
        (Devices(3, "Some GPU", 84 * GB), (1, 3)),  # two would leave one idle; three are stages
    ],
)
def test_auto_takes_what_plan_recommends(devices: Devices | None, wanted: tuple[int, int]) -> None:
    choice = choose_layout(EngineConfig(), FLASH, devices)
    assert (choice.tp, choice.pp) == wanted
    said = devices is not None and devices.count > 1
    assert choice.why.startswith(f"chosen tp {wanted[0]}, pp {wanted[1]} on ") == said


def test_auto_reckons_with_the_memory_that_gpus_can_write_to() -> None:
    """As found on this machine, not as is assumed of the card; NCCL also where it is asked for."""
    pcie, sxm = Devices(4, "NVIDIA RTX PRO 6000", 101 * GB), replace(H200, count=8, peers=True)
    found = {
        peers: choose_layout(EngineConfig(), FLASH, replace(pcie, peers=peers))
        for peers in (None, False, True)
    }
    assert (found[None].tp, found[None].pp) == (found[False].tp, found[False].pp) == (2, 2)
    assert (found[True].tp, found[True].pp) == (4, 1)
    assert choose_layout(EngineConfig(), FLASH, sxm).tp == 8
    slower = choose_layout(EngineConfig(comm="nccl"), FLASH, sxm)
    assert slower == choose_layout(EngineConfig(), FLASH, replace(sxm, peers=False))
    assert slower.why != choose_layout(EngineConfig(), FLASH, sxm).why


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GB10", "spark"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"), ("NVIDIA L40S", "l40s"), ("NVIDIA L20", "l20"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000"),
        ("Tesla T4", None),
    ],
)  # fmt: skip
def test_cards_are_known_by_the_names_of_their_drivers(name: str, card: str | None) -> None:
    assert published_rates(name) == (GPUS[card] if card else None)


def test_what_is_asked_for_is_taken() -> None:
    assert choose_layout(EngineConfig(tp=2), FLASH, H200) == LayoutChoice(2, 1)
    assert choose_layout(EngineConfig(tp=1), FLASH, H200) == LayoutChoice(1, 1)
    four = replace(H200, count=4)
    assert choose_layout(EngineConfig(pp=2), FLASH, four).tp == 2  # stages as asked
    assert choose_layout(EngineConfig(pp=3), FLASH, None) == LayoutChoice(1, 3)


def test_homes_have_room_for_more_sequences() -> None:
    """704 sequences of 128k tokens: too many for any other layout of four."""
    many: dict[str, Any] = {"max_sequences": 704, "max_context": 131072}
    with pytest.raises(CapacityError, match="no layout has room"):
        choose_layout(EngineConfig(**many), FLASH, replace(H200, count=4))
    for count, tp in ((4, 4), (8, 8)):
        choices = EngineConfig(attention="dp", **many)
        choice = choose_layout(choices, FLASH, replace(H200, count=count))
        assert (choice.tp, choice.pp) == (tp, 1)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (None, "tp 4 x pp 1 are 4 ranks on a node, expected at most 2, the GPUs that torch sees; "),
        ("1,3", "the GPUs that torch sees (CUDA_VISIBLE_DEVICES=1,3); lower tp or pp, or show"),
    ],
)
def test_more_ranks_than_gpus(
    monkeypatch: pytest.MonkeyPatch, mask: str | None, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if mask is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    settings = resolve(EngineConfig(device="cuda"), FLASH.config, has_gpu=True, memory_bytes=2**62)
    with pytest.raises(OptionError) as error:
        check_devices(settings, RankLayout(4), 1)
    assert words in str(error.value)
    check_devices(settings, RankLayout(4), 2)  # two on each of two nodes
    check_own_gpu("cuda:1", RankLayout(8, rank=5))
    shown = "" if mask is None else " (CUDA_VISIBLE_DEVICES=1,3)"
    with pytest.raises(OptionError) as error:  # on a node with fewer GPUs than rank 0's
        check_own_gpu("cuda:2", RankLayout(8, rank=6))
    assert f"rank 6 needs GPU 3 of its node, found 2 there{shown}; every node" in str(error.value)
    check_devices(replace(settings, device="cpu"), RankLayout(4), 1)


def test_auto_on_several_nodes_uses_them_all() -> None:
    pro = WeightSizes(PRO, parameter_bytes(PRO, scheme_named("official")))
    h100 = Devices(8, "NVIDIA H100 80GB HBM3", 84 * GB)
    choices = EngineConfig(nodes=2, head="10.0.0.1:29500")
    assert (choose_layout(choices, pro, h100).tp, choose_layout(choices, pro, h100).pp) == (8, 2)
    one = Devices(1, "NVIDIA GB10", 109 * GB)
    found = choose_layout(choices, FLASH, one)
    assert found.tp * found.pp == 2
    assert choose_layout(EngineConfig(device="cuda:1"), FLASH, H200) == LayoutChoice(1, 1)


def test_too_little_memory() -> None:
    with pytest.raises(CapacityError, match=r"no layout fits: .* 79.7. GB a GPU .* has 40.00 GB"):
        choose_layout(EngineConfig(), FLASH, replace(H200, memory=40 * GB))
    with pytest.raises(OptionError, match="pp is 3, 2 GPUs cannot be shared so; give tp, too"):
        choose_layout(EngineConfig(pp=3), FLASH, H200)
    cluster = replace(Cluster.of("h200", 2), memory=40 * GB)
    with pytest.raises(CapacityError, match=r"a rank of stage 0 has 80.[45]. GB of weights"):
        stage_memory(FLASH, FLASH.layout(2, 1), cluster, EngineConfig())


def test_state_is_sized_for_each_stage() -> None:
    """A stage keeps the state of its own layers: two of them have room for more sequences."""
    cluster = replace(Cluster.of("h200", 2), memory=95 * GB)
    choices = EngineConfig(device="cuda", max_context=1_000_000)
    found = []
    for tp, pp in ((2, 1), (1, 2)):
        memory = stage_memory(FLASH, FLASH.layout(tp, pp), cluster, choices)
        settings = resolve(choices, FLASH.config, has_gpu=True, memory_bytes=0, stages=memory)
        geometry = settings.geometry(FLASH.config)
        for layers, room in memory:
            held = replace(geometry, layers=layers)
            assert held.state_bytes(settings.max_context, settings.max_sequences) <= room
        found.append(settings.max_sequences)
    assert found[1] >= 2 * found[0]


def test_an_engine_counts_the_exchange_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over NCCL, which was asked for, less is left for sequences."""
    free: list[int] = []

    def memory(*about: Any) -> Sequence[StageMemory]:
        found = stage_memory(*about)
        free.append(found[0][1])
        return found

    monkeypatch.setattr(load, "find_devices", lambda device: Devices(2, "NVIDIA H200", 8 * GB))
    monkeypatch.setattr(load, "stage_memory", memory)
    for comm in ("auto", "nccl"):
        load.prepare("tiny", EngineConfig.make(tp=2, comm=comm))
    assert free[1] < free[0]


def test_an_engine_without_options_uses_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, each too small for the embedded model: they share it, and the plan says so."""
    memory = 3 * GB
    monkeypatch.setattr(load, "find_devices", lambda device: Devices(2, "NVIDIA H200", memory))
    assert load.prepare("tiny", EngineConfig()).layout.world == 1  # it fits one
    low, high, prepared = 2 * GB, 3 * GB, None  # a step alone takes 2 GB
    while high - low > 10**6:  # the least that suffices does so because two share the weights
        memory = (low + high) // 2
        try:
            prepared = load.prepare("tiny", EngineConfig(max_context=512, max_sequences=2))
            high = memory
        except CapacityError:
            low = memory
    assert prepared is not None
    assert prepared.layout.world == 2
    assert "; chosen tp " in str(prepared)
    engine = Engine.load(prepared)
    try:
        [answer] = engine.generate(["hi"], SamplingParams(max_tokens=2))
        assert len(answer.token_ids) == 2
    finally:
        engine.close()
