# ruff: noqa: T201 - a script that prints
"""Whether FP8 products have the same bits with operands in each other's place, then the time of
tiles of the kernel that multiplies prompts that way (sm_90), beside the kernel in use.

    python benchmarks/a8_mirrored.py [--tokens 8192] [--only wq_b] [--record FILE]

A line each: bits of `wgmma` for 64 rows by 64, 128 and 256; small matrices whose sides are no
whole tiles; V4-Flash's wq_b, wo_b and the shared expert's first matrix with every tile; experts,
few and all. `different`: how many numbers are not the plain kernel's.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.ops.gemm.a8 import fp8_mirrored_experts_gluon as mirrored_experts
from dsv4.ops.gemm.a8 import fp8_mirrored_gluon as mirrored
from dsv4.ops.gemm.a8 import fp8_product_triton as plain
from dsv4.ops.gemm.a8 import fp8_prompt_gluon as prompt
from dsv4.ops.gemm.a8.fp8_mirrored_experts_gluon import MirroredExperts
from dsv4.ops.gemm.a8.fp8_mirrored_gluon import MirrorTile
from dsv4.ops.gemm.a8.fp8_rows_triton import gather_rows, make_a8_rows
from dsv4.ops.gemm.split_k import split_k
from dsv4.ops.gemm.weights.a8 import A8Fp8
from dsv4.ops.moe.group_by_expert_triton import group_by_expert
from dsv4.tools.bench_ops import random_a8_mxfp4, run_facts, time_calls

MATRICES = (("wq_b", 32768, 1024), ("wo_b", 4096, 8192), ("shared w13", 4096, 4096))
EXPERTS = (("experts up", 4096, 4096, 2048), ("experts down", 4096, 2048, 4096))
EXPERT_TILES = (
    MirroredExperts(128, 4, False), MirroredExperts(64, 4, False), MirroredExperts(64, 4, True)
)  # fmt: skip
NUM_EXPERTS, CHOSEN = 256, 6
SAMPLES = 256  # of each form of the product


@gluon.jit
def _load(codes, COUNT: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, COUNT, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(codes + gl.expand_dims(r * 128, 1) + gl.expand_dims(k, 0))


@gluon.jit
def _product_kernel(a, b, out, steps, N: gl.constexpr, REGISTERS: gl.constexpr):
    """`out` `[samples, 64, N]`: of each sample `a` `[steps, 64, 128]` times `b` `[steps, N, 128]`
    transposed, a product a step."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    left = gl.allocate_shared_memory(gl.float8e4nv, [64, 128], SHARED)
    right = gl.allocate_shared_memory(gl.float8e4nv, [N, 128], SHARED)
    sums = gl.zeros([64, N], gl.float32, SUMS)
    first = gl.program_id(0) * steps
    for step in range(first, first + steps):
        left.store(_load(a + step * 64 * 128, 64))
        right.store(_load(b + step * N * 128, N))
        fence_async_shared()
        gl.thread_barrier()
        rows = left
        if REGISTERS:
            rows = left.load(gl.DotOperandLayout(0, SUMS, 4))
        zero = gl.zeros([64, N], gl.float32, SUMS)
        part = warpgroup_mma(rows, right.permute((1, 0)), zero, use_acc=False, is_async=True)
        sums += warpgroup_mma_wait(0, deps=(part,))
        gl.thread_barrier()
    r = gl.arange(0, 64, layout=gl.SliceLayout(1, SUMS)) + gl.program_id(0) * 64
    at = gl.expand_dims(r * N, 1) + gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, SUMS)), 0)
    gl.store(out + at, sums)


def product(a: Tensor, b: Tensor, registers: bool) -> Tensor:
    samples, steps, size = b.shape[:3]
    out = torch.empty(samples, 64, size, device=a.device)
    _product_kernel[(samples,)](a, b, out, steps, N=size, REGISTERS=registers, num_warps=4)
    return out


def random_codes(*shape: int, device: str) -> Tensor:
    """Half of them any but NaN, so over 18 powers of two, half normal numbers."""
    size = torch.randint(0, 127, shape, device=device)
    sign = torch.randint(0, 2, shape, device=device) << 7
    codes = (size + sign).to(torch.uint8).view(torch.float8_e4m3fn)
    normal = (torch.randn(shape, device=device) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    half = shape[0] // 2
    return torch.cat((codes[:half].view(torch.uint8), normal[half:].view(torch.uint8))).view(
        torch.float8_e4m3fn
    )


def swapped_bits(device: str, samples: int = SAMPLES) -> Iterator[dict[str, Any]]:
    for steps in (1, 8):
        for size in (64, 128, 256):
            a = random_codes(samples, steps, 64, 128, device=device)
            b = random_codes(samples, steps, size, 128, device=device)
            swapped = [product(part.contiguous(), a, True) for part in b.split(64, dim=2)]
            wanted = torch.cat(swapped, dim=1).transpose(1, 2)
            for registers in (False, True):
                found = product(a, b, registers)
                different = int((found != wanted).sum())
                row = {"what": "swapped", "rows": size, "steps": steps, "registers": registers}
                yield row | {"numbers": found.numel(), "different": different}


def tiles(ranges: int) -> list[MirrorTile]:
    """Most promising first."""
    T = MirrorTile
    if ranges > 1:
        return [
            T(128, 128, 1, 1, 6, False, 16),
            T(128, 128, 1, 1, 6, True, 16),
            T(128, 128, 1, 1, 6, False, 16, turns=True),
            T(128, 64, 1, 2, 6, True, 16),
            T(128, 64, 1, 1, 6, True, 16, turns=True),
            T(160, 32, 1, 2, 5, True, 16),
            T(128, 128, 1, 1, 6, False, 8),
            T(128, 128, 1, 1, 6, False, 32),
        ]
    return [
        T(256, 128, 1, 1, 4, False, 16),
        T(256, 128, 1, 1, 4, True, 16),
        T(256, 128, 1, 1, 4, True, 16, turns=True),
        T(128, 128, 1, 1, 4, False, 32, groups=3),
        T(256, 64, 1, 2, 4, True, 16),
        T(192, 64, 1, 2, 4, True, 16),
        T(128, 64, 2, 2, 4, False, 32),
        T(256, 64, 1, 1, 4, True, 16, turns=True),
        T(256, 128, 1, 1, 3, True, 16),
        T(256, 128, 1, 1, 4, True, 8),
        T(256, 128, 1, 1, 4, True, 32),
        T(256, 128, 1, 1, 4, True, 1024),
    ]


def random_given(tokens: int, n: int, k: int, ranges: int | None, device: str) -> Any:
    """(rows, weight): every 128 columns of a row have a scale of their own."""
    power = torch.randint(-4, 5, (tokens, k // 128, 1), device=device)
    values = torch.randn(tokens, k // 128, 128, device=device) * torch.exp2(power.float())
    codes = (torch.randn(n, k, device=device) * 50).clamp(-448, 448).to(torch.float8_e4m3fn)
    power = torch.randint(-10, -6, (n // 128, k // 128), device=device)
    weight = A8Fp8(codes, torch.exp2(power.float()))
    if ranges:
        weight = replace(weight, k_ranges=ranges)
    return make_a8_rows(values.view(tokens, k).bfloat16(), f"bench_{k}"), weight


def small(device: str) -> Iterator[dict[str, Any]]:
    """Tiles of every form at matrices that are no whole tiles."""
    half, single = torch.bfloat16, torch.float32
    for tokens, n, k, ranges, dtype, most in (
        (1000, 1152, 1024, 1, half, 8), (300, 640, 2048, 4, single, 8),
        (257, 128, 512, 1, single, 3), (300, 640, 2048, 4, half, 3),
    ):  # fmt: skip
        rows, weight = random_given(tokens, n, k, ranges, device)
        found, wanted = (torch.empty(tokens, n, dtype=dtype, device=device) for _ in "ab")
        plain.multiply_rows(rows, weight, wanted)
        for tile in tiles(ranges)[:most]:
            found.fill_(float("nan"))
            mirrored.multiply_rows(rows, weight, found, tile)
            different = int((found != wanted).sum())
            row = {"what": f"{tokens} x {n} x {k}", "ranges": ranges, "different": different}
            yield row | {"dtype": str(dtype), **tile._replace(ranges=ranges)._asdict()}


def timed(row: dict[str, Any], run: Any, found: Tensor, wanted: Tensor) -> dict[str, Any]:
    """`row` with the time and the bits of `run`, or with why it failed."""
    try:
        found.fill_(float("nan"))
        us, spread = time_calls([run], repeats=5)
        different = int((found != wanted).sum())
    except Exception as error:
        torch.cuda.synchronize()  # ends here if the context is lost
        return row | {"failed": f"{type(error).__name__}: {error}"[:300]}
    return row | {"us": round(us, 1), "spread_us": round(spread, 1), "different": different}


def matrices(tokens: int, only: str, device: str) -> Iterator[dict[str, Any]]:
    for name, n, k in MATRICES:
        if only not in name:
            continue
        rows, weight = random_given(tokens, n, k, None, device)
        dtype = torch.bfloat16 if name.startswith("w") else torch.float32
        found, wanted = (torch.empty(tokens, n, dtype=dtype, device=device) for _ in "ab")
        plain.multiply_rows(rows, weight, wanted)
        ranges = split_k(weight)[0]
        forms: list[Any] = [None, *tiles(ranges)]
        for tile in forms:
            kernel: Any = prompt if tile is None else mirrored
            row = {"what": name, "tokens": tokens, "kernel": kernel.__name__.split(".")[-1]}
            row |= {} if tile is None else tile._asdict() | {"ranges": ranges}
            run = partial(kernel.multiply_rows, rows, weight, found, tile)
            row = timed(row, run, found, wanted)
            yield row | {"tflops": round(2 * tokens * n * k / row.get("us", 1e9) / 1e6)}


def experts(
    tokens: int, only: str, device: str, shapes: Any = EXPERTS, count: int = NUM_EXPERTS
) -> Iterator[dict[str, Any]]:
    """Of few experts the first ones have many more rows than the last ones."""
    score = torch.rand(tokens, count, device=device)
    if count < NUM_EXPERTS:
        score *= 1 + torch.arange(count, device=device)
    chosen = score.argsort(1)[:, :CHOSEN].contiguous()
    weights = torch.rand(tokens, CHOSEN, device=device)
    for name, n, k, size in shapes:
        if only not in name:
            continue
        more: dict[str, Any] = {"weights": weights, "limit": 10.0} if size < n else {}
        weight = random_a8_mxfp4(n, k, count, paired=bool(more), device=device)
        dtype = torch.bfloat16 if more else torch.float32
        found, wanted = (
            torch.empty(tokens * CHOSEN, size, dtype=dtype, device=device) for _ in "ab"
        )
        grouped = group_by_expert(chosen, count, 128)
        rows = random_given(tokens, 128, k, 1, device)[0]
        rows = gather_rows(rows, grouped.groups, CHOSEN, "bench_pairs")
        plain.multiply_experts(rows, weight, wanted, grouped, 128, **more)
        grouped = group_by_expert(chosen, count, mirrored_experts.MOST_ROWS)
        forms: list[Any] = [None, *EXPERT_TILES]
        for tile in forms:
            kernel: Any = prompt if tile is None else mirrored_experts
            row = {"what": name, "tokens": tokens, "kernel": kernel.__name__.split(".")[-1]}
            row |= {} if tile is None else tile._asdict()
            given = more if tile is None else more | {"tile": tile}
            run = partial(kernel.multiply_experts, rows, weight, found, grouped, **given)
            yield timed(row, run, found, wanted)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", default="", help="a part of a matrix's name")
    parser.add_argument("--record", type=Path)
    return parser


@torch.inference_mode()
def main() -> None:
    options = make_parser().parse_args()
    torch.manual_seed(5)
    lines: list[dict[str, Any]] = [{"run": run_facts()}]
    few = (("experts up", 512, 1024, 256), ("experts down", 256, 512, 256))
    for part in (
        swapped_bits("cuda"),
        small("cuda"),
        matrices(options.tokens, options.only, "cuda"),
        experts(150, "", "cuda", few, 24),
        experts(options.tokens, options.only, "cuda"),
    ):
        for row in part:
            lines.append(row)
            print(json.dumps(row), flush=True)
            if options.record:
                text = "\n".join(map(json.dumps, lines)) + "\n"
                options.record.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
