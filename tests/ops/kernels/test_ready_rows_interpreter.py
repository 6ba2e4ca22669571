"""Rows that are quantised where they are made (mHC's boundary, RMS norm) and the products behind
them, in Triton's interpreter: the bits of the ops one by one.

Like test_weight_interpreter, this file is both the test and the program it starts.
"""

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.formats import fp8
from dsv4.ops.core.context import kernels_on_cpu
from dsv4.ops.core.op import Arguments, Fusion
from dsv4.ops.fused.block import mix_experts, mix_linear
from dsv4.ops.gemm.quantize_rows import quantize_rows
from dsv4.ops.gemm.weights.scaled import random_scaled, untile_scales
from dsv4.ops.mhc.mix import Residual, Update, _random_site, mhc_boundary_reference
from tests.ops.kernels.compiling import interpreted

GROUPS = (("mix rows", "mix count"), ("norm rows", "inputs"), ("experts", "queries"))
CPU = torch.device("cpu")


@pytest.mark.parametrize("group", GROUPS, ids=" and ".join)
def test_kernels_match_references(group: tuple[str, ...]) -> None:
    interpreted("tests.ops.kernels.test_ready_rows_interpreter", *group)


def mix_arguments(tokens: int, size: int, seed: int = 1) -> Arguments:
    """A row and two blocks of zeros, a block that is all but zero, very large channels."""
    g = torch.Generator().manual_seed(seed)
    site = replace(_random_site(g, 4, size, False), sinkhorn_iters=2)
    site.norm[:32] = 0
    site.norm[48:64] *= 1e-6
    site.norm[70], site.norm[size - 1] = 4000.0, -700.0
    streams = torch.randn(tokens, 4, size, generator=g) * 300
    y = torch.randn(tokens, size, generator=g) * 300
    if tokens > 1:
        streams[1], y[1] = 0, 0
    return {
        "streams": streams.bfloat16(),
        "y": y.bfloat16(),
        "post": torch.rand(tokens, 4, generator=g),
        "comb": torch.rand(tokens, 4, 4, generator=g) / 4,
        "site": site,
    }


def made_rows(tokens: int, size: int, a8: bool, tiled: bool) -> Any:
    """Buffers that hold something else before."""
    from dsv4.ops.gemm.quantize_rows_triton import make_rows

    rows = make_rows(CPU, tokens, size, tiled=tiled, name=f"test {a8}", a8=a8)
    for buffer in (rows.codes, rows.scales):
        buffer.fill_(0xA7)
    rows.row_scale.fill_(float("nan"))
    return rows


def parts(rows: Any) -> list[Tensor]:
    """Codes, block scales and row scales by row."""
    count, group = rows.num_rows, 32 if rows.a8 else 16
    width, groups = rows.columns // (1 if rows.a8 else 2), rows.columns // group
    codes = rows.codes[: count * width].view(count, width)
    scales = rows.scales[: count * groups].view(count, groups)
    if rows.tiled:
        whole = -(-count // 256) * 256
        grid = rows.scales[: whole * groups].view(whole // 128, groups // 4, 2, 256)
        scales = untile_scales(grid)[:count]
    found = [codes, scales]
    return found if rows.a8 else [*found, rows.row_scale[:count]]


def quantized(x: Tensor, rows: Any) -> list[Tensor]:
    """`parts` by the reference."""
    x = pad(x.float(), (0, rows.columns - x.shape[1]))
    found = fp8.quantize_groups(x, 32, check=False) if rows.a8 else quantize_rows(x)
    return [part if part.dtype == torch.float32 else part.view(torch.uint8) for part in found]


def assert_same(label: str, wanted: list[Tensor], found: list[Tensor]) -> None:
    from dsv4.ops.core.arguments import same_bits

    assert all(same_bits(a, b) for a, b in zip(wanted, found, strict=True)), label


def check_mix_rows() -> None:
    """The row as it was, and beside it the bytes of `quantize_rows`."""
    from dsv4.ops.mhc import mix_triton

    for tokens, size, dtype in ((3, 300, torch.bfloat16), (2, 256, torch.float32)):
        given = mix_arguments(tokens, size)
        given |= {name: given[name].to(dtype) for name in ("streams", "y")}
        plain = mix_triton.run(**given)
        expected = mhc_boundary_reference(**given)[1]
        for a8, tiled in ((False, False), (False, True), (True, False), (True, True)):
            label, rows = (
                f"{tokens}x{size} a8={a8} tiled={tiled}",
                made_rows(tokens, size, a8, tiled),
            )
            assert_same(label, list(plain), list(mix_triton.run(**given, rows=rows)))
            assert_same(label, quantized(plain[1], rows), parts(rows))
            differing = (parts(rows)[0] != quantized(expected, rows)[0]).float().mean()
            assert differing < 0.02, label  # the reference's row, but for last bits
        first = mix_triton.run(given["streams"], given["site"])
        rows = made_rows(tokens, size, False, False)
        assert_same(
            "pre", list(first), list(mix_triton.run(given["streams"], given["site"], rows=rows))
        )
        assert_same("pre", quantized(first[0], rows), parts(rows))


def check_mix_count() -> None:
    """A row's bytes with few rows and 16."""
    from dsv4.ops.mhc import mix_triton

    given = mix_arguments(16, 256)
    for a8 in (False, True):
        rows = made_rows(16, 256, a8, False)
        mix_triton.run(**given, rows=rows)
        whole = [part.clone() for part in parts(rows)]
        for count in (1, 2, 3, 8, 15) if not a8 else (1, 7):
            few = {k: v[16 - count :] if isinstance(v, Tensor) else v for k, v in given.items()}
            rows = made_rows(count, 256, a8, False)
            mix_triton.run(**few, rows=rows)
            assert_same(f"{count} rows", [part[16 - count :] for part in whole], parts(rows))


def check_norm_rows() -> None:
    from dsv4.ops.fused.norm_linear_scaled_triton import norm_quantize
    from dsv4.ops.norm import rms_norm_triton

    x, weight = (torch.randn(5, 208) * 70).bfloat16(), torch.randn(208) * 100
    x[1], weight[:16] = 0, 0
    plain = rms_norm_triton.run(x, weight, 1e-6)
    for a8, tiled in ((False, False), (True, True)):
        rows = made_rows(5, 208, a8, tiled)
        assert_same("norm", [plain], [norm_quantize(x, weight, 1e-6, rows)])
        assert_same("rows", quantized(plain, rows), parts(rows))


def fused(fusion: Fusion[..., Any], *given: Any) -> Any:
    with kernels_on_cpu():
        found = fusion.attempt(*given)
    assert found is not None
    return found


def residual_of(mix: Arguments) -> Residual:
    update = Update(mix["y"], mix["post"], mix["comb"]) if "y" in mix else None
    return Residual(mix["streams"], update)


def random_linear(size: int, kinds: tuple[str, ...]) -> Arguments:
    g = torch.Generator().manual_seed(4)
    weights = [random_scaled(n, size, g, kind) for n, kind in zip((130, 40), kinds, strict=True)]
    plain = torch.randn(24, size, generator=g).bfloat16()
    dtypes = [torch.bfloat16, torch.float32, torch.float32]
    return {"weights": [*weights, plain], "out_dtypes": dtypes}


def check_inputs() -> None:
    from dsv4.ops.gemm import linear_scaled_triton
    from dsv4.ops.mhc import mix_triton

    for tokens, kinds in ((3, ("nvfp4", "nvfp4")), (2, ("fp8", "nvfp4"))):
        mix, linear = mix_arguments(tokens, 288), random_linear(288, kinds)
        mix["site"].norm.clamp_(-3, 3)
        streams, x, post, comb = mix_triton.run(**mix)
        wanted = [streams, post, comb, *linear_scaled_triton.run(x, **linear)]
        *found, products = fused(mix_linear, residual_of(mix), mix["site"], *linear.values())
        assert_same(f"{tokens} rows {kinds}", wanted, [*found, *products])
    first = {"streams": mix["streams"], "site": mix["site"]}
    x, post, comb = mix_triton.run(**first)
    wanted = [first["streams"], post, comb, *linear_scaled_triton.run(x, **linear)]
    *found, products = fused(mix_linear, residual_of(first), mix["site"], *linear.values())
    assert_same("first layer", wanted, [*found, *products])
    plain = {"weights": linear["weights"][2:], "out_dtypes": linear["out_dtypes"][2:]}
    with kernels_on_cpu():  # nobody wants few bits: the ops run one by one
        assert mix_linear.attempt(residual_of(mix), mix["site"], *plain.values()) is None
        empty = residual_of({k: mix[k][:0] for k in ("streams", "y", "post", "comb")})
        assert mix_linear.attempt(empty, mix["site"], *linear.values()) is None


def check_experts() -> None:
    from dsv4.ops.mhc import mix_triton
    from dsv4.ops.moe import experts_scaled_triton, experts_triton, router_triton
    from dsv4.ops.moe.experts import _few_bit_case
    from dsv4.ops.moe.router import Gate

    for kinds in (("nvfp4", "nvfp4"), ("a16", "fp8"), ("mxfp4", "a16")):
        g = torch.Generator().manual_seed(3)
        case = _few_bit_case(2, kinds).build(g)
        experts, mix = case["by"], mix_arguments(2, 288)
        mix["site"].norm.clamp_(-3, 3)
        gate = Gate(
            gate=torch.randn(4, 288, generator=g).bfloat16(),
            bias=torch.randn(4, generator=g),
            table=None,
            num_chosen=2,
            scaling=1.5,
        )
        token_ids = torch.tensor([3, 5])
        streams, x, post, comb = mix_triton.run(**mix)
        module = experts_triton if kinds[0] == "a16" else experts_scaled_triton
        y = module.run(x, *router_triton.run(x, token_ids, gate), experts)
        given = (residual_of(mix), mix["site"], token_ids, gate, experts)
        found = fused(mix_experts, *given)
        assert_same(f"{kinds}", [streams, y, post, comb], [found.streams, *found.pending])


def check_queries() -> None:
    """Behind the norm alone, and behind the launch that also stores the state."""
    from dsv4.ops.core.arguments import copied
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.fused.block import norm_linear, store_and_query
    from dsv4.ops.gemm import linear_scaled_triton
    from dsv4.ops.kv import kv_store_triton
    from dsv4.ops.kv.rope import rope_frequencies
    from dsv4.ops.norm import rms_norm_triton
    from tests.ops.kernels.test_state_interpreter import case_arguments, compress_arguments

    g = torch.Generator().manual_seed(6)
    latent, norm = torch.randn(2, 288, generator=g).bfloat16(), torch.rand(288, generator=g)
    for kinds in (("nvfp4", "nvfp4"), ("mxfp4", "fp8")):
        weights = random_linear(288, kinds)["weights"]
        normed = rms_norm_triton.run(latent, norm, 1e-6)
        wanted = linear_scaled_triton.run(normed, weights, [torch.bfloat16] * len(weights))
        assert_same("norm", wanted, fused(norm_linear, latent, norm, 1e-6, weights))
        batch = make_ragged([6, 127], [1, 1], [1, 0], CPU)
        frequencies = rope_frequencies(16, 10000.0)
        key = case_arguments("kv_store", "fp8 [0, 4096]+[1, 1]", g)
        key = replace(key["key"], batch=batch, frequencies=frequencies, kv=key["key"].kv.bfloat16())
        blocks = [compress_arguments(128, False, batch, frequencies, g)]
        own = copied(key)
        found = fused(store_and_query, latent, norm, weights, own, copied(blocks))
        assert_same("state", wanted, found)
        kv_store_triton.run(key)
        assert_same("key", list(key.pool.parts.values()), list(own.pool.parts.values()))


CHECKS = {
    "mix rows": check_mix_rows,
    "mix count": check_mix_count,
    "norm rows": check_norm_rows,
    "inputs": check_inputs,
    "experts": check_experts,
    "queries": check_queries,
}


def main(group: list[str]) -> None:
    importlib.import_module("tests.ops.kernels.shim")
    torch.set_num_threads(1)
    for name in group:
        torch.manual_seed(0)
        CHECKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
