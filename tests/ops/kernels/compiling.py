"""Compile kernels without a GPU and read what came out: registers, memory, instructions.

A stub driver lets Triton specialise exactly as a launch would. The compiler's state is global to
a process, so tests start this file as a program, with what to compile and for which GPU.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch

from dsv4.ops.core.gpu import KNOWN, assume

ROOT = Path(__file__).parents[3]
MAX_TENSOR_COLUMNS = 512
PRODUCT = r"(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[\w.:]*"  # of PTX
Launch = tuple[str, Callable[[], object]]  # a case's name and what to launch


def compiled_facts(module: str, capability: int, *options: str) -> list[dict[str, Any]]:
    """One row per kernel that `module.launches(capability, *options)` compiles, in a process of
    its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "tests.ops.kernels.compiling", module, str(capability)]
    command += options
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]


def interpreted(module: str, *arguments: str) -> str:
    """What `module` prints as a program under Triton's interpreter; it must succeed."""
    pytest.importorskip("triton", reason="the interpreter is absent")
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout


def counts_are_known() -> bool:
    """Whether reloads were counted with this compiler; others allocate registers differently."""
    return metadata.version("triton").rpartition(".")[0] in ("3.6", "3.9")


def check_limits(row: dict[str, Any], least: int, capability: int = 90) -> None:
    """What holds with any compiler. Each allocates registers in its own way, and counts of reloads
    are its own; a kernel that reloads with every tenth instruction has lost its registers."""
    label = f"{row['case']} {row['kernel']}"
    assert row["shared"] <= KNOWN[capability].shared_per_block, label
    assert row["tensor_columns"] <= MAX_TENSOR_COLUMNS, label
    assert row["instructions"] > least, f"{label}: nothing but a trap"
    assert 10 * row["reloads"] < row["instructions"], f"{label}: {row['reloads']} reloads"


def facts(compiled: Any, tools: Path, *, all_code: bool = True) -> dict[str, Any]:
    """Without `all_code` only machine code with a stack is disassembled: nothing else spills."""
    cubin = compiled.asm["cubin"]
    usage = {} if all_code else resources(cubin, tools)
    return {
        **(disassembled(cubin, tools) if usage.pop("stack", 1) else {**usage, **NO_SPILLS}),
        "shared": compiled.metadata.shared,
        "tensor_columns": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "products": sorted(set(re.findall(PRODUCT, compiled.asm["ptx"]))),
    }


NO_SPILLS = {"reloads": 0, "hot_reloads": 0, "spills": 0}


def resources(cubin: bytes, tools: Path) -> dict[str, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, stdout=PIPE, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return {"registers": int(found[1]), "stack": int(found[2])}


def disassembled(cubin: bytes, tools: Path) -> dict[str, Any]:
    """What the machine code says; kept, since the tool needs longer to start than to read."""
    digest = hashlib.sha256(cubin + Path(__file__).read_bytes()).hexdigest()
    kept = ROOT / "build" / "disassembled" / f"{digest}.json"
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "nvdisasm"), "-c", file.name]
        code = subprocess.run(command, stdout=PIPE, text=True, check=True).stdout
    names, loops = instructions(code)
    found = {
        "registers": resources(cubin, tools)["registers"],
        "reloads": names.count("LDL"),
        "hot_reloads": hot_reloads(names, loops),
        "spills": names.count("STL"),
        "instructions": len(names),
        "mix": sorted(set(names)),
    }
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as new:
        json.dump(found, new)
    os.replace(new.name, kept)  # whole or not at all: tests run side by side
    return found


def instructions(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Mnemonics in order, and where loops begin and end: at branches that lead back."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_\w+):", line.strip()):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)(.*)", line):
            target = re.search(r"`\((\.L_\w+)\)", found[2])
            if found[1] == "BRA" and target and target[1] in labels:
                loops.append((labels[target[1]], len(names)))
            names.append(found[1])
    return names, loops


def hot_reloads(names: list[str], loops: list[tuple[int, int]]) -> int:
    """Reloads from local memory in the innermost loops with matrix products."""
    inner = [a for a in loops if not any(a[0] <= b[0] and b[1] <= a[1] and a != b for b in loops)]
    bodies = [names[first:last] for first, last in inner]
    return sum(b.count("LDL") for b in bodies if any(name.endswith("MMA") for name in b))


def forget_lines() -> None:
    """Triton's cache finds a kernel again where only the lines above it have changed."""
    from triton.runtime.jit import JITCallable

    JITCallable.starting_line_number = property(lambda kernel: 0, lambda kernel, line: None)


def install_driver(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:
            return 0

        def is_active(self) -> bool:
            return True

    triton.runtime.driver.set_active(Driver())


def pretend_cpu_is_a_gpu() -> None:
    """Kernels accept CPU tensors: nothing is run, so only shapes and pointers matter."""
    for path in (ROOT / "dsv4" / "ops").rglob("*_triton.py"):
        module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if hasattr(module, "device_reason"):
            module.device_reason = lambda device: None


def compile_all(launches: Iterator[Launch], report: Callable[[str, Any, Any], None]) -> None:
    """Every launch compiles its kernel and does not run it; each result is reported once."""
    from triton.runtime.jit import JITFunction

    seen: set[str] = set()
    run = JITFunction.run
    case = ""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            report(case, self, compiled)
        return compiled

    JITFunction.run = compile_only
    for name, launch in launches:
        case = name
        launch()


def main(module: str, capability: int, *options: str) -> None:
    import triton

    install_driver(capability)
    forget_lines()
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    given = import_module(module)
    all_code = not getattr(given, "ONLY_SPILLS", False)

    def report(case: str, kernel: Any, compiled: Any) -> None:
        row = {"case": case, "kernel": kernel.__name__, "module": kernel.fn.__module__}
        row |= facts(compiled, tools, all_code=all_code)
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()

    with assume(KNOWN[capability]):
        compile_all(given.launches(capability, *options), report)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
