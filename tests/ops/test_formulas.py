"""Each op against its formula, written out here in float64 with loops, from the model's paper.

Nothing of the package computes an expected value in this file: a formula that is wrong in the
package in the same way everywhere (helpers included) would otherwise go unseen. So it does not use
`dsv4/tools/formulas.py` either, which `doctor` and the training share.
"""

import cmath
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.formats.entry import index_entry, kv_entry
from dsv4.ops.attention.attention import Compressed, Visible, attention
from dsv4.ops.attention.index import IndexEntries, index_scores, index_select
from dsv4.ops.attention.query import index_query, query_prepare
from dsv4.ops.core.ragged import make_ragged
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.grouped_linear import grouped_linear
from dsv4.ops.gemm.linear import linear, linear_multi
from dsv4.ops.kv.compress import Compression, CompressorState, compress, state_rows
from dsv4.ops.kv.kv_store import WindowKey, kv_store
from dsv4.ops.kv.pool import PagedPool, allocate_pool, hadamard, load, store
from dsv4.ops.kv.rope import rope, rope_frequencies, yarn_frequencies
from dsv4.ops.mhc.mix import MixSite, Update, mhc_boundary, mhc_head, mhc_pre, sinkhorn
from dsv4.ops.moe.experts import Experts, experts_ffn
from dsv4.ops.moe.router import Gate, router
from dsv4.ops.norm.rms_norm import rms_norm

Array = NDArray[np.float64]
CPU = torch.device("cpu")
EPS = 1e-6


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def tensor(x: Array) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def as_float64(x: Tensor) -> Array:
    return x.double().numpy()


def drawn(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> Array:
    """Random numbers that float32 holds exactly."""
    return (rng.standard_normal(shape) * scale).astype(np.float32).astype(np.float64)


def close(found: Tensor, expected: Array, tolerance: float = 2e-5) -> None:
    np.testing.assert_allclose(as_float64(found), expected, atol=tolerance, rtol=tolerance)


# --- the formulas -----------------------------------------------------------------------------


def rms(x: Array, g: Array | None = None) -> Array:
    out = x / math.sqrt(float(np.mean(x * x)) + EPS)
    return out if g is None else out * g


def rotate(x: Array, position: float, theta: float, rope_dim: int, sign: int = 1) -> Array:
    """Channel pairs of the tail as complex numbers times e^(i angle)."""
    out = x.copy()
    first = len(x) - rope_dim
    for i in range(rope_dim // 2):
        u, v = x[first + 2 * i], x[first + 2 * i + 1]
        z = complex(u, v) * cmath.exp(sign * 1j * position * theta ** (-2 * i / rope_dim))
        out[first + 2 * i], out[first + 2 * i + 1] = z.real, z.imag
    return out


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


# --- norm, rope, queries ----------------------------------------------------------------------


def test_rms_norm(rng: np.random.Generator) -> None:
    x, g = drawn(rng, 4, 33, scale=5.0), drawn(rng, 33)
    close(rms_norm(tensor(x), tensor(g), EPS), np.stack([rms(row, g) for row in x]))
    close(rms_norm(tensor(x), None, EPS), np.stack([rms(row) for row in x]))


def test_rms_norm_rounds_once(rng: np.random.Generator) -> None:
    x, g = torch.randn(3, 64).bfloat16(), torch.rand(64) + 0.5
    wide = np.stack([rms(row, as_float64(g)) for row in as_float64(x)])
    found = rms_norm(x, g, EPS)
    assert found.dtype == torch.bfloat16
    # correctly rounded up to float32's own error: half a step of 8 bits
    assert np.all(np.abs(as_float64(found) - wide) <= np.abs(wide) * 2.0**-8)


@pytest.mark.parametrize("inverse", [False, True])
def test_rope_turns_complex_pairs(rng: np.random.Generator, inverse: bool) -> None:
    x = drawn(rng, 5, 3, 24)
    positions = [0, 1, 7, 100, 4000]
    found = rope(tensor(x), torch.tensor(positions), rope_frequencies(16, 10000.0), inverse=inverse)
    sign = -1 if inverse else 1
    expected = np.stack(
        [
            np.stack([rotate(head, p, 10000.0, 16, sign) for head in token])
            for token, p in zip(x, positions, strict=True)
        ]
    )
    # float32 angles: an error of half a unit in the last place of 4000 radians
    close(found, expected, 4e-4)
    assert torch.equal(found[..., :8], tensor(x)[..., :8])


def test_inverse_rope_undoes_rope() -> None:
    x = torch.randn(6, 2, 64)
    positions = torch.arange(1000, 1006)
    frequencies = yarn_frequencies(64, 160000.0, 16.0, 65536, 32.0, 1.0)
    there = rope(x, positions, frequencies)
    assert not torch.allclose(there, x, atol=1e-2)
    torch.testing.assert_close(rope(there, positions, frequencies, inverse=True), x)


def test_yarn_keeps_fast_pairs_and_slows_the_others() -> None:
    """The published setting: pairs 0..15 unchanged, 25..31 divided by 16, a ramp between."""
    plain = as_float64(rope_frequencies(64, 160000.0))
    found = as_float64(yarn_frequencies(64, 160000.0, 16.0, 65536, 32.0, 1.0))
    for i in range(32):
        exact = 160000.0 ** (-2 * i / 64)
        assert plain[i] == pytest.approx(exact, rel=1e-6)
        t = min(max((i - 15) / (25 - 15), 0.0), 1.0)
        assert found[i] == pytest.approx(exact * (1 - t) + exact / 16 * t, rel=1e-6)
    assert np.array_equal(found[:16], plain[:16])


def test_query_prepare_norms_each_head_then_turns(rng: np.random.Generator) -> None:
    q = drawn(rng, 3, 2, 24, scale=4.0)
    found = query_prepare(tensor(q), torch.tensor([3, 0, 9]), rope_frequencies(16, 100.0), EPS)
    expected = [
        [rotate(rms(head), p, 100.0, 16) for head in token]
        for token, p in zip(q, (3, 0, 9), strict=True)
    ]
    close(found, np.array(expected))


def hadamard_matrix(size: int) -> Array:
    """(-1)^(number of common bits of i and j) / sqrt(size)."""
    signs = [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return np.array(signs, dtype=np.float64) / math.sqrt(size)


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard_is_the_walsh_matrix(rng: np.random.Generator, size: int) -> None:
    x = drawn(rng, 5, size)
    matrix = hadamard_matrix(size)
    close(hadamard(tensor(x)), x @ matrix.T)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)


def test_index_query_without_rounding_is_rope_alone(rng: np.random.Generator) -> None:
    q = drawn(rng, 2, 3, 32)
    found = index_query(tensor(q), torch.tensor([5, 6]), rope_frequencies(16, 100.0), "fp32")
    expected = [
        [rotate(head, p, 100.0, 16) for head in token] for token, p in zip(q, (5, 6), strict=True)
    ]
    close(found, np.array(expected))


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@pytest.mark.parametrize("index_format", ["fp8", "fp4"])
def test_index_query_rotates_then_rounds(rng: np.random.Generator, index_format: str) -> None:
    q = drawn(rng, 4, 2, 64)
    found = index_query(tensor(q), torch.arange(4), rope_frequencies(16, 100.0), index_format)
    for token in range(4):
        for head in range(2):
            turned = hadamard_matrix(64) @ rotate(q[token, head], token, 100.0, 16)
            rounded = as_float64(found[token, head])
            if index_format == "fp8":  # three mantissa bits, one scale for all channels
                assert np.all(np.abs(rounded - turned) <= np.abs(turned) / 16 + 1e-4)
                continue
            for group in (slice(0, 32), slice(32, 64)):
                scale = 2.0 ** math.ceil(math.log2(np.abs(turned[group]).max() / 6))
                steps = np.abs(rounded[group]) / scale
                assert set(steps) <= set(E2M1)
                nearest = np.abs(np.abs(turned[group, None]) / scale - E2M1).min(1)
                off = np.abs(rounded[group] - turned[group]) / scale
                np.testing.assert_allclose(off, nearest, atol=1e-5)


# --- matrices ---------------------------------------------------------------------------------


def test_embed_copies_into_every_stream() -> None:
    table = torch.randn(7, 5)
    found = embed(torch.tensor([6, 0, 6]), table, 3, torch.bfloat16)
    for row, token in enumerate((6, 0, 6)):
        for stream in range(3):
            assert torch.equal(found[row, stream], table[token].bfloat16())


def test_linear(rng: np.random.Generator) -> None:
    x, a, b = drawn(rng, 11, 37), drawn(rng, 5, 37), drawn(rng, 2, 37)
    found = linear_multi(tensor(x), [tensor(a), tensor(b)], [torch.float32, torch.bfloat16])
    close(found[0], x @ a.T)
    close(found[1], x @ b.T, 0.02)
    assert found[1].dtype == torch.bfloat16
    close(linear(tensor(x), tensor(a)), x @ a.T)


def test_grouped_linear_gives_each_group_its_own_rows(rng: np.random.Generator) -> None:
    x, w = drawn(rng, 3, 4, 6), drawn(rng, 4 * 5, 6)
    expected = np.zeros((3, 20))
    for token in range(3):
        for row in range(20):
            expected[token, row] = w[row] @ x[token, row // 5]
    close(grouped_linear(tensor(x), tensor(w)), expected)


# --- streams ----------------------------------------------------------------------------------


def site_of(rng: np.random.Generator, n: int, size: int, head: bool = False) -> MixSite:
    rows = n if head else (2 + n) * n
    return MixSite(
        fn=tensor(drawn(rng, rows, n * size, scale=0.2)),
        base=tensor(drawn(rng, rows)),
        scale=tensor(drawn(rng, 1 if head else 3)),
        norm=tensor(drawn(rng, size)),
        eps=EPS,
        hc_eps=1e-3,  # large enough to be seen
        sinkhorn_iters=20,
    )


def mixing(streams: Array, site: MixSite) -> Array:
    v = streams.reshape(-1)
    return as_float64(site.fn) @ v / math.sqrt(float(np.mean(v * v)) + EPS)


def naive_pre(streams: Array, site: MixSite) -> tuple[Array, Array, Array]:
    n = streams.shape[0]
    m, scale, base = mixing(streams, site), as_float64(site.scale), as_float64(site.base)
    a = sigmoid(m[:n] * scale[0] + base[:n]) + site.hc_eps
    q = 2 * sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
    matrix = np.zeros((n, n))
    for j in range(n):
        for k in range(n):
            matrix[j, k] = m[2 * n + j * n + k] * scale[2] + base[2 * n + j * n + k]
    for j in range(n):
        matrix[j] = np.exp(matrix[j]) / np.exp(matrix[j]).sum() + site.hc_eps
    for turn in range(20):
        if turn:
            for j in range(n):
                matrix[j] = matrix[j] / (matrix[j].sum() + site.hc_eps)
        for k in range(n):
            matrix[:, k] = matrix[:, k] / (matrix[:, k].sum() + site.hc_eps)
    x = rms(sum(a[s] * streams[s] for s in range(n)), as_float64(site.norm))
    return x, q, matrix


def naive_update(streams: Array, y: Array, q: Array, matrix: Array) -> Array:
    n = streams.shape[0]
    mixed = [sum(matrix[j, k] * streams[j] for j in range(n)) for k in range(n)]
    return np.stack([q[k] * y + mixed[k] for k in range(n)])


def test_mhc_pre(rng: np.random.Generator) -> None:
    streams, site = drawn(rng, 3, 4, 10, scale=3.0), site_of(rng, 4, 10)
    x, post, comb = mhc_pre(tensor(streams), site)
    for token in range(3):
        expected = naive_pre(streams[token], site)
        close(x[token], expected[0])
        close(post[token], expected[1])
        close(comb[token], expected[2])


def test_mhc_boundary_updates_then_mixes_the_new_streams(rng: np.random.Generator) -> None:
    streams, y, site = drawn(rng, 2, 3, 8), drawn(rng, 2, 8), site_of(rng, 3, 8)
    q, matrix = np.abs(drawn(rng, 2, 3)), np.abs(drawn(rng, 2, 3, 3))
    update = Update(*map(tensor, (y, q, matrix)))
    found = mhc_boundary(tensor(streams), update, site)
    for token in range(2):
        updated = naive_update(streams[token], y[token], q[token], matrix[token])
        for tensor_found, expected in zip(found, (updated, *naive_pre(updated, site)), strict=True):
            close(tensor_found[token], expected)


def test_mhc_head(rng: np.random.Generator) -> None:
    streams, y, site = drawn(rng, 2, 4, 8), drawn(rng, 2, 8), site_of(rng, 4, 8, head=True)
    q, matrix = np.abs(drawn(rng, 2, 4)), np.abs(drawn(rng, 2, 4, 4))
    update = Update(*map(tensor, (y, q, matrix)))
    found = mhc_head(tensor(streams), update, site)
    for token in range(2):
        updated = naive_update(streams[token], y[token], q[token], matrix[token])
        a = sigmoid(mixing(updated, site) * float(site.scale[0]) + as_float64(site.base))
        mixed = sum((a[s] + site.hc_eps) * updated[s] for s in range(4))
        close(found[token], rms(mixed, as_float64(site.norm)))


def test_sinkhorn_makes_rows_and_columns_sum_to_one() -> None:
    torch.manual_seed(0)
    matrix = sinkhorn(torch.randn(50, 4, 4), 1e-6, 20)
    assert (matrix >= 0).all()
    torch.testing.assert_close(matrix.sum(-2), torch.ones(50, 4), atol=1e-4, rtol=0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(50, 4), atol=1e-2, rtol=0)
    # one turn alone does not get there, and the first normalisation is over columns
    once = sinkhorn(torch.randn(50, 4, 4) * 2, 1e-6, 1)
    torch.testing.assert_close(once.sum(-2), torch.ones(50, 4), atol=1e-4, rtol=0)
    assert (once.sum(-1) - 1).abs().max() > 0.05


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_sinkhorn_turns_as_often_as_it_is_told(turns: int) -> None:
    """Steep enough that a turn more or less is far off."""
    logits = np.array([[9.0, 2.0, 0.0], [4.0, 4.0, 1.0], [8.0, 0.0, 3.0]])
    wanted = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for turn in range(turns):
        if turn:
            wanted = wanted / wanted.sum(1, keepdims=True)
        wanted = wanted / wanted.sum(0, keepdims=True)
    found = sinkhorn(torch.tensor(logits).float(), 0.0, turns)
    np.testing.assert_allclose(as_float64(found), wanted, atol=1e-5)


# --- the state --------------------------------------------------------------------------------


def pool_of(fmt: str, dim: int, pages: int, size: int, index: bool = False) -> PagedPool:
    parts = index_entry(fmt, dim) if index else kv_entry(fmt, dim, 16)
    return allocate_pool(fmt, index, parts, (pages, size), "cpu")


def read(pool: PagedPool, table: Tensor, sequence: int, entry: int) -> Array:
    size = pool.page_entries
    page = table[sequence, entry // size % table.shape[1]]
    return as_float64(load(pool, page.view(1), torch.tensor([entry % size]))[0])


def test_kv_store_writes_norm_then_rope_through_the_ring(rng: np.random.Generator) -> None:
    kv, g = drawn(rng, 5, 24, scale=3.0), drawn(rng, 24)
    pool = pool_of("fp32", 24, 6, 4)
    table = torch.tensor([[5, 0, 3], [1, 4, 2]])
    batch = make_ragged([30, 0], [3, 2], [0, 1], CPU)
    frequencies = rope_frequencies(16, 100.0)
    kv_store(WindowKey(tensor(kv), tensor(g), frequencies, EPS, batch, pool, table))
    for row, (seq, p) in enumerate([(0, 30), (0, 31), (0, 32), (1, 0), (1, 1)]):
        expected = rotate(rms(kv[row], g), p, 100.0, 16)
        np.testing.assert_allclose(read(pool, table, seq, p), expected, atol=2e-5)
    # position 30 lies in the ring's column 30 // 4 % 3 = 1, page 0, offset 2
    assert torch.isfinite(pool.data[0, 2]).all()


def naive_entry(values: Array, gates: Array, ape: Array, ratio: int, b: int) -> Array:
    """Entry `b` of one sequence, channel by channel, from all its tokens."""
    dim = values.shape[1] // (2 if ratio == 4 else 1)
    out = np.zeros(dim)
    for channel in range(dim):
        slots: list[tuple[float, float]] = []
        if ratio == 4:
            for t in range(4 * (b - 1), 4 * b):
                if t >= 0:  # first half: what a token gives to the next block
                    slots.append((gates[t, channel] + ape[t % 4, channel], values[t, channel]))
        for t in range(ratio * b, ratio * (b + 1)):
            own = channel + (dim if ratio == 4 else 0)
            slots.append((gates[t, own] + ape[t % ratio, own], values[t, own]))
        top = max(z for z, _ in slots)
        total = sum(math.exp(z - top) for z, _ in slots)
        out[channel] = sum(math.exp(z - top) * v for z, v in slots) / total
    return out


@pytest.mark.parametrize(("ratio", "length"), [(4, 39), (128, 300)])
def test_compress_in_any_pieces(rng: np.random.Generator, ratio: int, length: int) -> None:
    """Two sequences grow in random pieces; every closed block equals the per-token loop."""
    dim, counts = 18, (length, length // 2)
    width = dim * (2 if ratio == 4 else 1)
    values = [drawn(rng, n, width) for n in counts]
    gates = [drawn(rng, n, width, scale=2.0) for n in counts]
    ape, norm = drawn(rng, ratio, width), drawn(rng, dim)
    shape = (3, state_rows(ratio), width)
    nan = float("nan")
    state = CompressorState(torch.full(shape, nan), torch.full(shape, nan))
    pool = pool_of("fp32", dim, 12, 2)
    table = torch.tensor([[3, 1, 5, 0, 2], [9, 8, 4, 7, 6]])
    done = [0, 0]
    while done != list(counts):
        new = [int(rng.integers(0, min(50, n - d) + 1)) for n, d in zip(counts, done, strict=True)]
        rows = [i for i in (0, 1) if new[i]]
        if not rows:
            continue
        batch = make_ragged(
            [done[i] for i in rows], [new[i] for i in rows], [2 - i for i in rows], CPU
        )
        part = [
            tensor(np.concatenate([source[i][done[i] : done[i] + new[i]] for i in rows]))
            for source in (values, gates)
        ]
        block = Compression(
            *part,
            tensor(ape),
            tensor(norm),
            rope_frequencies(16, 100.0),
            EPS,
            ratio,
            torch.float32,
            state,
            batch,
            pool,
            table[rows],
        )
        compress(block)
        done = [d + n for d, n in zip(done, new, strict=True)]
    for i, count in enumerate(counts):
        for b in range(count // ratio):
            entry = naive_entry(values[i], gates[i], ape, ratio, b)
            expected = rotate(rms(entry, norm), b * ratio, 100.0, 16)
            np.testing.assert_allclose(read(pool, table, i, b), expected, atol=5e-5)


def filled(rng: np.random.Generator, pool: PagedPool, dim: int) -> None:
    for page in range(pool.data.shape[0]):
        size = pool.page_entries
        store(pool, torch.full((size,), page), torch.arange(size), tensor(drawn(rng, size, dim)))


@pytest.mark.parametrize(("ratio", "topk"), [(0, 0), (128, 0), (4, 5)])
def test_attention_is_one_softmax_with_a_sink(
    rng: np.random.Generator, ratio: int, topk: int
) -> None:
    dim, heads, window = 24, 3, 9
    batch = make_ragged([260, 0], [3, 5], [0, 1], CPU)
    # the window's table is a ring: five pages of four tokens hold window and chunk
    pool, table = pool_of("fp32", dim, 10, 4), torch.randperm(10).view(2, 5)
    filled(rng, pool, dim)
    compressed = None
    selected: list[list[int]] = []
    if ratio:
        entries = pool_of("fp32", dim, 40, 4)
        filled(rng, entries, dim)
        entry_table = torch.randperm(40).view(2, 20)
        for p in batch.positions.tolist():
            visible = list(range((p + 1) // ratio))
            some = rng.choice(visible, min(topk, len(visible)), replace=False) if topk else visible
            selected.append(sorted(int(e) for e in some))
        rows = [s + [-1] * (topk - len(s)) for s in selected]
        chosen = torch.tensor(rows, dtype=torch.int64) if topk else None
        compressed = Compressed(entries, entry_table, ratio, chosen)
    q, sink = drawn(rng, 8, heads, dim, scale=2.0), drawn(rng, heads, scale=2.0)
    frequencies = rope_frequencies(16, 50.0)
    to = Visible(tensor(sink), pool, table, compressed, batch, window, frequencies)
    found = attention(tensor(q), to)
    for row, (p, seq) in enumerate(
        zip(batch.positions.tolist(), batch.seq_idx.tolist(), strict=True)
    ):
        keys = [read(pool, table, seq, j) for j in range(max(p - window + 1, 0), p + 1)]
        if compressed is not None:
            keys += [read(compressed.pool, compressed.table, seq, e) for e in selected[row]]
        for h in range(heads):
            weights = [math.exp(q[row, h] @ key / math.sqrt(dim)) for key in keys]
            total = sum(weights) + math.exp(sink[h])
            out = sum(w * key for w, key in zip(weights, keys, strict=True)) / total
            close(found[row, h], rotate(out, p, 50.0, 16, sign=-1), 5e-5)


def test_attention_survives_extreme_scores(rng: np.random.Generator) -> None:
    """Scores in the thousands and a sink far below or above them: no overflow, right limits."""
    pool, table = pool_of("fp32", 24, 2, 4), torch.tensor([[0, 1]])
    filled(rng, pool, 24)
    batch = make_ragged([3], [1], [0], CPU)
    q = tensor(drawn(rng, 1, 2, 24, scale=2000.0))
    still = torch.zeros(8)  # no rotation, so that a result can be compared with a key
    sink = torch.tensor([-1e4, 1e6])
    out = attention(q, Visible(sink, pool, table, None, batch, 4, still))
    keys = np.stack([read(pool, table, 0, j) for j in range(4)])
    best = keys[np.argmax(keys @ as_float64(q[0, 0]))]
    close(out[0, 0], best, 1e-5)  # one key takes all
    assert torch.count_nonzero(out[0, 1]) == 0  # the sink takes all


def test_index_scores(rng: np.random.Generator) -> None:
    dim, heads, topk = 16, 3, 4
    pool = pool_of("fp32", dim, 12, 8, index=True)
    filled(rng, pool, dim)
    table = torch.randperm(12).view(2, 6)
    batch = make_ragged([150, 0], [2, 30], [0, 1], CPU)
    q, g = drawn(rng, 32, heads, dim), drawn(rng, 32, heads)
    found = index_scores(tensor(q), tensor(g), IndexEntries(pool, table, batch, topk))
    for row, (p, seq) in enumerate(
        zip(batch.positions.tolist(), batch.seq_idx.tolist(), strict=True)
    ):
        visible = (p + 1) // 4
        for b in range(found.shape[1]):
            if b >= visible:
                assert found[row, b] == float("-inf")
            elif visible <= topk:
                assert found[row, b] == 0.0  # all are kept: their scores are not needed
            else:
                key = read(pool, table, seq, b)
                expected = sum(g[row, h] * max(0.0, q[row, h] @ key) for h in range(heads))
                assert float(found[row, b]) == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp8", "fp4"])
@pytest.mark.parametrize("rows", [3, 20])
def test_a_key_with_nan_has_no_score_and_is_chosen(
    rng: np.random.Generator, fmt: str, rows: int
) -> None:
    """Also in a format without NaN; scores of other keys stay as they are. Few rows and many: the
    CPU has a variant of each."""
    dim, entry = 32, 9
    pool, table = pool_of(fmt, dim, 6, 8, index=True), torch.tensor([[5, 2, 0, 1, 3, 4]])
    filled(rng, pool, dim)
    batch = make_ragged([150], [rows], [0], CPU)
    q, g = tensor(drawn(rng, rows, 3, dim)), tensor(drawn(rng, rows, 3))
    q = index_query(q, batch.positions, torch.zeros(8), fmt)
    wanted = index_scores(q, g, IndexEntries(pool, table, batch, 4))
    key = tensor(drawn(rng, 1, dim))
    key[0, 3] = float("nan")
    store(pool, table[:, 1], torch.tensor([entry - 8]), key)
    found = index_scores(q, g, IndexEntries(pool, table, batch, 4))
    assert found[:, entry].isnan().all()
    others = torch.arange(found.shape[1]) != entry
    assert torch.equal(found[:, others], wanted[:, others])
    chosen, best = index_select(found, 4), index_select(wanted[:, others], 3)
    kept = best + (best >= entry).long()
    assert torch.equal(chosen, torch.cat((kept, torch.full((rows, 1), entry)), 1).sort(1).values)


def test_index_select_takes_the_best_with_ties_to_the_lower_entry() -> None:
    hidden = float("-inf")
    scores = torch.tensor(
        [
            [1.0, 3.0, 2.0, 3.0, hidden, hidden],
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
            [5.0, hidden, hidden, hidden, hidden, hidden],
            [-2.0, -1.0, -3.0, -1.0, -1.0, 9.0],
            [hidden] * 6,
        ]
    )
    expected = [[1, 2, 3], [0, 1, 2], [0, -1, -1], [1, 3, 5], [-1, -1, -1]]
    found = [sorted_with_missing_last(row) for row in index_select(scores, 3).tolist()]
    assert found == expected
    assert index_select(scores, 3).tolist()[0] == [1, 2, 3]
    assert index_select(scores, 100).shape == (5, 6)
    for rows, entries in ((0, 6), (3, 0), (0, 0), (20, 0)):
        assert index_select(torch.zeros(rows, entries), 3).shape == (rows, min(3, entries))


def sorted_with_missing_last(row: list[int]) -> list[int]:
    kept = [entry for entry in row if entry >= 0]
    assert kept == sorted(kept)
    return kept + [-1] * (len(row) - len(kept))


# --- experts ----------------------------------------------------------------------------------


def naive_scores(x: Array, gate: Array) -> Array:
    return np.sqrt(np.log1p(np.exp(gate @ x)))


def test_router_selects_with_the_bias_and_weighs_without(rng: np.random.Generator) -> None:
    x, gate, bias = drawn(rng, 6, 10), drawn(rng, 9, 10), drawn(rng, 9)
    ids = torch.zeros(6, dtype=torch.int64)
    experts, weights = router(tensor(x), ids, Gate(tensor(gate), tensor(bias), None, 3, 2.5))
    changed = 0
    for token in range(6):
        s = naive_scores(x[token], gate)
        best = sorted(range(9), key=lambda e: -(s[e] + bias[e]))[:3]
        changed += best != sorted(range(9), key=lambda e: -s[e])[:3]
        assert experts[token].tolist() == sorted(best)
        expected = [s[e] / sum(s[k] for k in best) * 2.5 for e in sorted(best)]
        close(weights[token], np.array(expected))
    assert changed, "the bias never mattered; draw another case"


def test_hash_router_takes_the_tables_row(rng: np.random.Generator) -> None:
    x, gate = drawn(rng, 3, 10), drawn(rng, 5, 10)
    table = torch.tensor([[4, 0], [1, 3], [2, 1]])
    ids = torch.tensor([2, 0, 2])
    experts, weights = router(tensor(x), ids, Gate(tensor(gate), None, table, 2, 1.5))
    for token, row in enumerate(([1, 2], [0, 4], [1, 2])):
        s = naive_scores(x[token], gate)
        assert experts[token].tolist() == row
        close(weights[token], np.array([s[e] / sum(s[k] for k in row) * 1.5 for e in row]))


def test_router_ties_go_to_the_lower_expert() -> None:
    zeros = torch.zeros(4, 8)
    ids = torch.zeros(1, dtype=torch.int64)
    experts, weights = router(torch.ones(1, 8), ids, Gate(zeros, torch.zeros(4), None, 2, 1.0))
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))


def naive_expert(x: Array, w13: Array, w2: Array, weight: float, limit: float) -> Array:
    inner = w2.shape[1]
    gate = np.minimum(w13[:inner] @ x, limit)
    up = np.clip(w13[inner:] @ x, -limit, limit)
    return w2 @ (weight * gate * sigmoid(gate) * up)


@pytest.mark.parametrize("limit", [0.6, 10.0])
def test_experts_with_clamps_on_gate_and_up(rng: np.random.Generator, limit: float) -> None:
    x, w13, w2 = drawn(rng, 5, 12), drawn(rng, 4, 16, 12), drawn(rng, 4, 12, 8)
    shared13, shared2 = drawn(rng, 16, 12), drawn(rng, 12, 8)
    experts = np.stack([np.sort(rng.permutation(4)[:2]) for _ in range(5)])
    weights = np.abs(drawn(rng, 5, 2))
    matrices = Experts(*(tensor(t) for t in (w13, w2, shared13, shared2)), limit)
    found = experts_ffn(tensor(x), torch.tensor(experts), tensor(weights), matrices)
    for token in range(5):
        expected = naive_expert(x[token], shared13, shared2, 1.0, limit)
        for e, weight in zip(experts[token], weights[token], strict=True):
            expected = expected + naive_expert(x[token], w13[e], w2[e], weight, limit)
        close(found[token], expected, 1e-4)
