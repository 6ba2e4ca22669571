"""The MTP block of a checkpoint: a guess at the token after the next one.

Row p takes the final streams of token p, all of them, and the id of token p + 1:

    X0[s] = W_e RMS(Emb[t_(p+1)]) + W_h RMS(X[s])          each stream on its own
    X1    = Block(X0)        window only, plain rope at position p, router with a bias, own keys
    logits of t_(p+2) = W_head RMS(HeadMix(X1))            embedding and head are the model's

A second guess takes X1 in place of X and the first guess in place of the token, at p + 1. The block
attends to its own keys of the last tokens, so every token of a sequence has to pass `keys`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4.cache.kinds import SwaState
from dsv4.errors import CheckpointError
from dsv4.formats.quantized import Weight
from dsv4.model.exchange import SingleRank
from dsv4.model.inputs import StepInputs
from dsv4.model.mhc import collapse_head, finish, mix_site
from dsv4.model.transformer import Block, Transformer
from dsv4.model.weights import Weights
from dsv4.ops.gemm.embed import embed
from dsv4.ops.gemm.linear import linear
from dsv4.ops.kv.kv_store import WindowKey, kv_store
from dsv4.ops.mhc.mix import Residual
from dsv4.ops.norm.rms_norm import rms_norm
from dsv4.parallel.layout import RankLayout


class MtpBlock:
    def __init__(self, model: Transformer, table: Mapping[str, Weight]) -> None:
        """`table`: the block's parameters under their canonical names."""
        config, everything = model.config, Weights(table)
        weights = everything.under("mtp.0.")
        self.model, self.eps, self.num_streams = model, config.rms_norm_eps, config.hc_mult
        self.enorm, self.hnorm = weights.tensor("enorm.weight"), weights.tensor("hnorm.weight")
        self.e_proj, self.h_proj = weights.take("e_proj.weight"), weights.take("h_proj.weight")
        self.block = Block(config, 0, weights, RankLayout(), hashed=False)
        self.head_site = mix_site(config, weights, "hc_head", "norm")
        if everything.left:
            raise CheckpointError(f"unused weights: {sorted(everything.left)[:5]}")

    def __call__(
        self, streams: Tensor, following: Tensor, step: StepInputs, state: SwaState
    ) -> tuple[Tensor, Tensor]:
        """Streams `[rows, streams, size]` and the tokens that follow -> fp32 logits of the tokens
        after these, and the block's own streams; its keys are stored at the rows' positions."""
        start = Residual(self._start(streams, following))
        residual = self.block(start, step, state, SingleRank())
        hidden = collapse_head(residual, self.head_site, None)
        return linear(hidden, self.model.head, torch.float32), finish(residual)

    def keys(self, streams: Tensor, following: Tensor, step: StepInputs, state: SwaState) -> None:
        """Only store the keys."""
        attention, start = self.block.attention, Residual(self._start(streams, following))
        by = ([attention.wkv], [streams.dtype])
        *_, (kv,) = SingleRank().mix_linear(start, self.block.attention_site, by)
        kv_store(
            WindowKey(
                kv, attention.kv_norm, attention.frequencies, self.eps, step.batch, state.window,
                step.window_table,
            )
        )  # fmt: skip

    def _start(self, streams: Tensor, following: Tensor) -> Tensor:
        rows, _, size = streams.shape
        e = embed(following, self.model.embedding, 1, self.model.dtype).view(rows, size)
        e = linear(rms_norm(e, self.enorm, self.eps), self.e_proj)
        h = rms_norm(streams.reshape(-1, size), self.hnorm, self.eps)
        return e.unsqueeze(1) + linear(h, self.h_proj).view(streams.shape)
