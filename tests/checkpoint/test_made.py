"""What other people's tools wrote (`made/make.py`): the values are those that were quantised."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.checkpoint.reader import Checkpoint, open_checkpoint
from dsv4.config import ModelConfig
from dsv4.formats.quantized import Fp8BlockTensor, Mxfp4Tensor, Nvfp4Tensor, Weight
from dsv4.tools.check import check_checkpoint
from dsv4.tools.convert.convert import convert
from dsv4.tools.inspect import inspect_checkpoint
from tests.checkpoint import tiny, writers
from tests.checkpoint.made import make

MADE = Path(make.__file__).parent
# folder -> (layout, type of the experts, of attn.wq_a, and an FP8 tile or None)
FOUND = {
    "ct-mxfp4": ("compressed-tensors", Mxfp4Tensor, Mxfp4Tensor, None),
    "ct-mxfp8": ("compressed-tensors", Fp8BlockTensor, Fp8BlockTensor, (1, 32)),
    "ct-nvfp4": ("compressed-tensors", Nvfp4Tensor, Nvfp4Tensor, None),
    "ct-fp8-dynamic": ("compressed-tensors", Fp8BlockTensor, Fp8BlockTensor, (1, 160)),
    "ct-fp8-block": ("compressed-tensors", Fp8BlockTensor, Fp8BlockTensor, (128, 128)),
    "modelopt-mxfp4": ("modelopt", Mxfp4Tensor, Mxfp4Tensor, None),
    "modelopt-mxfp8": ("modelopt", Fp8BlockTensor, Fp8BlockTensor, (1, 32)),
    "modelopt-fp8": ("modelopt", Fp8BlockTensor, Fp8BlockTensor, (32, 160)),
    "modelopt-fp8-rows": ("modelopt", Fp8BlockTensor, Fp8BlockTensor, (1, 160)),
    "modelopt-fp8-blocks": ("modelopt", torch.Tensor, Fp8BlockTensor, (128, 128)),
    "modelopt-nvfp4": ("modelopt-full", Nvfp4Tensor, Nvfp4Tensor, None),
    "modelopt-nvfp4-experts": ("modelopt-experts", Nvfp4Tensor, torch.Tensor, None),
    "transformers-fp8": ("transformers-fp8", Fp8BlockTensor, Fp8BlockTensor, (32, 32)),
    "transformers-fp8-stacked": ("transformers-fp8", Fp8BlockTensor, Fp8BlockTensor, (32, 32)),
}
# relative RMS error of Gaussian weights, with room for small matrices (spec 4.5)
ERRORS = {Mxfp4Tensor: 0.13, Nvfp4Tensor: 0.11, Fp8BlockTensor: 0.03, torch.Tensor: 0.0}


def opened(name: str) -> Checkpoint:
    return open_checkpoint(MADE / name, ModelConfig.from_folder(MADE / name))


def numbers(weight: Weight) -> np.ndarray:
    values = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
    return values.float().numpy()


def truth() -> tiny.Model:
    model = tiny.random_model(draft=False, config=make.CONFIG)
    return writers.canonical(model, make.CONFIG)


def test_every_recipe_is_tested() -> None:
    assert FOUND.keys() == make.RECIPES.keys()


@pytest.mark.parametrize("name", FOUND)
def test_values_are_those_that_were_quantised(name: str) -> None:
    layout, experts, attention, tile = FOUND[name]
    checkpoint = opened(name)
    assert checkpoint.layout == layout
    loaded, wanted = checkpoint.load(), truth()
    assert loaded.keys() == wanted.keys()
    assert type(loaded["layers.0.ffn.experts.w13"]) is experts
    wq_a = loaded["layers.0.attn.wq_a.weight"]
    assert type(wq_a) is attention
    assert (wq_a.tile if isinstance(wq_a, Fp8BlockTensor) else None) == tile
    for key, weight in loaded.items():
        found, expected = numbers(weight), wanted[key]
        assert found.shape == expected.shape, key
        error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
        # what a tool leaves alone it may still round to bf16
        assert error < max(ERRORS[type(weight)], 2**-8), (key, error)


@pytest.mark.parametrize("name", FOUND)
def test_nothing_is_wrong_with_them(name: str) -> None:
    report = check_checkpoint(MADE / name, values=True)
    assert report.ok, [str(item) for item in report.findings]
    assert inspect_checkpoint(MADE / name).layout == FOUND[name][0]


@pytest.mark.parametrize("name", ["ct-fp8-dynamic", "ct-mxfp4", "transformers-fp8-stacked"])
def test_they_convert_to_nvfp4(name: str, tmp_path: Path) -> None:
    """What is not converted comes out as it went in."""
    convert(MADE / name, tmp_path / "out", "nvfp4")
    before = opened(name).load()
    folder = tmp_path / "out"
    after = open_checkpoint(folder, ModelConfig.from_folder(folder)).load()
    assert isinstance(after["layers.0.ffn.experts.w13"], Nvfp4Tensor)
    for key in before:
        if ".experts." not in key:
            assert np.array_equal(numbers(before[key]), numbers(after[key])), key
