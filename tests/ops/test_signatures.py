"""One signature per op: kernels take what the reference takes, and mypy sees every call."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.ops import OPS, SHARES

ROOT = Path(__file__).parents[2]
FUNCTIONS = ("supports", "run", "variant", "compile_others")


def parameters(module: str) -> dict[str, ast.arguments]:
    """Of a kernel module's functions, without importing Triton."""
    tree = ast.parse((ROOT / Path(*module.split("."))).with_suffix(".py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: node.args for node in functions if node.name in FUNCTIONS}


EVERY = OPS | SHARES


def test_every_op_is_listed() -> None:
    """Those that a module registers."""
    found = set()
    for path in (ROOT / "dsv4" / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "Op":
                found.add(ast.literal_eval(node.args[0]))
    assert found == EVERY.keys()


@pytest.mark.parametrize("name", EVERY)
def test_kernels_have_the_signature_of_the_reference(name: str) -> None:
    """What a kernel takes besides, it can do without; only `variant` may leave arguments out."""
    wanted = set(inspect.signature(EVERY[name].reference).parameters)
    for kernel in EVERY[name].kernels:
        found = parameters(kernel.module)
        assert {"supports", "run"} <= found.keys()
        for function, args in found.items():
            names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
            needed = set(names[: len(names) - len(args.defaults)])
            assert needed <= wanted, (kernel.module, function)
            assert args.kwarg is not None or wanted <= set(names), (kernel.module, function)


@pytest.mark.parametrize("name", OPS)
def test_an_op_takes_few_arguments(name: str) -> None:
    """More are fields of a typed object, which every spelling shares."""
    assert len(inspect.signature(OPS[name].reference).parameters) <= 6


def test_mypy_sees_wrong_arguments_of_an_op(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="a tool for development")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "from torch import Tensor\n"
        "from dsv4.ops.norm.rms_norm import OP\n"
        "def f(x: Tensor) -> str:\n"
        "    OP(x.device, x=x, weight=None, eps=1e-6)\n"
        "    OP(x.device, x=x, weight=None, epsilon=1e-6)\n"
        "    OP(x.device, x=x, weight=None, eps='small')\n"
        "    return OP(x.device, x=x, weight=None, eps=1e-6)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(wrong)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    lines = [line.split(":")[1] for line in found.splitlines() if ": error:" in line]
    assert sorted(set(lines)) == ["5", "6", "7"], found
