"""Compile the weight kernels at model sizes without a GPU; read registers, memory, instructions."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.kernels.compiling import Launch, check_limits, compiled_facts, counts_are_known

EVERY_KERNEL = ("linear 1 decode", "linear prefill", "experts 8 decode", "router", "embed")
HOT = re.compile("decode|prefill")
MATRIX = re.compile("HGMMA|HMMA|UTCHMMA|OMMA")


@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        (90, "streams"),  # which the interpreter does not run
        *(
            pytest.param(capability, "all", marks=pytest.mark.compile)
            for capability in (86, 90, 100)
        ),
    ],
)
def test_kernels_compile(capability: int, cases: str) -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    rows = compiled_facts("tests.ops.kernels.test_weight_compile", capability, cases)
    kernels = {row["kernel"] for row in rows}
    if capability == 90:
        assert kernels >= {"linear_stream", "stored_stream", "up_stream", "down_stream"}
        assert "_prompt_kernel" in kernels
    if cases == "all":
        assert kernels >= {"_linear_kernel", "_up_kernel", "_down_kernel", "_gate_kernel"}
    if (capability, cases) == (90, "all"):
        # offsets from a table are known to be aligned: loads are as wide as from a stack
        length = {(row["case"], row["kernel"]): row["instructions"] for row in rows}
        for kernel in ("_up_kernel", "_down_kernel"):
            stacked, placed = (
                length[f"{kind}experts 8 decode", kernel] for kind in ("", "placed ")
            )
            assert placed < 1.15 * stacked, kernel
    for row in rows:
        label = f"{row['case']} {row['kernel']}"
        check_limits(row, 20, capability)
        products = ("_linear_kernel", "_prompt_kernel", "_up_kernel", "_gate_kernel", "_stream")
        if row["kernel"].endswith(products):
            assert MATRIX.search(" ".join(row["mix"])), f"{label}: no matrix instruction"
        if capability != 100 and HOT.search(row["case"]) and counts_are_known():
            assert row["hot_reloads"] == 0, f"{label}: {row['hot_reloads']} reloads in a loop"


def launches(capability: int, cases: str = "all") -> Iterator[Launch]:
    """One variant of each kernel, to save time; all are read on sm_90."""
    if capability == 90:
        as_on_hopper()
        yield from stream_launches()
    if cases == "streams":
        return
    for name, launch in all_launches():
        if capability == 90 or name in EVERY_KERNEL:
            yield name, launch


def as_on_hopper() -> None:
    """Launches take the kernels for few rows that `streams` asks a GPU for."""
    from dsv4.ops.core import launch
    from dsv4.ops.gemm import linear_triton
    from dsv4.ops.moe import experts_single_token_triton

    for module in (launch, linear_triton, experts_single_token_triton):
        module.streams = lambda device: True  # type: ignore[attr-defined]


def stream_launches() -> Iterator[Launch]:
    """K in several ranges, one or several rows; experts of both formats."""
    from dsv4.ops.fused.linear_partial_sums_triton import run as partial_sums
    from dsv4.ops.gemm import linear_triton
    from dsv4.ops.gemm.weights.tiled import random_mxfp4, random_tiled, tile_mxfp4
    from dsv4.ops.moe import experts_stream_gluon

    generator = torch.Generator().manual_seed(0)
    prompt = torch.zeros(1024, 2048, dtype=torch.bfloat16)
    some = [torch.zeros(n, 2048).bfloat16() for n in (256, 192, 64)]
    yield "prompt", lambda: linear_triton.run(prompt, some, [torch.float32] * 3)
    wo_a, grouped = random_tiled(256, 1024, generator), torch.empty(1024, 256).bfloat16()
    yield "prompt groups", lambda: linear_triton.launch(prompt, [wo_a], [grouped], num_groups=2)
    for columns, rows in ((2048, 1), (2048, 8)):
        matrix = random_tiled(256, columns, generator)
        x = torch.zeros(rows, columns, dtype=torch.bfloat16)
        dtypes = [torch.bfloat16, torch.float32]
        yield f"stream {columns} {rows}", lambda a=(x, [matrix] * 2, dtypes): linear_triton.run(*a)
    one = torch.zeros(1, 2048, dtype=torch.bfloat16)
    matrix = random_tiled(256, 2048, generator)
    yield "stream of partial sums", lambda: partial_sums(one, matrix)
    up, down = (random_mxfp4(*shape, generator, count=2) for shape in ((512, 2048), (256, 256)))
    both = (
        (random_tiled(512, 2048, generator, count=2, paired=True),
         random_tiled(256, 256, generator, count=2)),
        (tile_mxfp4(up, paired=True), tile_mxfp4(down)),
    )  # fmt: skip
    for w13, w2 in both:
        ids, z = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(768, dtype=torch.bfloat16)
        given = (one, z, ids, torch.zeros(1, 2), w13, w2, w2[0], 10.0)
        name = f"stream of experts {type(w2).__name__}"
        yield name, lambda a=given: experts_stream_gluon.run(*a)
    yield from stored_launches(one, both[1])


def stored_launches(one: torch.Tensor, experts: tuple[Any, Any]) -> Iterator[Launch]:
    """Official checkpoints: FP8 and bf16 matrices; placed experts beside an FP8 shared one."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.fused import router_experts_triton
    from dsv4.ops.gemm import linear_triton
    from dsv4.ops.moe.experts import Experts
    from dsv4.ops.moe.router import Gate
    from tests.ops.kernels.test_placed_interpreter import place

    shared = [
        Fp8BlockTensor(*fp8.quantize_tiles(torch.zeros(shape), 128), 128)
        for shape in ((512, 2048), (256, 256))
    ]
    for name, weight in (("fp8", shared[0]), ("bf16", torch.zeros(512, 2048).bfloat16())):
        given = (one, [weight] * 2, [torch.bfloat16, torch.float32])
        yield f"stream {name} decode", lambda a=given: linear_triton.run(*a)
    ids, weights = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)
    by = Experts(*experts, *shared, 10.0)
    placed = place({"x": one, "experts": ids, "weights": weights, "by": by})[0]["by"]
    gate = Gate(torch.zeros(2, 2048).bfloat16(), torch.zeros(2), None, 2, 1.5)
    given = (one, torch.zeros(1, dtype=torch.int64), gate, placed)
    yield "stream of placed experts decode", lambda: router_experts_triton.run(*given)


def all_launches() -> Iterator[Launch]:
    """A layer's matrices, small in memory; tensors lie on the CPU."""
    from dsv4.ops.gemm import embed_triton, linear_triton
    from dsv4.ops.gemm.weights.tiled import random_tiled
    from dsv4.ops.moe import experts_triton, router_triton
    from dsv4.ops.moe.experts import Experts
    from dsv4.ops.moe.router import Gate
    from tests.ops.kernels.test_placed_interpreter import place

    generator = torch.Generator().manual_seed(0)
    matrix = random_tiled(256, 1024, generator)
    dense = torch.zeros(256, 1024, dtype=torch.bfloat16)
    for rows, case in ((1, "decode"), (32, "decode")):
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        yield f"linear {rows} {case}", lambda x=x: linear_triton.run(x, [matrix], [x.dtype])
    long = random_tiled(256, 2048, generator)
    wide = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    yield "linear prefill", lambda: linear_triton.run(wide, [long], [wide.dtype])
    short = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    yield "linear short prefill", lambda: linear_triton.run(short, [matrix], [short.dtype])
    x = torch.zeros(1, 1024, dtype=torch.bfloat16)
    yield "linear bf16", lambda: linear_triton.run(x, [dense, matrix, matrix], [torch.float32] * 3)
    w13 = random_tiled(512, 256, generator, count=2, paired=True)
    w2 = random_tiled(256, 256, generator, count=2)
    for rows, case in ((1, "decode"), (8, "decode"), (192, "prefill"), (2048, "prefill")):
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        ids = torch.zeros(rows, 2, dtype=torch.int64)
        by = Experts(w13, w2, w13[0], w2[0], 10.0)
        arguments = {"x": x, "experts": ids, "weights": torch.zeros(rows, 2), "by": by}
        yield f"experts {rows} {case}", lambda a=arguments: experts_triton.run(**a)
        if rows <= 8:
            given = place(arguments)[0]
            yield f"placed experts {rows} {case}", lambda a=given: experts_triton.run(**a)
    tokens = torch.zeros(1, dtype=torch.int64)
    gate = torch.zeros(256, 1024, dtype=torch.bfloat16)
    x = torch.zeros(1, 1024, dtype=torch.bfloat16)
    bias = torch.zeros(256)
    yield "router", lambda: router_triton.run(x, tokens, Gate(gate, bias, None, 6, 1.5))
    yield "embed", lambda: embed_triton.run(tokens, gate, 4, torch.bfloat16)


def other_formats() -> Iterator[Launch]:
    """Official and older checkpoints: FP8 tiles, MXFP4 experts."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.gemm import linear_triton
    from dsv4.ops.gemm.weights.tiled import random_mxfp4, tile_mxfp4
    from dsv4.ops.moe import experts_triton
    from dsv4.ops.moe.experts import Experts

    values = torch.zeros(512, 1024)
    tiles = [Fp8BlockTensor(*fp8.quantize_tiles(values, 32), 32)]
    tiles += [Fp8BlockTensor(*fp8.quantize_tiles(values, 128, power_of_two=False), 128)]
    for weight in tiles:
        for rows in (1, 32, 64, 512, 1024):
            x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
            name = f"linear fp8 {weight.block} {rows} prefill"
            yield name, lambda x=x, w=weight: linear_triton.run(x, [w], [x.dtype])
    generator = torch.Generator().manual_seed(0)
    w13 = tile_mxfp4(random_mxfp4(512, 256, generator, count=2), paired=True)
    w2 = tile_mxfp4(random_mxfp4(256, 256, generator, count=2), paired=False)
    for rows, case in ((1, "decode"), (8, "decode"), (64, "prefill")):
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        ids = torch.zeros(rows, 2, dtype=torch.int64)
        by = Experts(w13, w2, w13[0], w2[0], 10.0)
        arguments = (x, ids, torch.zeros(rows, 2), by)
        yield f"experts mxfp4 {rows} {case}", lambda a=arguments: experts_triton.run(*a)
    x, ids = torch.zeros(8, 256, dtype=torch.bfloat16), torch.zeros(8, 2, dtype=torch.int64)
    shared = [Fp8BlockTensor(*fp8.quantize_tiles(torch.zeros(n, 256), 32), 32) for n in (512, 256)]
    arguments = (x, ids, torch.zeros(8, 2), Experts(w13, w2, shared[0], shared[1], 10.0))
    yield "experts mxfp4, shared fp8", lambda a=arguments: experts_triton.run(*a)
