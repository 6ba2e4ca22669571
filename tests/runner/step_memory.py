"""Peak bytes of prompt steps at the widths of V4-Flash, printed: launches do nothing, on a CPU.

python -m tests.runner.step_memory 512 1024
"""

import sys
from dataclasses import replace

import torch
from triton.runtime.jit import JITFunction

from dsv4.config import ModelConfig
from dsv4.ops.core.context import EngineOps, kernels_on_cpu
from dsv4.ops.core.gpu import KNOWN, assume
from dsv4.tools.speed.model import filled_state, random_model
from dsv4.tools.speed.prompts import prompt_inputs
from tests.ops.kernels.compiling import install_driver, pretend_cpu_is_a_gpu

CAPABILITY = 86


def peak_bytes(model, tokens: int) -> int:
    state = filled_state(model.config, 1, 4096, torch.device("cpu"), chunk_tokens=tokens)
    inputs = prompt_inputs(state, tokens)
    with (
        EngineOps().active(),
        torch.inference_mode(),
        torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile,
    ):
        model(inputs, state.layers)
    used = most = 0
    for event in sorted(profile.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            used += event.nbytes()
            most = max(most, used)
    return most


def main() -> None:
    torch.set_num_threads(1)
    install_driver(CAPABILITY)
    pretend_cpu_is_a_gpu()
    JITFunction.run = lambda self, *arguments, grid, warmup, **options: None
    config = replace(
        ModelConfig.builtin("flash"), vocab_size=1000, num_experts=8, num_layers=2,
        compress_ratios=(4, 128), num_hash_layers=0,
    )  # fmt: skip
    with assume(KNOWN[CAPABILITY]), kernels_on_cpu():
        model, _ = random_model(config, torch.device("cpu"))
        for tokens in sys.argv[1:]:
            sys.stdout.write(f"peak {tokens} {peak_bytes(model, int(tokens))}\n")


if __name__ == "__main__":
    main()
