"""One class per layer kind: the tensors of its state."""

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
