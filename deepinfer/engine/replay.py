"""Bounded replay: from which prompt position on the decoder half of the model runs."""

from dataclasses import dataclass

from deepinfer.config.envs import Environment
from deepinfer.config.model import ModelConfig
from deepinfer.core.errors import ConfigError

LONGEST_ROLLBACK = 12
"""Tokens that speculation may take back; their windows must still be whole, so a replayed suffix is longer by these."""


@dataclass(frozen=True)
class ReplayPolicy:
    """The decoder half reads only the last `keep` prompt tokens.

    mode: "compact" leaves the earlier tokens out of the decoder half, "mask" runs them but hides them from its windows
    (same results, for checking), "off" runs the decoder half over the whole prompt.
    """

    mode: str
    keep: int

    @classmethod
    def choose(cls, environment: Environment, config: ModelConfig) -> "ReplayPolicy":
        """Return what the environment asks for; ConfigError for a suffix too short for the model's window."""
        least = config.sliding_window + LONGEST_ROLLBACK
        keep = least if environment.replay_keep_tokens is None else environment.replay_keep_tokens
        if keep < least:
            raise ConfigError(
                f"DEEPINFER_YOCO_PREFILL_KEEP_TOKENS is {keep}; this model takes at least {least} "
                f"(its window of {config.sliding_window} and {LONGEST_ROLLBACK} tokens of rollback)"
            )
        return cls(environment.replay_mode, keep)

    def start(self, prompt_length: int) -> int:
        """Return the first prompt position that the decoder half runs from; it stays for the life of the request."""
        return 0 if self.mode == "off" else max(0, prompt_length - self.keep)
