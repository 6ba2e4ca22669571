"""`doctor` names the op and the layer of every planted bug, and finds nothing where none is."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dsv4.ops.core.context as context_module
from dsv4.cache.state import StateTensors
from dsv4.errors import KernelError
from dsv4.runner import forward as step_parts
from dsv4.testing import small_config
from dsv4.tools.doctor import cross_check
from dsv4.tools.doctor.examine import examine_model
from dsv4.tools.doctor.report import model_conclusions
from tests.tools.doctor.faults import FAULTS, Fault, in_layer, kernel
from tests.tools.doctor.subjects import SMALL, make_subject, small_subject


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_bug_is_located(fault: Fault) -> None:
    subject = small_subject(nasty=fault.nasty, changes=fault.changes, **fault.choices)
    with fault.plant(subject):
        report = examine_model(subject, only_calls=True)
    assert not report.ok
    assert report.first is not None
    cell = report.first.cell
    assert (cell.layer, cell.station) == (fault.layer, fault.station), cell.cause
    assert cell.cause is not None
    assert cell.cause.kind == fault.kind, cell.cause
    assert fault.says in cell.cause.text


Changes = dict[str, Any]
HEALTHY: tuple[tuple[Changes, bool, Changes], ...] = (
    ({}, False, {}),
    ({}, True, {}),
    ({}, False, {"dtype": "bfloat16", "kv_format": "fp8", "index_format": "fp8"}),
    (
        {"index_head_dim": 32},
        False,
        {"dtype": "bfloat16", "kv_format": "fp8", "index_format": "fp4"},
    ),
    ({}, True, {"dtype": "bfloat16", "kv_format": "bf16", "index_format": "bf16"}),
    ({"index_head_dim": 32}, True, {"kv_format": "fp8", "index_format": "fp4"}),
    ({"hc_mult": 2, "hc_sinkhorn_iters": 3, "yarn_factor": 1.0}, False, {"prefix_cache": False}),
    ({"num_hash_layers": 3, "sliding_window": 5, "index_topk": 3}, False, {"kv_format": "fp8"}),
    ({"num_heads": 6, "o_groups": 3, "index_num_heads": 1, "num_experts": 9}, False, {}),
    ({"compress_ratios": (128, 4, 4), "rms_norm_eps": 1e-20, "swiglu_limit": 10.0}, False, {}),
)


@pytest.mark.parametrize("number", range(len(HEALTHY)))
def test_no_false_alarm(number: int) -> None:
    changes, nasty, choices = HEALTHY[number]
    config = small_config(**{**SMALL, **changes})
    report = examine_model(make_subject(config, number, nasty=nasty, **choices))
    assert report.ok, model_conclusions(report)
    assert {cell.status for cell in report.cells} == {"ok"}
    skipped = [item.name for item in report.crossings if item.status == "skipped"]
    expected = ["cold vs prefix hit"] if "prefix_cache" in choices else []
    assert skipped == [*expected, "eager vs graph"]


# --- bugs that only some way of feeding tokens shows ----------------------------------------------


def first_sequence_only(right: Callable[..., Any], a: dict[str, Any]) -> None:
    """Every key is written to the pages of the batch's first sequence."""
    batch = a["batch"]
    right(batch=replace(batch, seq_idx=torch.zeros_like(batch.seq_idx)))


def another_order_for_many_rows(right: Callable[..., Any], a: dict[str, Any]) -> Any:
    """Right to the last bits, which depend on the number of rows."""
    return [y * (1 + 2**-22) if a["x"].shape[0] > 8 else y for y in right()]


def last_buffers_token(right: Any = step_parts.begin_step) -> AbstractContextManager[Any]:
    """Steps through fixed buffers read another token."""

    def wrong(step: Any) -> None:
        right(step)
        step.token_ids.zero_()

    return patch.object(step_parts, "begin_step", wrong)


def unwatched(right: Callable[..., Any], a: dict[str, Any]) -> Any:
    """Only what runs when nobody looks is wrong, as a fused kernel would be."""
    return right() * (1 if context_module.current().observer else 1.001)


CROSS_FAULTS = (
    ("eager vs decode buffers", last_buffers_token, 0, "embed"),
    ("watched vs fused", lambda: kernel("experts", unwatched), 2, "head"),
    ("alone vs batched", lambda: kernel("kv_store", first_sequence_only), 0, "window_key"),
    ("prefill vs decode", lambda: kernel("linear", another_order_for_many_rows), 0, "project"),
    (
        "cold vs prefix hit",
        lambda: patch.object(StateTensors, "restore_rows", lambda self, row, slot: None),
        1,
        "entries",
    ),
)


@pytest.mark.parametrize(("name", "plant", "layer", "station"), CROSS_FAULTS)
def test_cross_check_is_reduced_to_the_first_op(
    name: str, plant: Callable[[], AbstractContextManager[Any]], layer: int, station: str
) -> None:
    subject = small_subject()
    with plant():
        report = examine_model(subject)
    assert not report.ok
    assert report.first is None, "on its own inputs every op is within its limit"
    found = {item.name: item for item in report.crossings}[name]
    assert (found.status, found.layer, found.station) == ("wrong", layer, station)
    assert any(line.startswith(name) for line in model_conclusions(report))


def test_large_results_are_compared_by_digests() -> None:
    subject = small_subject(prefix_cache=False)
    with patch.object(cross_check, "_LARGE", 0), last_buffers_token():
        report = examine_model(subject)
    found = {item.name: item for item in report.crossings}
    wrong = found.pop("eager vs decode buffers")
    assert (wrong.status, wrong.layer, wrong.station) == ("wrong", 0, "embed")
    assert {item.status for item in found.values()} == {"ok", "skipped"}


def test_missing_and_foreign_ops_are_reported() -> None:
    """A model that skips an op, or calls one in a strange place, is not silently passed."""
    subject = small_subject()
    attention = subject.model.blocks[1].attention
    with patch.object(attention, "compressor", None), patch.object(attention, "indexer", None):
        report = examine_model(subject, only_calls=True)
    assert not report.ok
    assert {"index_keys", "index_scores"} <= {
        c.station for c in report.cells if c.status == "not run"
    }


def test_an_op_that_fails_is_named() -> None:
    def fail(right: Any, a: dict[str, Any]) -> None:
        raise RuntimeError("illegal memory access")

    subject = small_subject()
    failing = kernel("compress", fail, in_layer(subject, 2, "ape", "compressor.ape"))
    with (
        failing,
        pytest.raises(KernelError, match=r"compress \(entries\) in layer 2 failed: illegal"),
    ):
        examine_model(subject, only_calls=True)
