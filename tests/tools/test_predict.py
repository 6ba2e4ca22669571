"""`bench ops --predict`: floors against arithmetic done by hand, a record's bytes, real launches.

Launches are counted, not run: the interpreter's way in is replaced by a list. The interpreter is
chosen when a kernel's module is imported, so this file is both the test and the program.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.errors import OptionError
from dsv4.ops.core.gpu import KNOWN
from dsv4.runner.ranks.cluster import GPUS
from dsv4.tools.predict import (
    LAUNCHES,
    MOST_DECODED,
    SHAPES,
    SOURCE,
    expected_experts,
    launches,
    measured_ops,
    op_costs,
    predict,
)
from tests.ops.kernels.compiling import interpreted

ROOT = Path(__file__).parents[2]
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
    scores = found["index_scores 128k", 1]
    assert scores.bytes == 32768 * (64 + 4 + 4)
    assert scores.operations == 32768 * 2 * 64 * 128
    assert scores.floor_us["a4"] == round(scores.bytes / 8e6, 2)
    assert found["attention csa", 1].bytes == 640 * 584 + 64 * 512 * (2 + 2)
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
    text = (ROOT / "benchmarks" / "records" / "2026-11-16_h200_ops.jsonl").read_text()
    rows = [json.loads(line).get("result") for line in text.splitlines()]
    recorded = {(r["op"], r["shape"], r["tokens"]): r["bytes"] for r in rows if r}
    assert len(recorded) > 20
    assert recorded.keys() <= measured_ops()[1].keys()
    for (op, shape, tokens), wanted in recorded.items():
        if op in LAUNCHES:
            found = dict(op_costs(SHAPES[shape], tokens))[op].num_bytes
            random_choice = op.startswith("experts")
            assert found == pytest.approx(wanted, rel=0.05 if random_choice else 1e-9), op


def read_records(folder: Path) -> tuple[str, dict[tuple[str, str, int], float]]:
    """As `scripts/make_docs.py` writes them and the command reads them."""
    script = runpy.run_path(str(ROOT / "scripts" / "make_docs.py"))
    written = folder / "measured.json"
    written.write_text(script["measured_ops"](folder))
    return measured_ops(written)


def test_no_record_no_figures(tmp_path: Path) -> None:
    assert read_records(tmp_path) == ("no record", {})


def test_newer_records_win(tmp_path: Path) -> None:
    for day, time in (("02", 2.0), ("01", 1.0)):
        row = {"op": "wq_b", "shape": "flash", "tokens": 1, "median_us": time}
        text = json.dumps({"run": {}}) + "\n" + json.dumps({"result": row}) + "\n"
        (tmp_path / f"2027-01-{day}_h200_ops.jsonl").write_text(text)
    other = json.dumps({"result": {"what": "decode", "ms": 3}})
    (tmp_path / "2027-01-03_h200_decode.jsonl").write_text(other)
    assert read_records(tmp_path) == ("2027-01-02_h200_ops.jsonl", {("wq_b", "flash", 1): 2.0})


def test_the_command(tmp_path: Path) -> None:
    record = tmp_path / "made" / "b200.jsonl"
    options = ["--predict", "b200", "--shape", "flash", "--only", "wo_b", "--tokens", "1,8"]
    result = CliRunner().invoke(app, ["bench", "ops", *options, "--record", str(record)])
    assert result.exit_code == 0, result.output
    assert "B200: predicted, not run" in result.output
    assert SOURCE.split(",")[0] in result.output
    facts, *rows = map(json.loads, record.read_text().splitlines())
    assert facts["prediction_for"]["note"] == "predicted, not run"
    assert [row["prediction"]["tokens"] for row in rows] == [1, 8]
    assert rows[0]["prediction"]["measured_us"] > rows[0]["prediction"]["floor_us"]["a16"]


@pytest.mark.parametrize("gpu", GPUS)
def test_every_card_is_predicted(gpu: str) -> None:
    """Narrower activations are faster only where the card multiplies them."""
    rows = list(predict(gpu, ["flash", "pro"], [1, 8192]))
    assert len(rows) > 40
    for row in rows:
        assert row.floor_us["a16"] >= row.floor_us["a8"] >= row.floor_us["a4"] > 0
    is_faster = any(row.floor_us["a4"] < row.floor_us["a16"] for row in rows)
    assert is_faster == KNOWN[GPUS[gpu].architecture].scales_blocks


@pytest.mark.parametrize(
    ("gpu", "shape", "says"), [("b300", "flash", "b200"), ("b200", "flahs", "flash, pro")]
)
def test_unknown_names(gpu: str, shape: str, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        list(predict(gpu, [shape], [1]))


def test_launches_are_counted() -> None:
    counted = json.loads(interpreted("tests.tools.test_predict").splitlines()[-1])
    for op in LAUNCHES:
        wanted = {number: launches(op, int(number)) for number in counted[op]}
        assert len(wanted) >= 4
        assert counted[op] == wanted, op


def main() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from benchmarks import state_ops as state
    from dsv4.ops import OPS
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.ops.core.op import Arguments
    from dsv4.ops.gemm.embed import embed
    from dsv4.ops.gemm.grouped_linear import grouped_linear
    from dsv4.ops.gemm.linear import linear_multi
    from dsv4.ops.gemm.weights.scaled import ScaledTensor, padded
    from dsv4.ops.moe.experts import Experts, experts_ffn
    from dsv4.ops.moe.router import Gate, router
    from dsv4.tools.bench_ops import random_fp4

    names: list[str] = []

    def run(op: str, arguments: Arguments) -> None:
        OPS[op].run(torch.device("cpu"), arguments)

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
    inputs += [random_fp4(rows, s.hidden, device="cpu") for rows in s.csa_inputs[2:]]
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
            "router": lambda: router(x, ids, Gate(gate, bias, None, s.chosen, 1.5)),
            "embed": lambda: embed(ids, table, 4, torch.bfloat16),
            "experts+shared": lambda: experts_ffn(x, *choice, Experts(*routed, *shared, 10.0)),
            "mhc_boundary": lambda: run("mhc_boundary", state.mhc_arguments(s, tokens, "cpu")),
        }

    def decode_calls(tokens: int) -> dict[str, Callable[[], object]]:
        long = state.decode_batch(tokens, 131072, "cpu")
        near = state.decode_batch(tokens, 8192, "cpu")
        csa = state.attention_arguments(s, near, 4, s.topk, "cpu", 4)
        hca = state.attention_arguments(s, long, 128, 0, "cpu", 4)
        return {
            "head": lambda: linear_multi(zeros(tokens, s.hidden), [zeros(1000, s.hidden)]),
            "attention csa": lambda: run("attention", csa),
            "attention hca 128k": lambda: run("attention", hca),
            "index_scores 128k": lambda: run(
                "index_scores", state.scores_arguments(long, s.topk, "cpu", 4)
            ),
            "index_select 32k": lambda: run(
                "index_select", {"scores": torch.zeros(tokens, 32768), "topk": s.topk}
            ),
            "sample": lambda: run("sample", state.sample_arguments(tokens, "cpu", 1000, False)),
        }

    counts: dict[str, dict[int, int]] = {op: {} for op in LAUNCHES}
    with kernels_on_cpu():
        for tokens in TOKENS:
            found = calls(tokens) | (decode_calls(tokens) if tokens <= MOST_DECODED else {})
            for op, call in found.items():
                names.clear()
                call()
                counts[op][tokens] = len(names)
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
