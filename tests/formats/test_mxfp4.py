"""MXFP4 and its casts: exact inside the window, the spec's figures outside."""

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.formats import e2m1, e8m0, fp8, mxfp4, nvfp4
from tests.formats.test_nvfp4 import gaussian, restore, rms


def spread_out(spread: int, rows: int = 512, cols: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 nibbles of Gaussian data under exponents drawn evenly from spread + 1 values."""
    packed, _ = mxfp4.quantize(gaussian(rows, cols))
    generator = torch.Generator().manual_seed(spread)
    scale = torch.randint(0, spread + 1, (rows, cols // 32), generator=generator)
    scale[0, 0], scale[0, 1] = 0, spread
    return packed, (scale + 100).to(torch.uint8)


def test_gaussian_error() -> None:
    w = gaussian()
    assert rms(mxfp4.dequantize(*mxfp4.quantize(w)), w) == pytest.approx(0.1184, rel=0.01)


def test_vector_of_the_spec() -> None:
    packed, _ = mxfp4.quantize(gaussian(1, 64))
    scale = torch.tensor([[118, 120]], dtype=torch.uint8)
    same, block, global_, report = mxfp4.to_nvfp4(packed, scale)
    assert torch.equal(same, packed)
    assert int(global_.view(torch.int32)) == 0x38000000
    # 2^-9 under the largest 2^-7: k - kmax + 8 = 6; the largest itself gets 2^8
    assert block.view(torch.uint8).tolist() == [[0x68, 0x68, 0x78, 0x78]]
    assert report.exact


@pytest.mark.parametrize("spread", range(18))
def test_the_pinned_cast_is_bit_exact_up_to_a_spread_of_17(spread: int) -> None:
    packed, scale = spread_out(spread, 64, 512)
    same, block, global_, report = mxfp4.to_nvfp4(packed, scale)
    assert torch.equal(same, packed)
    assert report == mxfp4.CastReport(64 * 16, 0, spread, 0.0)
    wanted = mxfp4.dequantize(packed, scale)
    assert torch.equal(nvfp4.dequantize(same, block, global_.reshape(1)), wanted)


@pytest.mark.parametrize(
    ("spread", "exact", "error"),
    [(18, 0.9453, 3.3e-6), (19, 0.8988, 6.2e-6), (20, 0.8558, 8.3e-6), (25, 0.699, 1.6e-5)],
)
def test_beyond_the_window_the_figures_of_the_spec(spread, exact, error) -> None:
    packed, scale = spread_out(spread)
    new, block, global_, report = mxfp4.to_nvfp4(packed, scale)
    assert not report.exact
    assert report.spread == spread
    assert 1 - report.inexact_blocks / report.blocks == pytest.approx(exact, abs=0.01)
    wanted = mxfp4.dequantize(packed, scale)
    # The spec's RMS column is the cast that leaves the nibbles of such blocks alone; halving
    # them, as we do, loses several times less.
    untouched = nvfp4.dequantize(packed, block, global_.reshape(1))
    assert rms(untouched, wanted) == pytest.approx(error, rel=0.08)
    assert report.relative_rms < error / 5
    found = nvfp4.dequantize(new, block, global_.reshape(1))
    assert rms(found, wanted) == pytest.approx(report.relative_rms, rel=1e-3)
    blocks = (found != wanted).reshape(512, 64, 32).any(-1)
    assert int(blocks.sum()) == report.inexact_blocks


def test_blocks_below_the_window_that_halve_exactly_stay_exact() -> None:
    code = torch.tensor([[4] * 32 + [7] * 32], dtype=torch.uint8)  # 2.0 halves to 1.0
    scale = torch.tensor([[100, 118]], dtype=torch.uint8)
    new, block, global_, report = mxfp4.to_nvfp4(e2m1.pack(code), scale)
    assert report.exact
    assert report.spread == 18
    found = nvfp4.dequantize(new, block, global_.reshape(1))
    assert torch.equal(found, mxfp4.dequantize(e2m1.pack(code), scale))


def test_a_common_largest_exponent_serves_two_matrices() -> None:
    packed, scale = spread_out(5, 32, 64)
    _, block, global_, report = mxfp4.to_nvfp4(packed, scale, largest=int(scale.max()) + 7)
    assert report.exact
    found = nvfp4.dequantize(packed, block, global_.reshape(1))
    assert torch.equal(found, mxfp4.dequantize(packed, scale))


def test_nan_scales_and_globals_below_float32_are_refused() -> None:
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    with pytest.raises(KernelError, match="255"):
        mxfp4.to_nvfp4(packed, torch.tensor([[255]], dtype=torch.uint8))
    with pytest.raises(KernelError, match="-118"):
        mxfp4.to_nvfp4(packed, torch.tensor([[127 - 119]], dtype=torch.uint8))
    _, _, global_, _ = mxfp4.to_nvfp4(packed, torch.tensor([[127 - 118]], dtype=torch.uint8))
    assert float(global_) == 2.0**-126


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    return mxfp4.dequantize(*mxfp4.quantize(gaussian()))


def exact_blocks(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of 16-blocks that agree in BF16: a global such as 2^j / 448 is itself rounded."""
    same = (found.bfloat16() == wanted.bfloat16()).reshape(wanted.shape[0], -1, 16).all(-1)
    return float(same.float().mean())


@pytest.mark.parametrize(
    ("largest", "exact", "error"), [(6.0, 0.52, 0.0608), (3.0, 0.52, 0.0608), (4.0, 0.0063, 0.0603)]
)
def test_the_obvious_route_is_not_exact(source, largest, exact, error) -> None:
    """Dequantise, then quantise by amax: depends on where the tensor's largest value lies."""
    w = source.clone()
    w[0, 0] = largest * 2.0 ** int(e8m0.ceil_exponent(w.abs().amax(), largest))
    found = restore(nvfp4.quantize(w))
    assert exact_blocks(found, w) == pytest.approx(exact, abs=0.015)
    assert rms(found, w) == pytest.approx(error, rel=0.03)


def test_a_power_of_two_global_with_better_scales_is_exact(source) -> None:
    g = torch.tensor(2.0 ** (int(e8m0.ceil_exponent(source.abs().amax(), 6.0)) - 8))
    found = restore(nvfp4.quantize(source, "max", global_=g))
    assert exact_blocks(found, source) == pytest.approx(0.52, abs=0.02)
    assert rms(found, source) == pytest.approx(0.0425, rel=0.03)
    for choice in ("four-over-six", "mse"):
        assert torch.equal(restore(nvfp4.quantize(source, choice, global_=g)), source)


@pytest.mark.parametrize("spread", [0, 7, 14])
def test_fp8_tiles_are_exact_up_to_a_spread_of_14(spread: int) -> None:
    packed, scale = spread_out(spread, 256, 256)
    data, tile_scale, report = mxfp4.to_fp8_tiles(packed, scale)
    assert report.exact
    found = fp8.dequantize_tiles(data, tile_scale, 128)
    assert torch.equal(found, mxfp4.dequantize(packed, scale))


def test_fp8_tiles_beyond_are_reported() -> None:
    packed, scale = spread_out(16, 256, 256)
    data, tile_scale, report = mxfp4.to_fp8_tiles(packed, scale)
    wanted = mxfp4.dequantize(packed, scale)
    wrong = (fp8.dequantize_tiles(data, tile_scale, 128) != wanted).reshape(256, 8, 32).any(-1)
    assert report.inexact_blocks == int(wrong.sum()) > 0
