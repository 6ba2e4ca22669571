"""The weight kernels on a GPU: every case, and rows that do not depend on their batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.ops import OPS
from dsv4.ops.core.ragged import make_ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ahead(run: Callable[[], object]) -> None:
    """Compile what `run` launches on all cores; its results mean nothing."""
    from dsv4.tools.speed.steps import compile_ahead

    compile_ahead(run, torch.device("cuda"))


def test_kernels_match_references() -> None:
    from tests.ops.kernels import inputs

    num_run, cases = 0, list(inputs.gpu_cases())
    ahead(lambda: [op.kernels[0].run(arguments) for _, arguments, op, _ in cases])
    for name, arguments, op, tolerance in cases:
        found, wanted = op.kernels[0].run(arguments), op.reference(**arguments)
        for a, b in zip(inputs.results(found), inputs.results(wanted), strict=True):
            assert inputs.relative_error(a, b) <= tolerance, name
        num_run += 1
    assert num_run > 20


def test_rows_do_not_depend_on_their_batch() -> None:
    """1 to 8192 rows: the variants for few rows against the one for many, bit for bit."""
    from tests.ops.kernels import inputs

    ahead(lambda: list(inputs.row_invariance()))
    wrong = [name for name, same in inputs.row_invariance() if not same]
    assert not wrong


def test_rows_do_not_depend_on_the_height_of_their_tile() -> None:
    """Experts with as many rows as a height has, one more, and none."""
    from importlib import import_module

    from tests.ops.kernels import inputs

    kernel = import_module("dsv4.ops.moe.experts_triton")
    counts = torch.tensor([64, 0, 65, 128, 129, 192, 193, 256, 257, 1, 513, 2])
    ids = torch.arange(len(counts)).repeat_interleave(counts)
    arguments = inputs.experts_arguments(len(ids) // 6)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    arguments["experts"] = ids[order].view(-1, 6).cuda()
    tall = kernel.launch(**arguments, config=kernel.ExpertsConfig(kernel.TALL, 128, 8, 3, 1))
    assert torch.equal(
        tall, kernel.launch(**arguments, config=kernel.ExpertsConfig(64, 128, 4, 3, 1))
    )


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("rows", [1024, 1025, 8191])
def test_matrices_of_prompts_have_the_bits_of_the_plain_kernel(
    kind: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One range of K and several, groups, both types of results, sizes that end inside a tile."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.gemm import linear_triton
    from dsv4.ops.gemm.variants import prompt_gluon
    from dsv4.ops.gemm.weights.tiled import random_tiled

    generator = torch.Generator().manual_seed(rows)

    def matrix(n: int, k: int) -> Any:
        if kind == "nvfp4":
            return random_tiled(n, k, generator).to("cuda")
        values = torch.randn(n, k, device="cuda")
        if kind == "bf16":
            return values.bfloat16()
        return Fp8BlockTensor(*fp8.quantize_tiles(values, 128, power_of_two=True), 128)

    used, real = [], prompt_gluon.launch

    def launch(*given: Any) -> bool:
        used.append(real(*given))
        return used[-1]

    monkeypatch.setattr(prompt_gluon, "launch", launch)
    one_range = 192 if kind == "nvfp4" else 32768  # packed on a CPU
    many = ((one_range, 192), 1024, 1), ((640, 8, 72), 4096, 1), ((1024,), 1024, 4)
    for sizes, columns, groups in many:
        weights = [matrix(n, columns) for n in sizes]
        x = torch.randn(rows, groups * columns, device="cuda").bfloat16()
        x[3, 5], x[4] = float("nan"), 0
        found, wanted = (
            [
                torch.full((rows, n), 5e5, dtype=(torch.bfloat16, torch.float32)[i % 2]).cuda()
                for i, n in enumerate(sizes)
            ]
            for _ in "ab"
        )
        linear_triton.launch(x, weights, wanted, num_groups=groups, parallel=False)
        for _ in range(5):
            linear_triton.launch(x, weights, found, num_groups=groups)
            for a, b in zip(found, wanted, strict=True):
                assert torch.equal(a.nan_to_num(7e4), b.nan_to_num(7e4)), sizes
                a.fill_(float("nan"))
    assert used == [True] * 15


@pytest.mark.parametrize("tokens", [1, 2, 40, 300, 3000])
def test_mxfp4_has_the_bits_of_nvfp4(tokens: int) -> None:
    from importlib import import_module

    from tests.ops.kernels import inputs

    kernel = import_module("dsv4.ops.moe.experts_triton")
    made = list(inputs.mx_and_nvfp4_experts(tokens, 1152, 1024, 8, 3, "cuda"))
    ahead(lambda: [kernel.run(**arguments) for arguments in made])
    found, wanted = (kernel.run(**arguments) for arguments in made)
    assert torch.equal(found, wanted)


def test_repeats_bit_for_bit() -> None:
    from tests.ops.kernels import inputs

    arguments = inputs.experts_arguments(40)
    first = OPS["experts"].kernels[0].run(arguments)
    for _ in range(20):
        assert torch.equal(first, OPS["experts"].kernels[0].run(arguments))


@pytest.mark.parametrize("hashed", [False, True])
def test_experts_that_choose_themselves(hashed: bool) -> None:
    """One token, router and experts together: the bits of one after the other."""
    from importlib import import_module

    from tests.ops.kernels import inputs

    fused = import_module("dsv4.ops.fused.router_experts_triton")
    choice = inputs.router_arguments(1, hashed)
    experts = inputs.experts_arguments(1)
    count, size = 24, experts["x"].shape[1]
    gate = replace(choice["by"], gate=choice["by"].gate[:count, :size].contiguous())
    if hashed:
        gate = replace(gate, table=(gate.table % count).sort(1).values.contiguous())
    else:
        gate = replace(gate, bias=gate.bias[:count].contiguous())
    given = (experts["x"], choice["token_ids"], gate, experts["by"])
    assert fused.supports(*given) is None
    choice |= {"x": experts["x"], "by": gate}
    picked, weights = OPS["router"].kernels[0].run(choice)
    arguments = {**experts, "experts": picked, "weights": weights}
    wanted = OPS["experts"].kernels[0].run(arguments)
    assert torch.equal(fused.run(*given).total(), wanted)


@pytest.mark.parametrize("size", [(1024, 4096), (32768, 1024), (4096, 8192), (576, 512)])
def test_streams_of_stored_weights(size: tuple[int, int]) -> None:
    """One row times FP8 and bf16: the bits of the kernel that does not stream."""
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.core.gpu import describe
    from dsv4.ops.gemm import linear_triton as kernel
    from dsv4.ops.gemm.split_k import split_k

    torch.manual_seed(7)
    rows, columns = size
    codes = torch.randint(0, 127, (2, rows, columns), dtype=torch.uint8, device="cuda")
    codes |= torch.randint_like(codes, 0, 2) << 7
    grid = (2, -(-rows // 128), columns // 128)
    scale = torch.randint(100, 120, grid, dtype=torch.uint8, device="cuda")
    fp8 = [Fp8BlockTensor(codes[i].view(torch.float8_e4m3fn), scale[i], 128) for i in (0, 1)]
    x = torch.randn(1, columns, device="cuda").bfloat16()
    for weights in (fp8, [w.dequantize(torch.bfloat16) for w in fp8]):
        assert all(kernel.streams_stored(weight) for weight in weights)
        config = kernel.choose_config(1, kernel.weight_format(weights[0]), describe(x.device))
        ranges = split_k(weights[0])[0]
        for partial in (False, True):
            shape = (ranges, 1, rows) if partial else (1, rows)
            results = []
            for by in (None, config):
                dtypes = torch.float32, torch.float32 if partial else torch.bfloat16
                outs = [torch.zeros(shape, dtype=dtype, device="cuda") for dtype in dtypes]
                kernel.launch(x, weights, outs, config=by, parallel=True, partial=partial)
                results.append(outs)
            for found, wanted in zip(*results, strict=True):
                assert torch.equal(found, wanted), (type(weights[0]), partial)


def test_streams_of_grouped_fp8() -> None:
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.core.gpu import describe
    from dsv4.ops.gemm import linear_triton as kernel

    torch.manual_seed(8)
    codes = torch.randint(0, 127, (2048, 1024), dtype=torch.uint8, device="cuda")
    scale = torch.randint(100, 120, (16, 8), dtype=torch.uint8, device="cuda")
    weight = Fp8BlockTensor(codes.view(torch.float8_e4m3fn), scale, 128)
    x = torch.randn(1, 4 * 1024, device="cuda").bfloat16()
    outs = []
    for config in (None, kernel.choose_config(1, kernel.FP8, describe(x.device))):
        outs.append(torch.zeros(1, 2048, dtype=torch.bfloat16, device="cuda"))
        kernel.launch(x, [weight], [outs[-1]], num_groups=4, config=config, parallel=True)
    assert torch.equal(*outs)


@pytest.mark.parametrize("missing", [0, 1, 3, 8])
@pytest.mark.parametrize("fp8_shared", [True, False])
def test_placed_experts_stream(missing: int, fp8_shared: bool) -> None:
    """Official formats: experts in slots and in pinned host memory have the bits of the ops."""
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.fused import router_experts_triton as fused
    from dsv4.ops.moe.experts import Experts
    from dsv4.ops.moe.router import Gate
    from dsv4.tools.bench_ops import random_fp4
    from tests.ops.kernels.test_placed_interpreter import place

    torch.manual_seed(9)
    size, inner, count, chosen = 2048, 1024, 8, 6
    routed = [
        random_fp4(2 * inner, size, count, paired=True, mx=True),
        random_fp4(size, inner, count, mx=True),
    ]

    def shared(rows: int, columns: int, paired: bool) -> Any:
        if not fp8_shared:
            return random_fp4(rows, columns, None, paired, mx=True)
        codes = torch.randint(0, 100, (rows, columns), dtype=torch.uint8, device="cuda")
        scale = torch.full((rows // 128, columns // 128), 114, dtype=torch.uint8, device="cuda")
        return Fp8BlockTensor(codes.view(torch.float8_e4m3fn), scale, 128)

    by = Experts(*routed, shared(2 * inner, size, True), shared(size, inner, False), 10.0)
    x = torch.randn(1, size, device="cuda").bfloat16()
    gate = Gate(
        torch.randn(count, size, device="cuda").bfloat16() * 0.02,
        torch.randn(count, device="cuda"), None, chosen, 1.5,
    )  # fmt: skip
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    picked, weights = OPS["router"].kernels[0].run({"x": x, "token_ids": token, "by": gate})
    given = {"x": x, "experts": picked, "weights": weights, "by": by}
    wanted = OPS["experts"].kernels[0].run(given)
    placed, table = place(given, count - missing)
    for experts in (by, placed["by"]):
        assert fused.supports(x, token, gate, experts) is None
        for _ in range(3):
            assert torch.equal(fused.run(x, token, gate, experts).total(), wanted)
    visits = torch.zeros_like(table.counts)
    visits[picked[0]] = 3
    assert torch.equal(table.counts, visits)


def test_a_whole_layer_is_the_same_at_any_size() -> None:
    """Rows of a step of 1 to 300 tokens through a whole model: bits of the row in a large one."""
    from dsv4.tools.speed.model import filled_state, random_model, shape_config
    from dsv4.tools.speed.prompts import prompt_inputs

    device = torch.device("cuda")
    model, _ = random_model(shape_config("trial", None), device)
    state = filled_state(model.config, 1, 512, device, chunk_tokens=300)
    inputs = prompt_inputs(state, 300)
    all_rows = type(inputs)(**{**inputs.__dict__, "logits_rows": None})
    whole = model(all_rows, state.layers).clone()
    for count in (1, 2, 9, 65, 299):
        part = type(inputs)(
            **{
                **all_rows.__dict__,
                "token_ids": inputs.token_ids[:count].contiguous(),
                "batch": make_ragged([0], [count], [0], device),
            }
        )
        assert torch.equal(model(part, state.layers), whole[:count]), count
