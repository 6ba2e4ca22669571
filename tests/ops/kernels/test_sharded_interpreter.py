"""A rank's shares of `wo_b` and of the experts in Triton's interpreter: they add up to the whole.

This file is both the test and the program it starts (see test_weight_interpreter.py).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.kernels.compiling import interpreted

TP = 2
KINDS = ("nvfp4", "mxfp4", "a8")


@pytest.mark.parametrize("group", ["ranges", "experts", "split"])
def test_sharded_add_up_to_the_whole(group: str) -> None:
    interpreted("tests.ops.kernels.test_sharded_interpreter", group)


def check_ranges(rows: int) -> None:
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor, part_of_whole
    from dsv4.ops.comm.sharded import linear_ranges
    from dsv4.ops.gemm.linear import linear
    from dsv4.ops.gemm.split_k import PartialSums
    from dsv4.ops.gemm.weights.a8 import random_a8_fp8
    from dsv4.ops.gemm.weights.tiled import random_tiled

    generator = torch.Generator().manual_seed(rows)
    values = torch.randn(64, 512, generator=generator)
    weights: list[Any] = [random_tiled(64, 512, generator), values.bfloat16()]
    weights += [Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128)]
    weights += [random_a8_fp8(64, 512, generator)]
    x = torch.randn(rows, 512, generator=generator).bfloat16()
    for weight in weights:
        wo_b = part_of_whole(weight, 64, 4)
        parts = [
            linear_ranges(own.contiguous(), wo_b, range(2 * i, 2 * i + 2))
            for i, own in enumerate(x.chunk(TP, 1))
        ]
        sums = torch.cat([part.values for part in parts], 1)
        assert sums.isfinite().all()
        found = PartialSums(sums, parts[0].factor, x.dtype).total()
        assert torch.equal(found, linear(x, wo_b)), type(weight)


def check_experts(rows: int, kind: str) -> None:
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.comm.own_experts import own_experts
    from dsv4.ops.comm.sharded import expert_sums, shared_expert
    from dsv4.ops.gemm.weights.a8 import random_a8, random_a8_fp8
    from dsv4.ops.gemm.weights.tiled import random_mxfp4, random_tiled, tile_mxfp4
    from dsv4.ops.moe.experts import Experts, experts_ffn

    size, inner, count, chosen = 128, 64, 4, 2
    generator = torch.Generator().manual_seed(rows)

    def matrix(rows: int, columns: int, paired: bool, number: int | None) -> Any:
        if kind == "nvfp4":
            return random_tiled(rows, columns, generator, count=number, paired=paired)
        if kind == "a8" and number is None:
            return random_a8_fp8(rows, columns, generator)
        if kind == "a8":
            return random_a8(rows, columns, generator, count=number, paired=paired)
        if number is None:  # as in official checkpoints
            values = torch.randn(rows, columns, generator=generator) * 0.2
            return Fp8BlockTensor(*fp8.quantize_tiles(values, 32), 32)
        made = random_mxfp4(rows, columns, generator, count=number)
        return tile_mxfp4(made, paired=paired)

    by = Experts(
        matrix(2 * inner, size, True, count), matrix(size, inner, False, count),
        matrix(2 * inner, size, True, None), matrix(size, inner, False, None), 10.0,
    )  # fmt: skip
    x = torch.randn(rows, size, generator=generator).bfloat16()
    picks = torch.rand(rows, count, generator=generator).topk(chosen).indices.sort(1).values
    weights = torch.rand(rows, chosen, generator=generator)
    alone, total = shared_expert(x, by), torch.zeros(rows, chosen, size)
    for rank in range(TP):
        held = range(rank * count // TP, (rank + 1) * count // TP)
        own = slice(held.start, held.stop)
        mine = Experts(by.w13[own], by.w2[own], by.shared_w13, by.shared_w2, by.limit)
        load = torch.tensor([100, 200])
        local = own_experts(picks, held, load)
        owners = [expert // len(held) for expert in picks.flatten().tolist()]
        assert load.tolist() == [100 + max(map(owners.count, range(TP))), 200 + len(owners)]
        made = expert_sums(x, local, weights, mine, with_shared=True)
        assert torch.equal(made.shared(), alone)
        total[local >= 0] = made.pairs(chosen)[local >= 0]
        bare = expert_sums(x, local, weights, mine, with_shared=False)
        assert torch.equal(bare.pairs(chosen)[local >= 0], total[local >= 0])
    added = torch.zeros(rows, size)
    for place in range(chosen):
        added = added + total[:, place]
    assert torch.equal((added + alone).bfloat16(), experts_ffn(x, picks, weights, by))


def check_split(rows: int, kind: str) -> None:
    from dsv4.ops.comm.sharded import combine_experts, shared_expert, split_experts
    from dsv4.ops.gemm.weights.a8 import a8_weight, random_a8_fp8
    from dsv4.ops.gemm.weights.tiled import random_mxfp4, tile_mxfp4, tile_nvfp4
    from dsv4.ops.moe.experts import Experts, experts_ffn

    size, inner, count, chosen = 128, 64, 4, 2
    generator = torch.Generator().manual_seed(rows)

    def as_a8(weight: Any, *, paired: bool = False) -> Any:
        return a8_weight(replace(weight, activations="a8"), paired=paired)

    tile: Any = {"nvfp4": tile_nvfp4, "mxfp4": tile_mxfp4, "a8": as_a8}[kind]

    def random(rows: int, columns: int) -> Any:
        make = _random_nvfp4 if kind == "nvfp4" else random_mxfp4
        return make(rows, columns, generator, count=count)

    w1, w3, w2 = random(inner, size), random(inner, size), random(size, inner)
    shared = tile(_join(w1, w3), paired=True)[0], tile(w2)[0]
    if kind == "a8":
        shared = tuple(random_a8_fp8(*s, generator) for s in ((2 * inner, size), (size, inner)))

    def part(rank: int, of: int) -> Any:
        """The share of a rank, or with one rank the whole."""
        halves = (_rows(w, range(rank * inner // of, (rank + 1) * inner // of)) for w in (w1, w3))
        down = _rows(w2, range(rank * size // of, (rank + 1) * size // of))
        return Experts(tile(_join(*halves), paired=True), tile(down), *shared, 10.0)

    x = torch.randn(rows, size, generator=generator).bfloat16()
    picks = torch.rand(rows, count, generator=generator).topk(chosen).indices.sort(1).values
    weights = torch.rand(rows, chosen, generator=generator)
    laid: list[torch.Tensor] = []

    def lay_down(z: torch.Tensor) -> torch.Tensor:
        laid.append(z.clone())
        return z.repeat(1, TP)

    ranks = [part(rank, TP) for rank in range(TP)]
    for by in ranks:
        split_experts(x, picks, weights, by, lay_down)
    columns = []
    for rank, by in enumerate(ranks):
        extra = shared_expert(x, by).chunk(TP, 1)[rank].contiguous()
        parts = split_experts(x, picks, weights, by, lambda z: torch.cat(laid, 1))
        columns.append(combine_experts(parts, extra, x.dtype))
    assert torch.equal(torch.cat(columns, 1), experts_ffn(x, picks, weights, part(0, 1)))
    zeros = torch.zeros(1, chosen, 1, size)
    assert not combine_experts(-zeros, -zeros[:, 0, 0], x.dtype).signbit().any()  # 0 + -0 + -0


def _random_nvfp4(rows: int, columns: int, generator: torch.Generator, *, count: int) -> Any:
    from dsv4.formats import nvfp4
    from dsv4.formats.quantized import Nvfp4Tensor

    made = [
        nvfp4.quantize(torch.randn(rows, columns, generator=generator) * 0.2) for _ in range(count)
    ]
    packed, scale = (torch.stack([m[i].view(torch.uint8) for m in made]) for i in range(2))
    factors = torch.stack([m[2].reshape(1) for m in made])
    return Nvfp4Tensor(packed, scale.view(torch.float8_e4m3fn), factors)


def _tensors(weight: Any) -> dict[str, torch.Tensor]:
    return {k: v for k, v in vars(weight).items() if isinstance(v, torch.Tensor)}


def _rows(weight: Any, own: range) -> Any:
    cut = {k: v[:, own.start : own.stop] for k, v in _tensors(weight).items() if v.dim() > 2}
    return replace(weight, **cut)


def _join(gate: Any, up: Any) -> Any:
    """Rows of both; globals beside each other."""
    other = _tensors(up)
    values = {k: _bytes_cat(v, other[k]) for k, v in _tensors(gate).items()}
    return replace(gate, **values)


def _bytes_cat(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float32:
        return torch.cat([a, b], 1)
    return torch.cat([a.view(torch.uint8), b.view(torch.uint8)], 1).view(a.dtype)


def main(group: str) -> None:
    import tests.ops.kernels.shim  # noqa: F401
    from dsv4.ops.core.context import kernels_on_cpu

    with kernels_on_cpu():
        if group == "ranges":
            for rows in (1, 5):
                check_ranges(rows)
        elif group == "split":
            for rows in (1, 3):
                for kind in KINDS:
                    check_split(rows, kind)
        else:
            for rows in (1, 3):
                for kind in KINDS:
                    check_experts(rows, kind)


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
