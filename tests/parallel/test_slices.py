"""A rank's slice of an op has the bits of the whole: products by rows and by ranges of K, heads."""

import random
from dataclasses import replace

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.errors import KernelError
from dsv4.formats.quantized import UnpackedTensor, part_of_whole
from dsv4.ops.attention import attention as attention_op
from dsv4.ops.comm.sharded import linear_ranges
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear
from dsv4.ops.gemm.split_k import PartialSums, num_ranges, split_k
from dsv4.parallel.layout import RankLayout, k_ranges


def sliced(weight: torch.Tensor, tp: int, whole: int) -> list[UnpackedTensor]:
    parts = [part_of_whole(part, whole) for part in weight.chunk(tp)]
    assert all(isinstance(part, UnpackedTensor) for part in parts)
    return parts  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_cuts_of_k_belong_to_the_whole_matrix(name: str) -> None:
    """And the sum over a rank's rows would be cut otherwise, so it matters."""
    c = ModelConfig.builtin(name)
    shapes = {
        "wq_b": (c.num_heads * c.head_dim, c.q_lora_rank),
        "wo_a": (c.o_groups * c.o_lora_rank, c.num_heads * c.head_dim // c.o_groups),
        "head": (c.vocab_size, c.hidden_size),
    }
    moved = set()
    for part, (rows, columns) in shapes.items():
        whole = torch.empty(rows, columns, device="meta")
        for tp in (2, 4, 8):
            for weight in sliced(whole, tp, rows):
                assert split_k(weight) == split_k(whole) == num_ranges(rows, columns)
                if num_ranges(*weight.shape) != num_ranges(rows, columns):
                    moved.add(part)
    assert moved == {"wq_b", "wo_a", "head"}


@pytest.mark.parametrize(("name", "cut"), [("flash", (8, 8)), ("pro", (8, 16))])
def test_ranges_of_wo_b_end_between_ranks(name: str, cut: tuple[int, int]) -> None:
    c = ModelConfig.builtin(name)
    columns = c.o_groups * c.o_lora_rank
    weight = part_of_whole(
        torch.empty(c.hidden_size, columns, device="meta"), c.hidden_size, k_ranges(c)
    )
    assert split_k(weight) == cut
    for tp in (1, 2, 4, 8):
        groups = RankLayout(tp, rank=tp - 1).groups(c)
        assert groups.start * c.o_lora_rank % (cut[1] * 128) == 0


def test_ranges_that_end_inside_a_step_are_left_to_the_kernel() -> None:
    weight = UnpackedTensor(torch.empty(64, 512, device="meta"), k_ranges=8)
    assert split_k(weight) == num_ranges(64, 512)


@pytest.mark.parametrize("seed", range(6))
def test_products_by_rows_and_by_ranges(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, k, n = rng.choice([1, 7, 8, 33]), rng.choice([64, 128, 256]), rng.choice([64, 96, 128])
    x = torch.randn(rows, k, generator=generator)
    values = torch.randn(n, k, generator=generator)
    if seed % 2:  # as a CPU holds matrices
        values = values.mT.contiguous().mT
    whole, wo_b = linear(x, values), part_of_whole(values, n, 8)
    by_ranges = linear(x, wo_b)
    assert not torch.equal(whole, by_ranges)  # another order of summation
    torch.testing.assert_close(whole, by_ranges, atol=1e-4, rtol=1e-4)
    for tp in (2, 4, 8):
        found = torch.cat([linear(x, part) for part in sliced(values, tp, n)], 1)
        assert torch.equal(found, whole)
        parts = [
            linear_ranges(own, wo_b, range(i * 8 // tp, (i + 1) * 8 // tp)).values[0]
            for i, own in enumerate(x.chunk(tp, 1))
        ]
        assert torch.equal(PartialSums(torch.cat(parts)[None], None, x.dtype).total(), by_ranges)


def test_groups_do_not_depend_on_the_other_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 8, 48, generator=generator)
    weight = torch.randn(8 * 16, 48, generator=generator)
    whole = grouped_linear(x, weight)
    for tp in (2, 4, 8):
        pairs = zip(x.chunk(tp, 1), weight.chunk(tp), strict=True)
        assert torch.equal(torch.cat([grouped_linear(a, w) for a, w in pairs], 1), whole)


def test_heads_do_not_depend_on_the_other_heads() -> None:
    for case in attention_op.cases():
        given = case.build(torch.Generator().manual_seed(1))
        if given["q"].shape[1] > 8:
            continue
        generator = torch.Generator().manual_seed(2)
        given["q"] = torch.randn(
            *given["q"].shape[:1], 8, given["q"].shape[2], generator=generator
        ).to(given["q"].dtype)
        q, to = given["q"], replace(given["to"], sink=torch.randn(8, generator=generator))
        whole = attention_op.attention_reference(q, to)
        for tp in (2, 4, 8):
            pairs = zip(q.chunk(tp, 1), to.sink.chunk(tp), strict=True)
            parts = [
                attention_op.attention_reference(some, replace(to, sink=sink))
                for some, sink in pairs
            ]
            assert torch.equal(torch.cat(parts, 1), whole), case.name


def test_ranges_that_cannot_be_had() -> None:
    weight = UnpackedTensor(torch.zeros(8, 64), k_ranges=4)
    x = torch.zeros(2, 32)
    with pytest.raises(KernelError, match=r"x has shape \(2, 32\), expected \[rows, 16\]"):
        linear_ranges(x, weight, range(1))
    with pytest.raises(KernelError, match=r"ranges range\(3, 5\)"):
        linear_ranges(x, weight, range(3, 5))
    for width in ("a4", "a8"):
        with pytest.raises(KernelError, match=f"{width} and ranges of 16 columns: a scale would"):
            linear_ranges(x, replace(weight, activations=width), range(2))
