"""What attention does with queries that it prepares itself, without running a kernel."""

from importlib import import_module
from typing import Any

import pytest
import torch

from dsv4.formats.entry import kv_entry
from dsv4.ops.device import ROW_WARPS
from dsv4.ops.kv.pool import allocate_pool
from dsv4.ops.ragged import make_ragged


@pytest.mark.parametrize("dim", [32, 512])
def test_squares_of_a_head_are_summed_by_as_many_warps_as_alone(
    dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="forms are those of kernels")
    attend = import_module("dsv4.ops.attention.attend_triton")
    attention = import_module("dsv4.ops.attention.attention_triton")
    seen: list[Any] = []
    monkeypatch.setattr(attention, "capability", lambda: 90)
    monkeypatch.setattr(attention, "run", lambda q, config, **_: seen.append(config))
    pool = allocate_pool("fp8", False, kv_entry("fp8", dim, 16), (1, 64), "cpu")
    for tokens in (1, 4, 30, 100):
        given = {
            "pool": pool,
            "table": torch.zeros(tokens, 3, dtype=torch.int64),
            "compressed": None,
            "window": 128,
            "frequencies": torch.zeros(8),
            "batch": make_ragged([200] * tokens, [1] * tokens, [0] * tokens, torch.device("cpu")),
        }
        attend.run(torch.zeros(tokens, 4, dim, dtype=torch.bfloat16), 1e-6, **given)
    assert [config.num_warps for config in seen] == [ROW_WARPS] * 4


def test_a_prompt_is_walked_as_if_its_queries_were_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="forms are those of kernels")
    attend = import_module("dsv4.ops.attention.attend_triton")
    attention = import_module("dsv4.ops.attention.attention_triton")
    seen: list[Any] = []
    monkeypatch.setattr(attention, "capability", lambda: 90)
    monkeypatch.setattr(attention, "run", lambda q, config, **_: seen.append(config))
    given = {
        "pool": allocate_pool("fp8", False, kv_entry("fp8", 512, 64), (1, 64), "cpu"),
        "table": torch.zeros(1, 131, dtype=torch.int64),
        "compressed": None,
        "window": 128,
        "frequencies": torch.zeros(32),
        "batch": make_ragged([0], [2000], [0], torch.device("cpu")),
    }
    attend.run(torch.zeros(2000, 64, 512, dtype=torch.bfloat16), 1e-6, **given)
    assert seen == [attention.UNPACKED]
