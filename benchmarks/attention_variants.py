# ruff: noqa: T201 - a script that prints
"""Time every variant of attention at the sizes of steps, and say how good the choice among them is.

    python benchmarks/attention_variants.py [--shape flash] [--record FILE]

`dsv4/ops/attention/variant_costs.json` holds what follows from the record. The last line says by
how much the chosen variants are slower than the fastest ones.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.state_ops import ROPE, WINDOW, attention_arguments, decode_batch, prefill_batch
from dsv4.ops.attention import attention_triton as kernels
from dsv4.ops.attention.tile_device import is_narrow, most_entries
from dsv4.ops.core.compile_triton import compile_only
from dsv4.tools.bench_ops import SHAPES, run_facts, time_calls

DECODE = (1, 2, 4, 8, 16, 32, 64, 128)
PROMPT = (16, 64, 128, 256, 512, 1024, 2048)
KINDS = (
    ("window", 0, 0, 8192),
    ("csa", 4, 512, 8192),
    ("hca", 128, 0, 8192),
    ("hca", 128, 0, 131072),
)


def cases(shape: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for kind, ratio, topk, context in KINDS:
        sizes = [("decode", n) for n in DECODE] + [("prompt", n) for n in PROMPT]
        for what, tokens in sizes:
            make = decode_batch if what == "decode" else prefill_batch
            batch = make(tokens, context, "cuda")
            arguments = attention_arguments(shape, batch, ratio, topk, "cuda")
            yield {"what": what, "kind": kind, "context": context, "tokens": tokens}, arguments


def variants(arguments: dict[str, Any]) -> dict[kernels.AttentionVariant, float]:
    q, to = arguments["q"], arguments["to"]
    compressed, entries = to.compressed, most_entries(to.compressed)
    held = 0 if compressed is None else compressed.table.shape[1] * compressed.pool.page_entries
    sizes = kernels.Sizes(q.shape[0], to.table.shape[0], *q.shape[1:], ROPE, WINDOW, entries, held)
    return kernels.variants_of(sizes, is_narrow(q, to.pool), q.device)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="flash")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    found = list(cases(SHAPES[options.shape]))
    with compile_only(16):
        for _, arguments in found:
            for config in variants(arguments):
                kernels.run(**arguments, config=config)
    rows, losses = [json.dumps({"run": run_facts()})], []
    for facts, arguments in found:
        costs = variants(arguments)
        taken = {}
        for config in costs:
            taken[config] = time_calls([partial(kernels.run, **arguments, config=config)])[0]
        chosen = min(costs, key=costs.get)
        losses.append(taken[chosen] / min(taken.values()) - 1)
        row = {
            **facts, "chosen": str(chosen),
            "us": {str(config): round(us, 2) for config, us in taken.items()},
            "predicted_us": {str(config): round(us, 1) for config, us in costs.items()},
        }  # fmt: skip
        rows.append(json.dumps({"attention": row}))
        print(rows[-1], flush=True)
    losses.sort()
    places = {"median": len(losses) // 2, "p90": len(losses) * 9 // 10, "most": len(losses) - 1}
    slower = {name: round(losses[place], 3) for name, place in places.items()}
    rows.append(json.dumps({"chosen_slower_by": slower}))
    print(rows[-1])
    if options.record:
        options.record.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
