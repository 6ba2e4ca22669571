"""How answers are drawn: settings of a row, and guides."""

from dsv4.sampling.guided import Compiling, Guides, Matcher
from dsv4.sampling.sampler import Draw

__all__ = ["Compiling", "Draw", "Guides", "Matcher"]
