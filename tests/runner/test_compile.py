"""Whole steps compiled as a GPU would launch them, at the widths of V4-Flash, without a GPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.ops.kernels.compiling import Launch, check_limits, compiled_facts, pretend_cpu_is_a_gpu


@pytest.mark.compile
def test_steps_compile() -> None:
    pytest.importorskip("triton", reason="the compiler is absent")
    rows = compiled_facts("tests.runner.test_compile", 90)
    kernels = {row["kernel"] for row in rows}
    assert kernels >= {"_state_kernel", "_queries_kernel", "_up_kernel", "_accept_kernel"}
    for row in rows:
        check_limits(row, 10)


def launches(capability: int, part: str = "decode") -> Iterator[Launch]:
    """`all`: also verifying drafts, and prompts."""
    from dsv4.config import ModelConfig
    from dsv4.ops.core.context import kernels_on_cpu
    from dsv4.tools.speed.model import decode_step, filled_state, random_model
    from dsv4.tools.speed.prompts import prompt_inputs

    pretend_cpu_is_a_gpu()
    config = replace(
        ModelConfig.builtin("flash"), vocab_size=1000, num_experts=8, num_layers=3,
        compress_ratios=(0, 4, 128), num_hash_layers=1,
    )  # fmt: skip
    cpu = torch.device("cpu")
    model, _ = random_model(config, cpu)
    for batch, width in ((1, 1), (2, 1), (1, 3), (8, 3))[: 4 if part == "all" else 2]:
        state = filled_state(config, batch, 4096, cpu, width=width)

        def step(state=state) -> None:  # type: ignore[no-untyped-def]
            with kernels_on_cpu(), torch.inference_mode():
                decode_step(model, state.layers, state)

        yield f"decode {batch} x {width}", step
    for tokens in (40, 1200) if part == "all" else ():
        state = filled_state(config, 1, 4096, cpu, chunk_tokens=2048)
        inputs = prompt_inputs(state, tokens)

        def prompt(state=state, inputs=inputs) -> None:  # type: ignore[no-untyped-def]
            with kernels_on_cpu(), torch.inference_mode():
                model(inputs, state.layers)

        yield f"prompt {tokens}", prompt
