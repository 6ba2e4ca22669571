"""dsv4: an inference engine for DeepSeek-V4. Start reading at `dsv4/engine.py`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.config import EngineConfig, EngineOptions, ModelConfig
    from dsv4.engine import Engine
    from dsv4.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        Dsv4Error,
        KernelError,
        NumericsError,
        OptionError,
        RankError,
        RequestError,
        StallError,
    )
    from dsv4.request import (
        Completion,
        FinishReason,
        Guide,
        Output,
        Request,
        SamplingParams,
        Stats,
        TokenLogprobs,
    )

__all__ = [
    "CapacityError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Dsv4Error",
    "Engine",
    "EngineConfig",
    "EngineOptions",
    "FinishReason",
    "Guide",
    "KernelError",
    "ModelConfig",
    "NumericsError",
    "OptionError",
    "Output",
    "RankError",
    "Request",
    "RequestError",
    "SamplingParams",
    "StallError",
    "Stats",
    "TokenLogprobs",
]
__version__ = "0.2.0.dev0"  # the only place that says it; pyproject.toml reads it here

if not TYPE_CHECKING:  # type checkers see the imports above, and that there is nothing else

    def __getattr__(name: str) -> object:
        # Imported on first use, so that `dsv4 --help` and torch-free modules start fast.
        if name in __all__:
            from importlib import import_module

            for home in ("errors", "request", "config", "engine"):  # torch comes with the last
                module = import_module(f"dsv4.{home}")
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
