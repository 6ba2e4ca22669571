"""Group quantisers with power-of-two scales: exponents are exact, short groups work."""

import math

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.formats import e8m0, fp4, fp8


def _exact_ceil(amax: float, limit: int) -> int:
    """ceil(log2(amax / limit)) in integer arithmetic."""
    numerator, denominator = amax.as_integer_ratio()
    k = math.frexp(amax / limit)[1] - 2
    while numerator * 2 ** max(-k, 0) > limit * denominator * 2 ** max(k, 0):
        k += 1
    return k


@pytest.mark.parametrize("limit", [6, 448])
def test_ceil_exponent_is_exact_next_to_every_power(limit: int) -> None:
    edge = torch.tensor([float(limit)]) * 2.0 ** torch.arange(-110, 100).to(torch.float32)
    below = torch.nextafter(edge, torch.zeros(1))
    above = torch.nextafter(edge, torch.full((1,), math.inf))
    for values in (edge, below, above):
        found = e8m0.ceil_exponent(values, float(limit)).tolist()
        assert found == [_exact_ceil(v, limit) for v in values.tolist()]


@pytest.mark.parametrize("channels", [448, 64, 96, 33 * 2, 2])
def test_fp8_groups(channels: int) -> None:
    x = torch.randn(5, 3, channels, generator=torch.Generator().manual_seed(1)) * 7
    data, scale = fp8.quantize_groups(x, 64)
    assert data.dtype == torch.float8_e4m3fn
    assert data.shape == x.shape
    assert scale.shape == (5, 3, math.ceil(channels / 64))
    for g in range(scale.shape[-1]):
        part = x[..., g * 64 : (g + 1) * 64]
        amax = part.abs().amax(-1)
        exponents = scale[..., g].to(torch.int32) - 127
        expected = [_exact_ceil(max(v, 1e-4), 448) for v in amax.flatten().tolist()]
        assert exponents.flatten().tolist() == expected
        factor = (2.0 ** exponents.to(torch.float32))[..., None]
        nearest = (part / factor).to(torch.float8_e4m3fn)
        assert torch.equal(data[..., g * 64 : (g + 1) * 64].float(), nearest.float())
    back = fp8.dequantize_groups(data, scale, 64)
    assert float((back - x).norm() / x.norm()) < 0.035
    assert torch.equal(fp8.dequantize_groups(*fp8.quantize_groups(back, 64), 64), back)


@pytest.mark.parametrize("channels", [128, 32, 40, 2])
def test_fp4_groups(channels: int) -> None:
    x = torch.randn(7, channels, generator=torch.Generator().manual_seed(2))
    packed, scale = fp4.quantize_groups(x, 32)
    assert packed.shape == (7, channels // 2)
    assert scale.shape == (7, math.ceil(channels / 32))
    back = fp4.dequantize_groups(packed, scale, 32)
    assert float((back - x).norm() / x.norm()) < 0.16
    again = fp4.quantize_groups(back, 32)
    assert torch.equal(fp4.dequantize_groups(*again, 32), back)


def test_zero_groups_keep_the_floor() -> None:
    data, scale = fp8.quantize_groups(torch.zeros(2, 64), 64)
    assert scale.tolist() == [[127 + _exact_ceil(1e-4, 448)]] * 2
    assert not data.float().any()
    packed, scale = fp4.quantize_groups(torch.zeros(2, 32), 32)
    assert scale.tolist() == [[1]] * 2
    assert not packed.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("quantize", [fp8.quantize_groups, fp4.quantize_groups])
def test_nonfinite_is_refused_with_its_place(quantize, bad: float) -> None:
    x = torch.zeros(3, 64)
    x[1, 5] = bad
    with pytest.raises(KernelError, match=r"\(1, 5\)"):
        quantize(x, 32)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_fp4_group_that_is_not_finite_is_nan(bad: float) -> None:
    """E2M1 has no NaN, so the scale has it; other groups and rows keep their bytes."""
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(3))
    packed, scale = fp4.quantize_groups(x, 32)
    x[1, 35] = bad
    found_packed, found_scale = fp4.quantize_groups(x, 32, check=False)
    back = fp4.dequantize_groups(found_packed, found_scale, 32)
    assert back[1, 32:64].isnan().all()
    wanted = fp4.dequantize_groups(packed, scale, 32)
    for rows, columns in ((0, slice(None)), (2, slice(None)), (1, slice(32)), (1, slice(64, 80))):
        assert torch.equal(back[rows, columns], wanted[rows, columns])


def test_largest_and_smallest_values() -> None:
    x = torch.tensor([[2e38, -2e38, 1.0, 0.0]])
    assert torch.isfinite(fp8.dequantize_groups(*fp8.quantize_groups(x, 4), 4)).all()
    assert torch.isfinite(fp4.dequantize_groups(*fp4.quantize_groups(x, 4), 4)).all()
    tiny = torch.tensor([[1e-40, 0.0]])
    assert not fp4.dequantize_groups(*fp4.quantize_groups(tiny, 2), 2).any()
