"""The sites where residual streams are collapsed, built from their stored parameters."""

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.weights import Weights
from dsv4.ops.mhc.mix import MixSite, Residual, Update, mhc_head, mhc_update


def collapse_head(residual: Residual, site: MixSite, rows: Tensor | None) -> Tensor:
    """After the last block: the head's input row, for all tokens or those in `rows`."""
    streams, update = residual.streams, residual.update
    assert update is not None, "a model has a block at least"
    if rows is not None:
        streams = streams[rows]
        update = Update(update.y[rows], update.post[rows], update.comb[rows])
    return mhc_head(streams, update, site)


def finish(residual: Residual) -> Tensor:
    """The streams with their last update, as the next pipeline stage takes them."""
    assert residual.update is not None, "a stage has a block at least"
    return mhc_update(residual.streams, residual.update)


def mix_site(config: ModelConfig, weights: Weights, mix: str, norm: str) -> MixSite:
    """`mix` is the name prefix of fn, base and scale; `norm` is the norm after the collapse."""
    return MixSite(
        fn=weights.tensor(f"{mix}_fn"),
        base=weights.tensor(f"{mix}_base"),
        scale=weights.tensor(f"{mix}_scale"),
        norm=weights.tensor(f"{norm}.weight"),
        eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
        sinkhorn_iters=config.hc_sinkhorn_iters,
    )
