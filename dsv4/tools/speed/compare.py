"""transformers' DeepSeek-V4 at the same shape in the same run, in bf16, unmodified.

Four layers by default: in bf16 a layer of `flash` takes 13 GB. Each step reads a token against a
cache that a short prompt filled.
"""

from importlib import import_module
from typing import Any

import torch

from dsv4.config import ModelConfig
from dsv4.errors import OptionError
from dsv4.testing import config_json
from dsv4.tools.speed.steps import elapsed_ms

PROMPT = 64  # tokens; eager attention is slow on long ones, and a layer's cost hardly depends on it


def transformers_ms(config: ModelConfig, device: str, steps: int = 5) -> float:
    """Milliseconds of one decode step at batch 1, median of a few."""
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise OptionError("--compare transformers needs that package; install dsv4[dev]") from error
    fields = config_json(config)
    fields.pop("architectures")
    fields["rope_scaling"] = {**fields["rope_scaling"], "rope_type": "yarn"}
    made = transformers.DeepseekV4Config(**fields)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = transformers.DeepseekV4ForCausalLM(made).eval()
    finally:
        torch.set_default_dtype(before)
    return _median_step(model, config, torch.device(device), steps)


@torch.inference_mode()
def _median_step(model: Any, config: ModelConfig, device: torch.device, steps: int) -> float:
    ids = torch.randint(0, config.vocab_size, (1, PROMPT), device=device)
    out = model(ids, use_cache=True)
    cache, token = out.past_key_values, ids[:, :1]

    def step() -> None:
        model(token, past_key_values=cache, use_cache=True)

    step()
    times = sorted(elapsed_ms(step, device) for _ in range(steps))
    return times[len(times) // 2]
