# ruff: noqa: T201 - a script that prints
"""Time the experts of one token on sm_90, NVFP4 beside MXFP4.

    python benchmarks/experts_one_token.py [--rounds 7] [--record FILE]

Shapes of V4-Flash. "up": the first product of the routed experts, 32 draws of experts in a chain of
launches; "up and down": both; "with the router": also its launch and a shared expert, as in a step.
Graphs of all cases are replayed in turn, so that what changes with time changes all of them.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.ops.moe import experts_single_token_triton as single
from dsv4.ops.moe import experts_stream_gluon as streams
from dsv4.ops.moe.experts import Experts
from dsv4.ops.moe.router import Gate
from dsv4.tools.bench_ops import elapsed_us, random_fp4, run_facts

SIZE, INNER, NUM_EXPERTS, CHOSEN = 4096, 2048, 256, 6
DRAWS, REPEATS = 32, 4


class Draws:
    """What one format's launches read and write."""

    def __init__(self, fmt: str, device: str) -> None:
        given: dict[str, Any] = {"device": device, "mx": fmt == "mxfp4"}
        self.w13 = random_fp4(2 * INNER, SIZE, NUM_EXPERTS, paired=True, **given)
        self.w2 = random_fp4(SIZE, INNER, NUM_EXPERTS, **given)
        self.shared = [
            (random_fp4(2 * INNER, SIZE, paired=True, **given), random_fp4(SIZE, INNER, **given))
            for _ in range(4)
        ]
        self.x = torch.randn(DRAWS, 1, SIZE, device=device).bfloat16() * 0.1
        scores = torch.rand(DRAWS, 1, NUM_EXPERTS, device=device)
        self.experts = scores.topk(CHOSEN, dim=2).indices.sort(2).values
        self.weights = torch.rand(DRAWS, 1, CHOSEN, device=device)
        self.z = torch.zeros(DRAWS, (CHOSEN + 1) * INNER, dtype=torch.bfloat16, device=device)
        self.sums = torch.zeros(DRAWS, CHOSEN, 2, SIZE, device=device)
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        scores = torch.zeros(NUM_EXPERTS, device=device)
        self.gates = [
            Gate(
                torch.randn(NUM_EXPERTS, SIZE, device=device).bfloat16(), scores, None, CHOSEN, 1.5
            )
            for _ in range(4)
        ]

    def up(self, index: int) -> None:
        streams.up(
            self.x[index], self.z[index], self.experts[index], self.weights[index], self.w13,
            self.w2, 10.0, (None, None),
        )  # fmt: skip

    def both(self, index: int) -> None:
        self.up(index)
        given = (self.z[index], self.sums[index], self.experts[index])
        streams.down(*given, self.w2, None, (None, None))

    def routed(self, index: int) -> Tensor:
        by = Experts(self.w13, self.w2, *self.shared[index % 4], 10.0)
        return single.launch_routed(self.x[index], self.token, self.gates[index % 4], by)


def capture(call: Callable[[int], object]) -> torch.cuda.CUDAGraph:
    for index in range(DRAWS):
        call(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(DRAWS * REPEATS):
            call(index % DRAWS)
    graph.replay()
    return graph


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", type=Path)
    return parser


@torch.inference_mode()
def main() -> None:
    options = make_parser().parse_args()
    torch.manual_seed(5)
    graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}
    every = {fmt: Draws(fmt, "cuda") for fmt in ("nvfp4", "mxfp4")}  # graphs do not keep them
    for fmt, draws in every.items():
        for what, call in (
            ("up", draws.up), ("up and down", draws.both), ("with the router", draws.routed)
        ):  # fmt: skip
            graphs[what, fmt] = capture(call)
    times: dict[tuple[str, str], list[float]] = {case: [] for case in graphs}
    for _ in range(options.rounds):
        for case, graph in graphs.items():
            times[case].append(elapsed_us(graph.replay) / (DRAWS * REPEATS))
    rows: list[dict[str, Any]] = [{"run": run_facts()}]
    for (what, fmt), found in times.items():
        us = statistics.median(found)
        row = {"what": what, "format": fmt, "us": round(us, 2)}
        row |= {"spread_us": round(max(found) - min(found), 2)}
        rows.append(row | {"to_nvfp4": round(us / statistics.median(times[what, "nvfp4"]), 4)})
        print(json.dumps(rows[-1]), flush=True)
    if options.record:
        options.record.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
