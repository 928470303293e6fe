"""What a step may hold and how the scheduler chooses."""

from dataclasses import dataclass

from deepinfer.core.errors import ConfigError


@dataclass(frozen=True)
class SchedulerLimits:
    """Settings of one scheduler; ConfigError for values that could leave a request without its turn.

    max_num_seqs: most requests that run at once (slots).
    max_num_batched_tokens: most rows of one step. Every running request can decode in each step, so it is at least
        `max_num_seqs`.
    max_chunk: most prompt rows of one request in one step; None: whatever the step has room for.
    ageing_steps: waiting that many steps makes up for one level of priority.
    prefix_hits: whether a request may start from pages that others wrote (not in batch-invariant mode).
    drafts: most drafts verified behind a newest token; 0: no speculation.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 8192
    max_chunk: int | None = None
    ageing_steps: int = 1024
    prefix_hits: bool = True
    drafts: int = 0

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_chunk", "ageing_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"SchedulerLimits: {name} is {value}; it takes a whole number >= 1")
        if self.drafts < 0:
            raise ConfigError(f"SchedulerLimits: drafts is {self.drafts}; it takes a whole number >= 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"SchedulerLimits: max_num_batched_tokens is {self.max_num_batched_tokens}; it takes at least "
                f"max_num_seqs, {self.max_num_seqs}, because each running request needs a row in every step"
            )
