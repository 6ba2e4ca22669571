"""One class per layer kind: the tensors of its state.

`pools` names its paged tensors. `carried` is the part of a slot that is still needed at a 128-token
boundary, `[slots, rows, width]` each, which a cached prefix stores with its pages. `kept` is that
storage, `[prefixes, rows, width]`, in the same order.
"""

from dsv4.cache.kinds.csa import CsaState
from dsv4.cache.kinds.hca import HcaState
from dsv4.cache.kinds.swa import SwaState
from dsv4.config import LayerKind

LayerState = SwaState | CsaState | HcaState

KINDS: dict[LayerKind, type[SwaState] | type[CsaState] | type[HcaState]] = {
    "swa": SwaState,
    "csa": CsaState,
    "hca": HcaState,
}

__all__ = ["KINDS", "CsaState", "HcaState", "LayerState", "SwaState"]
