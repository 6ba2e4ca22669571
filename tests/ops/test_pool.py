"""Entries in pages: every format gives back what it was given, within its step."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.formats.entry import entry_bytes, index_entry, kv_entry
from dsv4.ops.core.arguments import same_bits
from dsv4.ops.kv.pool import PagedPool, allocate_pool, load, locate, store

DIM, ROPE = 512, 64
NOPE = DIM - ROPE


def kv_pool(fmt: str, dim: int = DIM, rope: int = ROPE) -> PagedPool:
    return allocate_pool(fmt, False, kv_entry(fmt, dim, rope), (3, 8), "cpu")


def index_pool(fmt: str, dim: int = 128) -> PagedPool:
    return allocate_pool(fmt, True, index_entry(fmt, dim), (3, 8), "cpu")


def through(pool: PagedPool, x: Tensor) -> Tensor:
    count = x.shape[0]
    pages, offsets = torch.tensor([2, 0, 1] * 8)[:count], torch.arange(24)[:count] // 3
    store(pool, pages, offsets, x)
    return load(pool, pages, offsets)


def some(count: int, dim: int) -> Tensor:
    """Entries whose channels span many magnitudes, and one of zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, dim, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 8, (count, dim), generator=generator).float())
    x[0] = 0
    return x


def test_fp32_is_exact() -> None:
    x = some(10, DIM)
    assert same_bits(through(kv_pool("fp32"), x), x)
    assert same_bits(through(index_pool("fp32"), x[:, :128].contiguous()), x[:, :128])


def test_bf16_is_one_rounding() -> None:
    x = some(10, DIM)
    assert same_bits(through(kv_pool("bf16"), x), x.bfloat16().float())
    assert same_bits(through(index_pool("bf16"), x[:, :128]), x[:, :128].bfloat16().float())


@pytest.mark.parametrize(("dim", "rope"), [(512, 64), (80, 16), (32, 16)])
def test_fp8_keys_round_groups_of_64_and_keep_the_rotary_part(dim: int, rope: int) -> None:
    x = some(12, dim)
    found = through(kv_pool("fp8", dim, rope), x)
    assert same_bits(found[:, dim - rope :].contiguous(), x[:, dim - rope :].bfloat16().float())
    for first in range(0, dim - rope, 64):
        group = slice(first, min(first + 64, dim - rope))
        for row in range(12):
            values, rounded = x[row, group].double().numpy(), found[row, group].double().numpy()
            amax = max(np.abs(values).max(), 1e-4)
            scale = 2.0 ** math.ceil(math.log2(amax / 448))
            # E4M3: three mantissa bits, and steps of 2^-9 below 2^-6
            allowed = np.maximum(np.abs(values) / 16, scale * 2.0**-10)
            assert np.all(np.abs(rounded - values) <= allowed)
            assert np.all(np.abs(rounded) <= 448 * scale)


def test_fp8_groups_are_independent_and_the_rotary_part_is_not_among_them() -> None:
    x = some(1, DIM) + 1.0
    pool = kv_pool("fp8")
    plain = through(pool, x)
    for channel in (0, 63, 64, 447):
        louder = x.clone()
        louder[0, channel] = 1e4
        found = through(pool, louder)
        group = channel // 64
        outside = [c for c in range(DIM) if c // 64 != group]
        assert torch.equal(found[:, outside], plain[:, outside])
        assert not torch.equal(found, plain)
    louder = x.clone()
    louder[0, NOPE:] = 3e4  # a rotary outlier changes no scale
    assert torch.equal(through(pool, louder)[:, :NOPE], plain[:, :NOPE])


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_index_keys_are_stored_rotated(fmt: str) -> None:
    """Products of two stored keys are those of the keys themselves, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 128, generator=generator)
    found = through(index_pool(fmt), x)
    exact, stored = x @ x.T, found @ found.T
    relative = (stored - exact).abs() / x.square().sum(1).mean()
    assert relative.max() < {"fp8": 0.02, "fp4": 0.15}[fmt]
    assert not torch.allclose(found, x, atol=0.5)  # it is rotated, not stored as it came
    # a single loud channel is spread by the rotation: no other channel is lost to its scale
    loud = torch.zeros(1, 128)
    loud[0, 5] = 100.0
    spread = through(index_pool(fmt), loud)
    torch.testing.assert_close(
        spread.abs(), torch.full((1, 128), 100 / math.sqrt(128)), rtol=0.2, atol=0
    )


def test_bytes_of_an_entry_are_the_tensors_bytes() -> None:
    for fmt in ("fp8", "bf16", "fp32"):
        pool = kv_pool(fmt)
        held = sum(part.nbytes for part in pool.parts.values())
        assert held == 24 * entry_bytes(kv_entry(fmt, DIM, ROPE))
    for fmt in ("fp4", "fp8", "bf16", "fp32"):
        pool = index_pool(fmt)
        held = sum(part.nbytes for part in pool.parts.values())
        assert held == 24 * entry_bytes(index_entry(fmt, 128))


@pytest.mark.parametrize("fmt", ["fp8", "bf16", "fp32"])
def test_a_fresh_pool_holds_nothing_plausible(fmt: str) -> None:
    pool = kv_pool(fmt)
    pages = torch.zeros(1, dtype=torch.int64)
    assert torch.isnan(load(pool, pages, pages)).all()
    assert pool.dim == DIM


@pytest.mark.parametrize("fmt", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_entry_with_nan_is_no_number_and_leaves_others_alone(fmt: str, bad: float) -> None:
    x = torch.ones(2, DIM)
    wanted = through(kv_pool(fmt), x)
    x[1, 7] = bad
    found = through(kv_pool(fmt), x)
    assert torch.equal(found[0], wanted[0])
    assert not found[1, 7].isfinite()


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_an_index_key_with_nan_is_no_number_and_leaves_others_alone(fmt: str) -> None:
    x = torch.ones(2, 128)
    wanted = through(index_pool(fmt), x)
    x[1, 7] = float("nan")
    found = through(index_pool(fmt), x)
    assert torch.equal(found[0], wanted[0])
    assert found[1].isnan().all()  # the rotation mixes all its numbers


def test_locate_goes_round_in_a_narrow_table() -> None:
    table = torch.tensor([[7, 3], [5, 1]])
    entries = torch.tensor([0, 3, 4, 8, 13])
    pages, offsets = locate(table, torch.tensor([0, 0, 0, 1, 1]), entries, 4)
    assert pages.tolist() == [7, 7, 3, 5, 1]
    assert offsets.tolist() == [0, 3, 0, 0, 1]
