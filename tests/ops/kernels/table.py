"""Every kernel that a model can reach, compiled for every architecture: `make kernels`.

    python -m tests.ops.kernels.table --output build/kernels.jsonl

writes a line for each kernel, case and architecture, and fails where one does not compile, does
not fit, spills in a loop with products or is missing. Compiled, not run.
"""

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from dsv4.ops.core.gpu import KNOWN, Gpu
from tests.ops.kernels.compiling import Launch, compiled_facts, pretend_cpu_is_a_gpu

ROOT = Path(__file__).parents[3]
ONLY_SPILLS = True  # machine code is read only where registers may have been spilled
# in the loops of 64 heads and of index keys with Triton 3.9; with 3.6, which an H200 ran, 8, 0, 7
HOPPER_RELOADS = {"_loop_kernel": 140, "_prefill_kernel": 166, "_prompt_scores_kernel": 85}
# modules that only these reach
ONLY_90 = {"decode_two_pass_triton", "unpack_triton", "prefill_gluon", "stream_gluon"}
ONLY_90 |= {"experts_stream_gluon", "stream_stored_gluon"}
ONLY_90 |= {"fp8_product_triton", "fp8_rows_triton"}
ONLY_90 |= {"prompt_gluon", "fp8_prompt_gluon", "fp8_prompt_experts_gluon"}
ONLY_90 |= {"fp8_stream_gluon", "experts_a8_stream_gluon", "update_prompt_gluon"}
ONLY_90 |= {"prefill_copy_gluon"}
NOT_MMA = {"expand_fp8_triton"}
ONLY_SCALED = {"scaled_product_triton", "quantize_rows_triton"}
AT_MODEL_SIZES = ("linear", "experts", "router", "embed", "sample")  # in all their formats


def launches(capability: int) -> Iterator[Launch]:
    """Matrices and state at the sizes of V4-Flash, whole steps, then a case of each op and number
    format for what these do not reach, exchanges, block-scaled products."""
    from tests.ops.kernels import (
        test_a8_compile,
        test_blackwell_compile,
        test_state_compile,
        test_weight_compile,
    )
    from tests.runner import test_compile

    yield from test_weight_compile.all_launches()
    yield from test_weight_compile.other_formats()
    yield from test_state_compile.launches(capability, "all")
    yield from test_compile.launches(capability, "all")
    yield from case_launches()
    yield from peer_launches()
    if KNOWN[capability].scales_blocks:
        yield from test_blackwell_compile.launches(capability)
    if capability == 90:
        test_weight_compile.as_on_hopper()
        yield from test_weight_compile.stream_launches()
        yield from test_a8_compile.launches(capability)


def case_launches() -> Iterator[Launch]:
    from dsv4.ops import OPS
    from dsv4.ops.core.arguments import leaves
    from dsv4.tools.doctor.device.machine import format_of

    pretend_cpu_is_a_gpu()
    seen: set[tuple[str, str]] = set()
    for op in OPS.values():
        for case in () if op.name in AT_MODEL_SIZES else op.cases():
            arguments = case.build(torch.Generator().manual_seed(1))
            kind = op.name, format_of(arguments)
            if kind in seen or any(tensor.numel() == 0 for _, tensor in leaves(arguments)):
                continue
            seen.add(kind)
            for kernel in op.kernels:
                if "scaled" in kernel.module or kernel.supports(arguments) is not None:
                    continue
                module = import_module(kernel.module)
                yield f"{op.name} {case.name}", lambda m=module, a=arguments: m.run(**a)


def peer_launches() -> Iterator[Launch]:
    """Exchanges between the GPUs of a node."""
    from dsv4.ops.comm import own_experts_triton, push_triton
    from dsv4.ops.comm.symmetric_triton import SymmetricPushes
    from tests.ops.kernels.test_push_interpreter import ranks

    channel = ranks(2, 16 << 20)[0]
    pushes = SymmetricPushes(channel)
    for kind, num in (("", 4), ("wide ", 256)):  # rows; prompts are exchanged in wide blocks
        rows, words = torch.zeros(num, 4096).bfloat16(), torch.zeros(num * 2048, dtype=torch.int32)
        everyone = torch.zeros(2, *rows.shape).bfloat16()
        yield f"peers {kind}gather", lambda x=rows, y=everyone: pushes.gather(y, x)
        yield f"peers {kind}owners", lambda x=rows: pushes.to_owners(x, len(x))
        for name in ("send", "receive"):
            kernel = getattr(push_triton, f"{name}_kernel")
            given = {"before": (words,), "between": (len(words),), "num_words": len(words)}
            yield f"peers {kind}{name}", partial(channel.launch, kernel, phased=False, **given)
        local = torch.zeros(num, 6, dtype=torch.int64)
        parts = torch.zeros(num, 7, 1, 1).expand(-1, -1, 4, 4096)  # ranges; only its shape counts
        for name, given in (
            ("pairs", (parts, local, None, None)),
            ("owned pairs", (parts[:, :6], local, torch.zeros(num, 4096), num)),
        ):
            yield f"peers {kind}{name}", lambda a=given: pushes.sum_pairs(*a)
    values, load = torch.zeros(3, 4, 4096), torch.zeros(2, dtype=torch.int64)
    yield "peers ranges", lambda: pushes.sum_ranges(values, None, torch.bfloat16)
    yield "peers own experts", lambda: own_experts_triton.run(local, range(2), load)


def written_kernels() -> set[tuple[str, str]]:
    """(module, name) of every kernel under dsv4/ops that is launched somewhere: compiled functions
    that are called with a grid, and kernels that are arguments of a call."""
    trees = {}
    for path in (ROOT / "dsv4" / "ops").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        trees[module] = ast.parse(path.read_text("utf-8"))
    compiled: dict[str, set[str]] = {}
    launched: set[tuple[str, str]] = set()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "jit" in map(_name, node.decorator_list):
                compiled.setdefault(node.name, set()).add(module)
    for module, tree in trees.items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            names = [name for name in map(_name, node.args) if name.endswith("_kernel")]
            if isinstance(node.func, ast.Subscript):
                names.append(_name(node.func.value))
            for name in names:
                homes = compiled.get(name, set())
                own = {module} & homes  # the same name elsewhere is another kernel
                launched |= {(home, name) for home in own or homes}
    return launched


def _name(node: ast.expr) -> str:
    """The last part of a dotted name, of a call's too."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_reached(module: str, gpu: Gpu) -> bool:
    if module in ONLY_90:
        return gpu.architecture == 90
    if module in NOT_MMA:
        return gpu.products != "mma"
    return gpu.scales_blocks or module not in ONLY_SCALED


def holes(rows: list[dict[str, Any]], kernels: set[tuple[str, str]]) -> list[str]:
    """Which of `kernels` are missing, and what does not fit."""
    found = []
    for architecture, gpu in KNOWN.items():
        own = [row for row in rows if row["architecture"] == architecture]
        if not own:
            continue
        compiled = {(row["module"], row["kernel"]) for row in own}
        for module, name in sorted(kernels - compiled):
            if is_reached(module.rpartition(".")[2], gpu):
                found.append(f"sm_{architecture}: {name} of {module} was not compiled")
        for row in own:
            label = f"sm_{architecture} {row['case']} {row['kernel']}"
            if row["shared"] > gpu.shared_per_block:
                found.append(f"{label}: {row['shared']} bytes of shared memory")
            if row["tensor_columns"] > 512:
                found.append(f"{label}: {row['tensor_columns']} columns of tensor memory")
            if row["hot_reloads"] > HOPPER_RELOADS.get(row["kernel"], 0) * (architecture == 90):
                found.append(f"{label}: {row['hot_reloads']} reloads in a loop with products")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "kernels.jsonl")
    parser.add_argument("--only", type=int, nargs="*", default=list(KNOWN), help="architectures")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at the same time")
    chosen = parser.parse_args()
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    tree = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    facts = {
        "date": datetime.now(UTC).date().isoformat(),
        "triton": metadata.version("triton"),
        "tree": tree.stdout.strip(),
        "note": "compiled, not run",
    }
    compiled = partial(compiled_facts, "tests.ops.kernels.table")
    with ThreadPoolExecutor(chosen.jobs) as pool, chosen.output.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"compiled": facts}) + "\n")
        for architecture, found in zip(chosen.only, pool.map(compiled, chosen.only), strict=True):
            for row in found:
                row.pop("mix", None)
                rows.append({"architecture": architecture, **row})
                file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            sys.stdout.write(f"sm_{architecture}: {summary(rows, architecture)}\n")
            sys.stdout.flush()
    complaints = holes(rows, written_kernels())
    sys.stdout.write("\n".join(complaints) + "\n" * bool(complaints))
    sys.exit(1 if complaints else 0)


def summary(rows: list[dict[str, Any]], architecture: int) -> str:
    own = [row for row in rows if row["architecture"] == architecture]
    most = {name: max(row[name] for row in own) for name in ("registers", "shared", "hot_reloads")}
    kernels, num = {(row["module"], row["kernel"]) for row in own}, len(own)
    return (
        f"{len(kernels)} kernels in {num} configurations, up to {most['registers']} registers and "
        f"{most['shared'] / 1024:.0f} KB of shared memory, {most['hot_reloads']} reloads in loops"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
