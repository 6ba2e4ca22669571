"""What a rank computes, on a GPU: slices have the bits of the whole, at real models' sizes."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import state_ops
from dsv4.config import ModelConfig
from dsv4.formats import fp8
from dsv4.formats.quantized import Fp8BlockTensor, Weight, part_of_whole
from dsv4.ops.comm.own_experts import own_experts
from dsv4.ops.comm.sharded import (
    combine_experts,
    expert_sums,
    linear_ranges,
    shared_expert,
    split_experts,
)
from dsv4.ops.core.arguments import same_bits
from dsv4.ops.core.ragged import make_ragged
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear
from dsv4.ops.gemm.split_k import PartialSums
from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4, a8_weight, random_a8, random_a8_fp8
from dsv4.ops.gemm.weights.tiled import random_mxfp4, random_tiled, tile_mxfp4
from dsv4.ops.moe.experts import Experts, experts_ffn
from dsv4.tools.bench_ops import SHAPES, random_a8_mxfp4, random_fp4

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
ROWS = (1, 8, 33, 300)
TP = (2, 4, 8)
# hidden size, heads x head dim, query rank, output groups, inner size
MODELS = {"flash": (4096, 64 * 512, 1024, 8, 2048), "pro": (7168, 128 * 512, 1536, 16, 3072)}


def formats(rows: int, columns: int) -> Iterator[tuple[str, Weight]]:
    yield "nvfp4", random_fp4(rows, columns)
    values = torch.randn(rows, columns, device="cuda")
    yield "fp8", Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128)
    yield "bf16", values.bfloat16()
    if HOPPER:
        made = Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128, activations="a8")
        yield "a8", a8_weight(made, paired=False)  # type: ignore[misc]


def some_rows(weight: Any, first: int, last: int, whole: int) -> Weight:
    """Rows of a matrix, as a rank has them after loading."""
    if isinstance(weight, Tensor):
        return part_of_whole(weight[first:last].contiguous(), whole)
    if isinstance(weight, Fp8BlockTensor):
        return part_of_whole(weight.row_range(first, last), whole)
    if isinstance(weight, A8Fp8):
        data, scale = weight.data[first:last].contiguous(), weight.scale[first // 128 : last // 128]
        return part_of_whole(replace(weight, data=data, scale=scale.contiguous()), whole)
    tiles = slice(first // 64, last // 64)
    packed, scale = weight.packed[tiles], weight.scale[tiles]
    return part_of_whole(replace(weight, packed=packed, scale=scale, rows=last - first), whole)


@pytest.mark.parametrize("model", MODELS)
def test_rows_of_matrices_have_the_bits_of_the_whole(model: str) -> None:
    _, queries, rank, _, _ = MODELS[model]
    for name, weight in formats(queries, rank):
        whole_weight = part_of_whole(weight, queries)
        for rows in ROWS:
            x = torch.randn(rows, rank, device="cuda").bfloat16()
            whole = linear(x, whole_weight)
            for tp in TP:
                each = queries // tp
                for i in (0, tp - 1):
                    part = some_rows(weight, i * each, (i + 1) * each, queries)
                    found = linear(x, part)
                    assert torch.equal(found, whole[:, i * each : (i + 1) * each]), (name, rows, tp)


@pytest.mark.parametrize("model", MODELS)
def test_vocabulary_ranges_have_the_bits_of_the_whole(model: str) -> None:
    """Of the head, whose ranges end inside a tile of rows."""
    size, whole_rows = MODELS[model][0], ModelConfig.builtin(model).vocab_size
    head = torch.randn(whole_rows, size, device="cuda", dtype=torch.bfloat16)
    whole_head = part_of_whole(head, whole_rows)
    for rows in (1, 8, 33):
        x = torch.randn(rows, size, device="cuda").bfloat16()
        whole = linear(x, whole_head, torch.float32)
        for tp in TP:
            each = whole_rows // tp
            for i in (0, tp - 1):
                part = some_rows(head, i * each, (i + 1) * each, whole_rows)
                found = linear(x, part, torch.float32)
                assert torch.equal(found, whole[:, i * each : (i + 1) * each]), (rows, tp)


@pytest.mark.parametrize("model", MODELS)
def test_ranges_of_all_ranks_add_up_to_the_whole(model: str) -> None:
    size, _, _, groups, _ = MODELS[model]
    columns = groups * 1024
    for name, weight in formats(size, columns):
        wo_b = part_of_whole(weight, size, 8)
        for rows in (1, 8, 33, 63):
            x = torch.randn(rows, columns, device="cuda").bfloat16()
            whole = linear(x, wo_b)
            for tp in TP:
                each = 8 // tp
                parts = [
                    linear_ranges(own.contiguous(), wo_b, range(i * each, (i + 1) * each))
                    for i, own in enumerate(x.chunk(tp, 1))
                ]
                values = torch.cat([part.values for part in parts], 1)
                found = PartialSums(values, parts[0].factor, x.dtype).total()
                assert torch.equal(found, whole), (name, rows, tp)


@pytest.mark.parametrize("model", MODELS)
def test_groups_have_the_bits_of_the_whole(model: str) -> None:
    _, queries, _, groups, _ = MODELS[model]
    whole_rows, columns = groups * 1024, queries // groups
    for name, weight in formats(whole_rows, columns):
        if name == "a8":  # wo_a reads its rows as they are
            continue
        whole_weight = part_of_whole(weight, whole_rows)
        for rows in ROWS:
            x = torch.randn(rows, groups, columns, device="cuda").bfloat16()
            whole = grouped_linear(x, whole_weight)
            for tp in TP:
                each, i = groups // tp, tp - 1
                part = some_rows(weight, i * each * 1024, (i + 1) * each * 1024, whole_rows)
                found = grouped_linear(x[:, i * each : (i + 1) * each].contiguous(), part)
                wanted = whole.view(rows, groups, -1)[:, i * each : (i + 1) * each].flatten(1)
                assert torch.equal(found.flatten(1), wanted), (name, rows, tp)


@pytest.mark.parametrize("shared", ["nvfp4", "mxfp4", "fp8", *["a8"] * HOPPER])
def test_experts_of_all_ranks_add_up_to_the_whole(shared: str) -> None:
    size, inner, count = 1024, 1152, 32
    generator = torch.Generator().manual_seed(4)

    def stack(rows: int, columns: int, paired: bool, number: int | None) -> Any:
        if shared == "nvfp4":
            return random_tiled(rows, columns, generator, count=number, paired=paired).to("cuda")
        if shared == "a8":
            return random_a8(rows, columns, generator, count=number or 0, paired=paired).to("cuda")
        made = random_mxfp4(rows, columns, generator, count=number)
        return tile_mxfp4(made, paired=paired).to("cuda")

    def one(rows: int, columns: int, paired: bool) -> Any:
        if shared == "a8":
            return random_a8_fp8(rows, columns, generator).to("cuda")
        if shared != "fp8":
            return stack(rows, columns, paired, None)
        values = torch.randn(rows, columns, generator=generator).cuda() * 0.2
        return Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128)

    by = Experts(
        stack(2 * inner, size, True, count), stack(size, inner, False, count),
        one(2 * inner, size, True), one(size, inner, False), 10.0,
    )  # fmt: skip
    check_ranks_add_up(by, (1, 2, 8, 33, 300, 3000))


KINDS = ["nvfp4", "mxfp4", *["a8"] * HOPPER]


def experts_of(kind: str, size: int, inner: int, count: int) -> Experts:
    if kind == "a8":
        generator = torch.Generator().manual_seed(5)
        return Experts(
            random_a8_mxfp4(2 * inner, size, count, True),
            random_a8_mxfp4(size, inner, count, False),
            random_a8_fp8(2 * inner, size, generator).to("cuda"),
            random_a8_fp8(size, inner, generator).to("cuda"), 10.0,
        )  # fmt: skip
    mx = kind == "mxfp4"
    return Experts(
        random_fp4(2 * inner, size, count, True, mx=mx), random_fp4(size, inner, count, mx=mx),
        random_fp4(2 * inner, size, None, True, mx=mx), random_fp4(size, inner, mx=mx), 10.0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_whole_experts_of_real_sizes_add_up(model: str, kind: str) -> None:
    size, inner, count = MODELS[model][0], MODELS[model][-1], ModelConfig.builtin(model).num_experts
    check_ranks_add_up(experts_of(kind, size, inner, count), (1, 33))


def check_ranks_add_up(by: Experts, counts: tuple[int, ...], chosen: int = 6) -> None:
    count, size = by.w2.shape[:2]
    for rows in counts:
        x = torch.randn(rows, size, device="cuda").bfloat16()
        experts = torch.rand(rows, count, device="cuda").topk(chosen).indices.sort(1).values
        weights = torch.rand(rows, chosen, device="cuda")
        whole = experts_ffn(x, experts, weights, by)
        alone = shared_expert(x, by)
        for tp in TP:
            each, total = count // tp, torch.zeros(rows, chosen, size, device="cuda")
            for i in range(tp):
                held = range(i * each, (i + 1) * each)
                own = Experts(by.w13[held.start : held.stop], by.w2[held.start : held.stop],
                              by.shared_w13, by.shared_w2, by.limit)  # fmt: skip
                local = own_experts(experts, held)
                made = expert_sums(x, local, weights, own, with_shared=True)
                mine = local >= 0
                total[mine] = made.pairs(chosen)[mine]
                assert torch.equal(made.shared(), alone), (rows, tp)
            added = torch.zeros(rows, size, device="cuda")
            for place in range(chosen):
                added = added + total[:, place]
            assert torch.equal((added + alone).bfloat16(), whole), (rows, tp)


def some_tiles(stack: Any, part: int, of: int) -> Any:
    """A range of the rows of every matrix; of w13 of both halves, whose rows alternate by 32."""
    if isinstance(stack, A8Mxfp4):
        tiles = stack.words.shape[1] // of
        own = {k: getattr(stack, k)[:, part * tiles :][:, :tiles] for k in ("words", "shifts")}
        own = {name: value.contiguous() for name, value in own.items()}
        return replace(stack, rows=stack.rows // of, **own)
    tiles = stack.packed.shape[1] // of
    packed, scale = (
        x[:, part * tiles :][:, :tiles].contiguous() for x in (stack.packed, stack.scale)
    )
    return replace(stack, packed=packed, scale=scale, rows=stack.rows // of)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_split_experts_have_the_bits_of_whole_ones(model: str, kind: str) -> None:
    size, inner, count, chosen = MODELS[model][0], MODELS[model][-1], 8, 6
    by = experts_of(kind, size, inner, count)
    for rows in (1, 2, 33, 300):
        x = torch.randn(rows, size, device="cuda").bfloat16()
        experts = torch.rand(rows, count, device="cuda").topk(chosen).indices.sort(1).values
        weights = torch.rand(rows, chosen, device="cuda")
        whole = experts_ffn(x, experts, weights, by)
        shared = shared_expert(x, by)
        for tp in TP:
            ranks = [
                replace(by, w13=some_tiles(by.w13, i, tp), w2=some_tiles(by.w2, i, tp))
                for i in range(tp)
            ]
            inputs: list[Tensor] = []

            def keep(z: Tensor, inputs: list[Tensor] = inputs, tp: int = tp) -> Tensor:
                inputs.append(z.clone())
                return z.repeat(1, tp)

            for own in ranks:
                split_experts(x, experts, weights, own, keep)
            every, found = torch.cat(inputs, 1), []
            for own, extra in zip(ranks, shared.chunk(tp, 1), strict=True):
                parts = split_experts(x, experts, weights, own, lambda z, every=every: every)
                found.append(combine_experts(parts, extra.contiguous(), x.dtype))
            assert torch.equal(torch.cat(found, 1), whole), (rows, tp)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("model", ["flash", "pro"])
def test_heads_have_the_bits_of_all_heads(model: str, ratio: int) -> None:
    """The variant of attention depends on how many heads and queries there are; its bits do not."""
    shape, device = SHAPES[model], torch.device("cuda")
    topk = state_ops.TOPK[shape.name] if ratio == 4 else 0
    for starts, counts in (([5000], [1]), ([90000, 700], [5, 300]), ([70000] * 8, [1] * 8)):
        batch = make_ragged(starts, counts, list(range(len(starts))), device)
        arguments = state_ops.attention_arguments(shape, batch, ratio, topk, "cuda")
        kernel = import_module("dsv4.ops.attention.attention_triton")
        whole, heads = kernel.run(**arguments), arguments["q"].shape[1]
        for tp in TP:
            each = heads // tp
            for i in (0, tp - 1):
                own = slice(i * each, (i + 1) * each)
                q, to = arguments["q"][:, own].contiguous(), arguments["to"]
                to = replace(to, sink=to.sink[own].contiguous())
                assert kernel.supports(q, to) is None
                assert same_bits(kernel.run(q, to), whole[:, own].contiguous()), (counts, tp, i)
