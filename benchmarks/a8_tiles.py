# ruff: noqa: T201 - a script that prints
"""Time tiles of the kernels for FP8 prompts on sm_90; compare bits with the plain kernel.

    python benchmarks/a8_tiles.py [--tokens 8192,4096,2048] [--only experts] [--record FILE]

A line each: small matrices whose sides are no whole tiles, V4-Flash's wq_b, wo_b and the shared
expert's first matrix with several tiles; experts up and down, few and all. `different`: how many
numbers are not the plain kernel's. What should be used are constants of `fp8_prompt_gluon.py` and
`fp8_prompt_experts_gluon.py` in `dsv4/ops/gemm/a8`. Every 128 columns of a row have a scale of
their own, so that what is read too late or too early changes bits.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.ops.gemm.a8 import fp8_product_triton as plain
from dsv4.ops.gemm.a8 import fp8_prompt_experts_gluon as prompt_experts
from dsv4.ops.gemm.a8 import fp8_prompt_gluon as prompt
from dsv4.ops.gemm.a8.fp8_prompt_gluon import MATRIX, RANGES
from dsv4.ops.gemm.a8.fp8_rows_triton import make_a8_rows, make_pair_rows, make_token_rows
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.weights.a8 import A8Fp8
from dsv4.ops.moe.group_by_expert_triton import group_by_expert
from dsv4.tools.bench_ops import random_a8_mxfp4, run_facts, time_calls

SMALL = (
    (1000, 1152, 1024, 1, torch.bfloat16), (257, 128, 512, 1, torch.float32),
    (300, 640, 2048, 4, torch.bfloat16), (300, 640, 2048, 4, torch.float32),
)  # fmt: skip
MATRICES = (("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("shared w13", 4096, 4096))
EXPERTS = (("experts up", 4096, 4096, 2048), ("experts down", 4096, 2048, 4096))
FEW_EXPERTS = (("few experts up", 512, 1024, 256), ("few experts down", 256, 512, 256))
NUM_EXPERTS, NUM_FEW, CHOSEN = 256, 24, 6
# for matrices with one range of K, and with several
WHOLE = (MATRIX, MATRIX._replace(band=16), MATRIX._replace(groups=2, stages=5))
SPLIT = (RANGES, RANGES._replace(band=32), RANGES._replace(stages=4))
EXPERT_TILES = (
    prompt_experts.MANY, prompt_experts.FEW, prompt_experts.FEW._replace(heights=((64,),))
)  # fmt: skip


def random_given(tokens: int, n: int, k: int, ranges: int | None, device: str) -> Any:
    """(rows, weight)."""
    codes = (torch.randn(n, k, device=device) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    power = torch.randint(-10, -6, (n // 128, k // 128), device=device)
    weight = A8Fp8(codes, torch.exp2(power.float()))
    if ranges:
        weight = replace(weight, k_ranges=ranges)
    return make_a8_rows(random_rows(tokens, k, device), f"bench_{k}"), weight


def random_rows(tokens: int, k: int, device: str) -> Tensor:
    power = torch.randint(-4, 5, (tokens, k // 128, 1), device=device)
    values = torch.randn(tokens, k // 128, 128, device=device) * torch.exp2(power.float())
    return values.view(tokens, k).bfloat16()


def timed(
    row: dict[str, Any], run: Callable[[], None], found: Tensor, wanted: Tensor
) -> dict[str, Any]:
    """`row` with the time and the bits of `run`, or with why it failed."""
    try:
        found.fill_(float("nan"))
        us, spread = time_calls([run], repeats=5)
        different = int((found != wanted).sum())
    except Exception as error:
        torch.cuda.synchronize()  # ends here if the context is lost
        return row | {"failed": f"{type(error).__name__}: {error}"[:300]}
    return row | {"us": round(us, 1), "spread_us": round(spread, 1), "different": different}


def matrices(tokens: int, device: str) -> Iterator[dict[str, Any]]:
    big = [(name, tokens, n, k, None, torch.bfloat16) for name, n, k in MATRICES]
    small = [(f"{count} x {n} x {k}", count, n, k, ranges, dtype)
             for count, n, k, ranges, dtype in SMALL]  # fmt: skip
    for name, count, n, k, ranges, dtype in (*small, *big):
        rows, weight = random_given(count, n, k, ranges, device)
        found, wanted = (torch.empty(count, n, dtype=dtype, device=device) for _ in "ab")
        plain.multiply_rows(rows, weight, wanted)
        parts = split_k(weight)[0]
        for tile in WHOLE if parts == 1 else SPLIT:
            used = tile is (MATRIX if parts == 1 else RANGES)
            row = {"what": name, "tokens": count, "dtype": str(dtype), "used": used}
            row |= tile._replace(ranges=parts)._asdict()
            run = partial(prompt.multiply_rows, rows, weight, found, tile)
            row = timed(row, run, found, wanted)
            yield row | {"tflops": round(2 * count * n * k / row.get("us", 1e9) / 1e6)}


def experts(tokens: int, count: int, device: str) -> Iterator[dict[str, Any]]:
    """Of few experts the first ones have many more rows than the last ones."""
    score = torch.rand(tokens, count, device=device)
    if count == NUM_FEW:
        score *= 1 + torch.arange(count, device=device)
    chosen = score.argsort(1)[:, :CHOSEN].contiguous()
    weights = torch.rand(tokens, CHOSEN, device=device)
    for name, n, k, size in FEW_EXPERTS if count == NUM_FEW else EXPERTS:
        more: dict[str, Any] = {"weights": weights, "limit": 10.0} if size < n else {}
        weight = random_a8_mxfp4(n, k, count, paired=bool(more), device=device)
        found, wanted = (
            torch.empty(tokens * CHOSEN, size, dtype=torch.bfloat16, device=device) for _ in "ab"
        )
        grouped, x = group_by_expert(chosen, count, 128), random_rows(tokens, k, device)
        z = x[grouped.groups.sorted_pairs[: tokens * CHOSEN] // CHOSEN]  # of pairs, for down
        rows = make_a8_rows(x if more else z, "bench")
        gathered = {"chosen": CHOSEN} if more else {}
        plain.multiply_experts(rows, weight, wanted, grouped, 128, **gathered, **more)
        used = prompt_experts.choose_tile(chosen.numel(), weight)
        for tile in EXPERT_TILES:
            grouped = group_by_expert(chosen, count, tile.rows)
            if more:
                given = ("bench", "bench_pairs", grouped, tile.rows, CHOSEN)
                rows = make_token_rows(x, *given)[1]
            else:
                rows = make_pair_rows(z, "bench_pairs", grouped, tile.rows)
            run = partial(
                prompt_experts.multiply_experts, rows, weight, found, grouped, tile, **more
            )
            row = {"what": name, "tokens": tokens, "used": tile is used} | tile._asdict()
            yield timed(row, run, found, wanted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", default="8192", help="of a prompt, with commas")
    parser.add_argument("--only", choices=["matrices", "experts"])
    parser.add_argument("--record", type=Path)
    return parser


@torch.inference_mode()
def main() -> None:
    options = make_parser().parse_args()
    torch.manual_seed(5)
    lines: list[dict[str, Any]] = [{"run": run_facts()}]
    prompts = [int(count) for count in options.tokens.split(",")]
    parts = []
    if options.only != "experts":
        parts += [matrices(count, "cuda") for count in prompts]
    if options.only != "matrices":
        parts.append(experts(150, NUM_FEW, "cuda"))
        parts += [experts(count, NUM_EXPERTS, "cuda") for count in prompts]
    for part in parts:
        for row in part:
            lines.append(row)
            print(json.dumps(row), flush=True)
            if options.record:
                text = "\n".join(map(json.dumps, lines)) + "\n"
                options.record.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
