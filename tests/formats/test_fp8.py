"""FP8 tiles: error figures, edge tiles, exactness in BF16."""

import math

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.formats import e8m0, fp8
from tests.formats.test_nvfp4 import gaussian, rms


@pytest.mark.parametrize(("power", "expected"), [(True, 0.02659), (False, 0.02646)])
def test_gaussian_error(power: bool, expected: float) -> None:
    w = gaussian()
    data, scale = fp8.quantize_tiles(w, power_of_two=power)
    assert scale.dtype == (torch.uint8 if power else torch.float32)
    assert rms(fp8.dequantize_tiles(data, scale, 128), w) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("shape", [(130, 200), (1, 128), (128, 1), (127, 129)])
@pytest.mark.parametrize("block", [128, 32])
def test_edge_tiles(shape, block: int) -> None:
    w = gaussian(*shape)
    data, scale = fp8.quantize_tiles(w, block)
    assert scale.shape == tuple(math.ceil(n / block) for n in shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            tile = w[i * block : (i + 1) * block, j * block : (j + 1) * block]
            size = float(e8m0.decode(scale[i, j]))
            assert size * 448 >= float(tile.abs().max()) > size * 224
    back = fp8.dequantize_tiles(data, scale, block)
    assert rms(back, w) < 0.04


def test_rows_of_128_channels_match_tiles_of_one_row() -> None:
    """The activations' 1 x 128 form is the group quantiser."""
    x = gaussian(3, 256)
    data, scale = fp8.quantize_groups(x, 128)
    for row in range(3):
        one, tile = fp8.quantize_tiles(x[row : row + 1].expand(128, -1), 128)
        assert torch.equal(one[0].float(), data[row].float())
        assert torch.equal(tile[0], scale[row])


def test_zero_tiles_and_stacks() -> None:
    data, scale = fp8.quantize_tiles(torch.zeros(2, 128, 256))
    assert scale.shape == (2, 1, 2)
    assert not fp8.dequantize_tiles(data, scale, 128).any()


def test_nan_is_refused() -> None:
    w = gaussian(128, 128)
    w[5, 6] = math.nan
    with pytest.raises(KernelError, match=r"\(5, 6\)"):
        fp8.quantize_tiles(w)


def test_every_code_under_every_real_scale_is_exact_in_bf16() -> None:
    """Spec 4.4: exact for scale exponents -124 to 119, and not just outside."""
    code = torch.arange(256, dtype=torch.uint8)
    code = code[(code & 0x7F) != 0x7F].view(torch.float8_e4m3fn)

    def exact(exponent: int) -> bool:
        scale = torch.tensor([[exponent + 127]], dtype=torch.uint8)
        wanted = code.double() * 2.0**exponent
        found = fp8.dequantize_tiles(code[None], scale.expand(1, 1), 256, torch.bfloat16)
        return bool(torch.equal(found[0].double(), wanted))

    assert all(exact(exponent) for exponent in range(-124, 120))
    assert not exact(120)
    assert not exact(-125)


def test_a_float32_scale_costs_what_the_spec_says_in_bf16() -> None:
    data, scale = fp8.quantize_tiles(gaussian(), power_of_two=False)
    full = fp8.dequantize_tiles(data, scale, 128)
    half = fp8.dequantize_tiles(data, scale, 128, torch.bfloat16).float()
    assert rms(half, full) == pytest.approx(0.00165, rel=0.15)
    size = full.abs().clamp(min=1e-30)
    assert float(((half - full).abs() / size).max()) == pytest.approx(0.0038, rel=0.1)
