"""NVFP4: the spec's vectors, its error figures, and what must be refused."""

import math

import pytest
import torch

from dsv4.errors import KernelError, OptionError
from dsv4.formats import e2m1, nvfp4


def gaussian(rows: int = 1024, cols: int = 1024, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # the power-of-two formats care where sigma lies between powers; the spec's figures have 0.02
    return (torch.randn(rows, cols, generator=generator) * 0.02).bfloat16().float()


def rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def restore(parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    packed, scale, global_ = parts
    return nvfp4.dequantize(packed, scale, global_.reshape(1))


def test_first_vector_of_the_spec() -> None:
    x = torch.tensor(
        [[0, -0.0, 0.25, -0.25, 0.75, 1.25, 1.75, 2.5, -2.5, 3.5, 5, -5, 6, -6, 0.5, 1.5]]
    )
    for global_, byte in ((1.0, 0x38), (2.0**-8, 0x78)):
        packed, scale, _ = nvfp4.quantize(x, global_=torch.tensor(global_))
        assert bytes(packed[0].tolist()) == bytes.fromhex("808022446CE6F731")
        assert int(scale.view(torch.uint8)) == byte


def test_second_vector_of_the_spec() -> None:
    x = [0.1, -0.05, 0.02, -0.01, 0.005, 0, 0.033, -0.067]
    x += [0.09, -0.08, 0.07, 0.06, -0.04, 0.03, -0.02, 0.01]
    w = torch.zeros(2, 16)
    w[0] = torch.tensor(x)
    w[1, 0] = 0.5  # the tensor's largest value
    packed, scale, global_ = nvfp4.quantize(w)
    assert int(global_.view(torch.int32)) == 0x39430C31
    assert int(scale[0].view(torch.uint8)) == 0x6B
    assert bytes(packed[0].tolist()) == bytes.fromhex("D7920 1E4E7664C1A".replace(" ", ""))
    back = nvfp4.dequantize(packed, scale, global_.reshape(1))
    assert rms(back[0], w[0]) == pytest.approx(0.09916, abs=1e-5)


@pytest.mark.parametrize(
    ("choice", "expected"), [("max", 0.09511), ("four-over-six", 0.08698), ("mse", 0.08122)]
)
def test_gaussian_error_of_each_choice(choice, expected: float) -> None:
    w = gaussian()
    assert rms(restore(nvfp4.quantize(w, choice)), w) == pytest.approx(expected, rel=0.01)


def test_an_outlier_channel_leaves_other_blocks_alone() -> None:
    w = gaussian()
    w[:, 3] *= 100
    others = restore(nvfp4.quantize(w))[:, 16:]
    assert rms(others, w[:, 16:]) == pytest.approx(0.0952, rel=0.02)


def test_the_largest_block_gets_448_and_the_rounded_scale_is_used() -> None:
    w = gaussian(64, 64)
    packed, scale, global_ = nvfp4.quantize(w)
    assert float(scale.float().max()) == 448
    blocks = w.reshape(64, 4, 16)
    divided = blocks / global_ / scale.float()[..., None]
    assert torch.equal(packed, e2m1.pack(e2m1.encode(divided).reshape(64, 64)))


def test_four_over_six_has_head_room_above_the_largest_block() -> None:
    """The block with the matrix's largest value may take the larger scale as well: it is exact."""
    w = torch.tensor([[4.0, 3.0, 2.0, 1.5, 1.0, 0.5, -4.0, -3.0] * 2, [0.25] * 16])
    packed, scale, global_ = nvfp4.quantize(w, "four-over-six")
    assert float(scale[0]) == 384  # 256 * 6 / 4
    torch.testing.assert_close(restore((packed, scale, global_)), w, rtol=1e-6, atol=0)
    assert rms(restore(nvfp4.quantize(w, "max")), w) > 0.05


def test_zero_blocks_have_zero_nibbles_and_a_positive_scale() -> None:
    w = gaussian(4, 64)
    w[1] = 0
    packed, scale, global_ = nvfp4.quantize(w)
    assert not packed[1].any()
    assert float(scale.float().min()) == 2.0**-9
    packed, scale, global_ = nvfp4.quantize(torch.zeros(3, 32))
    assert float(global_) == 1
    assert not packed.any()
    for byte in (0x38, 0x00, 0x01):  # the three scales that writers put on a zero block
        other = torch.full((3, 2), byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
        assert not nvfp4.dequantize(packed, other, torch.ones(1)).any()


def test_tiny_and_huge_tensors_stay_finite() -> None:
    for size in (1e-38, 1e-30, 1e30, 3e38):
        w = gaussian(8, 32).clamp(-1, 1) * size
        back = restore(nvfp4.quantize(w))
        assert torch.isfinite(back).all()
        assert rms(back, w) < 0.2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_are_refused_with_their_place(bad: float) -> None:
    w = gaussian(4, 32)
    w[2, 7] = bad
    with pytest.raises(KernelError, match=r"\(2, 7\)"):
        nvfp4.quantize(w)


def test_wrong_shapes_and_choices_are_refused() -> None:
    with pytest.raises(KernelError, match="multiple of 16"):
        nvfp4.quantize(torch.zeros(2, 24))
    with pytest.raises(OptionError, match="four-over-six"):
        nvfp4.quantize(torch.zeros(2, 32), "best")  # type: ignore[arg-type]


def test_every_nibble_times_every_scale_is_exact_before_the_global() -> None:
    code = torch.arange(16, dtype=torch.uint8).repeat(127, 1)
    scale = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    values = nvfp4.dequantize(e2m1.pack(code), scale, torch.ones(1))
    assert torch.equal(values.double(), e2m1.decode(code).double() * scale.double())
    assert torch.equal(values, values.bfloat16().float())  # and needs no more than BF16
    folded = values.clamp(-448, 448).to(torch.float8_e4m3fn).float() == values
    assert float(folded[1:, :8].float().mean()) == pytest.approx(0.727, abs=0.001)


def test_rounding_to_bf16_costs_what_the_spec_says() -> None:
    packed, scale, _ = nvfp4.quantize(gaussian())
    errors = []
    for seed in range(16):  # the cost depends on the global's mantissa: average over some
        generator = torch.Generator().manual_seed(seed)
        global_ = (1 + torch.rand(1, generator=generator)) * 2.0**-15
        full = nvfp4.dequantize(packed, scale, global_)
        half = nvfp4.dequantize(packed, scale, global_, torch.bfloat16)
        errors.append(rms(half.float(), full))
    assert sum(errors) / len(errors) == pytest.approx(0.0017, rel=0.1)
    exact = nvfp4.dequantize(packed, scale, torch.tensor([2.0**-15]))
    assert torch.equal(exact, exact.bfloat16().float())
