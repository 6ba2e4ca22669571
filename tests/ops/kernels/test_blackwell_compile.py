"""Compile the kernels for sm_100 at model sizes, without a GPU, and read what came out.

Compiled for, not run: that the instructions are there, that nothing spills and that memory is
enough says nothing about speed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.ops.kernels.compiling import Launch, check_limits, compiled_facts

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
        check_limits(row, 60)
        assert row["reloads"] == row["spills"] == 0, f"{row['case']} {row['kernel']}"


def test_products_are_block_scaled(rows: list[dict[str, Any]]) -> None:
    products = [row for row in rows if "_rows_kernel" in row["kernel"]]
    assert {row["case"] for row in products} == {row["case"] for row in rows} - {"norm"}
    for row in products:
        label, kind = f"{row['case']} {row['kernel']}", KINDS[row["case"].split()[-1]]
        assert row["products"], f"{label}: no matrix instruction"
        assert all("tcgen05.mma" in name and kind in name for name in row["products"]), label
        assert "UTCCP" in row["mix"], f"{label}: weight scales pass through registers"
        if "_many" in row["kernel"]:
            assert "UTMALDG" in row["mix"], f"{label}: the copy engine is idle"


def launches(capability: int) -> Iterator[Launch]:
    from dsv4.ops.gemm import activation_triton, linear_scaled_triton
    from dsv4.ops.gemm.scaled import random_scaled
    from dsv4.ops.moe import experts_scaled_triton

    generator = torch.Generator().manual_seed(0)
    bf16 = torch.bfloat16

    def linear(count: int, columns: int, kind: str) -> Launch:
        weight = random_scaled(256, columns, generator, kind)
        x = torch.zeros(count, columns, dtype=bf16)
        return (
            f"linear {count} {kind}",
            lambda: linear_scaled_triton.run(x, [weight], [bf16]),
        )

    for kind in KINDS:
        yield linear(1, 1024, kind)
    yield linear(128, 2048, "nvfp4")  # two ranges
    yield linear(1024, 1024, "nvfp4")
    yield linear(1024, 1024, "mxfp4")
    x = torch.zeros(1, 4096, dtype=bf16)
    norm = torch.zeros(4096)
    yield "norm", lambda: activation_triton.rms_norm_rows(x, norm, 1e-6)
    w13 = random_scaled(2048, 1024, generator, count=2, num_parts=2)
    w2 = random_scaled(1024, 1024, generator, count=2)
    experts_scaled_triton._shared = lambda *_: None  # two products of `linear`
    for count in (8, 256):
        tokens = torch.zeros(count, 1024, dtype=bf16)
        ids = torch.zeros(count, 2, dtype=torch.int64)
        arguments = (tokens, ids, torch.zeros(count, 2), w13, w2, None, None, 10.0)
        yield f"experts {count} nvfp4", lambda a=arguments: experts_scaled_triton.run(*a)
