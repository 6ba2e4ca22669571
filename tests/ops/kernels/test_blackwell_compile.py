"""Compile the kernels for sm_100 at model sizes, without a GPU, and read what came out.

Compiled for, not run: that the instructions are there, that nothing spills and that memory is
enough says nothing about speed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.kernels.compiling import Launch, check_limits, compiled_facts, counts_are_known

pytest.importorskip("triton", reason="Triton is absent")

KINDS = {  # the tensor-core instruction that a product must use
    "nvfp4": "kind::mxf4nvf4.block_scale",
    "mxfp4": "kind::mxf8f6f4.block_scale",
    "fp8": "kind::mxf8f6f4.block_scale",
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return compiled_facts("tests.ops.kernels.test_blackwell_compile", 100)


def test_every_kernel_fits_and_nothing_spills(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        check_limits(row, 60, 100)
        if counts_are_known():
            assert row["reloads"] == row["spills"] == 0, f"{row['case']} {row['kernel']}"


def test_products_are_block_scaled(rows: list[dict[str, Any]]) -> None:
    products = [row for row in rows if row["kernel"].endswith("_rows_kernel")]
    cases = {row["case"] for row in rows if not row["case"].startswith("rows ")}
    assert {row["case"] for row in products} == cases
    assert len(cases) == 8
    for row in products:
        label, kind = f"{row['case']} {row['kernel']}", KINDS[row["case"].split()[-1]]
        assert row["products"], f"{label}: no matrix instruction"
        assert all("tcgen05.mma" in name and kind in name for name in row["products"]), label
        if "_rows_kernel" in row["kernel"]:
            assert "UTCCP" in row["mix"], f"{label}: weight scales pass through registers"
        if "_many" in row["kernel"]:
            assert "UTMALDG" in row["mix"], f"{label}: the copy engine is idle"


@pytest.mark.compile
@pytest.mark.parametrize("capability", [120, 121])
def test_a_workstation_multiplies_block_scaled_operands(capability: int) -> None:
    """NVFP4 rows with NVFP4 weights and MXFP8 rows with FP8 weights by `mma` with their scales;
    MXFP4 weights meet MXFP8 rows in bf16: what Triton 3.6 to 3.9 makes of them."""
    rows = compiled_facts("tests.ops.kernels.test_blackwell_compile", capability, "few")
    found = {row["case"]: row["products"] for row in rows}
    assert found.keys() == {"linear 1 nvfp4", "linear 1 mxfp4", "linear 1 fp8"}
    for case, kind in (("nvfp4", "mxf4nvf4"), ("fp8", "mxf8f6f4")):
        for name in found[f"linear 1 {case}"]:
            assert f"mma.sync.aligned.m16n8k{64 if kind == 'mxf4nvf4' else 32}" in name
            assert f"kind::{kind}.block_scale" in name
    assert all("bf16.bf16" in name for name in found["linear 1 mxfp4"])
    for row in rows:
        check_limits(row, 60, capability)


def launches(capability: int, part: str = "all") -> Iterator[Launch]:
    from dsv4.ops.gemm import linear_scaled_triton
    from dsv4.ops.gemm.weights.scaled import random_scaled
    from dsv4.ops.moe import experts_scaled_triton, experts_triton
    from dsv4.ops.moe.experts import Experts

    if part == "all":
        yield from row_launches()
    for module in (linear_scaled_triton, experts_scaled_triton):
        module.fill_rows = lambda *_, **__: None  # compiled above
    generator = torch.Generator().manual_seed(0)
    bf16 = torch.bfloat16

    def linear(count: int, columns: int, kind: str) -> Launch:
        weight = random_scaled(256, columns, generator, kind)
        x = torch.zeros(count, columns, dtype=bf16)
        return f"linear {count} {kind}", lambda: linear_scaled_triton.run(x, [weight], [bf16])

    for kind in ("nvfp4", "mxfp4", "fp8"):
        yield linear(1, 1024, kind)
    if part == "few":
        return
    yield linear(128, 2048, "nvfp4")  # two ranges
    yield linear(1024, 1024, "nvfp4")
    yield linear(1024, 1024, "mxfp4")
    w13 = random_scaled(2048, 1024, generator, count=2, num_parts=2)
    w2 = random_scaled(1024, 1024, generator, count=2)
    experts_triton.separate_output = lambda *_: None  # two products of `linear`
    # test_weight_compile compiles these two
    experts_scaled_triton.group_by_expert = lambda *_: some_groups()
    experts_scaled_triton.combine = lambda *_: None
    for count in (8, 256):
        tokens = torch.zeros(count, 1024, dtype=bf16)
        ids = torch.zeros(count, 2, dtype=torch.int64)
        by: Any = Experts(w13, w2, None, None, 10.0)  # type: ignore[arg-type]
        arguments = (tokens, ids, torch.zeros(count, 2), by)
        yield f"experts {count} nvfp4", lambda a=arguments: experts_scaled_triton.run(*a)


def row_launches() -> Iterator[Launch]:
    """Quantised rows: alone, and behind SwiGLU for routed pairs."""
    from dsv4.ops.gemm import quantize_rows_triton as kernel

    x = torch.zeros(128, 4096, dtype=torch.bfloat16)
    for a8 in (False, True):
        rows = kernel.make_rows(x.device, 128, 4096, tiled=True, a8=a8)
        yield f"rows a8={a8}", lambda rows=rows: kernel.fill_rows(rows, x)
    h, weights = torch.zeros(256, 4096), torch.zeros(256)
    rows = kernel.make_rows(x.device, 256, 2048, tiled=False)

    options = {"limit": 10.0, "size": 2048, "grouped": some_groups(), "chosen": 2, "bm": 16}
    options |= {"source": kernel.SWIGLU, "weight": weights}
    yield "rows SwiGLU", lambda: kernel.fill_rows(rows, h, **options)


def some_groups() -> Any:
    """Tables of routed pairs; only their types matter here."""
    from dsv4.ops.moe.group_by_expert_triton import ExpertGroups, ExpertTiles

    return ExpertTiles(ExpertGroups(*torch.zeros(6, 64, dtype=torch.int32)), 16)
