"""`bench ops --predict`: floors against arithmetic done by hand, a record's bytes, real launches.

Launches are counted, not run: the interpreter's way in is replaced by a list. The interpreter is
chosen when a kernel's module is imported, so this file is both the test and the program.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.errors import OptionError
from dsv4.tools.predict import (
    GPUS,
    LAUNCHES,
    RECORDS,
    SHAPES,
    expected_experts,
    launches,
    newest_record,
    op_sizes,
    predict,
)
from tests.ops.kernels.compiling import interpreted

TOKENS = (1, 8, 32, 128, 2048)


def test_floors_by_hand() -> None:
    found = {(row.op, row.tokens): row for row in predict("b200", ["flash"], [1, 8192])}
    wq_b = found["wq_b", 1]
    assert wq_b.bytes == 32768 * 1024 * 4.5 / 8 + 2 * (1024 + 32768)
    assert wq_b.operations == 2 * 32768 * 1024
    assert wq_b.floor_us == dict.fromkeys(("a16", "a8", "a4"), round(wq_b.bytes / 8e12 * 1e6, 2))
    assert wq_b.bound == "memory"
    up = found["shared gate/up", 8192]
    for width, rate in (("a16", 2250), ("a8", 4500), ("a4", 9000)):
        assert up.floor_us[width] == round(2 * 8192 * 4096 * 4096 / rate / 1e6, 2)
    assert up.bound == "tensor cores"
    # what is never rounded is not faster; a part of the input's matrices is not
    router, inputs = found["router", 8192], found["csa inputs", 8192]
    assert router.floor_us["a16"] == router.floor_us["a4"]
    rounded, fixed = 1024 + 512, 1024 + 1024 + 256 + 256
    wanted = 2 * 8192 * 4096 * (rounded / 9000 + fixed / 2250) / 1e6
    assert inputs.floor_us["a4"] == round(wanted, 2)
    assert ("head", 8192) not in found
    assert {row.note for row in found.values()} == {"predicted, not run"}


def test_experts_that_random_tokens_visit() -> None:
    shape = SHAPES["flash"]
    assert expected_experts(shape, 1) == pytest.approx(shape.chosen)
    assert expected_experts(shape, 8192) == pytest.approx(shape.num_experts)
    draws = torch.rand(64, 8, shape.num_experts, generator=torch.Generator().manual_seed(0))
    chosen = draws.topk(shape.chosen, dim=2).indices.flatten(1)
    mean = sum(len(row.unique()) for row in chosen) / 64
    assert expected_experts(shape, 8) == pytest.approx(mean, rel=0.03)


def test_sizes_are_those_of_the_measured_ops() -> None:
    """The record was written by code that allocated and timed the very same matrices."""
    name, times = newest_record()
    rows = [json.loads(line).get("result") for line in (RECORDS / name).read_text().splitlines()]
    recorded = {(r["op"], r["shape"], r["tokens"]): r["bytes"] for r in rows if r}
    assert len(times) == len(recorded) > 20
    for (op, shape, tokens), wanted in recorded.items():
        if op in LAUNCHES:
            found = dict(op_sizes(SHAPES[shape], tokens))[op].num_bytes
            random_choice = op.startswith("experts")
            assert found == pytest.approx(wanted, rel=0.05 if random_choice else 1e-9), op


def test_no_record_no_figures(tmp_path: Path) -> None:
    assert newest_record(tmp_path) == ("none", {})
    assert newest_record(tmp_path / "missing") == ("none", {})


def test_the_command(tmp_path: Path) -> None:
    record = tmp_path / "made" / "b200.jsonl"
    options = ["--predict", "b200", "--shape", "flash", "--only", "wo_b", "--tokens", "1,8"]
    result = CliRunner().invoke(app, ["bench", "ops", *options, "--record", str(record)])
    assert result.exit_code == 0, result.output
    assert "B200: predicted, not run" in result.output
    assert GPUS["b200"].source.split(",")[0] in result.output
    facts, *rows = map(json.loads, record.read_text().splitlines())
    assert facts["prediction_for"]["note"] == "predicted, not run"
    assert [row["prediction"]["tokens"] for row in rows] == [1, 8]
    assert rows[0]["prediction"]["measured_us"] > rows[0]["prediction"]["floor_us"]["a16"]


@pytest.mark.parametrize(
    ("gpu", "shape", "says"), [("b300", "flash", "b200"), ("b200", "flahs", "flash, pro")]
)
def test_unknown_names(gpu: str, shape: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        list(predict(gpu, [shape], [1]))


def test_launches_are_counted() -> None:
    counted = json.loads(interpreted("tests.tools.test_predict").splitlines()[-1])
    for op in LAUNCHES:
        wanted = {str(tokens): launches(op, tokens) for tokens in TOKENS}
        if op == "head":
            del wanted["2048"]
        assert counted[op] == wanted, op


def main() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from dsv4.ops.gemm.embed import embed
    from dsv4.ops.gemm.grouped_linear import grouped_linear
    from dsv4.ops.gemm.linear import linear_multi
    from dsv4.ops.gemm.scaled import ScaledTensor, padded
    from dsv4.ops.moe.experts import experts_ffn
    from dsv4.ops.moe.router import router
    from dsv4.ops.op import kernels_on_cpu
    from dsv4.tools.bench_ops import random_nvfp4

    names: list[str] = []

    def record(self, grid):  # type: ignore[no-untyped-def]
        return lambda *args, **kwargs: names.append(self.fn.__name__)

    InterpretedFunction.__getitem__ = record
    s, few = SHAPES["flash"], 8  # experts

    def native(rows: int, columns: int, *lead: int) -> ScaledTensor:
        high, wide = padded(rows, columns)
        data = torch.zeros(*lead, high, wide // 2, dtype=torch.uint8)
        scale = torch.zeros(*lead, high // 128, wide // 64, 2, 256, dtype=torch.uint8)
        one = torch.ones(*lead, 1)
        return ScaledTensor(data, scale, one, rows, columns, 16, 4, activations="a4")

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.bfloat16)

    width, low = s.heads * s.head_dim, s.groups * s.o_rank
    inputs = [native(rows, s.hidden) for rows in s.csa_inputs[:2]]
    inputs += [random_nvfp4(rows, s.hidden, device="cpu") for rows in s.csa_inputs[2:]]
    wq_b, wo_a = native(width, s.q_rank), native(low, width // s.groups)
    wo_b, up = native(s.hidden, low), native(2 * s.inner, s.hidden)
    routed = [native(2 * s.inner, s.hidden, few), native(s.hidden, s.inner, few)]
    shared = [up, native(s.hidden, s.inner)]
    gate, bias, table = zeros(s.num_experts, s.hidden), torch.zeros(s.num_experts), zeros(9, 4096)

    def calls(tokens: int) -> dict[str, Callable[[], object]]:
        x, ids = zeros(tokens, s.hidden), torch.zeros(tokens, dtype=torch.int64)
        choice = torch.arange(s.chosen).repeat(tokens, 1), torch.rand(tokens, s.chosen)
        return {
            "csa inputs": lambda: linear_multi(x, inputs),
            "wq_b": lambda: linear_multi(zeros(tokens, s.q_rank), [wq_b]),
            "wo_a": lambda: grouped_linear(zeros(tokens, s.groups, width // s.groups), wo_a),
            "wo_b": lambda: linear_multi(zeros(tokens, low), [wo_b]),
            "shared gate/up": lambda: linear_multi(x, [up]),
            "router": lambda: router(x, gate, bias, None, ids, s.chosen, 1.5),
            "embed": lambda: embed(ids, table, 4, torch.bfloat16),
            "head": lambda: linear_multi(x, [zeros(1000, s.hidden)]),
            "experts+shared": lambda: experts_ffn(x, *choice, *routed, *shared, 10.0),
        }

    counts: dict[str, dict[int, int]] = {op: {} for op in LAUNCHES}
    with kernels_on_cpu():
        for tokens in TOKENS:
            for op, call in calls(tokens).items():
                if op == "head" and tokens > 128:
                    continue
                names.clear()
                call()
                counts[op][tokens] = len(names)
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
