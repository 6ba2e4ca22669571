"""Writes the folders beside it with the tools themselves: one small model, many recipes.

Kept in the repository because the tools bring many packages. In an environment with torch,
transformers, llmcompressor, compressed-tensors, nvidia-modelopt and accelerate, from the root:

    python -m tests.checkpoint.made.make                  # every folder
    python -m tests.checkpoint.made.make ct-mxfp4 ...     # some

Each folder's `made_by.json` names the recipe and the versions.
"""

import copy
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.checkpoint import tiny, writers

HERE = Path(__file__).parent
# one layer with every kind of matrix; two FP8 tiles along K, less than one along most rows
CONFIG: dict[str, Any] = {
    **tiny.CONFIG,
    "vocab_size": 32,
    "hidden_size": 160,
    "num_hidden_layers": 1,
    "num_hash_layers": 0,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 2,
    "head_dim": 32,
    "compress_ratios": [4],
    "index_n_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 64,
    "hc_mult": 2,
}
# folder -> (tool, its name for the recipe)
RECIPES = {
    "ct-mxfp4": ("llmcompressor", "MXFP4"),
    "ct-mxfp8": ("llmcompressor", "MXFP8A16"),
    "ct-nvfp4": ("llmcompressor", "NVFP4A16"),
    "ct-fp8-dynamic": ("llmcompressor", "FP8_DYNAMIC"),
    "ct-fp8-block": ("llmcompressor", "FP8_BLOCK"),
    "modelopt-mxfp4": ("modelopt", "MXFP4_DEFAULT_CFG"),
    "modelopt-mxfp8": ("modelopt", "MXFP8_DEFAULT_CFG"),
    "modelopt-fp8": ("modelopt", "FP8_DEFAULT_CFG"),
    "modelopt-fp8-rows": ("modelopt", "FP8_PER_CHANNEL_PER_TOKEN_CFG"),
    "modelopt-fp8-blocks": ("modelopt", "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "modelopt-nvfp4": ("modelopt", "NVFP4_DEFAULT_CFG"),
    "modelopt-nvfp4-experts": ("modelopt", "NVFP4_EXPERTS_ONLY_CFG"),
    "transformers-fp8": ("transformers", "float"),
    "transformers-fp8-stacked": ("transformers", "ue8m0"),
}


def source(folder: Path) -> Path:
    """The model before it is quantised, for transformers to read."""
    written = writers.plain_hybrid(tiny.random_model(draft=False, config=CONFIG))
    written.config = CONFIG
    return writers.save(written, folder, shards=1)


def llmcompressor(model: Any, recipe: str, folder: Path) -> None:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    rest = ["lm_head", "re:.*mlp.gate$"]
    oneshot(model=model, recipe=QuantizationModifier(targets="Linear", scheme=recipe, ignore=rest))
    model.save_pretrained(folder, save_compressed=True)


def modelopt(model: Any, recipe: str, folder: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            model(torch.arange(CONFIG["vocab_size"])[None])

    chosen = copy.deepcopy(getattr(mtq, recipe))
    if recipe == "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG":  # its export of stacked experts fails
        chosen["quant_cfg"].append({"quantizer_name": "*mlp.experts*", "enable": False})
    export_hf_checkpoint(mtq.quantize(model, chosen, calibrate), export_dir=folder)


def transformers(plain: Path, recipe: str, folder: Path) -> None:
    """It quantises while loading; `ue8m0` is saved under transformers' own names, stacked."""
    from transformers import DeepseekV4ForCausalLM, FineGrainedFP8Config
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    FineGrainedFP8HfQuantizer.validate_environment = lambda *args, **options: None  # wants a GPU
    # with tiles of 128 it would leave these small matrices alone
    chosen = FineGrainedFP8Config(weight_block_size=(32, 32), scale_fmt=recipe)
    model = DeepseekV4ForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, quantization_config=chosen
    )
    model.save_pretrained(folder, save_original_format=recipe == "float")


def make(name: str) -> None:
    from transformers import DeepseekV4ForCausalLM

    tool, recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        plain = source(Path(folder) / "plain")
        out = Path(folder) / name
        if tool == "transformers":
            transformers(plain, recipe, out)
        else:
            model = DeepseekV4ForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            {"llmcompressor": llmcompressor, "modelopt": modelopt}[tool](model, recipe, out)
        shutil.rmtree(HERE / name, ignore_errors=True)
        (HERE / name).mkdir()
        shutil.copyfile(out / "model.safetensors", HERE / name / "model.safetensors")
        shutil.copyfile(out / "config.json", HERE / name / "config.json")
    package = "nvidia-modelopt" if tool == "modelopt" else tool
    packages = (package, "compressed-tensors", "transformers", "torch")
    versions = {name: version(name) for name in packages}
    made_by = json.dumps({"recipe": recipe, **versions}, indent=1)
    (HERE / name / "made_by.json").write_text(made_by + "\n")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RECIPES:
        make(chosen)
