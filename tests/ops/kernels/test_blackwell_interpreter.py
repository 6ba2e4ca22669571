"""The kernels for sm_100 in Triton's interpreter against their references, without a GPU.

Like test_weight_interpreter, this file is both the test and the program it starts.
"""

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.formats import fp8, mxfp4, nvfp4
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor
from dsv4.ops.core.context import EngineOps
from dsv4.ops.gemm.quantize_rows import Fp4Rows, quantize_a8, quantize_rows
from dsv4.ops.gemm.weights.repack import mxfp4_as_nvfp4, repack
from dsv4.ops.gemm.weights.scaled import ScaledTensor, scaled_weight, tile_scales, untile_scales
from dsv4.ops.gemm.weights.tiled import TiledNvfp4
from tests.ops.kernels.compiling import interpreted

GROUPS = ("rows", "linear", "experts")


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_match_references(group: str) -> None:
    interpreted("tests.ops.kernels.test_blackwell_interpreter", group)


def stored_weights(rows: int, columns: int, generator: torch.Generator) -> dict[str, Any]:
    """A weight of each format that block-scaled products read; `a4` and `a8` by their names."""
    values = torch.randn(rows, columns, generator=generator) * 0.2
    codes, scale, factor = nvfp4.quantize(values)
    mx = Mxfp4Tensor(*mxfp4.quantize(values), activations="a8")
    return {
        "NVFP4 a4": Nvfp4Tensor(codes, scale, factor.reshape(1), activations="a4"),
        "MXFP4 a8": mx,
        "MXFP4 as NVFP4 a8": mxfp4_as_nvfp4(mx),
        "FP8 a8": Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128, activations="a8"),
    }


def test_scaled_weights_keep_their_values() -> None:
    generator = torch.Generator().manual_seed(3)
    for rows, columns in ((130, 288), (1, 32), (256, 512)):
        for name, weight in stored_weights(rows, columns, generator).items():
            found = repack("layers.0.attn.wq_a", weight)
            assert isinstance(found, ScaledTensor), name
            assert found.activations == weight.activations
            assert torch.equal(found.dequantize(), weight.dequantize()), name


def test_scales_lie_in_the_tensor_cores_order() -> None:
    """Spelled out: byte 16 (row % 32) + 4 (row // 32) + group of a tile of 128 rows, 4 groups."""
    scale = torch.arange(256 * 8).reshape(256, 8)
    tiles = tile_scales(scale).reshape(2, 2, 512)
    for row, group in ((0, 0), (1, 0), (32, 0), (127, 3), (130, 5), (255, 7), (97, 6)):
        place = 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4
        assert tiles[row // 128, group // 4, place] == scale[row, group]
    assert torch.equal(untile_scales(tile_scales(scale)), scale)


def test_what_is_not_exact_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = stored_weights(128, 256, generator)
    odd = replace(weights["NVFP4 a4"], activations="a8")
    assert "powers of two" in str(scaled_weight(odd))
    wide = fp8.quantize_tiles(torch.randn(128, 256), 128, power_of_two=False)
    assert "not MXFP8" in str(scaled_weight(Fp8BlockTensor(*wide, 128, activations="a8")))
    with EngineOps().active():
        found = repack("layers.3.attn.wq_b", odd)
    assert isinstance(found, TiledNvfp4)
    assert found.activations == "a16"
    assert "layers.3.attn.wq_b" in caplog.text
    assert "activations stay a16: NVFP4 block scales" in caplog.text


def check_rows() -> None:
    """The same bytes as the reference, for every case and fusion."""
    from dsv4.ops.core.arguments import same_bits
    from dsv4.ops.gemm import quantize_rows_triton

    def by_kernel(x: torch.Tensor) -> Fp4Rows:
        count, columns = x.shape
        rows = quantize_rows_triton.make_rows(x.device, count, columns, tiled=False)
        quantize_rows_triton.fill_rows(rows, x)
        wide = rows.columns
        codes = rows.codes[: count * wide // 2].view(count, -1)[:, : columns // 2]
        scales = rows.scales[: count * wide // 16].view(count, -1)[:, : columns // 16]
        return Fp4Rows(codes, scales.view(torch.float8_e4m3fn), rows.row_scale[:count])

    generator = torch.Generator().manual_seed(1)
    for count, columns, magnitude, dtype in (
        (1, 16, 1.0, torch.bfloat16), (5, 208, 400.0, torch.bfloat16),
        (3, 1040, 5000.0, torch.bfloat16), (7, 128, 1e-30, torch.float32),
        (4, 256, 1e35, torch.float32), (17, 64, 1e-4, torch.bfloat16),
    ):  # fmt: skip
        x = torch.randn(count, columns, generator=generator) * magnitude
        if count > 2:  # a zero row, a zero block, one that is nearly zero, an outlier
            x[1], x[2, :16] = 0, 0
            x[2, 16:32] *= 1e-7
            x[0, columns // 2] *= 300
        pairs = zip(quantize_rows(x.to(dtype)), by_kernel(x.to(dtype)), strict=True)
        assert all(same_bits(a, b) for a, b in pairs), (count, columns)
    x = torch.randn(3, 64)
    x[1, 3], x[2, 60] = float("inf"), float("nan")
    wanted, found = quantize_rows(x), by_kernel(x)
    assert same_bits(wanted.codes, found.codes)
    assert same_bits(wanted.scales, found.scales)
    assert torch.equal(wanted.row_scale.isnan(), torch.tensor([False, True, True]))
    assert torch.equal(found.row_scale.isnan(), torch.tensor([False, True, True]))

    # SwiGLU, rows padded and scales in the tensor core's order
    h = torch.randn(36, 2 * 48) * 3
    rows = quantize_rows_triton.make_rows(h.device, 36, 48, tiled=True)
    quantize_rows_triton.fill_rows(rows, h, source=quantize_rows_triton.SWIGLU, limit=2.0, size=48)
    gate, up = h.chunk(2, dim=1)
    gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
    z = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
    wanted = quantize_rows(torch.nn.functional.pad(z, (0, 208)))
    codes = rows.codes[: 256 * 128].view(256, 128)[:36]
    scales = untile_scales(rows.scales[: 256 * 16].view(2, 4, 2, 256))[:36]
    differing = int((codes != wanted.codes).sum())
    assert differing <= 2, f"{differing} bytes: more than exp's last bit explains"
    assert torch.equal(scales, wanted.scales.view(torch.uint8))

    # a8, two rows side by side in one row of the product
    x = torch.randn(6, 160) * 1000
    x[0], x[1, :128], x[2, 5], x[4, 130] = 0, 1e-9, float("nan"), float("-inf")
    x[3, 0], x[3, 128] = 448 * 64, 450 * 64  # just fits its scale, just does not
    rows = quantize_rows_triton.make_rows(x.device, 6, 160, tiled=True, fold=2, a8=True)
    quantize_rows_triton.fill_rows(rows, x)
    data, power = quantize_a8(torch.nn.functional.pad(x, (0, 96)))
    assert torch.equal(rows.codes[: 6 * 256].view(6, 256), data.view(torch.uint8))
    assert data[2, :128].isnan().all()
    assert data[4, 128:].isnan().all()
    scales = untile_scales(rows.scales[: 128 * 16].view(1, 4, 2, 256))
    assert torch.equal(scales[:3].reshape(6, 8), power.repeat_interleave(4, 1))


def check_cases(name: str, skip: tuple[str, ...] = ()) -> None:
    """Every small case of an op that asks for few bits, by every kernel that takes it."""
    from dsv4.ops import OPS
    from tests.ops.kernels.test_weight_interpreter import compare

    op, num_run = OPS[name], 0
    for case in op.cases():
        if "few bits" not in case.name or not case.small or any(s in case.name for s in skip):
            continue
        arguments = case.build(torch.Generator().manual_seed(1))
        takers = [kernel for kernel in op.kernels if kernel.supports(arguments) is None]
        assert takers, f"{name} {case.name}: no kernel"
        for kernel in takers:
            found, num_run = kernel.run(arguments), num_run + 1
            wanted = op.reference(**arguments)
            compare(f"{name} {case.name}", wanted, found, case.atol, case.rtol)
    assert num_run >= 1, f"{name}: no case fits its kernels"


def fill_by_reference(rows: Any, x: torch.Tensor) -> None:
    """In place of `fill_rows`, whose bytes `check_rows` has compared: the interpreter takes its
    time over a row."""
    x = torch.nn.functional.pad(x.float(), (0, rows.columns - x.shape[1]))
    if rows.a8:
        codes, scales = quantize_a8(x)
        scales = scales.repeat_interleave(4, 1)
    else:
        codes, scales, row_scale = quantize_rows(x)
        rows.row_scale[: x.shape[0]] = row_scale
    codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
    rows.codes[: codes.numel()] = codes.flatten()
    if rows.tiled:
        scales = scales.reshape(x.shape[0] // rows.fold, -1)
        scales = tile_scales(torch.nn.functional.pad(scales, (0, 0, 0, -scales.shape[0] % 256)))
    rows.scales[: scales.numel()] = scales.flatten()


def check_linear_variants() -> None:
    """Every variant gives the same bits, however many rows come with it."""
    from dsv4.ops.gemm import linear_scaled_triton as kernel
    from dsv4.ops.gemm.linear import linear_reference
    from dsv4.ops.gemm.scaled_product_triton import ScaledConfig, num_scaled_ranges
    from dsv4.ops.gemm.weights.scaled import random_scaled
    from tests.ops.kernels.test_weight_interpreter import compare

    kernel.fill_rows = fill_by_reference
    generator = torch.Generator().manual_seed(2)
    assert num_scaled_ranges(40, 2048)[0] == 2
    for kind in ("nvfp4", "mxfp4"):
        weight = random_scaled(40, 2048, generator, kind)
        # blocks of very different size: with all alike fp32 sums are exact in any order
        size = torch.randint(-12, 7, (16, 64), generator=generator).repeat_interleave(32, dim=1)
        x = (torch.randn(16, 2048, generator=generator) * torch.exp2(size)).bfloat16()
        x[3] = 0
        whole = torch.full((16, 40), float("nan"))
        kernel.launch(x, [weight], [whole])
        compare(kind, linear_reference(x, [weight], [torch.float32]), [whole], 1e-2, 1e-5)
        assert not whole[3].any()
        variants = [(ScaledConfig(128, 8, 3, False), 16), (ScaledConfig(64, 4, 4, True), 16)]
        counts = (1, 2, 7, 8, 9, 15) if kind == "nvfp4" else (1, 15)
        variants += [(ScaledConfig(16, 4, 4, True), count) for count in counts]
        for config, count in variants:
            out = torch.full((count, 40), float("nan"))
            kernel.launch(x[16 - count :], [weight], [out], config=config)
            assert torch.equal(out, whole[16 - count :]), f"{kind} {config}, {count} rows"


def check_many_rows() -> None:
    """More rows than a tile of scales has, in the variant with descriptors: all three kinds."""
    from dsv4.ops.gemm import linear_scaled_triton as kernel
    from dsv4.ops.gemm.grouped_linear import grouped_linear_reference
    from dsv4.ops.gemm.scaled_product_triton import ScaledConfig
    from dsv4.ops.gemm.weights.scaled import random_scaled
    from tests.ops.kernels.test_weight_interpreter import compare

    kernel.fill_rows = fill_by_reference
    generator = torch.Generator().manual_seed(5)
    for kind, config in (
        ("nvfp4", ScaledConfig(128, 8, 3, False)),
        ("fp8", ScaledConfig(256, 8, 3, False)),
    ):
        x = torch.randn(131, 2, 288, generator=generator)
        weight = random_scaled(256, 288, generator, kind)
        out = torch.full((131, 256), float("nan"))
        kernel.launch(x.flatten(1), [weight], [out], num_groups=2, config=config)
        compare(kind, grouped_linear_reference(x, weight), [out], 1e-4, 1e-4)


def check_experts() -> None:
    check_cases("experts")
    from dsv4.ops.gemm.scaled_product_triton import ScaledConfig
    from dsv4.ops.moe import experts_scaled_triton as kernel
    from dsv4.ops.moe.experts import _few_bit_case

    case = _few_bit_case(9, ("nvfp4", "fp8"))
    arguments = case.build(torch.Generator().manual_seed(4))
    whole = kernel.run(**arguments)
    few = {**arguments, **{name: arguments[name][7:8] for name in ("x", "experts", "weights")}}
    alone = kernel.run(**few)
    assert torch.equal(alone[0], whole[7]), "a row's bits depend on its batch"
    many = kernel.run(**few, config=ScaledConfig(128, 8, 3, False))
    assert torch.equal(many[0], whole[7]), "a row's bits depend on the variant"


def main(group: str) -> None:
    importlib.import_module("tests.ops.kernels.shim")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if group == "rows":
        check_rows()
    elif group == "linear":
        check_cases("linear")
        check_cases("grouped_linear")
        check_linear_variants()
        check_many_rows()
    else:
        check_experts()


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]))
