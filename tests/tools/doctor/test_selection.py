"""Which kernel serves which op and format, and why."""

import json
from dataclasses import dataclass
from io import StringIO

import torch
from rich.console import Console

from dsv4.cli.doctor import _print_kernels, _print_machine
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, UnpackedTensor
from dsv4.ops import OPS
from dsv4.ops.core.op import Arguments, Kernel, Op
from dsv4.ops.gemm.weights.scaled import random_scaled
from dsv4.ops.gemm.weights.tiled import random_tiled
from dsv4.ops.kv.pool import PagedPool
from dsv4.tools.doctor.capsule import _decode, _encode
from dsv4.tools.doctor.device.machine import choice_for, examine_machine, format_of


def test_a_capsule_keeps_weights_with_few_bit_activations() -> None:
    g, tensors = torch.Generator().manual_seed(2), {}
    wide = UnpackedTensor(torch.randn(8, 32, generator=g), activations="a4")
    few = random_scaled(16, 64, g, "fp8")
    tree = _encode({"weights": [wide, few]}, "input", tensors)
    one, two = _decode(json.loads(json.dumps(tree)), tensors)["weights"]
    assert (one.activations, two.activations) == ("a4", "a8")
    assert torch.equal(one.values, wide.values)
    assert torch.equal(two.dequantize(), few.dequantize())


@dataclass(frozen=True)
class Picky(Kernel):
    reason: str | None = None

    def supports(self, arguments: Arguments) -> str | None:
        return self.reason


def op_with(*kernels: Kernel) -> Op:
    return Op("linear", lambda **_: None, lambda: (), kernels)


def test_formats_are_named_with_their_activations() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    tiled, four = random_tiled(16, 64, g), random_scaled(16, 64, g, "nvfp4")
    assert format_of({"x": x}) == "bfloat16"
    assert format_of({"x": x, "weights": [tiled]}) == "nvfp4 x a16"
    assert format_of({"x": x, "weights": [four, tiled, four]}) == "nvfp4 x a4, nvfp4 x a16"
    assert format_of(random_scaled(16, 64, g, "mxfp4")) == "mxfp4 x a8"
    assert format_of(random_scaled(16, 64, g, "fp8")) == "fp8 x a8"
    tiles = Fp8BlockTensor(torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), 4)
    assert format_of(tiles) == "fp8 x a16"
    codes = torch.zeros(4, 16, dtype=torch.uint8)
    assert format_of(Mxfp4Tensor(codes, codes[:, :1], activations="a4")) == "mxfp4 x a4"
    assert format_of({"q": x, "pool": PagedPool("fp8", False, {"data": x})}) == "fp8 entries"
    assert format_of({"ids": torch.zeros(3, dtype=torch.int64)}) == "integers"


def test_the_first_kernel_that_can_is_chosen_and_others_say_why_not() -> None:
    no, yes = Picky("a.no_triton", "x is float32"), Picky("a.yes_triton")
    assert choice_for(op_with(yes, no), {}) == ("yes_triton", "first choice")
    assert choice_for(op_with(no, yes), {}) == ("yes_triton", "not no_triton: x is float32")
    assert choice_for(op_with(no), {}) == ("reference", "not no_triton: x is float32")
    assert choice_for(op_with(), {}) == ("reference", "no kernel is written yet")


def printed(rows: list[dict[str, str]]) -> list[str]:
    out = StringIO()
    _print_kernels(rows, Console(file=out, width=400))
    return out.getvalue().splitlines()


def test_one_line_for_each_op() -> None:
    def row(op: str, label: str, runs: str) -> dict[str, str]:
        return {"op": op, "format": label, "runs": runs, "why": "x is float32"}

    rows = [row("linear", "nvfp4 x a16", "linear_triton"), row("linear", "float32", "reference")]
    rows += [row("linear", "bfloat16", "linear_triton"), row("rope", "bfloat16", "rope_triton")]
    assert printed(rows)[1:] == [
        "  linear: nvfp4 x a16 | bfloat16: linear_triton; float32: reference (x is float32)",
        "  rope: bfloat16: rope_triton",
    ]


def test_a_cpu_says_so_in_one_line() -> None:
    machine = examine_machine("cpu")
    assert [row["op"] for row in machine.kernels] == list(OPS)
    assert printed(machine.kernels) == ["kernels none, references: a CPU runs references"]
    out = StringIO()
    _print_machine(machine, Console(file=out, width=400))
    groups = ("attention", "shared expert", "routed experts")
    widths = ", ".join(f"{group} a16" for group in groups)
    assert f"activations auto: {widths}" in out.getvalue()
    assert machine.activations_why in out.getvalue()
