"""What kernels choose for a GPU: on sm_90 and sm_100 as measured, elsewhere what fits."""

import json
from collections.abc import Iterator
from dataclasses import astuple, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.errors import OptionError
from dsv4.ops.core import gpu
from dsv4.ops.core.gpu import KNOWN, Gpu, assume

pytest.importorskip("triton", reason="choices are made in the kernels' modules")
MMA = [gpu for gpu in KNOWN.values() if gpu.products == "mma"]
ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 512, 1024, 4096, 8192)


def of(gpu: Gpu, architecture: int) -> Gpu:
    return replace(gpu, architecture=architecture)


STEPS = (  # tokens, sequences, context
    (1, 1, 4096), (1, 1, 131072), (8, 8, 4096), (32, 32, 4096), (32, 32, 131072), (128, 128, 16384),
    (2048, 1, 8192), (2048, 1, 131072),
)  # fmt: skip


def attention_choices(heads: int, ratio: int, chosen: int) -> Iterator[tuple[object, ...]]:
    kernel = import_module("dsv4.ops.attention.attention_triton")
    for tokens, sequences, context in STEPS:
        held = (context // ratio // 32 + 1) * 32 if ratio else 0
        sizes = kernel.Sizes(tokens, sequences, heads, 512, 64, 128, chosen or held, held)
        costs = kernel.variants_of(sizes, True, torch.device("cpu"))
        best = min(costs, key=costs.__getitem__)
        yield str(best), best.num_warps, best.num_stages, best.channels


@pytest.mark.parametrize("architecture", [90, 100])
def test_choices_that_were_measured_stay(architecture: int) -> None:
    """measured_choices.json has what sm_90 and sm_100 chose before other GPUs were known: tiles,
    warps, stages and variants at the shapes of Flash and Pro. New measurements change the file."""
    gpu, rows = KNOWN[architecture], (*ROWS, 2048)
    linear = import_module("dsv4.ops.gemm.linear_triton")
    experts = import_module("dsv4.ops.moe.experts_triton")
    mix = import_module("dsv4.ops.mhc.mix_triton")
    scaled = import_module("dsv4.ops.gemm.scaled_product_triton")
    select = import_module("dsv4.ops.attention.index_select_triton")
    found: dict[str, list[Any]] = {}
    for name in ("NVFP4", "BF16", "FP8", "EXPANDED"):
        kind = getattr(linear, name)
        found[f"linear {name}"] = [astuple(linear.choose_config(n, kind, gpu)) for n in rows]
    for model, count in (("flash", 256), ("pro", 384)):
        configs = [experts.choose_config(n, 6, count, gpu) for n in rows]
        found[f"experts {model}"] = list(map(astuple, configs))
    for size in (4096, 7168):
        found[f"mix {size}"] = [astuple(mix.choose_config(n, size, gpu)) for n in rows]
    for ranges in (1, 2):
        configs = [scaled.choose_config(n, ranges, gpu) for n in rows]
        found[f"scaled {ranges}"] = list(map(astuple, configs))
    with assume(gpu):
        for heads, topk in ((64, 512), (128, 1024)):
            for kind, shape in {"window": (0, 0), "csa": (4, topk), "hca": (128, 0)}.items():
                found[f"attention {heads} {kind}"] = list(attention_choices(heads, *shape))
    found["select"] = [
        select.choose_chunk(n, width, gpu.multiprocessors)
        for n in (1, 32, 2048)
        for width in (32768, 262144)
    ]
    kept = json.loads((Path(__file__).parent / "measured_choices.json").read_text())
    assert json.loads(json.dumps(found)) == kept[str(architecture)]


@pytest.mark.parametrize("gpu", MMA, ids=lambda gpu: f"sm_{gpu.architecture}")
def test_products_in_registers_take_columns_in_one_order(gpu: Gpu) -> None:
    """Variant 1 joins weights, which `mma` multiplies in another order: rows would depend on their
    batch."""
    linear = import_module("dsv4.ops.gemm.linear_triton")
    experts = import_module("dsv4.ops.moe.experts_triton")
    for rows in ROWS:
        for fmt in (linear.NVFP4, linear.BF16, linear.FP8):
            assert linear.choose_config(rows, fmt, gpu).variant == 0
        assert experts.choose_config(rows, 6, 256, gpu).variant == 0


def test_a_card_that_is_too_old_is_told_so() -> None:
    reason = of(KNOWN[80], 75).reason
    assert reason is not None
    assert "sm_75" in reason
    assert "sm_80" in reason
    assert "device=cpu" in reason
    assert all(gpu.reason is None and gpu.note is None for gpu in KNOWN.values())


@pytest.mark.parametrize("architecture", [110, 130])
def test_a_newer_card_runs_what_every_card_has_and_says_so(architecture: int) -> None:
    gpu = of(KNOWN[100], architecture)
    assert gpu.reason is None
    assert gpu.products == "mma"
    assert not gpu.scales_blocks
    assert gpu.note is not None
    assert f"sm_{architecture}" in gpu.note
    assert "portable" in gpu.note
    assert "doctor" in gpu.note


def test_what_the_architectures_have() -> None:
    assert [a for a, gpu in KNOWN.items() if not gpu.converts_fp8] == [80, 86]
    assert [a for a, gpu in KNOWN.items() if gpu.scales_blocks] == [100, 120, 121]
    assert of(KNOWN[100], 103).products == "tcgen05"


@pytest.mark.parametrize("architecture", [75, 130])
def test_what_an_engine_says_when_it_starts(
    architecture: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "describe", lambda device: of(KNOWN[80], architecture))
    with caplog.at_level("WARNING"):
        assert gpu.usable_device("auto") == ("cpu" if architecture == 75 else "auto")
    (line,) = caplog.messages
    assert f"sm_{architecture}" in line
    if architecture == 75:
        with pytest.raises(OptionError, match=r"cuda:0.*sm_75"):
            gpu.usable_device("cuda:0")
