"""Compile FP8 products of a8 rows for sm_90, at the sizes of V4-Flash, without a GPU."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.ops.kernels.compiling import Launch, check_limits, compiled_facts, counts_are_known

NUMBERS = {  # of kernels; what the interpreter does not run is compiled by every test run
    "gluon": {
        "_a8_prompt_kernel": 2,
        "_a8_prompt_experts_kernel": 2,
        "_prompt_kernel": 1,
        "a8_stream": 4,
        "a8_up_stream": 1,
        "a8_down_stream": 1,
    },
    "all": {
        "_a8_kernel": 13,
        "_a8_rows_kernel": 5,
        "_a8_prompt_kernel": 4,
        "_a8_prompt_experts_kernel": 4,
        "_prompt_kernel": 1,
        "a8_stream": 4,
        "a8_up_stream": 1,
        "a8_down_stream": 1,
    },
}


@pytest.mark.parametrize("cases", ["gluon", pytest.param("all", marks=pytest.mark.compile)])
def test_kernels_compile(cases: str) -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    rows = compiled_facts("tests.ops.kernels.test_a8_compile", 90, cases)
    products = [
        row for row in rows if not row["kernel"].endswith(("_rows_kernel", "_prompt_kernel"))
    ]
    products += [row for row in rows if row["kernel"] == "_a8_prompt_kernel"]
    kernels = [row["kernel"] for row in rows]
    assert {name: kernels.count(name) for name in kernels} == NUMBERS[cases]
    for row in rows:
        check_limits(row, 0, 90)
    for row in products:
        # all by the same instruction, whose bits do not depend on the number of rows
        assert row["products"], row["case"]
        for name in row["products"]:
            assert name.startswith("wgmma.mma_async"), f"{row['case']}: {name}"
            assert name.endswith("k32.f32.e4m3.e4m3"), f"{row['case']}: {name}"
        if counts_are_known():
            assert row["hot_reloads"] == 0, row["case"]


def launches(capability: int, cases: str = "all") -> Iterator[Launch]:
    """`gluon`: streams; of prompts' matrices, bf16 results of one range of K and fp32 ones of
    several, of their experts, up with few rows and down with many."""
    for name, launch in all_launches():
        chosen = ("prompt" in name and name not in ONLY_IN_ALL) or "stream" in name
        if cases == "all" or chosen:
            yield name, launch


ONLY_IN_ALL = {
    "a8 rows of a prompt",
    "a8 fp8 prompt 1 torch.float32",
    "a8 fp8 prompt 8 torch.bfloat16",
    "a8 mxfp4 prompt up many",
    "a8 mxfp4 prompt down few",
}


def all_launches() -> Iterator[Launch]:
    from dsv4.ops.gemm.a8 import fp8_prompt_experts_gluon as prompt_experts
    from dsv4.ops.gemm.a8 import fp8_prompt_gluon as prompt
    from dsv4.ops.gemm.a8 import fp8_rows_triton as prompt_rows
    from dsv4.ops.gemm.a8.fp8_product_triton import multiply_experts, multiply_rows
    from dsv4.ops.gemm.a8.fp8_rows_triton import (
        A8Rows,
        make_a8_rows,
        make_pair_rows,
        make_token_rows,
    )
    from dsv4.ops.gemm.variants import prompt_gluon
    from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4
    from dsv4.ops.moe.group_by_expert_triton import ExpertGroups, ExpertTiles
    from tests.ops.kernels.test_weight_compile import as_on_hopper

    as_on_hopper()  # launches of few rows start early
    x = torch.zeros(256, 4096, dtype=torch.bfloat16)
    yield "a8 rows", lambda: make_a8_rows(x[:16], "rows")
    yield "a8 rows of a shared expert", lambda: make_a8_rows(x[:16], "rows", limit=10.0)
    yield "a8 rows of a prompt", lambda: make_a8_rows(x, "rows")
    rows = A8Rows(x.to(torch.float8_e4m3fn), torch.zeros(32, 256))
    grouped = ExpertTiles(ExpertGroups(*torch.zeros(6, 6 * 256, dtype=torch.int32)), 4)
    yield "a8 rows of pairs", lambda: make_pair_rows(x, "pairs", grouped, 64)
    yield "a8 rows of tokens and pairs", lambda: make_token_rows(x, "rows", "pairs", grouped, 64, 6)
    matrix = A8Fp8(torch.zeros(1024, 4096, dtype=torch.float8_e4m3fn), torch.ones(8, 32))
    for bm in (16, 32, 64):
        out = torch.empty(256, 1024, dtype=torch.bfloat16)
        yield f"a8 fp8 {bm}", lambda bm=bm, out=out: multiply_rows(rows, matrix, out, bm=bm)
    for ranges, dtype in product((1, 8), (torch.bfloat16, torch.float32)):
        weight, out = replace(matrix, k_ranges=ranges), torch.empty(256, 1024, dtype=dtype)
        yield (
            f"a8 fp8 prompt {ranges} {dtype}",
            lambda w=weight, out=out: prompt.multiply_rows(rows, w, out),
        )
    groups = prompt_rows.room(x.device, "rows", 256, 1024)
    yield (
        "a8 prompt rows of groups",
        lambda: prompt_gluon.launch(
            x.repeat(1, 2), [torch.zeros(1024, 4096).bfloat16()], [groups], [(2, 16)], [None], 2
        ),
    )
    yield from stream_launches()
    words, shifts = torch.zeros(2, 8, 32, 64, 16, dtype=torch.int32), torch.zeros(2, 8, 32, 64)
    for up in (True, False):
        weight = A8Mxfp4(words, shifts.int(), torch.ones(2), 512, 4096, up)
        kind, size = ("up", 256) if up else ("down", 512)
        out = torch.empty(256, size, dtype=torch.bfloat16)
        given = {"weights": torch.ones(256), "limit": 10.0} if up else {}
        for bm, tiles in ((16, 1), (16, 2), (32, 2), (64, 1), (128, 1)):
            more = {**given, "tiles": tiles} | ({"chosen": 2} if up else {})
            yield (
                f"a8 mxfp4 {bm} {kind} {tiles}",
                lambda w=weight, o=out, b=bm, g=more: multiply_experts(rows, w, o, grouped, b, **g),
            )
        for label, tile in (("many", prompt_experts.MANY), ("few", prompt_experts.FEW)):
            yield (
                f"a8 mxfp4 prompt {kind} {label}",
                lambda w=weight, o=out, t=tile, g=given: prompt_experts.multiply_experts(
                    A8Rows(rows.codes, torch.zeros(4, 32, t.rows)), w, o, grouped, t, **g
                ),
            )


def stream_launches() -> Iterator[Launch]:
    """A ring of weights or all of them, one row or several, whole sums or ranges; experts, whose
    shared one has two more."""
    from dsv4.ops.gemm.a8.linear_a8_triton import stream
    from dsv4.ops.gemm.weights.a8 import A8Fp8, A8Mxfp4
    from dsv4.ops.moe.a8.experts_a8_stream_gluon import launch
    from dsv4.ops.moe.experts import Experts

    def fp8(rows: int, columns: int) -> A8Fp8:
        scale = torch.ones(-(-rows // 128), columns // 128)
        return A8Fp8(torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), scale)

    def mxfp4(rows: int, columns: int, paired: bool) -> A8Mxfp4:
        words = torch.zeros(2, rows // 64, columns // 128, 64, 16, dtype=torch.int32)
        return A8Mxfp4(words, words[..., 0].clone(), torch.ones(2), rows, columns, paired)

    x = torch.zeros(5, 4096, dtype=torch.bfloat16)
    both = [fp8(1024, 4096), fp8(192, 4096)]
    for rows in (1, 5):
        outs = [torch.empty(rows, 1024).bfloat16(), torch.empty(rows, 192)]
        yield f"a8 stream {rows}", lambda x=x[:rows], outs=outs: stream(x, both, outs)
    sums = [torch.empty(8, 1, 1024)]
    yield "a8 stream of ranges", lambda: stream(x[:1], both[:1], sums, partial=True)
    by = Experts(
        mxfp4(512, 4096, True), mxfp4(4096, 256, False), fp8(512, 4096), fp8(4096, 256), 10.0
    )
    ids, weights = torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)
    yield "a8 stream of experts", lambda: launch(x[:1], ids, weights, by)
