"""A checkpoint's draft blocks, which guess the tokens after the next one.

They are window-only blocks with their own keys, so every token of a sequence must go through
`keys`; they use the model's embedding and head, on a GPU a copy of the head in 4 bits, since each
draft reads all of it. They cannot change an answer (docs/drafting.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.cache.kinds import SwaState
from dsv4.errors import CheckpointError
from dsv4.formats import nvfp4
from dsv4.formats.quantized import Nvfp4Tensor, Weight
from dsv4.formats.spec import NVFP4_GROUP
from dsv4.model.exchange import SingleRank
from dsv4.model.inputs import StepInputs
from dsv4.model.mhc import collapse_head, finish, mix_site
from dsv4.model.transformer import Block, Transformer
from dsv4.model.weights import Weights
from dsv4.ops.attention.attention import Visible, attention
from dsv4.ops.attention.query import query_prepare
from dsv4.ops.core.ragged import Ragged
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.linear import linear, linear_multi
from dsv4.ops.gemm.weights.tiled import tile_nvfp4
from dsv4.ops.kv.kv_store import WindowKey, kv_store
from dsv4.ops.kv.rope import rope
from dsv4.ops.mhc.mix import Residual, Update
from dsv4.ops.norm.rms_norm import rms_norm
from dsv4.ops.sample.draft_rows import MOST_DRAFTS
from dsv4.parallel.layout import RankLayout

CONFIDENCE = "confidence_head.proj.weight"
HEAD_ROWS = 8192  # converted at a time


class MtpBlock:
    """Row p takes all final streams of token p and the id of token p + 1:

        X0[s] = W_e RMS(Emb[t_(p+1)]) + W_h RMS(X[s])      each stream on its own
        X1    = Block(X0)    window only, plain rope at position p, router with a bias, own keys
        logits of t_(p+2) = W_head RMS(HeadMix(X1))

    A second guess takes X1 in place of X and the first guess in place of the token, at p + 1.
    """

    def __init__(self, model: Transformer, table: Mapping[str, Weight]) -> None:
        """`table`: the block's parameters under their canonical names."""
        config, everything = model.config, Weights(table)
        weights = everything.under("mtp.0.")
        self.model, self.eps, self.num_streams = model, config.rms_norm_eps, config.hc_mult
        self.enorm, self.hnorm = weights.tensor("enorm.weight"), weights.tensor("hnorm.weight")
        self.e_proj, self.h_proj = weights.take("e_proj.weight"), weights.take("h_proj.weight")
        self.block = Block(config, 0, weights, RankLayout(), hashed=False)
        self.head_site, self.head = mix_site(config, weights, "hc_head", "norm"), draft_head(model)
        if everything.left:
            raise CheckpointError(f"unused weights: {sorted(everything.left)[:5]}")

    def __call__(self, start: Tensor, step: StepInputs, state: SwaState) -> tuple[Tensor, Residual]:
        """X0 -> fp32 logits, and X1, with its last update to come; stores the rows' keys."""
        residual = self.block(Residual(start), step, state, SingleRank())
        hidden = collapse_head(residual, self.head_site, None)
        return linear(hidden, self.head, torch.float32), residual

    def keys(self, start: Tensor, step: StepInputs, state: SwaState) -> None:
        """Only store the keys."""
        attention, by = self.block.attention, ([self.block.attention.wkv], [start.dtype])
        *_, (kv,) = SingleRank().mix_linear(Residual(start), self.block.attention_site, by)
        kv_store(
            WindowKey(
                kv, attention.kv_norm, attention.frequencies, self.eps, step.batch, state.window,
                step.window_table,
            )
        )  # fmt: skip

    def start(self, streams: Tensor, following: Tensor) -> Tensor:
        """X0, from streams `[rows, streams, size]` and the tokens after these rows."""
        rows, _, size = streams.shape
        e = embed(following, self.model.embedding, 1, self.model.dtype).view(rows, size)
        e = linear(rms_norm(e, self.enorm, self.eps), self.e_proj)
        h = rms_norm(streams.reshape(-1, size), self.hnorm, self.eps)
        return e.unsqueeze(1) + linear(h, self.h_proj).view(streams.shape)


class DSpark:
    """Draft blocks that guess several tokens together.

        m[p] = outputs of some backbone blocks at p, averaged over the streams, concatenated
        z[p] = RMS(W_main m[p])
        context key of stage i at p = rope_p(RMS(W_kv^i z[p]))                   every token
        rows at p + 1 ...: t_(p+1), then noise tokens, embedded, through all stages; each sees the
        window's context keys up to p and the keys of all these rows, later ones included
        h[j] = HeadMix(X[j]);  base[j] = W_head RMS(h[j])
        d[0] = t_(p+1);  logits of t_(p+2+j) = base[j] + M2 M1[d[j]];  d[j+1] drawn from them
        chance that d[j+1] is right if all before it are = sigmoid(w_c [h[j]; M1[d[j]]])

    Training fixed the number of rows, so all are computed even if fewer drafts are wanted.
    """

    def __init__(self, model: Transformer, table: Mapping[str, Weight]) -> None:
        config, shape, everything = model.config, model.config.dspark, Weights(table)
        if not 1 <= shape.block <= MOST_DRAFTS:
            raise CheckpointError(
                f"dspark_block_size is {shape.block}, expected 1 to {MOST_DRAFTS}"
            )
        if not 0 <= shape.noise_id < config.vocab_size:
            raise CheckpointError(
                f"dspark_noise_token_id is {shape.noise_id}, the vocabulary has {config.vocab_size}"
            )
        if not shape.targets or not all(0 <= t < config.num_layers for t in shape.targets):
            raise CheckpointError(
                f"dspark_target_layer_ids is {list(shape.targets)}, the model has "
                f"{config.num_layers} layers"
            )
        stages = [everything.under(f"mtp.{i}.") for i in range(config.num_draft_layers)]
        first, last = stages[0], stages[-1]
        self.model, self.eps, self.shape = model, config.rms_norm_eps, shape
        self.window = config.sliding_window
        self.main_proj = first.take("main_proj.weight")
        self.main_norm = first.tensor("main_norm.weight")
        self.stages = [Block(config, 0, one, RankLayout(), hashed=False) for one in stages]
        self.head_site, self.head = mix_site(config, last, "hc_head", "norm"), draft_head(model)
        self.markov_in = last.tensor("markov_head.markov_w1.weight")
        self.markov_out = last.take("markov_head.markov_w2.weight")
        self.confidence: Tensor | None = None
        if CONFIDENCE in last:
            self.confidence = last.tensor(CONFIDENCE).float().flatten()
        if everything.left:
            raise CheckpointError(f"unused weights: {sorted(everything.left)[:5]}")

    def keys(self, taps: Tensor, step: StepInputs, states: Sequence[SwaState]) -> None:
        """Store the context keys; `taps` `[rows, targets, size]`."""
        z = rms_norm(linear(taps.flatten(1), self.main_proj), self.main_norm, self.eps)
        matrices = [stage.attention.wkv for stage in self.stages]
        every = linear_multi(z, matrices, [z.dtype] * len(matrices))
        for stage, kv, state in zip(self.stages, every, states, strict=True):
            self._store(stage, kv, step.batch, step.window_table, state)

    def __call__(
        self, anchors: Tensor, positions: Tensor, slots: Tensor, table: Tensor,
        states: Sequence[SwaState],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Newest tokens `[sequences]` and the positions before them -> `[sequences, block, ...]`:
        fp32 logits without the Markov head's term, and the hidden rows, both for `after`."""
        count, block = anchors.shape[0], self.shape.block
        ids = torch.full((count, block), self.shape.noise_id, device=anchors.device)
        ids[:, 0] = anchors
        offsets = torch.arange(1, block + 1, device=anchors.device)
        own = (positions.unsqueeze(1) + offsets).flatten()
        last, slots = ((x.repeat_interleave(block)) for x in (positions + block, slots))
        rows, table = torch.arange(count * block, device=own.device), table.index_select(0, slots)
        # here every row is its own sequence: all rows of a block see the same keys
        batch = Ragged(own, rows, rows, own, own + 1, slots)
        seen = Ragged(last, rows, rows, last, last + 1, slots)
        config, ids = self.model.config, ids.flatten()
        residual = Residual(embed(ids, self.model.embedding, config.hc_mult, self.model.dtype))
        for stage, state in zip(self.stages, states, strict=True):
            residual = self._attend(stage, residual, batch, seen, table, state)
            residual = stage.ffn(residual, stage.ffn_site, ids, SingleRank())
        hidden = self._collapse(finish(residual))
        normed = rms_norm(hidden.to(self.model.dtype), self.head_site.norm, self.eps)
        base = linear(normed, self.head, torch.float32)
        return base.view(count, block, -1), hidden.view(count, block, -1)

    def after(self, base: Tensor, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """One row per sequence and the token before it -> logits, and the chance that a token
        drawn from them is right (1 if unknown). A token of -1 was drawn from NaN; while kernels are
        only compiled, tokens are whatever memory held."""
        embedded = self.markov_in.index_select(0, token_ids.clamp(0, len(self.markov_in) - 1))
        logits = base + linear(embedded, self.markov_out, torch.float32)
        if self.confidence is None:
            return logits, torch.ones_like(logits[:, 0])
        row = torch.cat((hidden, embedded.float()), dim=1)
        return logits, torch.sigmoid((row * self.confidence).sum(1))

    def _attend(
        self, stage: Block, residual: Residual, batch: Ragged, seen: Ragged, table: Tensor,
        state: SwaState,
    ) -> Residual:  # fmt: skip
        """Like `Block.attend`, but each row sees the keys of the whole block. Attention undoes the
        rotation at the last visible position, so the difference to the row's own is put back."""
        a, by = stage.attention, stage.attention.inputs(residual.streams.dtype)
        mixed = SingleRank().mix_linear(residual, stage.attention_site, by)
        streams, post, comb, (latent, kv) = mixed
        self._store(stage, kv, batch, table, state)
        q = linear(rms_norm(latent, a.q_norm, self.eps), a.wq_b)
        q = q.view(-1, a.num_heads, a.head_dim)
        q = query_prepare(q, batch.positions, a.frequencies, self.eps)
        to = Visible(
            a.sink, state.window, table, None, seen, self.window + self.shape.block, a.frequencies
        )
        out = rope(attention(q, to), seen.positions - batch.positions, a.frequencies, inverse=False)
        y = SingleRank().project(out.view(len(out), a.num_groups, -1), a.wo_a, a.wo_b)
        return Residual(streams, Update(y, post, comb))

    def _store(
        self, stage: Block, kv: Tensor, batch: Ragged, table: Tensor, state: SwaState
    ) -> None:
        a = stage.attention
        kv_store(
            WindowKey(kv, a.kv_norm, a.frequencies, self.eps, batch, state.window, table)
        )  # fmt: skip

    def _collapse(self, streams: Tensor) -> Tensor:
        """HeadMix without its norm, fp32: the chances read it unnormalised."""
        site, flat = self.head_site, streams.flatten(1).float()
        inverse_rms = flat.square().mean(-1, keepdim=True).add(site.eps).rsqrt()
        logits = flat @ site.fn.T * inverse_rms * site.row_scale + site.base
        weights = torch.sigmoid(logits) + site.hc_eps
        return (streams.float() * weights.unsqueeze(-1)).sum(1)


def draft_head(model: Transformer) -> Weight:
    """The head that drafts are drawn from."""
    head = model.head
    if not isinstance(head, Tensor) or not head.is_cuda or head.shape[1] % NVFP4_GROUP:
        return head
    return nvfp4_head(head)


def nvfp4_head(head: Tensor) -> Weight:
    """A plain matrix in NVFP4, as kernels read it; some rows at a time, for their memory."""
    largest = torch.stack([rows.abs().amax() for rows in torch.split(head, HEAD_ROWS)]).amax()
    if not torch.isfinite(largest):
        return head
    scale = nvfp4.global_scale(largest)
    tiled = [
        tile_nvfp4(Nvfp4Tensor(*nvfp4.quantize(rows, global_=scale)[:2], scale.view(1)))
        for rows in torch.split(head, HEAD_ROWS)
    ]
    packed, scales = (torch.cat([getattr(t, n) for t in tiled]) for n in ("packed", "scale"))
    return replace(tiled[0], packed=packed, scale=scales, rows=len(head))


DraftModel = MtpBlock | DSpark


def draft_model(model: Transformer, table: Mapping[str, Weight]) -> DraftModel:
    """The checkpoint's draft blocks; `table`: their parameters under canonical names."""
    return (DSpark if model.config.draft_kind == "dspark" else MtpBlock)(model, table)
