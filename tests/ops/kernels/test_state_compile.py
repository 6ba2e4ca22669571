"""Compile the state kernels at model sizes without a GPU; read registers, memory, instructions."""

import re
from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from tests.ops.kernels.compiling import Launch, check_limits, compiled_facts, counts_are_known

# kernel: (instruction expected on sm_90, reloads from local memory allowed: in the innermost loops
# where there are matrix products, else anywhere)
EXPECTED: dict[str, tuple[str, int]] = {
    "update_kernel": ("HGMMA|HMMA", 0),
    "few_update_kernel": ("HMMA", 0),
    "_mix_kernel": ("SHFL", 0),
    "comb_kernel": ("MUFU", 0),
    "_rms_norm_kernel": ("SHFL", 0),
    "_kv_store_kernel": ("F2FP", 0),
    "_close_kernel": ("MUFU", 1),  # Triton 3.9, hca; 0 with 3.6
    "_append_kernel": ("STG", 0),
    "_prepare_kernel": ("SHFL", 0),
    "_index_kernel": ("SHFL", 3),  # once a program, Triton 3.9; 0 with 3.6
    "_loop_kernel": (
        "HGMMA|HMMA",
        140,
    ),  # walking, Triton 3.9; 8 with 3.6 (docs/state-kernels.md)
    "_split_kernel": ("HGMMA|HMMA", 0),
    "_merge_kernel": ("MUFU", 0),
    "_matrix_parts_kernel": ("STG", 0),
    "_update_prompt_kernel": ("HGMMA", 0),
    "_weights_kernel": ("HGMMA", 0),
    "_values_kernel": ("HGMMA", 0),
    "_unpack_kernel": ("STG", 0),
    "_prefill_kernel": ("HGMMA", 165),  # Triton 3.9; 0 with 3.6
    "_scores_kernel": ("HGMMA|HMMA", 0),
    # Triton 3.9, FP8 keys; 18 with 3.6, 7 of them in the loop
    "_prompt_scores_kernel": ("HGMMA|HMMA", 85),
    "_select_kernel": ("SHFL|REDUX", 0),
    # Triton 3.9, in the search of a whole row, which is rare; 20 with 3.6
    "_select_row_kernel": ("SHFL|REDUX", 27),
    "_select_short_kernel": ("SHFL|REDUX", 0),
    "_peaks_kernel": ("FMNMX", 0),
    "_select_chunk_kernel": ("SHFL|REDUX", 8),  # once, in the last program of a row
    "_stats_kernel": ("MUFU", 0),
    "_candidates_kernel": ("MUFU", 0),
    "_filter_kernel": ("MUFU", 1),  # triton 3.9; the row's share is kept over both filters
    "_draw_kernel": ("IMAD", 0),
    "_best_kernel": ("SHFL", 0),
}
ONLY_ON_90 = {"_weights_kernel", "_values_kernel", "_unpack_kernel", "_prefill_kernel"}  # 64 heads
ONLY_ON_90 |= {"_matrix_parts_kernel", "_update_prompt_kernel"}
# Matrix products depend on the GPU: one variant of each, for the least shared memory and for two
# with instructions of their own; `make kernels` compiles all for all.
PRODUCTS = {
    ("mhc_boundary", "1"),
    ("mhc_boundary", "128"),
    ("attention", "csa 2"),
    ("attention", "csa 32"),
    ("attention", "csa 100"),
    ("index_scores", ""),
    ("index_scores", "prompt fp8"),
}


@pytest.mark.parametrize(
    ("capability", "cases"),
    [
        pytest.param(86, "products", marks=pytest.mark.compile),
        (90, "products"),
        pytest.param(100, "products", marks=pytest.mark.compile),
        pytest.param(90, "all", marks=pytest.mark.compile),
    ],
)
def test_kernels_compile(capability: int, cases: str) -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    rows = compiled_facts("tests.ops.kernels.test_state_compile", capability, cases)
    kernels = set(EXPECTED) - (set() if capability == 90 else ONLY_ON_90)
    if cases == "all":
        assert {row["kernel"] for row in rows} == kernels
    else:
        products = {name for name in kernels if "MMA" in EXPECTED[name][0]}
        assert {row["kernel"] for row in rows} >= products
    for row in rows:
        label = f"{row['case']} {row['kernel']}"
        instruction, reloads = EXPECTED[row["kernel"]]
        check_limits(row, 40, capability)
        if capability == 86:
            assert row["hot_reloads"] == 0, label
        if capability == 90:
            assert re.search(instruction, " ".join(row["mix"])), f"{label}: no {instruction}"
        if capability == 90 and counts_are_known():
            found = row["hot_reloads" if "MMA" in instruction else "reloads"]
            assert found <= reloads, f"{label}: {found} reloads"


def launches(capability: int, cases: str) -> Iterator[Launch]:
    """At the sizes of V4-Flash; tensors lie on the CPU."""
    from benchmarks.state_ops import (
        SHAPES,
        attention_arguments,
        prefill_batch,
        small_arguments,
    )
    from dsv4.ops import OPS
    from dsv4.ops.attention.query import Queries

    for name, case, arguments in small_arguments():
        if cases == "products" and (name, case) not in PRODUCTS:
            continue
        module = import_module(OPS[name].kernels[0].module)
        yield f"{name} {case}", lambda module=module, arguments=arguments: module.run(**arguments)
    if capability == 90:
        attend = import_module("dsv4.ops.fused.attention_with_queries_triton")
        prompt = attention_arguments(
            SHAPES["flash"], prefill_batch(160, 9000, "cpu"), 4, 512, "cpu", 4
        )
        queries = Queries(prompt["q"], 1e-6)
        yield "attend csa 160", lambda: attend.run(queries, prompt["to"])
        update = import_module("dsv4.ops.mhc.update_prompt_gluon")
        streams, y = torch.zeros(2000, 4, 4096).bfloat16(), torch.zeros(2000, 4096).bfloat16()
        small = torch.zeros(2000, 4), torch.zeros(2000, 4, 4), torch.zeros(24, 4 * 4096)
        sums = torch.zeros(8 * 2000 * 32)
        yield "update 2000", lambda: update.launch(streams, y, *small, streams, sums)
