"""The places where the residual streams are collapsed, from their stored parameters."""

from torch import Tensor

from dsv4.config import ModelConfig
from dsv4.model.weights import Weights
from dsv4.ops.mhc.mix import MixSite, mhc_boundary, mhc_pre
from dsv4.ops.op import Arguments


def collapse(mix: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> updated streams, normalised row, post, comb; without a `y` there is nothing to update."""
    if "y" in mix:
        return mhc_boundary(**mix)
    return (mix["streams"], *mhc_pre(**mix))


def mix_site(config: ModelConfig, weights: Weights, mix: str, norm: str) -> MixSite:
    """`mix` is the prefix of fn, base and scale; `norm` the norm that follows the collapse."""
    return MixSite(
        fn=weights.tensor(f"{mix}_fn"),
        base=weights.tensor(f"{mix}_base"),
        scale=weights.tensor(f"{mix}_scale"),
        norm=weights.tensor(f"{norm}.weight"),
        eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
        sinkhorn_iters=config.hc_sinkhorn_iters,
    )
