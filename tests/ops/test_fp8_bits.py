"""E4M3 by integer operations, as GPUs before sm_89 do it, in Triton's interpreter: all 256 codes,
and every float between, at and beside the borders of rounding.

This file is both the test and the program it starts (see kernels/test_weight_interpreter.py).
"""

import torch

from tests.ops.kernels.compiling import interpreted


def test_conversions_equal_those_of_torch() -> None:
    interpreted("tests.ops.test_fp8_bits")


def border_values() -> torch.Tensor:
    """Codes, the middles between neighbours, one fp32 step to both sides of each, both signs."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    values = torch.cat([codes, middles, torch.rand(2000) * 448, torch.rand(2000) * 2**-6])
    far = torch.tensor([1e-30, 1e-44, 2.0**-10, 448.0, 463.9, 464.0, 465.0, 480.0, 1e30])
    values = torch.cat([values, far])
    values = torch.cat([values, *(values.nextafter(torch.tensor(end)) for end in (0.0, 1e38))])
    return torch.cat([values, -values, torch.tensor([float("nan"), float("inf")])])


if __name__ == "__main__":
    import triton
    import triton.language as tl

    import tests.ops.kernels.shim  # noqa: F401 - repairs the interpreter
    from dsv4.ops.core.helpers_device import e4m3_bits, e4m3_bits_to_half

    @triton.jit
    def decode(source, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(out + at, e4m3_bits_to_half(tl.load(source + at)))

    @triton.jit
    def encode(source, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(out + at, e4m3_bits(tl.load(source + at)))

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    half = torch.empty(256, dtype=torch.float16)
    decode[(1,)](codes, half, SIZE=256)
    wanted = codes.view(torch.float8_e4m3fn).to(torch.float16)
    numbers = ~wanted.isnan()
    assert torch.equal(half.isnan(), ~numbers)
    assert torch.equal(half[numbers].view(torch.int16), wanted[numbers].view(torch.int16))

    values = border_values()
    source = torch.zeros(triton.next_power_of_2(len(values)))
    source[: len(values)] = values
    found = torch.empty(len(source), dtype=torch.uint8)
    encode[(1,)](source, found, SIZE=len(source))
    clamped = torch.where(source.isnan(), source, source.clamp(-448, 448))
    expected = clamped.to(torch.float8_e4m3fn).view(torch.uint8)
    wrong = (found != expected).nonzero().flatten()
    assert len(wrong) == 0, (source[wrong][:5], found[wrong][:5], expected[wrong][:5])
