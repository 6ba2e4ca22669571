"""FP8 products of a8 rows on a Hopper GPU: errors of sums, cases, and rows that do not depend on
their batch."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.ops import OPS
from dsv4.ops.core.arguments import copied
from dsv4.ops.moe.experts import Experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]


def products() -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(name, fp32 results, what was multiplied: the rows' values and the weights')."""
    from dsv4.ops.gemm.a8.fp8_product_triton import multiply_experts, multiply_rows
    from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
    from dsv4.ops.gemm.weights.a8 import random_a8, random_a8_fp8
    from dsv4.ops.moe.group_by_expert_triton import group_by_expert

    generator = torch.Generator().manual_seed(4)
    for count, k in ((1, 1536), (70, 4096), (600, 1024)):
        x = (torch.randn(count, k, generator=generator) * 30).cuda()
        rows = make_a8_rows(x, "test")
        values = rows.codes.double() * rows.scales[:, :count].T.double().repeat_interleave(128, 1)
        matrix = random_a8_fp8(256, k, generator).to("cuda")
        out = torch.full((count, 256), float("nan"), device="cuda")
        multiply_rows(rows, matrix, out)
        yield f"{count} rows FP8", out, values, matrix.dequantize().double()
        expert = random_a8(256, k, generator, count=1).to("cuda")
        grouped = group_by_expert(torch.zeros(count, 1, dtype=torch.int64, device="cuda"), 1, 64)
        out = torch.full((count, 256), float("nan"), device="cuda")
        multiply_experts(rows, expert, out, grouped, 64)
        yield f"{count} rows MXFP4", out, values, expert[0].dequantize().double()


def test_sums_err_by_what_the_tensor_core_cuts() -> None:
    from dsv4.ops.gemm.weights.a8 import SUM_ERROR

    for name, found, values, weights in products():
        allowed = SUM_ERROR * (values.abs() @ weights.abs().T)
        off = (found.double() - values @ weights.T).abs() / allowed
        assert float(off.max()) <= 1, f"{name}: {float(off.max())} times what is allowed"
        # one scale of one step, off by a power of two, would be seen in every row
        wrong = values.clone()
        wrong[:, 128:256] *= 2
        off = (found.double() - wrong @ weights.T).abs() / allowed
        assert (off.amax(1) > 2).all(), name


@pytest.mark.parametrize("name", ["linear", "experts"])
def test_kernels_match_references(name: str) -> None:
    from tests.ops.kernels.test_weight_interpreter import compare

    op, num_run = OPS[name], 0
    for case in op.cases():
        if "with a8 rows" in case.name:
            arguments = copied(case.build(torch.Generator().manual_seed(1)), lambda t: t.cuda())
            [kernel] = [kernel for kernel in op.kernels if kernel.supports(arguments) is None]
            found, wanted = kernel.run(arguments), op.reference(**arguments)
            compare(case.name, wanted, found, case.atol, case.rtol)
            num_run += 1
    assert num_run == 3


def test_rows_do_not_depend_on_their_batch() -> None:
    """1 to 3,000 rows, with ranges of K in parallel and in sequence; one row has NaN."""
    from dsv4.ops.gemm.a8.fp8_product_triton import multiply_rows
    from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
    from dsv4.ops.gemm.weights.a8 import random_a8_fp8

    weight = random_a8_fp8(1024, 4096, torch.Generator().manual_seed(2)).to("cuda")
    x = torch.randn(3000, 4096, device="cuda").bfloat16()
    x[7, 9] = float("nan")

    def multiplied(rows: Tensor, **how: object) -> Tensor:
        out = torch.empty(len(rows), 1024, device="cuda")
        multiply_rows(make_a8_rows(rows, "test"), weight, out, **how)
        return out.nan_to_num(7e7)

    wanted = multiplied(x)
    assert (wanted[7] == 7e7).all()
    assert (wanted[8] != 7e7).all()
    for count in (1, 16, 17, 33, 65, 500):
        assert torch.equal(multiplied(x[5 : 5 + count]), wanted[5 : 5 + count])
    for bm in (16, 32, 64):
        for parallel in (True, False):
            assert torch.equal(multiplied(x, bm=bm, parallel=parallel), wanted)


def test_experts_do_not_depend_on_the_height_of_their_tile() -> None:
    from dsv4.ops.moe.a8 import experts_a8_triton as kernel

    [case] = [c for c in OPS["experts"].cases() if "with a8 rows" in c.name and not c.small]
    arguments = copied(case.build(torch.Generator().manual_seed(1)), lambda t: t.cuda())
    wanted = kernel.run(**arguments)
    for bm in (16, 32, 64, 128):
        assert torch.equal(kernel.run(**arguments, bm=bm), wanted)
    rows = {n: v[40:41] if isinstance(v, Tensor) else v for n, v in arguments.items()}
    assert torch.equal(kernel.run(**rows), wanted[40:41])


def random_experts(counts: list[int], hidden: int, inner: int) -> dict[str, Any]:
    """Arguments of `experts` with `counts` rows for each expert, one expert per token."""
    from dsv4.ops.gemm.weights.a8 import random_a8, random_a8_fp8

    generator = torch.Generator().manual_seed(3)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    experts = experts[torch.randperm(len(experts), generator=generator)]
    return {
        "x": torch.randn(len(experts), hidden, generator=generator).bfloat16().cuda(),
        "experts": experts[:, None].cuda(),
        "weights": torch.rand(len(experts), 1, generator=generator).cuda(),
        "by": Experts(
            random_a8(2 * inner, hidden, generator, count=len(counts), paired=True).to("cuda"),
            random_a8(hidden, inner, generator, count=len(counts)).to("cuda"),
            random_a8_fp8(2 * inner, hidden, generator).to("cuda"),
            random_a8_fp8(hidden, inner, generator).to("cuda"),
            3.0,
        ),
    }


def test_prompts_have_the_bits_of_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 matrices with one range of K and with several, experts with any number of rows."""
    from dsv4.ops.gemm.a8 import fp8_prompt_experts_gluon as prompt_experts
    from dsv4.ops.gemm.a8 import fp8_prompt_gluon as prompt
    from dsv4.ops.gemm.a8.fp8_product_triton import multiply_rows
    from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
    from dsv4.ops.gemm.weights.a8 import random_a8_fp8
    from dsv4.ops.moe.a8 import experts_a8_triton as kernel

    generator = torch.Generator().manual_seed(2)
    counts, dtypes = (257, 1000), (torch.bfloat16, torch.float32)
    for count, ranges, dtype in product(counts, (1, 4), dtypes):
        weight = replace(random_a8_fp8(640, 2048, generator), k_ranges=ranges).to("cuda")
        x = torch.randn(count, 2048, generator=generator).cuda()
        x[7, 9], x[8] = float("nan"), 0
        rows = make_a8_rows(x, "test")
        found, wanted = (torch.full((count, 640), 5e5, device="cuda", dtype=dtype) for _ in "ab")
        prompt.multiply_rows(rows, weight, found)
        multiply_rows(rows, weight, wanted)
        assert (found[7].isnan() & wanted[7].isnan()).all()
        assert torch.equal(found.nan_to_num(7e4), wanted.nan_to_num(7e4)), (count, ranges, dtype)
    arguments = random_experts([64, 0, 65, 127, 129, 191, 193, 400, 1, 0, 3], 1024, 512)
    used = []
    real = prompt_experts.multiply_experts

    def multiply(*given: Any, **more: Any) -> None:
        used.append(1)
        real(*given, **more)

    monkeypatch.setattr(prompt_experts, "multiply_experts", multiply)
    wanted = kernel.run(**arguments, bm=64)
    for tile in (prompt_experts.MANY, prompt_experts.FEW):
        monkeypatch.setattr(prompt_experts, "choose_tile", lambda *_, tile=tile: tile)
        assert torch.equal(kernel.run(**arguments), wanted), tile
    assert len(used) == 4


def test_prompts_repeat_their_bits_while_programs_walk_over_many_tiles() -> None:
    """Experts and matrices of V4-Flash with 8,192 tokens; every 128 columns of every row have their
    own scale, so a scale, a weight or a row that is read too late or too early changes bits."""
    from dsv4.ops.gemm.a8 import fp8_product_triton as plain
    from dsv4.ops.gemm.a8 import fp8_prompt_experts_gluon as prompt_experts
    from dsv4.ops.gemm.a8 import fp8_prompt_gluon as prompt
    from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows, make_pair_rows, make_token_rows
    from dsv4.ops.gemm.weights.a8 import A8Fp8
    from dsv4.ops.moe.group_by_expert_triton import group_by_expert
    from dsv4.tools.bench_ops import random_a8_mxfp4

    torch.manual_seed(5)
    cuda: dict[str, Any] = {
        "device": "cuda",
        "generator": torch.Generator("cuda").manual_seed(5),
    }

    def any_rows(count: int, columns: int) -> Tensor:
        power = torch.randint(-4, 5, (count, columns // 128, 1), **cuda)
        values = torch.randn(count, columns // 128, 128, **cuda) * torch.exp2(power.float())
        return values.view(count, columns).bfloat16()

    def assert_repeats(run: Any, out: Tensor, wanted: Tensor, what: str) -> None:
        for index in range(10):
            out.fill_(float("nan"))
            run()
            different = int((out != wanted).sum())
            assert different == 0, f"{what}, run {index}: {different} of {out.numel()} numbers"

    for name, n, k in (("wq_b", 32768, 1024), ("wo_b", 4096, 8192)):  # the second in ranges of K
        values = (torch.randn(n, k, **cuda) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
        power = torch.randint(-10, -6, (n // 128, k // 128), **cuda)
        weight = A8Fp8(values, torch.exp2(power.float()))
        rows = make_a8_rows(any_rows(8192, k), "test")
        wanted, found = (torch.empty(8192, n, dtype=torch.bfloat16, device="cuda") for _ in "ab")
        plain.multiply_rows(rows, weight, wanted)
        run = partial(prompt.multiply_rows, rows, weight, found)
        assert_repeats(run, found, wanted, name)

    chosen = torch.rand(8192, 256, **cuda).argsort(1)[:, :6].contiguous()
    given: dict[str, Any] = {"weights": torch.rand(8192, 6, **cuda), "limit": 10.0}
    for n, k, size, more in ((4096, 4096, 2048, given), (4096, 2048, 4096, {})):
        weight, x = random_a8_mxfp4(n, k, 256, paired=bool(more)), any_rows(8192, k)
        shape = {"size": (8192 * 6, size), "dtype": torch.bfloat16, "device": "cuda"}
        wanted, found = (torch.empty(**shape) for _ in "ab")
        grouped = group_by_expert(chosen, 256, 128)
        z = x[grouped.groups.sorted_pairs[: 8192 * 6] // 6]
        rows, gathered = make_a8_rows(x if more else z, "test"), {"chosen": 6} if more else {}
        plain.multiply_experts(rows, weight, wanted, grouped, 128, **gathered, **more)
        for tile in (prompt_experts.MANY, prompt_experts.FEW):
            grouped = group_by_expert(chosen, 256, tile.rows)
            if more:
                rows = make_token_rows(x, "test", "pairs", grouped, tile.rows, 6)[1]
            else:
                rows = make_pair_rows(z, "pairs", grouped, tile.rows)
            run = partial(prompt_experts.multiply_experts, rows, weight, found, grouped, tile)
            assert_repeats(partial(run, **more), found, wanted, f"experts, {size} results, {tile}")


@pytest.mark.parametrize("size", [(1024, 4096), (32768, 1024), (4096, 8192), (576, 640)])
def test_streams_have_the_bits_of_tiles(size: tuple[int, int]) -> None:
    """Up to eight rows times several matrices in one launch, whole and as partial sums."""
    from dsv4.ops.fused import linear_partial_sums_triton as partial_sums
    from dsv4.ops.gemm.a8 import linear_a8_triton as kernel
    from dsv4.ops.gemm.a8.fp8_product_triton import multiply_rows
    from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows
    from dsv4.ops.gemm.weights.a8 import random_a8_fp8

    generator = torch.Generator().manual_seed(6)
    n, k = size
    weights = [random_a8_fp8(rows, k, generator).to("cuda") for rows in (n, 192, n)]
    dtypes = torch.bfloat16, torch.float32, torch.float32
    power = torch.randint(-6, 7, (8, k // 128), generator=generator).float()
    x = torch.randn(8, k, generator=generator) * torch.exp2(power).repeat_interleave(128, 1)
    x[2, k - 5], x[3], x[5] = float("nan"), 0, x[5] * 1e4
    x = x.bfloat16().cuda()
    for first, last in ((0, 1), (2, 3), (1, 3), (0, 5), (0, 8)):
        rows = x[first:last]
        assert kernel.fits_stream(rows, *weights)
        for chosen in ((0,), (0, 1, 2)):
            outs = [
                [torch.full((len(rows), len(weights[i].data)), 5e5, device="cuda", dtype=dtypes[i])
                 for i in chosen] for _ in "ab"
            ]  # fmt: skip
            kernel.launch(rows, [weights[i] for i in chosen], outs[0])
            for i, out in zip(chosen, outs[1], strict=True):
                multiply_rows(make_a8_rows(rows, "test"), weights[i], out)
            for found, wanted in zip(*outs, strict=True):
                assert torch.equal(found.nan_to_num(7e4), wanted.nan_to_num(7e4)), (first, last)
        if len(rows) == 1:
            assert partial_sums.supports(rows, weights[0]) is None
            found = partial_sums.run(rows, weights[0]).total()
            assert torch.equal(found.nan_to_num(7e4), outs[1][0].nan_to_num(7e4))


@pytest.mark.parametrize(("size", "inner"), [(4096, 2048), (1152, 640)])
def test_a_tokens_experts_stream(size: int, inner: int) -> None:
    """Router and experts of one token, launch after launch: the bits of the ops."""
    from dsv4.ops.fused import router_experts_triton as fused
    from dsv4.ops.moe.router import Gate

    torch.manual_seed(9)
    by = random_experts([1] * 16, size, inner)["by"]
    gate = Gate(
        torch.randn(16, size, device="cuda").bfloat16() * 0.02, torch.randn(16, device="cuda"),
        None, 6, 1.5,
    )  # fmt: skip
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    for spread in (1.0, 1e4, 0.0, float("nan")):
        x = torch.randn(1, size, device="cuda").bfloat16()
        x[0, 130] *= spread
        picked, weights = OPS["router"].kernels[0].run({"x": x, "token_ids": token, "by": gate})
        given = {"x": x, "experts": picked, "weights": weights, "by": by}
        [kernel] = [kernel for kernel in OPS["experts"].kernels if kernel.supports(given) is None]
        wanted = kernel.run(given)
        assert fused.supports(x, token, gate, by) is None
        for _ in range(3):
            found = fused.run(x, token, gate, by).total()
            assert torch.equal(found.nan_to_num(7e4), wanted.nan_to_num(7e4)), spread
        # a step ahead of the host may have drawn no token: no expert is read from outside
        assert fused.run(x, token - 1, gate, by).total().shape == wanted.shape
        torch.cuda.synchronize()


@pytest.mark.parametrize("rows", [1024, 3001])
@pytest.mark.parametrize("columns", [1024, 4096])
def test_output_projections_have_the_bits_of_two_ops(rows: int, columns: int) -> None:
    """A prompt's `wo_a` leaves rows for `wo_b` that the op between them would have made."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.fused import output_rows_triton as fused
    from dsv4.ops.gemm.grouped_linear import grouped_linear
    from dsv4.ops.gemm.linear import linear
    from dsv4.ops.gemm.weights.a8 import random_a8_fp8

    generator = torch.Generator().manual_seed(rows)
    wo_a = Fp8BlockTensor(*fp8.quantize_tiles(torch.randn(8 * 256, columns, device="cuda")), 128)
    wo_b = random_a8_fp8(640, 8 * 256, generator).to("cuda")
    x = torch.randn(rows, 8, columns, generator=generator).bfloat16().cuda()
    x[3, 2, 5], x[4], x[5, 1] = float("nan"), 0, x[5, 1] * 1e4
    assert fused.supports(x, wo_a, wo_b) is None
    wanted = linear(grouped_linear(x, wo_a), wo_b)
    assert wanted[3].isnan().all()
    for _ in range(5):
        assert torch.equal(fused.run(x, wo_a, wo_b).nan_to_num(7e4), wanted.nan_to_num(7e4))
