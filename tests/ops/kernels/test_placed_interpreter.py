"""Experts found by a table of offsets, in Triton's interpreter: the bits of a stack, and counts."""

import importlib
import sys
from dataclasses import replace
from typing import Any

import torch

from dsv4.ops.moe.placed import BlockLayout, ExpertTable, offset_of, placed_pair
from tests.ops.kernels.compiling import interpreted

SLOTS = 2


def test_placed_experts_have_the_bits_of_a_stack() -> None:
    interpreted("tests.ops.kernels.test_placed_interpreter")


def place(arguments: dict[str, Any], slots: int = SLOTS) -> tuple[dict[str, Any], ExpertTable]:
    """The first experts in slots, in reverse; each other in memory of its own, on a GPU pinned."""
    w13, w2 = arguments["by"].w13, arguments["by"].w2
    layout, count, device = BlockLayout.of(w13[0], w2[0]), w13.shape[0], w13.device
    pinned = device.type == "cuda"
    pool = torch.full((max(slots, 1), layout.nbytes), 255, dtype=torch.uint8, device=device)
    blocks = [
        pool[slots - 1 - e] if e < slots
        else torch.zeros(layout.nbytes, dtype=torch.uint8, pin_memory=pinned)
        for e in range(count)
    ]  # fmt: skip
    for expert, block in enumerate(blocks):
        layout.store(block, 0, w13[expert])
        layout.store(block, 1, w2[expert])
    offsets = torch.tensor([offset_of(block, pool[0]) for block in blocks], device=device)
    counts = torch.zeros(count, dtype=torch.int32, device=device)
    beside = w13.global_scale, w2.global_scale
    table = ExpertTable(layout, pool[0], blocks, offsets, counts, beside)
    w13, w2 = placed_pair(table)
    return {**arguments, "by": replace(arguments["by"], w13=w13, w2=w2)}, table


def check_tokens(case: Any) -> None:
    from dsv4.ops.moe import experts_triton
    from dsv4.ops.moe.experts import experts_reference

    arguments = case.build(torch.Generator().manual_seed(1))
    placed, table = place(arguments)
    assert experts_triton.supports(**placed) is None
    wanted, found = experts_triton.run(**arguments), experts_triton.run(**placed)
    assert torch.equal(wanted, found), case.name
    visits = torch.zeros_like(table.counts)
    visits[arguments["experts"].unique()] = 1
    assert torch.equal(table.counts, visits), case.name
    assert torch.equal(experts_reference(**placed), experts_reference(**arguments)), case.name
    assert torch.equal(table.counts, 2 * visits), case.name


def check_routed() -> None:
    """The router's own launch, of one token."""
    from dsv4.ops.moe.experts import _tiled_case
    from dsv4.ops.moe.router import Gate

    fused = importlib.import_module("dsv4.ops.fused.router_experts_triton")
    arguments = _tiled_case(1, 160, 48, 8, 2, 10.0).build(torch.Generator().manual_seed(2))
    placed, table = place(arguments)
    gate = Gate(torch.randn(8, 160).bfloat16() * 0.1, torch.randn(8), None, 2, 1.5)
    sums = []
    for given in (arguments, placed):
        call = (arguments["x"], torch.tensor([3]), gate, given["by"])
        assert fused.supports(*call) is None, fused.supports(*call)
        sums.append(fused.run(*call).total().clone())
    assert torch.equal(*sums)
    assert int(table.counts.sum()) == 2


def main() -> None:
    importlib.import_module("tests.ops.kernels.shim")
    from dsv4.ops.moe.experts import _tiled_case

    torch.set_num_threads(1)
    check_tokens(_tiled_case(1, 160, 48, 8, 2, 10.0))
    check_tokens(_tiled_case(1, 1056, 32, 3, 2, 10.0, mx=True))
    check_tokens(_tiled_case(5, 128, 32, 4, 3, 0.5, fp8_shared=True, mx=True))
    check_tokens(_tiled_case(20, 128, 32, 3, 2, 10.0, mx=True))
    check_routed()


if __name__ == "__main__":
    main()
    sys.exit(0)
