"""From logits to tokens: the settings of a batch as tensors, and what came out."""

from dsv4.sampling.guided import Compiling, Guides, Matcher
from dsv4.sampling.sampler import Draw, sample_batch, sample_inputs

__all__ = ["Compiling", "Draw", "Guides", "Matcher", "sample_batch", "sample_inputs"]
