"""A window-only block and the head, row by row in fp32, from the mathematics alone.

The oracle of draft blocks. It shares nothing with the package but the names of parameters: loops
over streams, heads and experts where the engine has tiles and fusions.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import torch
from torch import Tensor

from dsv4.config import ModelConfig

Table = dict[str, Tensor]
Visible = Callable[[int], Sequence[int]]  # rows whose keys a row sees


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    row = x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return row if weight is None else row * weight


def rates(c: ModelConfig, theta: float) -> list[float]:
    """How far each pair of channels turns from one position to the next: theta^(-2k/d)."""
    return [theta ** (-2 * k / c.rope_head_dim) for k in range(c.rope_head_dim // 2)]


PLAIN_RATES = rates


def yarn_rates(c: ModelConfig, theta: float) -> list[float]:
    """Those of compressed layers: pairs that turn around less than `beta_slow` times over the
    original length are slowed down by `yarn_factor`, those of `beta_fast` times and more are not,
    and in between a share is. Wrong for draft blocks."""

    def pair(turns: float) -> float:
        """The pair that turns around so often: theta^(-2k/d) = 2 pi turns / length."""
        ratio = c.yarn_original_len / (2 * math.pi * turns)
        return c.rope_head_dim / 2 * math.log(ratio) / math.log(theta)

    low, high = max(math.floor(pair(c.yarn_beta_fast)), 0), math.ceil(pair(c.yarn_beta_slow))
    slowed = [min(max((k - low) / (high - low), 0), 1) for k in range(c.rope_head_dim // 2)]
    every = zip(PLAIN_RATES(c, theta), slowed, strict=True)
    return [rate * (1 - share + share / c.yarn_factor) for rate, share in every]


ROPES = ("theta of compressed layers", "YaRN alone", "rope of compressed layers")


@contextmanager
def wrong_rope(variant: str, c: ModelConfig) -> Iterator[ModelConfig]:
    """The config to use, while blocks turn as a variant of ROPES says; others change nothing."""
    if variant in ("theta of compressed layers", "rope of compressed layers"):
        c = replace(c, rope_theta=c.compress_rope_theta)
    if variant in ("YaRN alone", "rope of compressed layers"):
        with patch(f"{__name__}.rates", yarn_rates):
            yield c
    else:
        yield c


def turn(x: Tensor, position: float, c: ModelConfig, theta: float, sign: int = 1) -> Tensor:
    """The last channels as complex numbers, times exp(i sign position rate)."""
    pairs = c.rope_head_dim // 2
    angle = torch.tensor([position * rate for rate in rates(c, theta)])
    tail = torch.view_as_complex(x[..., -2 * pairs :].double().unflatten(-1, (pairs, 2)).clone())
    turned = torch.view_as_real(tail * torch.exp(1j * sign * angle.double())).flatten(-2)
    return torch.cat((x[..., : -2 * pairs], turned.float()), -1)


def mixing(w: Table, site: str, streams: Tensor, c: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Of one token: weights of the collapse, of the result, and the matrix between streams."""
    n, flat = c.hc_mult, streams.flatten()
    z = w[site + "fn"] @ flat / math.sqrt(float(flat.pow(2).mean()) + c.rms_norm_eps)
    scale, base = w[site + "scale"], w[site + "base"]
    pre = torch.sigmoid(z[:n] * scale[0] + base[:n]) + c.hc_eps
    post = 2 * torch.sigmoid(z[n : 2 * n] * scale[1] + base[n : 2 * n])
    m = torch.softmax((z[2 * n :] * scale[2] + base[2 * n :]).view(n, n), -1) + c.hc_eps
    for turn_number in range(2 * c.hc_sinkhorn_iters - 1):
        axis = 0 if turn_number % 2 == 0 else 1
        m = m / (m.sum(axis, keepdim=True) + c.hc_eps)
    return pre, post, m


def update(streams: Tensor, y: Tensor, post: Tensor, m: Tensor) -> Tensor:
    return torch.stack(
        [post[k] * y + sum(m[j, k] * streams[j] for j in range(len(m))) for k in range(len(m))]
    )


def experts(w: Table, prefix: str, x: Tensor, c: ModelConfig, chosen: Tensor | None) -> Tensor:
    """`chosen`: the experts of a hashed layer."""

    def ffn(w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = (w13 @ x).chunk(2)
        gate, up = gate.clamp(max=c.swiglu_limit), up.clamp(-c.swiglu_limit, c.swiglu_limit)
        return w2 @ (gate * torch.sigmoid(gate) * up)

    scores = torch.sqrt(torch.log1p(torch.exp(w[prefix + "gate.weight"] @ x)))
    if chosen is None:
        chosen = torch.topk(scores + w[prefix + "gate.bias"], c.num_experts_per_tok).indices
    total = sum(float(scores[e]) for e in chosen)
    y = ffn(w[prefix + "shared_experts.w13"], w[prefix + "shared_experts.w2"])
    for e in chosen.tolist():
        share = c.routed_scaling_factor * float(scores[e]) / total
        y = y + share * ffn(w[prefix + "experts.w13"][e], w[prefix + "experts.w2"][e])
    return y


def window_key(w: Table, prefix: str, x: Tensor, position: float, c: ModelConfig) -> Tensor:
    row = norm(w[prefix + "attn.wkv.weight"] @ x, w[prefix + "attn.kv_norm.weight"], c.rms_norm_eps)
    return turn(row, position, c, c.rope_theta)


def attend(
    w: Table, prefix: str, x: Tensor, keys: Sequence[Tensor], position: float, c: ModelConfig,
    back: float | None = None,
) -> Tensor:  # fmt: skip
    """`back`: where the rotation is undone; at the position, unless that is wrong on purpose."""
    a, eps = prefix + "attn.", c.rms_norm_eps
    latent = norm(w[a + "wq_a.weight"] @ x, w[a + "q_norm.weight"], eps)
    heads, every = [], torch.stack(list(keys))
    for head, q in enumerate((w[a + "wq_b.weight"] @ latent).view(c.num_heads, c.head_dim)):
        q = turn(norm(q, None, eps), position, c, c.rope_theta)
        scores = every @ q / math.sqrt(c.head_dim)
        weights = torch.softmax(torch.cat((scores, w[a + "attn_sink"][head : head + 1])), 0)
        back = position if back is None else back
        heads.append(turn(weights[:-1] @ every, back, c, c.rope_theta, -1))
    groups = torch.stack(heads).view(c.o_groups, -1)
    low = w[a + "wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
    return w[a + "wo_b.weight"] @ torch.cat([m @ g for m, g in zip(low, groups, strict=True)])


def block(
    w: Table, prefix: str, streams: Tensor, positions: Sequence[float], c: ModelConfig,
    visible: Visible, context: Sequence[Tensor] = (), wanted: Sequence[int] | None = None,
    hashed: Tensor | None = None, back: float | None = None,
) -> Tensor:  # fmt: skip
    """Streams `[rows, n, size]` -> those of the `wanted` rows. A row sees `context` keys, all of
    them, and the keys of the rows in `visible`."""
    sites = [mixing(w, prefix + "hc_attn_", row, c) for row in streams]
    xs = [
        norm(pre @ row, w[prefix + "attn_norm.weight"], c.rms_norm_eps)
        for (pre, _, _), row in zip(sites, streams, strict=True)
    ]
    keys = [window_key(w, prefix, x, p, c) for x, p in zip(xs, positions, strict=True)]
    out = []
    for row in range(len(streams)) if wanted is None else wanted:
        seen = [*context, *(keys[at] for at in visible(row))]
        y = attend(w, prefix, xs[row], seen, positions[row], c, back)
        now = update(streams[row], y, *sites[row][1:])
        pre, post, m = mixing(w, prefix + "hc_ffn_", now, c)
        x = norm(pre @ now, w[prefix + "ffn_norm.weight"], c.rms_norm_eps)
        chosen = None if hashed is None else hashed[row]
        out.append(update(now, experts(w, prefix + "ffn.", x, c, chosen), post, m))
    return torch.stack(out)


def head_mix(w: Table, prefix: str, streams: Tensor, c: ModelConfig) -> Tensor:
    """`[rows, size]`, before the norm."""
    rows = []
    for row in streams:
        flat = row.flatten()
        z = w[prefix + "hc_head_fn"] @ flat / math.sqrt(float(flat.pow(2).mean()) + c.rms_norm_eps)
        weights = torch.sigmoid(z * w[prefix + "hc_head_scale"] + w[prefix + "hc_head_base"])
        rows.append((weights + c.hc_eps) @ row)
    return torch.stack(rows)


def window(c: ModelConfig) -> Visible:
    return lambda row: range(max(0, row - c.sliding_window + 1), row + 1)


def backbone(w: Table, ids: Sequence[int], c: ModelConfig) -> list[Tensor]:
    """Streams before the first block and after each, of a model that has window layers only."""
    rows = [w["embed.weight"][list(ids)].unsqueeze(1).expand(-1, c.hc_mult, -1)]
    for layer in range(c.num_layers):
        prefix = f"layers.{layer}."
        table = w.get(prefix + "ffn.gate.tid2eid")
        hashed = None if table is None else table[list(ids)]
        rows.append(block(w, prefix, rows[-1], range(len(ids)), c, window(c), hashed=hashed))
    return rows
