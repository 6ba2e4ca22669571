"""Every kernel that a model can reach, compiled for every architecture: `make kernels`.

    python -m tests.ops.kernels.table --output build/kernels.jsonl

writes a line for each kernel, case and architecture, and fails where one does not compile, does
not fit, spills in a loop with products or is missing. Compiled, not run.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch

from dsv4.ops.core.gpu import KNOWN
from tests.ops.kernels.compiling import Launch, compiled_facts, pretend_cpu_is_a_gpu

ROOT = Path(__file__).parents[3]
PEERS = {
    "gather_kernel",
    "rows_kernel",
    "ranges_kernel",
    "pairs_kernel",
    "send_kernel",
    "receive_kernel",
}
ONLY_TCGEN05 = {"_scaled_kernel"}
ONLY_WGMMA = {"_weights_kernel", "_values_kernel", "_unpack_kernel", "_prefill_kernel"}
ONLY_SCALED = {"_few_rows_kernel", "_many_rows_kernel", "_norm_quantize_kernel", "_quantize_kernel"}
AT_MODEL_SIZES = ("linear", "experts", "router", "embed", "sample")  # in all their formats


def launches(capability: int) -> Iterator[Launch]:
    """Matrices and state at the sizes of V4-Flash, whole steps, then a case of each op and number
    format for what these do not reach, exchanges, block-scaled products."""
    from tests.ops.kernels import test_blackwell_compile, test_state_compile, test_weight_compile
    from tests.runner import test_compile

    yield from test_weight_compile.all_launches()
    yield from test_weight_compile.other_formats()
    yield from test_state_compile.launches(capability, "all")
    yield from test_compile.launches(capability)
    yield from case_launches()
    yield from peer_launches()
    if KNOWN[capability].scales_blocks:
        yield from test_blackwell_compile.launches(capability)
    if capability == 90:
        test_weight_compile.as_on_hopper()
        yield from test_weight_compile.stream_launches()


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
    from dsv4.ops.comm import push_triton
    from dsv4.ops.comm.symmetric_triton import SymmetricPushes
    from tests.ops.kernels.test_push_interpreter import ranks

    channel = ranks(2, 1 << 20)[0]
    pushes = SymmetricPushes(channel)
    rows, parts = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(4, 3, 1, 64)
    local, extra = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 64)
    yield "peers gather", lambda: pushes.gather(torch.zeros(2, 4, 64).bfloat16(), rows)
    yield "peers owners", lambda: pushes.to_owners(rows, 2)
    yield "peers ranges", lambda: pushes.sum_ranges(parts[:, 0], None, torch.bfloat16)
    words = torch.zeros(64, dtype=torch.int32)
    for name in ("send", "receive"):
        kernel = getattr(push_triton, f"{name}_kernel")
        yield f"peers {name}", lambda k=kernel: channel.launch(k, (words,), (64,), phased=False)
    yield "peers pairs", lambda: pushes.sum_pairs(parts[:, :2], local, extra, None)


def written_kernels() -> set[str]:
    """Names of all kernels that are launched somewhere under dsv4/ops."""
    names: set[str] = set()
    for path in (ROOT / "dsv4" / "ops").rglob("*.py"):
        names.update(re.findall(r"\b(\w*kernel)\[", path.read_text(encoding="utf-8")))
    return names - {"kernel"} | PEERS


def holes(rows: list[dict[str, Any]]) -> list[str]:
    """What is missing or does not fit."""
    found = []
    for architecture, gpu in KNOWN.items():
        own = [row for row in rows if row["architecture"] == architecture]
        if not own:
            continue
        wanted = written_kernels()
        wanted -= ONLY_WGMMA if architecture != 90 else set()
        wanted -= ONLY_TCGEN05 if gpu.products != "tcgen05" else set()
        wanted -= ONLY_SCALED if not gpu.scales_blocks else set()
        missing = wanted - {row["kernel"] for row in own}
        found += [f"sm_{architecture}: {name} was not compiled" for name in sorted(missing)]
        for row in own:
            label = f"sm_{architecture} {row['case']} {row['kernel']}"
            if row["shared"] > gpu.shared_per_block:
                found.append(f"{label}: {row['shared']} bytes of shared memory")
            if row["tensor_columns"] > 512:
                found.append(f"{label}: {row['tensor_columns']} columns of tensor memory")
            if row["hot_reloads"] > 0:
                found.append(f"{label}: {row['hot_reloads']} reloads in a loop with products")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "kernels.jsonl")
    parser.add_argument("--only", type=int, nargs="*", default=list(KNOWN), help="architectures")
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
    with chosen.output.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"compiled": facts}) + "\n")
        for architecture in chosen.only:
            for row in compiled_facts("tests.ops.kernels.table", architecture):
                del row["mix"]
                rows.append({"architecture": architecture, **row})
                file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            sys.stdout.write(f"sm_{architecture}: {summary(rows, architecture)}\n")
            sys.stdout.flush()
    complaints = holes(rows)
    sys.stdout.write("\n".join(complaints) + "\n" * bool(complaints))
    sys.exit(1 if complaints else 0)


def summary(rows: list[dict[str, Any]], architecture: int) -> str:
    own = [row for row in rows if row["architecture"] == architecture]
    most = {name: max(row[name] for row in own) for name in ("registers", "shared", "hot_reloads")}
    kernels, num = {row["kernel"] for row in own}, len(own)
    return (
        f"{len(kernels)} kernels in {num} configurations, up to {most['registers']} registers and "
        f"{most['shared'] / 1024:.0f} KB of shared memory, {most['hot_reloads']} reloads in loops"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
