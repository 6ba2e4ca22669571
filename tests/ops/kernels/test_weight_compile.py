"""Compile the weight kernels at model sizes without a GPU; read registers, memory, instructions.

A stub driver lets Triton specialise exactly as a launch would. The compiler's state is global to
a process, so this file is both the test and the program it starts.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

MAX_SHARED = 232448
MAX_TENSOR_COLUMNS = 512
ALLOWED_RELOADS = {"linear prefill": 16}  # where ranges end, outside the loop over K
EVERY_KERNEL = ("linear 1 decode", "linear prefill", "experts 8 decode", "router", "embed")
HOT = re.compile("decode|prefill")
MATRIX = re.compile("HGMMA|HMMA|UTCHMMA|OMMA")


@pytest.mark.compile
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile(capability: int) -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "tests.ops.kernels.test_weight_compile", str(capability)]
    found = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    kernels = {row["kernel"] for row in rows}
    assert kernels >= {"_linear_kernel", "_up_kernel", "_down_kernel", "_gate_kernel"}
    for row in rows:
        label = f"{row['case']} {row['kernel']}"
        assert row["shared"] <= MAX_SHARED, label
        assert row["tensor_columns"] <= MAX_TENSOR_COLUMNS, label
        assert row["instructions"] > 20, f"{label}: nothing but a trap"
        if row["kernel"] in ("_linear_kernel", "_up_kernel", "_down_kernel", "_gate_kernel"):
            assert MATRIX.search(" ".join(row["mix"])), f"{label}: no matrix instruction"
        if capability == 90 and HOT.search(row["case"]):
            most = ALLOWED_RELOADS.get(row["case"], 0)
            assert row["reloads"] <= most, f"{label}: {row['reloads']} reloads from local memory"


def _facts(compiled: Any, tools: Path) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code = subprocess.run(
            [str(tools / "nvdisasm"), "-c", file.name], capture_output=True, text=True
        )
    pattern = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)"
    names = re.findall(pattern, code.stdout, re.M)
    return {
        "reloads": names.count("LDL"),
        "shared": compiled.metadata.shared,
        "tensor_columns": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "instructions": len(names),
        "mix": sorted(set(names)),
    }


def launches() -> Any:
    """(case, what to launch): a layer's matrices, small in memory; tensors lie on the CPU."""
    from dsv4.ops.gemm import embed_triton, linear_triton
    from dsv4.ops.gemm.packed import random_tiled
    from dsv4.ops.moe import experts_triton, router_triton

    generator = torch.Generator().manual_seed(0)
    matrix = random_tiled(256, 1024, generator)
    dense = torch.zeros(256, 1024, dtype=torch.bfloat16)
    for rows, case in ((1, "decode"), (32, "decode")):
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16)
        yield f"linear {rows} {case}", lambda x=x: linear_triton.run(x, [matrix], [x.dtype])
    long = random_tiled(256, 2048, generator)
    wide = torch.zeros(2048, 2048, dtype=torch.bfloat16)
    yield "linear prefill", lambda: linear_triton.run(wide, [long], [wide.dtype])
    short = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    yield "linear short prefill", lambda: linear_triton.run(short, [matrix], [short.dtype])
    x = torch.zeros(1, 1024, dtype=torch.bfloat16)
    yield "linear bf16", lambda: linear_triton.run(x, [dense, matrix, matrix], [torch.float32] * 3)
    w13 = random_tiled(512, 256, generator, count=2, paired=True)
    w2 = random_tiled(256, 256, generator, count=2)
    for rows, case in ((1, "decode"), (8, "decode"), (2048, "prefill")):
        x = torch.zeros(rows, 256, dtype=torch.bfloat16)
        ids = torch.zeros(rows, 2, dtype=torch.int64)
        arguments = (x, ids, torch.zeros(rows, 2), w13, w2, w13[0], w2[0], 10.0)
        yield f"experts {rows} {case}", lambda a=arguments: experts_triton.run(*a)
    tokens = torch.zeros(1, dtype=torch.int64)
    gate = torch.zeros(256, 1024, dtype=torch.bfloat16)
    x = torch.zeros(1, 1024, dtype=torch.bfloat16)
    bias = torch.zeros(256)
    yield "router", lambda: router_triton.run(x, gate, bias, None, tokens, 6, 1.5)
    yield "embed", lambda: embed_triton.run(tokens, gate, 4, torch.bfloat16)


def main(capability: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

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
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    case = ""
    seen = set()
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            row = {"case": case, "kernel": self.__name__, **_facts(compiled, tools)}
            sys.stdout.write(json.dumps(row) + "\n")
        return compiled

    JITFunction.run = compile_only
    for name, launch in launches():
        # on sm_100 one form of each kernel, to save time; the other forms are read on sm_90
        if (name in EVERY_KERNEL) if capability == 100 else (name != "experts 8 decode"):
            case = name
            launch()


if __name__ == "__main__":
    main(int(sys.argv[1]))
