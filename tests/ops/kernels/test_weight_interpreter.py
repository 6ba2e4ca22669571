"""The weight kernels in Triton's interpreter against their references, without a GPU.

The interpreter is chosen when a kernel's module is imported, so the checks run in a process of
their own: this file is both the test and the program it starts.
"""

import importlib
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.kernels.compiling import interpreted

GROUPS = ("linear", "experts", "unusual rows", "others")


@pytest.mark.parametrize("group", GROUPS)
def test_kernels_match_references(group: str) -> None:
    interpreted("tests.ops.kernels.test_weight_interpreter", group)


def test_shim_refuses_to_do_nothing() -> None:
    pytest.importorskip("triton", reason="the interpreter is absent")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "import tests.ops.kernels.shim"]
    found = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode != 0
    assert "TRITON_INTERPRET=1" in found.stderr


def compare(label: str, wanted: Any, found: Any, atol: float, rtol: float) -> None:
    pairs = zip(_list(wanted), _list(found), strict=True)
    for place, (a, b) in enumerate(pairs):
        assert a.shape == b.shape, f"{label}[{place}]: {tuple(b.shape)}, not {tuple(a.shape)}"
        assert a.dtype == b.dtype, f"{label}[{place}]: {b.dtype}, not {a.dtype}"
        off = (a.double() - b.double()).abs() - rtol * a.double().abs()
        assert bool((off <= atol).all()), f"{label}[{place}]: off by {float(off.max())}"


def _list(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, list | tuple) else [value]


def poison_new_buffers() -> None:
    """Unwritten results and workspaces show up as NaN."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(10**6))

    torch.empty = poisoned


def module_of(name: str) -> Any:
    from dsv4.ops import OPS

    return importlib.import_module(OPS[name].kernels[0].module)


def check_cases(name: str, seed: int = 1) -> None:
    from dsv4.ops import OPS

    op, module, num_run = OPS[name], module_of(name), 0
    for case in op.cases():
        arguments = case.build(torch.Generator().manual_seed(seed))
        rows = arguments["token_ids" if name == "embed" else "x"].shape[0]
        if rows == 0:
            check_empty(op, case.name, arguments)
            continue
        if not case.small or module.supports(**arguments) is not None:
            continue
        num_run += 1
        wanted, found = op.reference(**arguments), module.run(**arguments)
        compare(f"{name} {case.name}", wanted, found, case.atol, case.rtol)
    assert num_run >= 1, f"{name}: no case fits its kernel"


def check_empty(op: Any, case: str, arguments: Any) -> None:
    """No rows in, results of the right shape out, by reference and kernel."""
    from dsv4.ops.core.context import kernels_on_cpu
    from tests.ops.test_references import PUBLIC

    with kernels_on_cpu():
        found = PUBLIC[op.name](**arguments)
    for a, b in zip(_list(PUBLIC[op.name](**arguments)), _list(found), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{op.name} {case}"


def check_linear_variants() -> None:
    """Every variant gives the same numbers; groups, bf16 and FP8 with an uneven K."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.gemm import linear_triton as kernel
    from dsv4.ops.gemm.linear import linear_reference
    from dsv4.ops.gemm.weights.tiled import random_tiled

    generator = torch.Generator().manual_seed(2)
    tiled = random_tiled(130, 1024, generator)
    x = torch.randn(3, 1024, generator=generator).bfloat16()
    values = torch.randn(130, 1024, generator=generator)
    plain = kernel.LinearConfig(8, 64, 2, 3)
    expanded = kernel.LinearConfig(16, 128, 4, 3, kernel.EXPANDED)
    for weight, configs in (
        (tiled, (plain, kernel.LinearConfig(16, 128, 4, 3, 1), expanded)),
        (values.bfloat16(), (expanded,)),
        (Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128), (plain, expanded)),
        (Fp8BlockTensor(*fp8.quantize_tiles(values, 32), 32), (expanded,)),
    ):
        wanted = linear_reference(x, [weight], [torch.float32])
        for config in configs:
            for parallel in (True, False):
                out = torch.full((3, 130), float("nan"))
                kernel.launch(x, [weight], [out], config=config, parallel=parallel)
                compare(f"{config} {parallel}", wanted, [out], 1e-4, 1e-4)


def check_partial_sums() -> None:
    """FP8 as sums of ranges: the bits of the whole product."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor
    from dsv4.ops.fused import linear_partial_sums_triton as sums
    from dsv4.ops.gemm import linear_triton as kernel

    generator = torch.Generator().manual_seed(3)
    weight = Fp8BlockTensor(*fp8.quantize_tiles(torch.randn(70, 1024, generator=generator)), 128)
    x = torch.randn(1, 1024, generator=generator).bfloat16()
    assert sums.supports(x, weight) is None
    parts = sums.run(x, weight)
    assert parts.values.shape[1] == 2
    assert torch.equal(parts.total(), kernel.run(x, [weight], [x.dtype])[0])


def check_two_ranges() -> None:
    """K in two ranges: side by side where both have the same length, otherwise in a row."""
    from dsv4.ops.moe import expert_tensors, experts_triton
    from dsv4.ops.moe.experts import _tiled_case, experts_reference

    long, expert_tensors.LONG_STEPS = expert_tensors.LONG_STEPS, 2
    in_a_row = experts_triton.ExpertsConfig(8, 64, 2, 3)
    for size in (144, 256):
        results = []
        for tokens in (1, 2):
            case = _tiled_case(tokens, size, 256, 2, 2, 10.0)
            arguments = case.build(torch.Generator().manual_seed(4))
            if results:  # the row of the first run again, in company
                arguments |= {**results[0][1], "x": arguments["x"], "experts": arguments["experts"]}
                arguments["weights"] = torch.rand(2, 2)
                for name in ("x", "experts", "weights"):
                    arguments[name][1] = results[0][1][name][0]
            found = experts_triton.run(**arguments)
            wanted = experts_reference(**arguments)
            compare(f"two ranges, {tokens} x {size}", wanted, found, case.atol, case.rtol)
            results.append((found, arguments))
        assert torch.equal(results[0][0][0], found[1]), "a row's bits depend on its batch"
        assert torch.equal(found, experts_triton.launch(**arguments, config=in_a_row)), size
    expert_tensors.LONG_STEPS = long


def check_slices() -> None:
    """A rank's rows keep the ranges of K of the whole matrix: here two, four by their own shape."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor, UnpackedTensor
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.ops.gemm.linear import linear
    from dsv4.ops.gemm.weights.tiled import random_tiled

    generator = torch.Generator().manual_seed(5)
    values = torch.randn(64, 2048, generator=generator)
    x = torch.randn(3, 2048, generator=generator).bfloat16()
    for weight in (
        random_tiled(64, 2048, generator),
        Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128),
        UnpackedTensor(values.bfloat16()),
    ):
        with kernels_on_cpu():
            alone = linear(x, weight, torch.float32)
            part = linear(x, replace(weight, whole_rows=16384), torch.float32)
            ranges = linear(x, replace(weight, k_ranges=2), torch.float32)
        assert torch.equal(part, ranges), type(weight)
        assert not torch.equal(part, alone), type(weight)
        compare("slices", alone, part, 1e-3, 1e-3)


def check_heights() -> None:
    """Tall tiles with as many rows as a height has and one more; then all in one expert."""
    from dsv4.ops.moe.experts import _tiled_case, experts_reference
    from dsv4.ops.moe.experts_triton import TALL, ExpertsConfig, launch

    rows = torch.tensor([64, 0, 65, 128, 129, 192, 193, 256, 257, 1, 0])
    for counts in (rows, torch.tensor([0, 600, 0])):
        tokens, count = int(counts.sum()), len(counts)
        case = _tiled_case(tokens, 144, 64, count, 1, 10.0)
        arguments = case.build(torch.Generator().manual_seed(5))
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(6))
        arguments["experts"] = torch.arange(count).repeat_interleave(counts)[order, None]
        wanted = experts_reference(**arguments)
        found = launch(**arguments, config=ExpertsConfig(TALL, 128, 8, 3, 1))
        compare(f"rows of experts {counts.tolist()}", wanted, found, case.atol, case.rtol)


def check_groups(experts: torch.Tensor, num_experts: int, bm: int, shared: bool) -> None:
    """Every row in one tile of its expert, tiles in order and without gaps."""
    from dsv4.ops.moe.group_by_expert_triton import group_by_expert

    found = group_by_expert(experts, num_experts, bm, shared=shared)
    flat = experts.flatten().tolist()
    pairs = found.groups.sorted_pairs[: len(flat)].tolist()
    assert pairs == sorted(range(len(flat)), key=lambda i: (flat[i], i))
    owners = [flat[pair] for pair in pairs] + [num_experts] * (len(experts) if shared else 0)
    covered, num_live = [], int((found.groups.tile_expert[: found.num_tiles] >= 0).sum())
    for tile in range(num_live):
        expert, start = int(found.groups.tile_expert[tile]), int(found.groups.tile_start[tile])
        rows = range(start, min(start + bm, int(found.groups.tile_end[tile])))
        assert rows
        assert {owners[row] for row in rows} == {expert}
        covered += rows
    assert covered == list(range(len(owners)))
    places, slots = (found.groups[4 + i][: len(flat)].tolist() for i in range(2))
    assert [pairs[place] for place in places] == list(range(len(flat)))
    for place, slot in enumerate(slots):
        tile, row = divmod(slot, bm)
        assert int(found.groups.tile_start[tile]) + row == place
        assert int(found.groups.tile_expert[tile]) == owners[place]
    assert set(found.groups.tile_expert[num_live : found.num_tiles].tolist()) <= {-1}


def check_mx_bits() -> None:
    """MXFP4 kept as it is has the bits of the NVFP4 that it was cast to before."""
    from dsv4.ops.moe import experts_triton
    from tests.ops.kernels.inputs import mx_and_nvfp4_experts

    for tokens, size, inner in ((1, 160, 64), (1, 1056, 32), (3, 160, 64), (90, 128, 32)):
        made = mx_and_nvfp4_experts(tokens, size, inner, 3, 2, "cpu")
        found, wanted = (experts_triton.run(**arguments) for arguments in made)
        assert torch.equal(found, wanted), f"{tokens} tokens"


def check_unusual_rows(case: Any, kernel: Any) -> None:
    """NaN, infinities, large numbers and zeros in a row of experts: NaN where the reference has it,
    and rows beside it keep their bits."""
    from dsv4.ops.moe.experts import experts_reference

    arguments = case.build(torch.Generator().manual_seed(1))
    x, values = arguments["x"], [float("nan"), float("inf"), float("-inf"), 1e4, 0.0]
    usual = kernel.run(**arguments)
    for first in range(0, len(values), len(x)):
        unusual, count = x.clone(), min(len(x), len(values) - first)
        for row, value in enumerate(values[first : first + count]):
            unusual[row, 5 if not math.isfinite(value) else slice(None)] = value
        given = {**arguments, "x": unusual}
        wanted, found = experts_reference(**given), kernel.run(**given)
        label = f"{case.name}, {values[first : first + count]}"
        assert torch.equal(found.isnan(), wanted.isnan()), label
        assert torch.equal(found[count:], usual[count:]), label
        large = wanted.nan_to_num(0.0)
        allowed = case.rtol * float(large.abs().max()) + case.atol
        compare(label, large, found.nan_to_num(0.0), allowed, case.rtol)


def check_unusual_experts() -> None:
    from dsv4.ops import OPS

    seen = set()
    for case in OPS["experts"].cases():
        arguments = case.build(torch.Generator().manual_seed(1))
        if not case.small or not len(arguments["x"]):
            continue
        for kernel in OPS["experts"].kernels:
            if kernel.supports(arguments) is None:
                module = importlib.import_module(kernel.module)
                seen.add(kernel.name)
                check_unusual_rows(case, module)
    assert seen == {"experts_triton", "experts_scaled_triton", "experts_a8_triton"}, seen


def check_experts() -> None:
    check_cases("experts")
    check_mx_bits()
    check_two_ranges()
    check_heights()
    generator = torch.Generator().manual_seed(3)
    for num_tokens, num_experts, bm in ((1, 5, 8), (40, 5, 8), (600, 7, 16), (1500, 300, 8)):
        experts = torch.randint(0, num_experts, (num_tokens, 2), generator=generator)
        for shared in (False, True):
            check_groups(experts, num_experts, bm, shared)
    for num_tokens in (300, 900):
        check_groups(torch.full((num_tokens, 2), 3), 5, 256, True)


def check_shim() -> None:
    """Rounding to nearest even, FP8 saturating, as the GPU does."""
    import triton
    import triton.language as tl

    global _cast_kernel

    @triton.jit
    def _cast_kernel(x, y, z):
        value = tl.load(x + tl.arange(0, 4))
        tl.store(y + tl.arange(0, 4), value.to(tl.bfloat16))
        tl.store(z + tl.arange(0, 4), value.to(tl.float8e4nv))

    x = torch.tensor([1.00390625, 500.0, -1.01171875, 0.3])
    y, z = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float8_e4m3fn)
    _cast_kernel[(1,)](x, y, z)
    assert torch.equal(y, x.bfloat16())
    assert z.float()[1] == 448.0


def main(group: str) -> None:
    importlib.import_module("tests.ops.kernels.shim")
    torch.set_num_threads(1)
    poison_new_buffers()
    if group == "linear":
        check_cases("linear")
        check_linear_variants()
        check_partial_sums()
        check_slices()
        check_cases("grouped_linear")
    elif group == "experts":
        check_experts()
    elif group == "unusual rows":
        check_unusual_experts()
    else:
        check_shim()
        check_cases("router")
        check_cases("embed")


if __name__ == "__main__":
    main(sys.argv[1])
