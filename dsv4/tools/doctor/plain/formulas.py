"""The formulas of DeepSeek-V4, plainly: one whole sequence, no pages, no batch, float64.

Deliberately shares nothing with `dsv4.ops` and `dsv4.model`, so that their mistakes cannot hide.
Rows are token positions from 0. `docs/glossary.md` explains the terms.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dsv4.config import ModelConfig


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


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


def rope(x: Tensor, positions: Tensor, table: Tensor, *, back: bool = False) -> Tensor:
    """Pairs `(2i, 2i + 1)` of the last channels, as complex numbers; angles in fp32."""
    angles = (positions.float()[:, None] * table).double()
    turn = torch.polar(torch.ones_like(angles), -angles if back else angles)
    turn = turn.view(turn.shape[0], *(1,) * (x.dim() - 2), turn.shape[1])
    width = 2 * table.shape[0]
    pairs = x[..., -width:].reshape(*x.shape[:-1], -1, 2)
    tail = torch.view_as_complex(pairs.contiguous())
    return torch.cat((x[..., :-width], torch.view_as_real(tail * turn).flatten(-2)), dim=-1)


# --- residual streams ---------------------------------------------------------------------------


def mixing_logits(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    flat = streams.flatten(1)
    return (flat @ fn.T) / torch.sqrt((flat * flat).mean(1, keepdim=True) + eps)


def mixing(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of the collapse, of the result, and stream to stream `[source, destination]`."""
    n, tiny = streams.shape[1], config.hc_eps
    m = mixing_logits(streams, fn, config.rms_norm_eps)
    pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + tiny
    post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), dim=2) + tiny
    comb = comb / (comb.sum(1, keepdim=True) + tiny)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + tiny)
        comb = comb / (comb.sum(1, keepdim=True) + tiny)
    return pre, post, comb


def spread(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`X_k <- q_k y + sum_j M[j, k] X_j`."""
    return torch.einsum("tk,td->tkd", post, y) + torch.einsum("tjk,tjd->tkd", comb, streams)


# --- storage formats: rounding of stored numbers -------------------------------------------------


def _power_of_two(amax: Tensor, limit: float) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(amax / limit)))


def _groups(x: Tensor, size: int) -> Tensor:
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size))
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
    return through_nvfp4(x) if width == "a4" else through_fp8(x, 32)


def met_by_keys(q: Tensor, width: str, rope_dim: int) -> Tensor:
    """Queries as multiplied with keys: rotary channels are never rounded."""
    return torch.cat((as_multiplied(q[..., :-rope_dim], width), q[..., -rope_dim:]), dim=-1)


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


def compress(values: Tensor, gates: Tensor, ape: Tensor, ratio: int, block: int) -> Tensor:
    """Entry `block` before its norm, from the values and gates of the whole sequence."""
    own = torch.arange(block * ratio, (block + 1) * ratio)
    v, z = values[own], gates[own] + ape
    if ratio == 4:  # half the channels read the previous block
        dim = v.shape[1] // 2
        v, z = v[:, dim:], z[:, dim:]
        if block > 0:
            v = torch.cat((values[own - ratio, :dim], v))
            z = torch.cat((gates[own - ratio, :dim] + ape[:, :dim], z))
    return (torch.softmax(z, dim=0) * v).sum(0)


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
    return torch.sqrt(softplus(x @ gate.T).float().double())


def expert(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    weight: Tensor,
    limit: float,
    widths: tuple[str, str] = ("a16", "a16"),
) -> Tensor:
    gate, up = (as_multiplied(x, widths[0]) @ w13.T).chunk(2, dim=1)
    z = weight[:, None] * silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return as_multiplied(z, widths[1]) @ w2.T
