"""The one exception of the harness beside the engine's own."""

from deepinfer.core.errors import DeepInferError


class EvalError(DeepInferError):
    """A data set, a run's directory or a judge cannot be used; the message says what, where and what would do."""
