# ruff: noqa: T201 - a script that prints
"""How fast the tensor core of sm_90 multiplies FP8, by the form of the product and by who waits.

    python benchmarks/product_rates.py [--record FILE]

No copies and no memory: operands stay in shared memory or registers, so only products, and what is
done with their sums, take time. Cycles are the multiprocessor's own; with the time of the launch
they also give its clock, which a GPU at its power limit lowers. For comparison cuBLAS multiplies
8,192 rows with V4-Flash's wq_b.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.ops.core.helpers_device import append
from dsv4.tools.bench_ops import run_facts, time_calls

STEPS = 4000  # products of 128 columns by each warpgroup
joined = gluon.jit(append.fn)


class Form(NamedTuple):
    """Constants of a launch."""

    groups: int  # warpgroups of a program, each with 64 weight rows
    programs: int  # on a multiprocessor
    rows: int  # input rows of a product
    pieces: int  # products per step, each with its own sums
    flight: int
    drain: bool
    registers: bool  # weights are read from registers, otherwise from shared memory
    ordered: bool = False  # a product is issued whole before the last one is awaited


@gluon.constexpr_function
def sums_layout(rows, groups):
    return gl.NVMMADistributedLayout([3, 0], [4 * groups, 1], [16, rows, 32])


@gluon.constexpr_function
def outstanding(f, place):
    """Products that may go on when number `place` of a step is awaited."""
    if not f.drain:
        return 1
    if f.ordered and place + f.flight < f.pieces:
        return f.flight
    return min(f.flight, f.pieces - place) - 1


@gluon.jit
def _start(a, x, i, sums, F: gl.constexpr):
    b = x.index(i).permute((1, 0))
    return warpgroup_mma(a, b, sums, use_acc=not F.drain, is_async=True)


@gluon.jit
def _zeros(F: gl.constexpr):
    M: gl.constexpr = 64 * F.groups
    N: gl.constexpr = F.rows
    return gl.zeros([M, N], gl.float32, sums_layout(N, F.groups))


@gluon.jit
def _clock():
    return gl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], gl.int64, False, 1)


@gluon.jit
def _step(a, x, sums, scale, F: gl.constexpr):
    P: gl.constexpr = F.pieces
    FLIGHT: gl.constexpr = F.flight
    flying = ()
    for i in gl.static_range(FLIGHT):
        flying = joined(flying, _start(a, x, i, _zeros(F) if F.drain else sums[i], F))
    added = ()
    for i in gl.static_range(P):
        if F.ordered and i + F.flight < P:
            flying = joined(flying, _start(a, x, i + F.flight, _zeros(F), F))
        part = warpgroup_mma_wait(outstanding(F, i), deps=(flying[i],))
        if not F.ordered and i + F.flight < P:
            flying = joined(flying, _start(a, x, i + F.flight, _zeros(F), F))
        added = joined(added, part * scale + sums[i] if F.drain else part)
    return added


@gluon.jit(do_not_specialize=["steps"])
def _rate_kernel(codes, scales, out, cycles, steps, F: gl.constexpr):
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    LOAD: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4 * F.groups, 1], [1, 0])
    SUMS: gl.constexpr = sums_layout(F.rows, F.groups)
    k = gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD))
    r = gl.arange(0, 64 * F.groups, layout=gl.SliceLayout(1, LOAD))
    weights = gl.load(codes + gl.expand_dims(r * 128, 1) + gl.expand_dims(k, 0))
    a = gl.allocate_shared_memory(gl.float8e4nv, [64 * F.groups, 128], SHARED, weights)
    x = gl.allocate_shared_memory(gl.float8e4nv, [F.pieces, F.rows, 128], SHARED)
    r = gl.arange(0, F.rows, layout=gl.SliceLayout(1, LOAD))
    P: gl.constexpr = F.pieces
    for i in gl.static_range(P):
        at = codes + i * F.rows * 128 + gl.expand_dims(r * 128, 1) + gl.expand_dims(k, 0)
        x.index(i).store(gl.load(at))
    fence_async_shared()
    gl.thread_barrier()
    columns = gl.arange(0, F.rows, layout=gl.SliceLayout(0, SUMS))
    scale = gl.expand_dims(gl.load(scales + columns), 0)
    operand = a
    if F.registers:
        operand = a.load(gl.DotOperandLayout(0, SUMS, 4))
    sums = ()
    for _ in gl.static_range(P):
        sums = joined(sums, _zeros(F))
    begin = _clock()
    for _ in range(0, steps):
        sums = _step(operand, x, sums, scale, F)
    if not F.drain:
        sums = (warpgroup_mma_wait(0, deps=(sums[0],)),)
    gl.store(cycles + gl.program_id(0), _clock() - begin)
    r = gl.arange(0, 64 * F.groups, layout=gl.SliceLayout(1, SUMS))
    at = out + gl.expand_dims(r * F.rows, 1) + gl.expand_dims(columns, 0)
    for i in gl.static_range(P):
        gl.store(at, sums[i])


def forms() -> Iterator[Form]:
    for registers in (True, False):
        for groups, rows in ((1, 64), (1, 256), (2, 64), (2, 128), (2, 256)):
            yield Form(groups, 1, rows, 1, 1, False, registers)
        yield Form(2, 1, 64, 1, 1, True, registers)
        yield Form(1, 3, 64, 1, 1, True, registers)
        yield Form(2, 1, 64, 3, 2, True, registers)
        yield Form(2, 1, 128, 1, 1, True, registers)
        yield Form(2, 1, 128, 2, 1, True, registers)
    yield Form(2, 1, 64, 3, 1, True, True)
    yield Form(2, 1, 64, 3, 1, True, True, ordered=True)


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_given(device: str, programs: int) -> Given:
    codes = (torch.rand(1024, 128, device=device) * 4 - 2).to(torch.float8_e4m3fn)
    out = torch.zeros(128, 256, device=device)
    cycles = torch.zeros(programs, dtype=torch.int64, device=device)
    return codes, torch.rand(256, device=device), out, cycles


def launch(form: Form, given: Given, multiprocessors: int) -> Any:
    grid = (multiprocessors * form.programs,)
    return _rate_kernel[grid](*given, STEPS, F=form, num_warps=4 * form.groups)


def measure(form: Form, given: Given, multiprocessors: int) -> dict[str, Any]:
    us, spread = time_calls([lambda: launch(form, given, multiprocessors)], repeats=9)
    cycles = given[3][: multiprocessors * form.programs].double().mean().item()
    products = STEPS * form.pieces * form.groups * form.programs
    flops = 2 * 64 * form.rows * 128 * products * multiprocessors
    row = {**form._asdict(), "us": round(us, 1), "spread_us": round(spread, 1)}
    row |= {"tflops": round(flops / us / 1e6), "mhz": round(cycles / us)}
    # 64 x 64 x 128 take 128 cycles at the rate the tensor core is sold with
    return row | {"cycles_per_64_rows": round(cycles / products / (form.rows / 64), 1)}


def cublas() -> dict[str, Any]:
    """What a library makes of FP8 with one scale for all, without sums leaving the tensor core."""
    x = torch.randn(8192, 1024, device="cuda").to(torch.float8_e4m3fn)
    w = torch.randn(32768, 1024, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    row: dict[str, Any] = {"what": "cuBLAS, wq_b of 8,192 rows"}
    for name, fast in (("fast", True), ("exact", False)):

        def call(fast: bool = fast) -> torch.Tensor:
            return torch._scaled_mm(
                x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        us, _ = time_calls([call])
        row[name] = {"us": round(us, 1), "tflops": round(2 * 8192 * 1024 * 32768 / us / 1e6)}
    return row


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--record", type=Path)
    return parser


@torch.inference_mode()
def main() -> None:
    options = make_parser().parse_args()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    given = make_given("cuda", 3 * multiprocessors)
    rows: list[dict[str, Any]] = [{"run": run_facts()}, cublas()]
    print(json.dumps(rows[-1]), flush=True)
    for form in forms():
        rows.append(measure(form, given, multiprocessors))
        print(json.dumps(rows[-1]), flush=True)
        if options.record:
            text = "\n".join(map(json.dumps, rows)) + "\n"
            options.record.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
