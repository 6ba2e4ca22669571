"""dsv4: an inference engine for DeepSeek-V4. Start reading at `dsv4/engine.py`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsv4.config import EngineConfig, ModelConfig
    from dsv4.engine import Engine
    from dsv4.request import SamplingParams

__all__ = ["Engine", "EngineConfig", "ModelConfig", "SamplingParams"]
__version__ = "0.1.0"

_HOMES = {
    "Engine": "dsv4.engine",
    "EngineConfig": "dsv4.config",
    "ModelConfig": "dsv4.config",
    "SamplingParams": "dsv4.request",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `dsv4 --help` and torch-free modules start fast.
    if name not in _HOMES:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
