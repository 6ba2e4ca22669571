"""What attention does with queries that it prepares itself, without running a kernel."""

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.formats.entry import kv_entry
from dsv4.ops.attention.attention import Visible
from dsv4.ops.attention.query import Queries
from dsv4.ops.core.gpu import KNOWN, assume
from dsv4.ops.core.launch import ROW_WARPS
from dsv4.ops.core.ragged import make_ragged
from dsv4.ops.kv.pool import allocate_pool

ROOT = Path(__file__).parents[3]
# variants have had other names since the record
RENAMED = {
    "walk 16": "loop 16", "walk 64": "loop 64", "walk unpacked": "prefill", "passes": "two pass",
}  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The variants of attention that were started, as on an H200."""
    pytest.importorskip("triton", reason="a kernel's module chooses the variant")
    attention = import_module("dsv4.ops.attention.attention_triton")
    found: list[Any] = []
    monkeypatch.setattr(attention, "run", lambda q, to, config, eps: found.append(config))
    with assume(KNOWN[90]):
        yield found


def attend(starts: list[int], counts: list[int], heads: int, dim: int, rope_dim: int) -> None:
    """Sequences with so many tokens before and now, through attention that prepares queries."""
    to = Visible(
        sink=torch.zeros(heads),
        pool=allocate_pool("fp8", False, kv_entry("fp8", dim, rope_dim), (1, 64), "cpu"),
        table=torch.zeros(len(starts), 131, dtype=torch.int64),
        compressed=None,
        window=128,
        frequencies=torch.zeros(rope_dim // 2),
        batch=make_ragged(starts, counts, [0] * len(starts), torch.device("cpu")),
    )
    queries = Queries(torch.zeros(sum(counts), heads, dim, dtype=torch.bfloat16), 1e-6)
    import_module("dsv4.ops.fused.attention_with_queries_triton").run(queries, to)


@pytest.mark.parametrize("dim", [32, 512])
def test_squares_of_a_head_are_summed_by_as_many_warps_as_alone(dim: int, seen: list[Any]) -> None:
    for tokens in (1, 4, 30, 100):
        attend([200] * tokens, [1] * tokens, 4, dim, 16)
    assert [config.num_warps for config in seen] == [ROW_WARPS] * 4


def test_a_prompt_is_walked_as_if_its_queries_were_ready(seen: list[Any]) -> None:
    attend([0], [2000], 64, 512, 64)
    assert seen == [import_module("dsv4.ops.attention.attention_triton").UNPACKED]


def test_the_variant_chosen_is_the_fastest_measured() -> None:
    """What the table of costs leads to, at every size of the record it came from."""
    pytest.importorskip("triton", reason="a variant is chosen in a kernel's module")
    kernels = import_module("dsv4.ops.attention.attention_triton")
    table = json.loads((ROOT / "dsv4/ops/attention/variant_costs.json").read_text())["sm_90"]
    lines = (ROOT / table["record"]).read_text().splitlines()
    rows = [row["attention"] for row in map(json.loads, lines) if "attention" in row]
    assert len(rows) == 60
    for row in rows:
        ratio, selected = {"window": (0, 0), "csa": (4, 512), "hca": (128, 0)}[row["kind"]]
        held = (row["context"] // ratio // 32 + 1) * 32 if ratio else 0
        sequences = row["tokens"] if row["what"] == "decode" else 1
        sizes = kernels.Sizes(row["tokens"], sequences, 64, 512, 64, 128, selected or held, held)
        with assume(KNOWN[90]):
            costs = kernels.variants_of(sizes, True, torch.device("cpu"))
        taken = {RENAMED.get(name, name): us for name, us in row["us"].items()}
        chosen = str(min(costs, key=costs.__getitem__))
        assert {str(config) for config in costs} == set(taken), row
        assert taken[chosen] < 1.1 * min(taken.values()), row
