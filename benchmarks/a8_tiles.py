# ruff: noqa: T201 - a script that prints
"""Time tiles of the kernel for FP8 prompts on sm_90; compare bits with the plain kernel.

    python benchmarks/a8_tiles.py [--tokens 8192] [--record FILE]

V4-Flash's wq_b, wo_b, the shared expert's first matrix, experts up and down; a line per tile. What
should be used is a constant of `dsv4/ops/gemm/a8/fp8_prompt_gluon.py`. Every 128 columns of a row
have a scale of their own, so that what is read too late or too early changes bits.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.ops.gemm.a8 import fp8_product_triton as plain
from dsv4.ops.gemm.a8 import fp8_prompt_gluon as prompt
from dsv4.ops.gemm.a8.fp8_prompt_device import PromptTile
from dsv4.ops.gemm.a8.fp8_rows_triton import gather_rows, make_a8_rows
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.weights.a8 import A8Fp8
from dsv4.ops.moe.group_by_expert_triton import group_by_expert
from dsv4.tools.bench_ops import random_a8_mxfp4, run_facts, time_calls

Run = Callable[[PromptTile], None]
MATRICES = (("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("shared w13", 4096, 4096))
EXPERTS = (("experts up", 4096, 4096, 2048), ("experts down", 4096, 2048, 4096))
NUM_EXPERTS, CHOSEN = 256, 6


def random_rows(count: int, columns: int, device: str) -> Tensor:
    power = torch.randint(-4, 5, (count, columns // 128, 1), device=device)
    values = torch.randn(count, columns // 128, 128, device=device) * torch.exp2(power.float())
    return values.view(count, columns).bfloat16()


def matrices(tokens: int, device: str) -> Iterator[tuple[str, Run, Tensor, Tensor, PromptTile]]:
    """(name, what is timed, its results, the plain kernel's, the tile in use)."""
    for name, n, k in MATRICES:
        values = (torch.randn(n, k, device=device) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
        power = torch.randint(-10, -6, (n // 128, k // 128), device=device)
        weight = A8Fp8(values, torch.exp2(power.float()))
        rows = make_a8_rows(random_rows(tokens, k, device), "bench")
        dtype = torch.bfloat16 if name.startswith("w") else torch.float32
        found, wanted = (torch.empty(tokens, n, dtype=dtype, device=device) for _ in "ab")
        plain.multiply_rows(rows, weight, wanted)

        def run(tile: PromptTile, rows: Any = rows, weight: Any = weight, out: Any = found) -> None:
            prompt.multiply_rows(rows, weight, out, tile)

        yield name, run, found, wanted, prompt.MATRIX if split_k(weight)[0] == 1 else prompt.RANGES


def experts(tokens: int, device: str) -> Iterator[tuple[str, Run, Tensor, Tensor, PromptTile]]:
    chosen = torch.rand(tokens, NUM_EXPERTS, device=device).argsort(1)[:, :CHOSEN].contiguous()
    weights = torch.rand(tokens, CHOSEN, device=device)
    for name, n, k, size in EXPERTS:
        more: dict[str, Any] = {"weights": weights, "limit": 10.0} if size < n else {}
        weight = random_a8_mxfp4(n, k, NUM_EXPERTS, paired=bool(more), device=device)
        dtype = torch.bfloat16 if more else torch.float32
        found, wanted = (
            torch.empty(tokens * CHOSEN, size, dtype=dtype, device=device) for _ in "ab"
        )
        grouped = group_by_expert(chosen, NUM_EXPERTS, 128)
        rows = make_a8_rows(random_rows(tokens, k, device), "bench")
        rows = gather_rows(rows, grouped.groups, CHOSEN, "bench_pairs")
        plain.multiply_experts(rows, weight, wanted, grouped, 128, **more)

        def run(
            tile: PromptTile,
            rows: Any = rows,
            weight: Any = weight,
            out: Any = found,
            more: Any = more,
        ) -> None:
            grouped = tiles_of(tile)
            prompt.multiply_experts(rows, weight, out, grouped, tile=tile, **more)

        kept: dict[int, Any] = {}

        def tiles_of(tile: PromptTile, kept: dict[int, Any] = kept) -> Any:
            height = tile.pieces * prompt.ROWS
            if height not in kept:
                kept[height] = group_by_expert(chosen, NUM_EXPERTS, height)
            return kept[height]

        yield name, run, found, wanted, prompt.EXPERTS


def tiles(used: PromptTile) -> Iterator[PromptTile]:
    """The one in use, with turns, and others that fit registers and shared memory."""
    yield used
    shapes = ((2, 6, 1), (2, 6, 2), (3, 4, 1), (3, 4, 2), *(() if used.fp8 else ((4, 4, 1),)))
    for pieces, stages, flight in shapes:
        for turns in (False, True):
            tile = used._replace(pieces=pieces, stages=stages, flight=flight, turns=turns)
            if tile != used:
                yield tile


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--record", type=Path)
    return parser


@torch.inference_mode()
def main() -> None:
    options = make_parser().parse_args()
    torch.manual_seed(5)
    lines: list[dict[str, Any]] = [{"run": run_facts()}]
    for make in (matrices, experts):
        for name, run, found, wanted, used in make(options.tokens, "cuda"):
            for tile in tiles(used):
                found.fill_(float("nan"))
                us, spread = time_calls([lambda run=run, tile=tile: run(tile)], repeats=5)  # type: ignore[misc]
                different = int((found != wanted).sum())
                row = {"what": name, "tokens": options.tokens, "us": round(us, 1)}
                row |= {"spread_us": round(spread, 1), "different": different, **tile._asdict()}
                lines.append(row | {"used": tile == used})
                print(json.dumps(lines[-1]), flush=True)
                if options.record:
                    text = "\n".join(map(json.dumps, lines)) + "\n"
                    options.record.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
