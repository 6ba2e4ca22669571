"""DeepSeek-V4 as a plain differentiable function of a table of weights.

Names are the canonical ones of `dsv4.checkpoint.names`, so a trained table is exported as it is.
In fp32 the result equals the engine's exact mode (tests/training/test_network.py). Its formulas are
those of `dsv4/tools/formulas.py`, except where a gradient or the memory of long rows asks for more:
Sinkhorn, the index scores, and attention in blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from dsv4.config import ModelConfig
from dsv4.tools.formulas import (
    collapse,
    compress,
    head_weights,
    mixing_logits,
    mixing_weights,
    rms,
    rope,
    router_scores,
    spread,
    swiglu,
)
from training import rounding
from training.attention import Index, attention_rows, top_mask
from training.rope import Rotation, rotations

Table = Mapping[str, Tensor]


@dataclass
class Options:
    """How a forward pass runs; training phases differ in these options."""

    dtype: torch.dtype = torch.float32
    select: bool = True  # hard top-k selection in ratio-4 layers
    rounded: bool = False  # keys and index vectors pass through their storage formats
    draft: bool = False  # also run the MTP block
    mistake: str = ""  # one of dsv4.tools.quality.variants.MISTAKES: computed wrongly on purpose
    strength: int = 1  # exaggerates the mistakes that are hardest to see
    most_scores: int = 1 << 28


@dataclass
class Result:
    hidden: Tensor  # [B, S, D], normalised, before the head
    draft: Tensor | None  # the same for the token after the next
    index_loss: Tensor
    loads: dict[str, Tensor] = field(default_factory=dict)  # share of tokens per expert
    layers: list[Tensor] = field(default_factory=list)  # streams after each block


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))


_TRACKED = 3  # Sinkhorn rounds that carry a gradient


def _normalise(m: Tensor, eps: float, rounds: int) -> Tensor:
    for _ in range(rounds):
        m = m / (m.sum(1, keepdim=True) + eps)
        m = m / (m.sum(0, keepdim=True) + eps)
    return m


def sinkhorn(matrix: Tensor, eps: float, iters: int) -> Tensor:
    """`formulas.sinkhorn`: the same forward values, with a different gradient and layout.

    The gradient passes only through the last rounds: earlier rounds merely scale rows and columns,
    which is taken as constant and which the last rounds undo almost completely. A token's sixteen
    numbers lie far apart in memory, so each sum adds whole columns.
    """
    m = (matrix.softmax(-1) + eps).permute(1, 2, 0).contiguous()
    m = m / (m.sum(0, keepdim=True) + eps)
    early = max(iters - 1 - _TRACKED, 0)
    with torch.no_grad():
        scaling = _normalise(m, eps, early) / m
    return _normalise(m * scaling, eps, iters - 1 - early).permute(2, 0, 1)


def coefficients(
    logits: Tensor, base: Tensor, scale: Tensor, n: int, eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = mixing_weights(logits, base, scale, n, eps)
    return pre, post, sinkhorn(comb, eps, iters)


def collapse_fused(streams: Tensor, weights: Tensor) -> Tensor:
    """`collapse` in a form that a compiler can fuse."""
    return (streams * weights.unsqueeze(-1)).sum(1)


def spread_fused(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = (comb.unsqueeze(-1) * streams.unsqueeze(2)).sum(1)
    return post.unsqueeze(-1) * y.unsqueeze(1) + mixed


def glu(both: Tensor, weights: Tensor | None, limit: float) -> Tensor:
    """`[tokens, experts, 2 * inner]` -> `[tokens, experts, inner]`."""
    z = swiglu(both, limit)
    return z if weights is None else z * weights.unsqueeze(-1).to(z.dtype)


class Network:
    """`weights`: every parameter under its canonical name, drafts included, fp32."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        # replaced by compiled versions where the machine has a compiler
        self.coefficients = coefficients
        self.glu = glu
        self.collapse = collapse
        self.spread = spread

    def forward(self, w: Table, ids: Tensor, options: Options, emphasis: Tensor | None) -> Result:
        """`ids` `[B, S]`, S a multiple of 128; `emphasis` `[B, S]` weights the indexer's loss, None
        leaves it out."""
        c = self.config
        shape = ids.shape
        positions = torch.arange(shape[1], device=ids.device)
        tables = {
            r: rotations(c, r, positions, options.mistake, options.strength)
            for r in {0, *c.compress_ratios}
        }
        embedded = F.embedding(ids.flatten(), w["embed.weight"])
        streams = embedded.unsqueeze(1).expand(-1, c.hc_mult, -1)
        result = Result(embedded, None, embedded.new_zeros(2))
        for layer, ratio in enumerate(c.compress_ratios):
            streams = self._block(
                w, f"layers.{layer}.", streams, ids, ratio, tables[ratio], options, emphasis, result
            )
            result.layers.append(streams)
        result.hidden = self._head(w, "", streams).view(*shape, -1)
        if options.draft and c.num_draft_layers:
            result.draft = self._draft(w, streams, embedded, ids, tables[0], options, result)
        loss, weight = result.index_loss
        result.index_loss = loss / weight.clamp(min=1e-6)
        return result

    def _draft(
        self,
        w: Table,
        streams: Tensor,
        embedded: Tensor,
        ids: Tensor,
        table: Rotation,
        options: Options,
        result: Result,
    ) -> Tensor:
        """The MTP block: streams at p and token p + 1 give a guess for token p + 2."""
        c, dtype = self.config, options.dtype
        following = embedded.view(*ids.shape, -1).roll(-1, 1).flatten(0, 1)
        e = rms(following, w["mtp.0.enorm.weight"], c.rms_norm_eps)
        h = rms(streams, w["mtp.0.hnorm.weight"], c.rms_norm_eps)
        mixed = linear(h.to(dtype), w["mtp.0.h_proj.weight"]).float()
        streams = mixed + linear(e.to(dtype), w["mtp.0.e_proj.weight"]).float().unsqueeze(1)
        streams = self._block(w, "mtp.0.", streams, ids, 0, table, options, None, result)
        return self._head(w, "mtp.0.", streams).view(*ids.shape, -1)

    def _head(self, w: Table, prefix: str, streams: Tensor) -> Tensor:
        c = self.config
        fn, base, scale = (w[f"{prefix}hc_head_{part}"] for part in ("fn", "base", "scale"))
        mixed = self.collapse(streams, head_weights(streams, fn, base, scale, c))
        return rms(mixed, w[prefix + "norm.weight"], c.rms_norm_eps)

    def _block(
        self,
        w: Table,
        prefix: str,
        streams: Tensor,
        ids: Tensor,
        ratio: int,
        table: Rotation,
        options: Options,
        emphasis: Tensor | None,
        result: Result,
    ) -> Tensor:
        x, post, comb = self._collapse(w, prefix, "attn", streams, options)
        x = x.view(*ids.shape, -1).to(options.dtype)
        y, loss = self._attention(w, prefix + "attn.", x, ratio, table, options, emphasis)
        result.index_loss = result.index_loss + loss
        streams = self.spread(streams, y.flatten(0, 1).float(), post, comb)
        x, post, comb = self._collapse(w, prefix, "ffn", streams, options)
        y = self._ffn(w, prefix + "ffn.", x, ids.flatten(), options, result)
        return self.spread(streams, y.float(), post, comb)

    def _collapse(
        self, w: Table, prefix: str, half: str, streams: Tensor, options: Options
    ) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        site = f"{prefix}hc_{half}_"
        logits = mixing_logits(streams, w[site + "fn"], c.rms_norm_eps)
        pre, post, comb = self.coefficients(
            logits, w[site + "base"], w[site + "scale"], c.hc_mult, c.hc_eps, c.hc_sinkhorn_iters
        )
        if options.mistake == "transposed-mixing":
            comb = comb.transpose(1, 2)
        mixed = self.collapse(streams, pre)
        return rms(mixed, w[f"{prefix}{half}_norm.weight"], c.rms_norm_eps), post, comb

    def _attention(
        self,
        w: Table,
        prefix: str,
        x: Tensor,
        ratio: int,
        table: Rotation,
        options: Options,
        emphasis: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        c, eps = self.config, self.config.rms_norm_eps
        batch, length, _ = x.shape
        latent = rms(linear(x, w[prefix + "wq_a.weight"]), w[prefix + "q_norm.weight"], eps)
        q = linear(latent, w[prefix + "wq_b.weight"]).view(batch, length, c.num_heads, -1)
        q = rope(rms(q, None, eps), table.tokens, axis=1)
        keys = rms(linear(x, w[prefix + "wkv.weight"]), w[prefix + "kv_norm.weight"], eps)
        keys = self._stored(rope(keys, table.tokens, axis=1), options)
        entries = index = None
        if ratio and length >= ratio:
            entries = self._entries(w, prefix + "compressor.", x, ratio, options)
            entries = rope(entries, table.entries, axis=1)
            entries = self._stored(entries, options)
        if ratio == 4 and entries is not None:
            index = self._index(w, prefix + "indexer.", x, latent, table, options, emphasis)
        out, loss = attention_rows(
            q,
            w[prefix + "attn_sink"],
            keys,
            entries,
            ratio,
            c.sliding_window,
            index,
            options.most_scores,
            reach=c.sliding_window + options.strength * (options.mistake == "window-one-too-long"),
        )
        out = rope(out, table.tokens, axis=1, back=True).reshape(batch, length, c.o_groups, -1)
        low = w[prefix + "wo_a.weight"].unflatten(0, (c.o_groups, -1)).to(out.dtype)
        mixed = torch.einsum("bsgk,grk->bsgr", out, low).flatten(2)
        return linear(mixed, w[prefix + "wo_b.weight"]), loss

    def _stored(self, keys: Tensor, options: Options) -> Tensor:
        return rounding.kv_round(keys, self.config.rope_head_dim) if options.rounded else keys

    def _entries(self, w: Table, prefix: str, x: Tensor, ratio: int, options: Options) -> Tensor:
        """Compressed keys `[B, S / ratio, dim]`, not yet rotated."""
        values = linear(x, w[prefix + "wkv.weight"]).float()
        bias = w[prefix + "ape"].repeat(x.shape[1] // ratio, 1)
        gates = linear(x, w[prefix + "wgate.weight"]).float() + bias
        if options.mistake == "bias-on-values":
            values = values + options.strength * bias
        if ratio == 4 and options.mistake == "swapped-halves":
            values, gates = (torch.cat(x.chunk(2, -1)[::-1], -1) for x in (values, gates))
        mixed = compress(values, gates, ratio).to(x.dtype)
        return rms(mixed, w[prefix + "norm.weight"], self.config.rms_norm_eps)

    def _index(
        self,
        w: Table,
        prefix: str,
        x: Tensor,
        latent: Tensor,
        table: Rotation,
        options: Options,
        emphasis: Tensor | None,
    ) -> Index:
        """The indexer learns from its own loss alone, so its inputs carry no gradient."""
        c = self.config
        x, latent = x.detach(), latent.detach()
        queries = linear(latent, w[prefix + "wq_b.weight"])
        queries = rope(queries.unflatten(-1, (c.index_num_heads, -1)), table.index_queries, axis=1)
        keys = self._entries(w, prefix + "compressor.", x, 4, options)
        if options.mistake != "no-rope-on-index-keys":
            keys = rope(keys, table.entries, axis=1)
        if options.rounded:
            queries, keys = rounding.index_round(queries), rounding.index_round(keys)
        scale = c.index_head_dim**-0.5 * c.index_num_heads**-0.5
        weights = linear(x, w[prefix + "weights_proj.weight"]).float() * scale
        return Index(queries, keys, weights, c.index_topk, options.select, emphasis)

    def _ffn(
        self, w: Table, prefix: str, x: Tensor, ids: Tensor, options: Options, result: Result
    ) -> Tensor:
        c = self.config
        scores = router_scores(x, w[prefix + "gate.weight"])
        if prefix + "gate.tid2eid" in w:
            kept = torch.zeros_like(scores).scatter_(1, w[prefix + "gate.tid2eid"][ids], 1.0)
        else:
            ranked = scores.detach() + w[prefix + "gate.bias"]
            kept = top_mask(ranked, c.num_experts_per_tok).to(scores.dtype)
        result.loads[prefix] = kept.mean(0).detach()
        weights = scores * kept
        weights = weights / weights.sum(-1, keepdim=True) * c.routed_scaling_factor
        x = x.to(options.dtype)
        w13, w2 = w[prefix + "experts.w13"], w[prefix + "experts.w2"]
        both = linear(x, w13.flatten(0, 1)).unflatten(-1, (c.num_experts, -1))
        z = self.glu(both, weights, c.swiglu_limit).flatten(1)
        y = linear(z, w2.permute(1, 0, 2).reshape(w2.shape[1], -1))
        shared = linear(x, w[prefix + "shared_experts.w13"]).unsqueeze(1)
        unclamped = options.mistake == "shared-expert-unclamped"
        z = self.glu(shared, None, float("inf") if unclamped else c.swiglu_limit).squeeze(1)
        return y + linear(z, w[prefix + "shared_experts.w2"])
