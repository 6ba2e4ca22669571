"""From logits to tokens: the settings of a batch as tensors, and what came out."""

from dsv4.sampling.sampler import Draw, sample_batch

__all__ = ["Draw", "sample_batch"]
