"""What kernels choose for a GPU: on sm_90 and sm_100 as measured, elsewhere what fits."""

from dataclasses import replace
from importlib import import_module

import pytest

from dsv4.errors import OptionError
from dsv4.ops.core import gpu
from dsv4.ops.core.gpu import KNOWN, Gpu

pytest.importorskip("triton", reason="choices are made in the kernels' modules")
MMA = [gpu for gpu in KNOWN.values() if gpu.products == "mma"]
ROWS = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1024, 4096, 8192)


def of(gpu: Gpu, architecture: int) -> Gpu:
    return replace(gpu, architecture=architecture)


@pytest.mark.parametrize("architecture", [90, 100])
def test_choices_that_were_measured_stay(architecture: int) -> None:
    """From the sweeps of an H200 in benchmarks/records."""
    gpu = KNOWN[architecture]
    linear = import_module("dsv4.ops.gemm.linear_triton")
    make = linear.LinearConfig
    found = [linear.choose_config(rows, linear.NVFP4, gpu) for rows in (1, 9, 32, 33, 500)]
    assert found == [
        make(8, 64, 2, 3), make(16, 64, 4, 3, 1), make(32, 64, 4, 3, 1), make(64, 128, 4, 3, 1),
        make(64, 128, 4, 3, 1),
    ]  # fmt: skip
    assert linear.choose_config(2048, linear.EXPANDED, gpu) == make(256, 128, 8, 3)
    assert linear.choose_config(8, linear.FP8, gpu) == make(16, 64, 4, 5)
    experts = import_module("dsv4.ops.moe.experts_triton")
    assert experts.choose_config(8192, 6, 256, gpu) == experts.ExpertsConfig(256, 128, 8, 3, 1)
    mix = import_module("dsv4.ops.mhc.mix_triton")
    assert mix.choose_config(4096, 4096, gpu) == mix.MixConfig(128, False, 8, 4)
    scaled = import_module("dsv4.ops.gemm.scaled_product_triton")
    assert scaled.choose_config(1024, 1, gpu) == scaled.ScaledConfig(256, 8, 3, False)


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
