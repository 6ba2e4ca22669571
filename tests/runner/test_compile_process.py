"""Kernels compiled in other processes are the ones this process would make, and found on disk."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_compiled_elsewhere(tmp_path: Path) -> None:
    """Tuples of pointers, named or not, constants, options: described well enough for one key."""
    assert _run(tmp_path, "whole") == [
        "_embed_kernel True", "_kv_store_kernel True", "_linear_kernel True",
    ]  # fmt: skip


def test_a_process_that_dies(tmp_path: Path) -> None:
    """What it left undone is compiled here."""
    assert _run(tmp_path, "dies") == ["_embed_kernel False"]


def test_ctrl_c_while_kernels_compile(tmp_path: Path) -> None:
    """The next launches compile as if nothing had happened."""
    assert set(_run(tmp_path, "interrupted")) == {"_embed_kernel True"}


def test_a_process_whose_parent_was_killed_ends_quietly() -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "dsv4.ops.core.compile_triton"]
    found = subprocess.run(
        command, cwd=ROOT, input=b"{}\n{}\n", stdout=writes, stderr=subprocess.PIPE, check=False
    )
    os.close(writes)
    assert (found.returncode, found.stderr) == (0, b"")


def _run(folder: Path, story: str) -> list[str]:
    pytest.importorskip("triton", reason="the compiler is absent")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.runner.test_compile_process", story],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-4000:]
    return sorted(found.stdout.splitlines())


def interrupted(*given: object) -> None:
    """As Triton 3.6 ends if Ctrl-C comes while it waits."""
    raise KeyboardInterrupt


def main(story: str) -> None:
    import triton

    from benchmarks.state_ops import kv_arguments
    from dsv4.ops.core import compile_triton
    from dsv4.ops.core.ragged import make_ragged
    from dsv4.ops.gemm import embed_triton, linear_triton
    from dsv4.ops.kv import kv_store_triton
    from tests.ops.kernels.compiling import install_driver

    install_driver(90)
    compile_here, program = compile_triton.compile_here, compile_triton.__name__

    def noted(source, target, options, **kwargs):  # type: ignore[no-untyped-def]
        is_there = compile_triton._is_on_disk(source, target, options)
        sys.stdout.write(f"{source.name} {is_there}\n")
        return compile_here(source, target=target, options=options, **kwargs)

    compile_triton.compile_here = noted
    if story == "dies":
        compile_triton.__name__ = "this.module.is.not.there"
    weight = torch.zeros(256, 512, dtype=torch.bfloat16)
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    if story == "interrupted":
        with pytest.MonkeyPatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(triton.AsyncCompileMode, "__exit__", interrupted)
            with compile_triton.compile_only(2):
                embed_triton.run(torch.zeros(3, dtype=torch.int64), weight, 4, torch.bfloat16)
    with compile_triton.compile_only(2):
        embed_triton.run(torch.zeros(3, dtype=torch.int64), weight, 4, torch.bfloat16)
        if story == "whole":
            linear_triton.run(x, [weight, weight], [torch.float32] * 2)
            kv_store_triton.run(**kv_arguments(make_ragged([0], [1], [0], x.device), "cpu", 4))
    compile_triton.__name__ = program


if __name__ == "__main__":
    main(sys.argv[1])
