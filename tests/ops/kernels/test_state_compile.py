"""Compile the state kernels at model sizes without a GPU; read registers, memory, instructions.

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
# kernel: (instruction expected on sm_90, reloads from local memory allowed)
EXPECTED: dict[str, tuple[str, int]] = {
    "_update_kernel": ("HGMMA|HMMA", 0),
    "_mix_kernel": ("SHFL", 0),
    "_rms_norm_kernel": ("SHFL", 0),
    "_kv_store_kernel": ("F2FP", 0),
    "_close_kernel": ("MUFU", 0),
    "_append_kernel": ("STG", 0),
    "_prepare_kernel": ("SHFL", 0),
    "_index_kernel": ("SHFL", 0),
    "_attend_kernel": ("HGMMA|HMMA", 240),  # outside the loop over tiles, see docs
    "_merge_kernel": ("MUFU", 0),
    "_scores_kernel": ("HGMMA|HMMA", 0),
    "_select_kernel": ("SHFL|REDUX", 0),
    "_stats_kernel": ("MUFU", 0),
    "_candidates_kernel": ("MUFU", 0),
    "_filter_kernel": ("MUFU", 0),
    "_draw_kernel": ("IMAD", 0),
    "_best_kernel": ("SHFL", 0),
}


@pytest.mark.compile
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile(capability: int) -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    command = [sys.executable, "-m", "tests.ops.kernels.test_state_compile", str(capability)]
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
    assert {row["kernel"] for row in rows} == set(EXPECTED)
    for row in rows:
        label = f"{row['case']} {row['kernel']}"
        instruction, reloads = EXPECTED[row["kernel"]]
        assert row["shared"] <= MAX_SHARED, label
        assert row["tensor_columns"] <= MAX_TENSOR_COLUMNS, label
        assert row["instructions"] > 40, f"{label}: nothing but a trap"
        if capability == 90:
            assert re.search(instruction, " ".join(row["mix"])), f"{label}: no {instruction}"
            assert row["reloads"] <= reloads, f"{label}: {row['reloads']} reloads"


def _facts(compiled: Any, tools: Path) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([str(tools / tool), flag, file.name], capture_output=True, text=True)
            for tool, flag in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    pattern = r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)"
    names = re.findall(pattern, code.stdout, re.M)
    registers = re.search(r"REG:(\d+)", usage.stdout)
    return {
        "registers": int(registers[1]) if registers else -1,
        "reloads": names.count("LDL"),
        "shared": compiled.metadata.shared,
        "tensor_columns": getattr(compiled.metadata, "tmem_size", 0) or 0,
        "instructions": len(names),
        "mix": sorted(set(names)),
    }


def launches() -> Any:
    """(case, what to launch) at the sizes of V4-Flash; tensors lie on the CPU."""
    from importlib import import_module

    from benchmarks.state_ops import small_arguments
    from dsv4.ops import OPS

    for name, case, arguments in small_arguments():
        module = import_module(OPS[name].kernels[0].module)
        yield f"{name} {case}", lambda module=module, arguments=arguments: module.run(**arguments)


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
    compiled: list[tuple[str, Any]] = []

    def compile_only(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            compiled.append((self.fn.__name__, self.warmup(*args, grid=grid, **options)))

        return launch

    JITFunction.__getitem__ = compile_only
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    for case, launch in launches():
        compiled.clear()
        launch()
        for kernel, result in compiled:
            print(json.dumps({"case": case, "kernel": kernel, **_facts(result, tools)}))  # noqa: T201


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
