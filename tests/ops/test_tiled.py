"""Weights in the order of the kernels hold what they held before."""

import pytest
import torch

from dsv4.errors import KernelError
from dsv4.formats.quantized import Mxfp4Tensor
from dsv4.ops.gemm.weights.repack import repack
from dsv4.ops.gemm.weights.tiled import TiledMxfp4, random_mxfp4, tile_mxfp4


@pytest.mark.parametrize(
    ("rows", "columns", "paired"), [(64, 128, False), (130, 96, False), (96, 160, True)]
)
@pytest.mark.parametrize("exponents", [(100, 130), (0, 140), (200, 255), (254, 255)])
def test_mxfp4_comes_back(
    rows: int, columns: int, paired: bool, exponents: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(rows)
    shape = (2, rows, columns)
    packed = torch.randint(0, 256, (2, rows, columns // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(*exponents, (2, rows, columns // 32), generator=generator)
    weight = Mxfp4Tensor(packed, scale.to(torch.uint8))
    tiled = tile_mxfp4(weight, paired=paired)
    assert tiled.shape == shape
    plain = tiled.plain()
    assert torch.equal(plain.packed, weight.packed)
    assert torch.equal(plain.scale, weight.scale)
    assert torch.equal(tiled[1].plain().scale, weight.scale[1])


def test_a_spread_that_one_power_cannot_bridge_is_refused() -> None:
    weight = random_mxfp4(64, 64, torch.Generator().manual_seed(0))
    scale = weight.scale.clone()
    scale[0, 0], scale[1, 0] = 0, 254
    with pytest.raises(KernelError, match="0 to 254"):
        tile_mxfp4(Mxfp4Tensor(weight.packed, scale))


def test_experts_stay_mxfp4_and_take_fewer_bytes() -> None:
    weight = random_mxfp4(256, 1024, torch.Generator().manual_seed(0), count=2)
    tiled = repack("layers.0.ffn.experts.w13", weight)
    assert isinstance(tiled, TiledMxfp4)
    assert tiled.packed.nbytes + tiled.scale.nbytes == 2 * 256 * 1024 * 17 // 32
    other = repack("layers.0.attn.wq_b.weight", weight[0])
    assert not isinstance(other, TiledMxfp4)
