"""The compile table: what it complains about, and that the record has every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsv4.ops.core.gpu import KNOWN
from tests.ops.kernels.table import holes, is_reached, written_kernels

RECORDS = Path(__file__).parents[3] / "benchmarks" / "records"


def row(architecture: int, module: str, kernel: str, **facts: int) -> dict[str, Any]:
    fine = {"shared": 1024, "tensor_columns": 0, "hot_reloads": 0}
    named = {"architecture": architecture, "case": "x", "module": module, "kernel": kernel}
    return {**named, **fine, **facts}


def test_kernels_are_found_in_the_source() -> None:
    """By grid, by Gluon, as an argument; two of one name; none that others only call."""
    found = written_kernels()
    for module, name in (
        ("gemm.linear_triton", "_linear_kernel"), ("gemm.variants.stream_gluon", "linear_stream"),
        ("comm.push_triton", "send_kernel"), ("moe.experts_triton", "_up_kernel"),
        ("moe.experts_single_token_triton", "_up_kernel"),
    ):  # fmt: skip
        assert (f"dsv4.ops.{module}", name) in found
    assert not {name for _, name in found} & {"dot_nvfp4", "narrow", "_range_sum"}


def test_a_hole_is_named() -> None:
    kernels = {("dsv4.ops.a_triton", "_a_kernel"), ("dsv4.ops.stream_gluon", "linear_stream")}
    whole = [row(86, "dsv4.ops.a_triton", "_a_kernel")]
    assert holes(whole, kernels) == []  # streams are Hopper's
    hopper = [row(90, "dsv4.ops.a_triton", "_a_kernel")]
    assert holes(hopper, kernels) == [
        "sm_90: linear_stream of dsv4.ops.stream_gluon was not compiled"
    ]
    for facts, says in (
        ({"shared": 100 << 10}, "102400 bytes of shared memory"),
        ({"hot_reloads": 3}, "3 reloads in a loop"),
        ({"tensor_columns": 600}, "600 columns"),
    ):
        [complaint] = holes([row(86, "dsv4.ops.a_triton", "_a_kernel", **facts)], kernels)
        assert says in complaint
    assert holes([row(90, "dsv4.ops.a_triton", "_a_kernel", shared=100 << 10)], set()) == []


def test_the_record_has_no_hole() -> None:
    """Every architecture, each with all kernels of the record that it can reach."""
    newest = max(RECORDS.glob("*_kernels_compiled.jsonl"))
    facts, *rows = map(json.loads, newest.read_text().splitlines())
    assert facts["compiled"]["note"] == "compiled, not run"
    assert {row["architecture"] for row in rows} == KNOWN.keys()
    kernels = {(row["module"], row["kernel"]) for row in rows}
    assert holes(rows, kernels) == []
    for gpu in KNOWN.values():
        own = {row["kernel"] for row in rows if row["architecture"] == gpu.architecture}
        assert ("_prefill_kernel" in own) == is_reached("prefill_gluon", gpu)
        assert ("_few_rows_kernel" in own) == gpu.scales_blocks
        cases = {row["case"] for row in rows if row["architecture"] == gpu.architecture}
        assert {"peers pairs", "peers wide pairs"} <= cases


@pytest.mark.parametrize("architecture", [120, 121])
def test_block_scaled_products_were_compiled(architecture: int) -> None:
    """What `a4` and `a8` multiply on workstations, in the record's compiled text."""
    newest = max(RECORDS.glob("*_kernels_compiled.jsonl"))
    rows = [json.loads(line) for line in newest.read_text().splitlines()][1:]
    found = {
        kind: [
            row["products"]
            for row in rows
            if row["architecture"] == architecture
            and row["kernel"] in ("_few_rows_kernel", "_many_rows_kernel")
            and row["case"].endswith(f" {kind}")
        ]
        for kind in ("nvfp4", "fp8")
    }
    assert len(found["nvfp4"]) >= 3
    for kind, name in (
        ("nvfp4", "kind::mxf4nvf4.block_scale"),
        ("fp8", "kind::mxf8f6f4.block_scale"),
    ):
        assert found[kind]
        for products in found[kind]:
            assert products
            assert all("mma.sync" in each and name in each for each in products)
