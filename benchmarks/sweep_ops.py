# ruff: noqa: T201 - a script that prints
"""Check the weight kernels on this GPU, then time many tile sizes. Results: JSONL in --out.

    python benchmarks/sweep_ops.py --out /tmp/sweep [--phase check,linear,experts,prefill]

Kernels are compiled first in several processes, so that the timing process finds them compiled.
"""

import argparse
import json
import multiprocessing
import sys
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.ops.gemm import linear_triton, split_k
from dsv4.ops.gemm.linear_triton import LinearConfig
from dsv4.ops.moe import experts_triton
from dsv4.tools import bench_ops as bench

FLASH = bench.SHAPES["flash"]
LINEARS = {
    "wq_b": ([32768], 1024),
    "wo_b": ([4096], 8192),
    "shared13": ([4096], 4096),
    "csa": ([1024, 512, 1024, 1024, 256, 256], 4096),
}
# (BM, BN, warps, stages, variant); variant 3 writes the weights out as bf16 first
SMALL = {
    1: [(8, 64, 2, 5), (8, 64, 2, 4), (8, 64, 2, 6)],
    8: [(8, 64, 2, 5)],
    32: [(32, 64, 4, 3, 1)],
    128: [(64, 128, 4, 3, 1), (64, 64, 4, 3, 1)],
}
WIDE = [(128, 256, 8, 3, 3), (64, 128, 4, 3, 1)]
EXPERTS = {
    1: [(8, 64, 2, 5), (8, 64, 2, 4), (8, 64, 2, 6)],
    128: [(8, 64, 2, 3), (8, 64, 2, 4)],
    8192: [(64, 128, 4, 3, 1), (128, 256, 8, 2)],
}


def jobs(phases):
    if "linear" in phases:
        for name in LINEARS:
            for tokens, configs in SMALL.items():
                for config in configs:
                    for wide in (256, 512) if name != "wq_b" and tokens <= 8 else (512,):
                        yield "linear", name, tokens, config, wide
    if "prefill" in phases:
        for name in ("wq_b", "wo_b"):
            for config in WIDE:
                yield "linear", name, 8192, config, 512
    if "experts" in phases:
        for tokens, configs in EXPERTS.items():
            for config in configs:
                yield "experts", "experts", tokens, config, 512


_cache = {}


def linear_calls(name, tokens, config, sets):
    sizes, columns = LINEARS[name]
    key = (name, tokens)
    if key not in _cache:
        _cache.clear()
        torch.cuda.empty_cache()
        _cache[key] = [
            (bench._rows(tokens, columns), [bench.random_fp4(n, columns) for n in sizes])
            for _ in range(sets)
        ]
    calls = []
    for x, weights in _cache[key]:
        outs = [torch.empty(tokens, n, dtype=torch.bfloat16, device="cuda") for n in sizes]
        calls.append(
            lambda x=x, w=weights, o=outs: linear_triton.launch(
                x, w, o, config=LinearConfig(*config)
            )
        )
    return calls


def experts_calls(tokens, config):
    if "experts" not in _cache:
        _cache.clear()
        _cache["experts"] = bench.expert_weights(FLASH)
    torch.manual_seed(tokens)
    chosen = experts_triton.ExpertsConfig(*config)
    configs = {"up": chosen, "down": chosen}
    work = bench.experts_work(FLASH, tokens, _cache["experts"], shared=False, configs=configs)
    return work.calls


def calls_of(job, sets):
    kind, name, tokens, config, wide = job
    split_k.WIDE_PROGRAMS = wide
    if kind == "linear":
        return linear_calls(name, tokens, config, sets if tokens < 8192 else min(sets, 2))
    return experts_calls(tokens, config)


def compile_worker(args):
    part, total, phases = args
    failed = []
    todo = [job for job in jobs(phases) if job[4] in (512,)]
    for job in todo[part::total]:
        try:
            calls_of(job, 1)[0]()
            torch.cuda.synchronize()
        except Exception as error:
            failed.append((job, repr(error)[:200]))
    return failed


def check(out):
    """Each op on the GPU against its reference, and rows of many batches against each other."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.ops.kernels import inputs

    for name, arguments, op, tolerance in inputs.gpu_cases():
        try:
            kernel = op.kernels[0]
            found, wanted = kernel.run(arguments), op.reference(**arguments)
            found = found if isinstance(found, (list, tuple)) else [found]
            wanted = wanted if isinstance(wanted, (list, tuple)) else [wanted]
            errors = [inputs.relative_error(a, b) for a, b in zip(found, wanted, strict=True)]
            line = {"check": name, "errors": errors, "ok": max(errors) <= tolerance}
        except Exception:
            line = {"check": name, "ok": False, "error": traceback.format_exc()[-1500:]}
        out.append(line)
        if not line["ok"]:
            print("WRONG", line, flush=True)
    try:
        for name, same in inputs.row_invariance():
            out.append({"rows": name, "ok": same})
            if not same:
                print("ROWS DIFFER", name, flush=True)
    except Exception:
        print("ROWS FAILED", traceback.format_exc()[-1500:])
    print(f"{sum(line['ok'] for line in out)} of {len(out)} checks passed", flush=True)


def time_all(out):
    """`dsv4 bench ops` for Flash, with its record."""
    _cache.clear()
    torch.cuda.empty_cache()
    rows = []
    for row in bench.bench_ops(["flash"], bench.DEFAULT_TOKENS):
        rows.append(row)
        print(row, flush=True)
        bench.write_record(Path(out) / "record.jsonl", rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--phase", default="check,linear,prefill,experts,bench")
    parser.add_argument("--processes", type=int, default=14)
    args = parser.parse_args()
    phases = args.phase.split(",")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    begin = time.time()
    lines = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(args.processes) as pool:
        parts = [(i, args.processes, phases) for i in range(args.processes)]
        pending = pool.map_async(compile_worker, parts)
        if "check" in phases:
            check(lines)
        failed = {job for part in pending.get() for job, _ in part}
        for part in pending.get():
            for job, error in part:
                print("NO COMPILE", job, error)
    if "bench" in phases:
        time_all(args.out)
    print(f"compiled after {time.time() - begin:.0f} s")
    for job in jobs(phases):
        if (*job[:4], 512) in failed:
            continue
        try:
            calls = calls_of(job, 12)
            heavy = job[2] >= 8192
            budget = 1000.0 if heavy else 2000.0
            median, spread = bench.time_calls(calls, 5 if heavy else 9, budget)
        except Exception as error:
            print("FAILED", job, repr(error)[:200])
            continue
        line = {"op": job[1], "tokens": job[2], "config": job[3], "wide": job[4]}
        lines.append({**line, "us": round(median, 2), "spread": round(spread, 2)})
        print(*job[1:], round(median, 2), round(spread, 2), flush=True)
    text = "\n".join(json.dumps(line) for line in lines)
    (Path(args.out) / "sweep.jsonl").write_text(text + "\n", encoding="utf-8")
    print(f"done after {time.time() - begin:.0f} s")


if __name__ == "__main__":
    main()
