"""The weight kernels on a GPU: every case, and rows that do not depend on their batch."""

import pytest
import torch

from dsv4.ops import OPS

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


def test_repeats_bit_for_bit() -> None:
    from tests.ops.kernels import inputs

    arguments = inputs.experts_arguments(40)
    first = OPS["experts"].kernels[0].run(arguments)
    for _ in range(20):
        assert torch.equal(first, OPS["experts"].kernels[0].run(arguments))
