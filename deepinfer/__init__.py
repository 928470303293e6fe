"""DeepInfer: an independent, readable inference engine for DeepSeek-V4.1-Flash."""

from typing import TYPE_CHECKING, Any

from deepinfer.core.errors import CheckpointError, ConfigError, DeepInferError, EngineError, RequestError
from deepinfer.core.outputs import CompletionOutput, RequestOutput
from deepinfer.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.llm import LLM

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "ConfigError",
    "DeepInferError",
    "EngineError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `LLM`, and with it torch, only when it is asked for: the small modules stay quick to import."""
    if name == "LLM":
        from deepinfer.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
