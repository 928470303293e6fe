"""One exception type for each kind of fault; every message says what, where, and what would be accepted."""


class DeepInferError(Exception):
    """Base of all errors that a user of deepinfer can cause and mend."""


class ConfigError(DeepInferError):
    """A model or engine configuration, or an environment variable, breaks a rule."""


class CheckpointError(DeepInferError):
    """A checkpoint is missing, incomplete, misshapen or does not fit its tokenizer."""


class RequestError(DeepInferError):
    """A request (prompt, image, sampling parameters) cannot be served as it stands; other requests are unaffected."""


class EngineError(DeepInferError):
    """A step of the engine failed under a request that was good; the requests outside that step are unaffected."""


class RankError(EngineError):
    """A rank failed, and all that share its work have ended with it; the engine cannot be used any more."""
