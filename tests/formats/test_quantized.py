"""Weights that carry their format: shapes, slices and what they refuse."""

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.formats import fp8, mxfp4, nvfp4
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, QuantizedTensor
from tests.formats.test_nvfp4 import gaussian


def stack_nvfp4(parts: int) -> Nvfp4Tensor:
    experts = []
    for e in range(3):
        pieces = [nvfp4.quantize(gaussian(64 // parts, 96, seed=e * 9 + p)) for p in range(parts)]
        packed, scale = (
            torch.cat([piece[i].view(torch.uint8) for piece in pieces]) for i in (0, 1)
        )
        experts.append((packed, scale, torch.stack([piece[2] for piece in pieces])))
    packed, scale, globals_ = (torch.stack(items) for items in zip(*experts, strict=True))
    return Nvfp4Tensor(packed, scale.view(torch.float8_e4m3fn), globals_)


def stack_mxfp4() -> Mxfp4Tensor:
    return Mxfp4Tensor(*mxfp4.quantize(gaussian(192, 96).reshape(3, 64, 96)))


def stack_fp8(power: bool = True) -> Fp8BlockTensor:
    data, scale = fp8.quantize_tiles(gaussian(192, 96).reshape(3, 64, 96), 32, power_of_two=power)
    return Fp8BlockTensor(data, scale, 32)


WEIGHTS = {
    "nvfp4": lambda: stack_nvfp4(1),
    "nvfp4-two-globals": lambda: stack_nvfp4(2),
    "mxfp4": stack_mxfp4,
    "fp8": stack_fp8,
    "fp8-f32": lambda: stack_fp8(False),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_shape_bytes_experts_and_slices(name: str) -> None:
    weight: QuantizedTensor = WEIGHTS[name]()
    full = weight.dequantize()
    assert weight.shape == full.shape == (3, 64, 96)
    assert weight.nbytes == sum(value.nbytes for _, value in weight._tensors())
    assert weight.device.type == "cpu"
    assert torch.equal(weight.to("cpu").dequantize(), full)
    assert weight.dequantize(torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(weight[1].dequantize(), full[1])
    assert torch.equal(weight[1:3].dequantize(), full[1:3])
    assert torch.equal(weight.row_range(32, 64).dequantize(), full[:, 32:64])
    assert torch.equal(weight[2].column_range(32, 96).dequantize(), full[2][:, 32:96])
    with pytest.raises(KernelError, match="leading axis"):
        weight[0][0]


def test_rows_may_not_mix_globals() -> None:
    weight = stack_nvfp4(2)
    assert torch.equal(weight.row_range(8, 24).dequantize(), weight.dequantize()[:, 8:24])
    with pytest.raises(KernelError, match="different globals"):
        weight.row_range(16, 48)


def test_columns_follow_the_blocks() -> None:
    with pytest.raises(KernelError, match="NVFP4"):
        stack_nvfp4(1).column_range(8, 32)
    with pytest.raises(KernelError, match="MXFP4"):
        stack_mxfp4().column_range(0, 48)


def test_fp8_cuts_inside_a_tile_refine_it() -> None:
    weight = stack_fp8()
    full = weight.dequantize()
    part = weight.row_range(24, 50)
    assert part.tile == (8, 32)
    assert torch.equal(part.dequantize(), full[:, 24:50])
    assert torch.equal(weight.column_range(4, 7).dequantize(), full[..., 4:7])
    assert torch.equal(weight.refine(16, 8).dequantize(), full)
    assert weight.refine(16, 8).scale.shape == (3, 4, 12)
    with pytest.raises(KernelError, match="outside"):
        weight.row_range(0, 65)
    with pytest.raises(KernelError, match="cannot be cut"):
        weight.refine(24, 32)


@pytest.mark.parametrize("tile", [(1, 96), (1, 32), (64, 96), (16, 32)])
def test_fp8_tiles_need_not_be_square(tile) -> None:
    rows, cols = tile
    data = gaussian(64, 96).to(torch.float8_e4m3fn)
    scale = torch.rand(64 // rows, 96 // cols) + 0.5
    weight = Fp8BlockTensor(data, scale, cols, rows)
    by_hand = data.float() * torch.kron(scale, torch.ones(tile))
    assert torch.equal(weight.dequantize(), by_hand)
    assert torch.equal(weight.row_range(24, 50).dequantize(), by_hand[24:50])
    assert torch.equal(weight.column_range(40, 71).dequantize(), by_hand[:, 40:71])
    assert torch.equal(weight.refine(1, 16).dequantize(), by_hand)


def byte(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def e4m3(*shape: int) -> torch.Tensor:
    return byte(*shape).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Nvfp4Tensor(byte(4, 16), e4m3(2, 4), torch.ones(1)),  # transposed scale
        lambda: Nvfp4Tensor(byte(4, 16), byte(4, 2), torch.ones(1)),
        lambda: Nvfp4Tensor(byte(4, 16), e4m3(4, 2), torch.ones(())),
        lambda: Nvfp4Tensor(byte(4, 16), e4m3(4, 2), torch.ones(3)),
        lambda: Nvfp4Tensor(byte(4, 15), e4m3(4, 1), torch.ones(1)),
        lambda: Mxfp4Tensor(byte(4, 16), byte(4, 2)),
        lambda: Mxfp4Tensor(byte(4, 16).to(torch.int8), byte(4, 1)),
        lambda: Fp8BlockTensor(e4m3(130, 128), byte(1, 1), 128),
        lambda: Fp8BlockTensor(e4m3(128, 128), torch.ones(1, 1, dtype=torch.bfloat16), 128),
        lambda: Fp8BlockTensor(e4m3(128, 128), byte(1, 1), 0),
    ],
)
def test_parts_that_do_not_fit_are_refused(build) -> None:
    with pytest.raises(KernelError, match=r"expected|fit"):
        build()
