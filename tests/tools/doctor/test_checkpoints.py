"""Weights that were misread or written by another convention: which, and how."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dsv4.checkpoint import assemble
from dsv4.config import EngineConfig
from dsv4.errors import OptionError
from dsv4.formats import fp8, mxfp4, nvfp4
from dsv4.runner import load
from dsv4.tools.doctor.examine import ModelReport, examine_model
from dsv4.tools.doctor.subject import open_subject
from tests.checkpoint import writers

NUM_TOKENS = 18
CPU = EngineConfig(device="cpu")


def examine(folder: Path, **options: Any) -> ModelReport:
    subject = open_subject(str(folder), CPU, tokens=NUM_TOKENS, **options)
    return examine_model(subject, only_calls=True)


@pytest.mark.parametrize(
    ("layout", "stream"),
    [
        ("official", True),
        ("modelopt-full", False),
        ("compressed-tensors", True),
        ("plain-transformers", False),
    ],
)
def test_healthy_layouts(layout: str, stream: bool, tmp_path: Path) -> None:
    """Streamed as a large model would be: its experts stay packed."""
    writers.save(writers.made(layout), tmp_path / "m")
    with patch.object(load, "MOST_UNPACKED", 10_000 if stream else load.MOST_UNPACKED):
        report = examine(tmp_path / "m", stream=stream)
    assert report.ok, report.wrong
    assert report.streamed == stream


def _swapped(packed: torch.Tensor, *rest: Any, right: Callable[..., Any]) -> Any:
    return right((packed << 4) | (packed >> 4), *rest)


LOADER_BUGS = {
    "global dropped": (
        "modelopt-full",
        lambda: patch.object(assemble, "_global", lambda stored, files: torch.ones(1)),
        "project",
        "layers.0.attn.wq_a.weight was read without the second (global) scale",
    ),
    "NVFP4 nibbles": (
        "modelopt-experts",
        lambda: patch.object(
            nvfp4, "dequantize", lambda *a, right=nvfp4.dequantize: _swapped(*a, right=right)
        ),
        "experts",
        "was read with the nibbles in the other order",
    ),
    "MXFP4 scales": (
        "official",
        lambda: patch.object(
            mxfp4,
            "dequantize",
            lambda p, s, d, right=mxfp4.dequantize: right(p, torch.full_like(s, 127), d),
        ),
        "experts",
        "was read without block scales",
    ),
    "FP8 scales inverted": (
        "official",
        lambda: patch.object(
            fp8,
            "expand_tiles",
            lambda s, *a, right=fp8.expand_tiles: right(
                254 - s if s.dtype == torch.uint8 else s, *a
            ),
        ),
        "project",
        "layers.0.attn.wq_a.weight was read with block scales inverted",
    ),
}


@pytest.mark.parametrize("bug", LOADER_BUGS)
def test_misread_weight_is_named(bug: str, tmp_path: Path) -> None:
    layout, plant, station, says = LOADER_BUGS[bug]
    writers.save(writers.made(layout), tmp_path / "m")
    with plant():
        report = examine(tmp_path / "m")
    assert report.first is not None
    cell = report.first.cell
    assert (cell.layer, cell.station) == (0, station)
    assert cell.cause is not None
    assert cell.cause.kind == "weight"
    assert says in cell.cause.text


def test_against_another_checkpoint(tmp_path: Path) -> None:
    """A converter swapped the nibbles of layer 2: only the original can tell."""
    writers.save(writers.made("official"), tmp_path / "right")
    converted = writers.made("modelopt-experts")
    writers.save(converted, tmp_path / "good")
    for name, (dtype, packed) in converted.disk.items():
        if name.startswith("layers.2.ffn.experts") and name.endswith(".weight"):
            converted.disk[name] = (dtype, (packed << 4) | (packed >> 4))
    writers.save(converted, tmp_path / "bad")
    right = str(tmp_path / "right")
    assert examine(tmp_path / "good", against=right).ok
    assert examine(tmp_path / "bad").ok  # alone, the file is what it is
    report = examine(tmp_path / "bad", against=right)
    assert report.first is not None
    cell = report.first.cell
    assert (cell.layer, cell.station) == (2, "experts")
    assert cell.cause is not None
    assert "nibbles in the other order the file agrees" in cell.cause.text


def test_against_another_model(tmp_path: Path) -> None:
    writers.save(writers.made("official"), tmp_path / "m")
    with pytest.raises(OptionError, match="tiny has num_layers"):
        examine(tmp_path / "m", against="tiny")
