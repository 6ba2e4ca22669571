"""Sampling settings of a row, and guided output."""

from dsv4.sampling.guide_compiler import PendingGuide
from dsv4.sampling.guided import NO_TEXT, Guides, Matcher
from dsv4.sampling.min_tokens import MinTokens
from dsv4.sampling.row import SamplingRow

__all__ = ["NO_TEXT", "Guides", "Matcher", "MinTokens", "PendingGuide", "SamplingRow"]
