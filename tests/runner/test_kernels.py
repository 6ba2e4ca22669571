"""The whole decode step and a prompt through the Triton kernels, in the interpreter.

Strict: an op that would fall back to its reference fails. The interpreter is chosen when a
kernel's module is imported, so this file is both the test and the program it starts.
"""

import sys

import pytest
import torch

from tests.ops.kernels.compiling import interpreted


@pytest.mark.parametrize("what", ["decode", pytest.param("prompt", marks=pytest.mark.compile)])
def test_steps_through_kernels(what: str) -> None:
    interpreted("tests.runner.test_kernels", what)


def check_decode() -> None:
    """A token and the state of two sequences at the end of a block, against the references."""
    from dsv4.ops.core.arguments import copied, leaves
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.tools.speed.model import (
        decode_step,
        filled_state,
        random_model,
        shape_config,
        start_at,
    )

    cpu, context = torch.device("cpu"), 160
    config = shape_config("trial", 3)
    model, _ = random_model(config, cpu)
    state = filled_state(config, 2, context, cpu)
    buffers, mine = state.buffers, copied(state.layers)
    start_at(state, 127)
    inputs = buffers.newest.clone()
    decode_step(model, state.layers, state)
    wanted = [t.clone() for t in (buffers.newest, buffers.step.line, buffers.chosen)]
    start_at(state, 127)
    buffers.newest.copy_(inputs)
    with kernels_on_cpu():
        decode_step(model, mine, state)
    assert torch.equal(buffers.newest, wanted[0]), "the same tokens are drawn"
    assert torch.equal(buffers.step.line, wanted[1])
    assert (buffers.chosen - wanted[2]).abs().max() < 0.05
    for (path, a), (_, b) in zip(leaves(state.layers), leaves(mine), strict=True):
        if a.numel() == 0:
            continue  # no prefixes are kept
        close = a.view(torch.uint8) == b.view(torch.uint8)
        if a.dtype == torch.float32:
            close = (a - b).abs() <= 0.02 * a.abs() + 0.02 * float(a.abs().mean())
        assert close.float().mean() > 0.98, f"{path}: {close.float().mean():.1%} agree"


def check_prompt() -> None:
    """A prompt of 37 tokens that closes blocks of 4: logits against the references."""
    from dsv4.ops.core.arguments import copied
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.tools.speed.model import filled_state, random_model, shape_config
    from dsv4.tools.speed.prompts import prompt_inputs

    cpu = torch.device("cpu")
    config = shape_config("trial", 3)
    model, _ = random_model(config, cpu)
    state = filled_state(config, 1, 64, cpu, chunk_tokens=64)
    mine = copied(state.layers)
    inputs = prompt_inputs(state, 37)
    wanted = model(inputs, state.layers)
    with kernels_on_cpu():
        found = model(inputs, mine)
    error = float((found - wanted).norm() / wanted.norm())
    assert error < 0.02, f"logits differ by {error:.3f}"


if __name__ == "__main__":
    import tests.ops.kernels.shim  # noqa: F401 - repairs the interpreter

    torch.set_num_threads(1)
    with torch.inference_mode():
        {"decode": check_decode, "prompt": check_prompt}[sys.argv[1]]()
