"""Sampling settings of a row, and guided output."""

from dsv4.sampling.compiler import Compiling
from dsv4.sampling.guided import NO_TEXT, Guides, Matcher
from dsv4.sampling.late_ends import LateEnds
from dsv4.sampling.row import SamplingRow

__all__ = ["NO_TEXT", "Compiling", "Guides", "LateEnds", "Matcher", "SamplingRow"]
