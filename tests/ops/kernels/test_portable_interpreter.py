"""What GPUs with `mma` alone choose (sm_86: small tiles, E4M3 by integer operations), in Triton's
interpreter: against the references, and rows whose bits do not depend on their batch.

Like test_weight_interpreter, this file is both the test and the program it starts.
"""

import importlib
import sys
from typing import Any

import pytest
import torch

from dsv4.ops.core.gpu import KNOWN, assume
from tests.ops.kernels.compiling import interpreted

GROUPS: dict[str, tuple[str, ...]] = {
    "weights": ("linear rows", "experts rows"),
    "state": ("kv_store", "index_query", "index_scores", "mhc rows", "attention rows"),
}


@pytest.mark.parametrize("group", GROUPS)
def test_portable_choices_match_references(group: str) -> None:
    interpreted("tests.ops.kernels.test_portable_interpreter", *GROUPS[group])


def check_linear_rows() -> None:
    """All formats with every tile that numbers of rows lead to; FP8 is never asked of the GPU."""
    from dsv4.formats import fp8
    from dsv4.formats.quantized import Fp8BlockTensor, UnpackedTensor
    from dsv4.ops.gemm import linear_triton as kernel
    from dsv4.ops.gemm.linear import linear_reference
    from dsv4.ops.gemm.weights.tiled import random_tiled
    from tests.ops.kernels.test_weight_interpreter import compare

    generator = torch.Generator().manual_seed(2)
    values = torch.randn(72, 288, generator=generator)
    x = torch.randn(70, 288, generator=generator).bfloat16()
    for fmt, weight in (
        (kernel.NVFP4, random_tiled(72, 288, generator)),
        (kernel.FP8, Fp8BlockTensor(*fp8.quantize_tiles(values, 128), 128)),
        (kernel.BF16, UnpackedTensor(values.bfloat16())),
    ):
        label, tiles = type(weight).__name__, set()
        [wanted] = linear_reference(x, [weight], [torch.float32])
        [whole] = kernel.run(x, [weight], [torch.float32])
        compare(label, wanted, whole, 1e-3, 1e-3)
        for count in (1, 9, 17, 33, 70):
            tiles.add(kernel.choose_config(count, fmt, KNOWN[86]))
            [some] = kernel.run(x[-count:], [weight], [torch.float32])
            assert torch.equal(some, whole[-count:]), f"{label}: {count} rows have other bits"
        assert len(tiles) >= 4, tiles


def check_experts_rows() -> None:
    from dsv4.ops.moe import experts_triton as kernel
    from dsv4.ops.moe.experts import _tiled_case, experts_reference
    from tests.ops.kernels.test_weight_interpreter import compare

    case, tiles = _tiled_case(66, 144, 64, 2, 2, 10.0), set()
    arguments = case.build(torch.Generator().manual_seed(5))
    whole = kernel.run(**arguments)
    compare("experts", experts_reference(**arguments), whole, case.atol, case.rtol)
    for count in (2, 9, 20):
        tiles.add(kernel.choose_config(count, 2, 2, KNOWN[86]))
        few = {name: arguments[name][:count] for name in ("x", "experts", "weights")}
        found = kernel.run(**{**arguments, **few})
        assert torch.equal(found, whole[:count]), f"{count} rows have other bits"
    assert len(tiles) == 3, tiles


def check_mhc_rows() -> None:
    """70 rows take other tiles than three of them."""
    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import same_bits
    from dsv4.ops.mhc import mix_triton as kernel
    from tests.ops.kernels.test_state_interpreter import mhc_rows

    case = next(c for c in OPS["mhc_boundary"].cases() if "bfloat16" in c.name)
    few: dict[str, Any] = case.build(torch.Generator().manual_seed(2))
    again = torch.arange(70) % few["streams"].shape[0]
    many = mhc_rows(few, again)
    assert kernel.choose_config(70, 64, KNOWN[86]).bm == 32
    pairs = list(zip(kernel.run(**few), kernel.run(**many), strict=True))
    assert all(same_bits(a[again], b) for a, b in pairs)


def check_attention_rows() -> None:
    """Attention of many tokens loops over tiles; of few, each tile has a program."""
    from dsv4.ops import OPS
    from dsv4.ops.attention import attention_triton as kernel
    from dsv4.ops.attention.variants import decode_split_triton
    from tests.ops.kernels.test_state_interpreter import compare

    for case in OPS["attention"].cases():
        if not case.name.startswith("fp8") or "few bits" in case.name or not case.small:
            continue
        arguments = case.build(torch.Generator().manual_seed(3))
        split, wanted = kernel.run(**arguments), OPS["attention"].reference(**arguments)
        compare(case.name, wanted, split, case.atol, case.rtol)
        most, decode_split_triton.MOST_TILES = decode_split_triton.MOST_TILES, 0
        assert kernel.variant(**arguments) == "loop 16"
        assert torch.equal(kernel.run(**arguments), split), case.name
        decode_split_triton.MOST_TILES = most


ROWS = {
    "linear rows": check_linear_rows,
    "experts rows": check_experts_rows,
    "mhc rows": check_mhc_rows,
    "attention rows": check_attention_rows,
}


def main(names: list[str]) -> None:
    importlib.import_module("tests.ops.kernels.shim")
    from tests.ops.kernels.test_state_interpreter import check_cases, fill_with_nan

    fill_with_nan()
    for name in names:
        if name in ROWS:
            ROWS[name]()
        else:
            check_cases(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with assume(KNOWN[86]):
        main(sys.argv[1:])
