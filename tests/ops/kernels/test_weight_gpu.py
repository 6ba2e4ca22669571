"""The weight kernels on a GPU: every case, and rows that do not depend on their batch."""

from dataclasses import replace

import pytest
import torch

from dsv4.ops import OPS
from dsv4.ops.core.ragged import make_ragged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_kernels_match_references() -> None:
    from tests.ops.kernels import inputs

    num_run = 0
    for name, arguments, op, tolerance in inputs.gpu_cases():
        found, wanted = op.kernels[0].run(arguments), op.reference(**arguments)
        for a, b in zip(inputs.results(found), inputs.results(wanted), strict=True):
            assert inputs.relative_error(a, b) <= tolerance, name
        num_run += 1
    assert num_run > 20


def test_rows_do_not_depend_on_their_batch() -> None:
    """1 to 8192 rows: the forms for few rows against the form for many, bit for bit."""
    from tests.ops.kernels import inputs

    wrong = [name for name, same in inputs.row_invariance() if not same]
    assert not wrong


def test_rows_do_not_depend_on_the_height_of_their_tile() -> None:
    """Experts with as many rows as a height has, one more, and none."""
    from importlib import import_module

    from tests.ops.kernels import inputs

    kernel = import_module("dsv4.ops.moe.experts_triton")
    counts = torch.tensor([64, 0, 65, 128, 129, 192, 193, 256, 257, 1, 513, 2])
    ids = torch.arange(len(counts)).repeat_interleave(counts)
    arguments = inputs.experts_arguments(len(ids) // 6)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    arguments["experts"] = ids[order].view(-1, 6).cuda()
    tall = kernel.launch(**arguments, config=kernel.ExpertsConfig(kernel.TALL, 128, 8, 3, 1))
    assert torch.equal(
        tall, kernel.launch(**arguments, config=kernel.ExpertsConfig(64, 128, 4, 3, 1))
    )


@pytest.mark.parametrize("tokens", [1, 2, 40, 300, 3000])
def test_mxfp4_has_the_bits_of_nvfp4(tokens: int) -> None:
    from importlib import import_module

    from tests.ops.kernels import inputs

    kernel = import_module("dsv4.ops.moe.experts_triton")
    made = inputs.mx_and_nvfp4_experts(tokens, 1152, 1024, 8, 3, "cuda")
    found, wanted = (kernel.run(**arguments) for arguments in made)
    assert torch.equal(found, wanted)


def test_repeats_bit_for_bit() -> None:
    from tests.ops.kernels import inputs

    arguments = inputs.experts_arguments(40)
    first = OPS["experts"].kernels[0].run(arguments)
    for _ in range(20):
        assert torch.equal(first, OPS["experts"].kernels[0].run(arguments))


@pytest.mark.parametrize("hashed", [False, True])
def test_experts_that_choose_themselves(hashed: bool) -> None:
    """One token, router and experts together: the bits of one after the other."""
    from importlib import import_module

    from tests.ops.kernels import inputs

    fused = import_module("dsv4.ops.fused.router_experts_triton")
    choice = inputs.router_arguments(1, hashed)
    experts = inputs.experts_arguments(1)
    count, size = 24, experts["x"].shape[1]
    gate = replace(choice["by"], gate=choice["by"].gate[:count, :size].contiguous())
    if hashed:
        gate = replace(gate, table=(gate.table % count).sort(1).values.contiguous())
    else:
        gate = replace(gate, bias=gate.bias[:count].contiguous())
    given = (experts["x"], choice["token_ids"], gate, experts["by"])
    assert fused.supports(*given) is None
    choice |= {"x": experts["x"], "by": gate}
    picked, weights = OPS["router"].kernels[0].run(choice)
    arguments = {**experts, "experts": picked, "weights": weights}
    wanted = OPS["experts"].kernels[0].run(arguments)
    assert torch.equal(fused.run(*given).total(), wanted)


def test_a_whole_layer_is_the_same_at_any_size() -> None:
    """Rows of a step of 1 to 300 tokens through a whole model: bits of the row in a large one."""
    from dsv4.tools.speed.model import filled_state, random_model, shape_config
    from dsv4.tools.speed.steps import prompt_inputs

    device = torch.device("cuda")
    model, _ = random_model(shape_config("trial", None), device)
    state = filled_state(model.config, 1, 512, device, chunk_tokens=300)
    inputs = prompt_inputs(state, 300)
    all_rows = type(inputs)(**{**inputs.__dict__, "logits_rows": None})
    whole = model(all_rows, state.layers).clone()
    for count in (1, 2, 9, 65, 299):
        part = type(inputs)(
            **{
                **all_rows.__dict__,
                "token_ids": inputs.token_ids[:count].contiguous(),
                "batch": make_ragged([0], [count], [0], device),
            }
        )
        assert torch.equal(model(part, state.layers), whole[:count]), count
