"""The formulas of DeepSeek-V4, plainly: whole sequences, no pages, no ragged batch, differentiable.

`doctor` compares the engine with them in float64, training runs them in fp32, and tests use them
where they need a correct value. They share nothing with `dsv4.ops` and `dsv4.model`, so mistakes
there cannot hide. `docs/numerics.md` lists what must not share this file either. Sums are
in fp32 or wider. Rows are token positions from 0; `docs/glossary.md` explains the terms.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from dsv4.config import ModelConfig


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    row = wide(x)
    row = row / torch.sqrt((row * row).mean(-1, keepdim=True) + eps)
    return (row if weight is None else row * weight).to(x.dtype)


# --- rotary embedding ---------------------------------------------------------------------------


def frequencies(config: ModelConfig, ratio: int) -> Tensor:
    """The fp32 rotation frequencies of a layer; YaRN only for layers that compress."""
    dim, pairs = config.rope_head_dim, torch.arange(config.rope_head_dim // 2).double()
    theta = config.compress_rope_theta if ratio else config.rope_theta
    plain = theta ** (-2 * pairs / dim)
    if ratio == 0 or config.yarn_factor == 1.0:
        return plain.float()

    def pair_at(turns: float) -> float:
        length = config.yarn_original_len / (2 * math.pi * turns)
        return dim * math.log(length) / (2 * math.log(theta))

    low = max(math.floor(pair_at(config.yarn_beta_fast)), 0)
    high: float = min(math.ceil(pair_at(config.yarn_beta_slow)), dim - 1)
    high = high + 0.001 if low == high else high
    slow = ((pairs - low) / (high - low)).clamp(0, 1)
    return (plain * (1 - slow) + plain / config.yarn_factor * slow).float()


def angles(positions: Tensor, table: Tensor) -> Tensor:
    """fp32 `[positions, pairs]`."""
    return positions.float()[:, None] * table


def rope(x: Tensor, by: Tensor, *, axis: int = 0, back: bool = False) -> Tensor:
    """Rotate the pairs `(2i, 2i + 1)` of the last channels; `axis` of `x` counts positions."""
    shape = [1] * x.dim()
    shape[axis], shape[-1] = by.shape
    width = 2 * by.shape[1]
    head, tail = x[..., :-width], wide(x[..., -width:])
    turn = by.to(tail.dtype).view(shape)
    cos, sin = turn.cos(), -turn.sin() if back else turn.sin()
    u, v = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((u * cos - v * sin, v * cos + u * sin), dim=-1).flatten(-2)
    return torch.cat((head, turned.to(x.dtype)), dim=-1)


# --- residual streams ---------------------------------------------------------------------------


def mixing_logits(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = wide(streams.flatten(-2))
    return (flat @ fn.T) / torch.sqrt((flat * flat).mean(-1, keepdim=True) + eps)


def mixing_weights(
    logits: Tensor, base: Tensor, scale: Tensor, n: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the collapse, of the result, and from stream to stream (before `sinkhorn`)."""
    pre = torch.sigmoid(logits[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * torch.sigmoid(logits[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    return pre, post, (logits[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n)


def sinkhorn(comb: Tensor, eps: float, iters: int) -> Tensor:
    """`[tokens, source, destination]`; columns are normalised first and last."""
    comb = torch.softmax(comb, dim=2) + eps
    comb = comb / (comb.sum(1, keepdim=True) + eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + eps)
        comb = comb / (comb.sum(1, keepdim=True) + eps)
    return comb


def mixing(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    logits = mixing_logits(streams, fn, config.rms_norm_eps)
    pre, post, comb = mixing_weights(logits, base, scale, streams.shape[1], config.hc_eps)
    return pre, post, sinkhorn(comb, config.hc_eps, config.hc_sinkhorn_iters)


def head_weights(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig
) -> Tensor:
    logits = mixing_logits(streams, fn, config.rms_norm_eps)
    return torch.sigmoid(logits * scale + base) + config.hc_eps


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    return torch.einsum("ts,tsd->td", weights, streams)


def spread(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`X_k <- q_k y + sum_j M[j, k] X_j`."""
    return torch.einsum("tk,td->tkd", post, y) + torch.einsum("tjk,tjd->tkd", comb, streams)


# --- storage formats: rounding of stored numbers -------------------------------------------------


def _power_of_two(amax: Tensor, limit: float) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(amax / limit)))


def _groups(x: Tensor, size: int) -> Tensor:
    padded = pad(x, (0, -x.shape[-1] % size))
    return padded.reshape(*x.shape[:-1], padded.shape[-1] // size, size)


def through_fp8(x: Tensor, group: int) -> Tensor:
    """E4M3 with one power of two per group of channels."""
    cut = _groups(x, group)
    scale = _power_of_two(cut.abs().amax(-1, keepdim=True).clamp(min=1e-4), 448.0)
    codes = (cut / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.to(x.dtype) * scale).flatten(-2)[..., : x.shape[-1]]


def through_fp4(x: Tensor, group: int) -> Tensor:
    """E2M1 (0 0.5 1 1.5 2 3 4 6) with one power of two per group of channels."""
    cut = _groups(x, group)
    scale = _power_of_two(cut.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126), 6.0)
    size = (cut / scale).abs().clamp(max=6.0)
    step = torch.exp2(torch.floor(torch.log2(size.clamp(min=1.0)))) / 2
    rounded = torch.copysign(torch.round(size / step) * step, cut)
    return (rounded * scale).flatten(-2)[..., : x.shape[-1]]


def through_nvfp4(x: Tensor) -> Tensor:
    """E2M1 with an E4M3 scale per 16 channels and one scale per row, computed in fp32 step by step,
    because a scale that rounds the other way moves its whole group."""
    wide, top = x.float(), 6.0 * 448.0
    amax = wide.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    cut, inverse = _groups(wide, 16), (top / amax)[..., None]
    share = cut.abs().amax(-1, keepdim=True) * inverse * torch.tensor(1 / 6, device=x.device)
    scale = share.clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
    size = (cut * (inverse / scale)).double().abs().clamp(max=6.0)
    step = torch.exp2(torch.floor(torch.log2(size.clamp(min=1.0)))) / 2
    rounded = torch.copysign(torch.round(size / step) * step, cut.double())
    return (rounded * scale.double()).flatten(-2)[..., : x.shape[-1]] * (amax / top).double()


def as_multiplied(x: Tensor, width: str) -> Tensor:
    """Activations as multiplied: a16, a8 or a4."""
    if width == "a16":
        return x
    return through_nvfp4(x) if width == "a4" else through_fp8(x, 128)


def stored_key(key: Tensor, kv_format: str, rope_dim: int) -> Tensor:
    """A window key or an entry after storage: rotary channels are never in FP8."""
    if kv_format == "fp32":
        return key
    if kv_format == "bf16":
        return key.bfloat16().double()
    head, tail = key[..., :-rope_dim], key[..., -rope_dim:]
    return torch.cat((through_fp8(head, 64), tail.bfloat16().double()), dim=-1)


def stored_index(x: Tensor, index_format: str, dtype: torch.dtype) -> Tensor:
    """An index key or query after storage; narrow formats rotate it first."""
    if index_format == "fp32":
        return x
    if index_format == "bf16":
        return x.bfloat16().double()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < x.shape[-1]:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double())
    turned = (x @ matrix.to(x.device) / math.sqrt(x.shape[-1])).to(dtype).double()
    return through_fp4(turned, 32) if index_format == "fp4" else through_fp8(turned, x.shape[-1])


# --- attention ----------------------------------------------------------------------------------


def compress(values: Tensor, gates: Tensor, ratio: int) -> Tensor:
    """`[..., tokens, width]` of whole blocks, the gates with their bias -> `[..., blocks, dim]`,
    the entries before their norm. Nothing comes before the first block."""
    v, z = (x.reshape(*x.shape[:-2], -1, ratio, x.shape[-1]) for x in (values, gates))
    if ratio == 4:
        v, z = _with_previous(v, 0.0), _with_previous(z, -torch.inf)
    return (torch.softmax(z, dim=-2) * v).sum(-2)


def _with_previous(x: Tensor, empty: float) -> Tensor:
    """Eight tokens for each block: first halves of the previous four, second halves of its own."""
    before, own = x.chunk(2, dim=-1)
    before = pad(before[..., :-1, :, :], (0, 0, 0, 0, 1, 0), value=empty)
    return torch.cat((before, own), dim=-2)


def index_scores(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """`[rows, heads, dim]`, `[rows, heads]`, `[entries, dim]` -> `[rows, entries]`."""
    return torch.einsum("th,thb->tb", head_weights, torch.relu(q @ keys.T))


def attend(q: Tensor, keys: Tensor, seen: Tensor, sink: Tensor) -> Tensor:
    """One softmax over the keys that a row has `seen`; the sink is added only to the sum."""
    scores = torch.einsum("thd,kd->thk", q, keys) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
    top = torch.maximum(scores.amax(-1), sink)
    weights = torch.exp(scores - top[..., None])
    total = weights.sum(-1) + torch.exp(sink - top)
    return (weights @ keys) / total[..., None]


# --- experts ------------------------------------------------------------------------------------


def router_scores(x: Tensor, gate: Tensor) -> Tensor:
    """In fp32 as in the model, where scores far below zero lose precision."""
    return torch.sqrt(softplus(x @ gate.T).float().to(x.dtype))


def swiglu(both: Tensor, limit: float) -> Tensor:
    """Gate and up projections side by side, `[..., 2 * inner]` -> `[..., inner]`."""
    gate, up = both.chunk(2, dim=-1)
    return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weight: Tensor,
    limit: float,
    widths: tuple[str, str] = ("a16", "a16"),
) -> Tensor:
    z = weight[:, None] * swiglu(as_multiplied(x, widths[0]) @ w13.T, limit)
    return as_multiplied(z, widths[1]) @ w2.T
