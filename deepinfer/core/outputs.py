"""What a finished request returns."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from deepinfer.core.errors import DeepInferError

if TYPE_CHECKING:  # the noun only carries these
    from deepinfer.text.reply import ParsedToolCall

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token that came, and those of the most probable ones in its place, by id, highest first.

    They are the model's own: at temperature 1, before biases, penalties, grammars and cut-offs.
    """

    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class CompletionOutput:
    """The generated part of a request.

    text: the decoded tokens, control tokens, the stop token and everything from a stop string on left out.
    token_ids: every generated token, those of the stop included.
    finish_reason: "stop" (a stop token or stop string came), "length" (`max_tokens`, or no more room) or "error" (see
        the output).
    reasoning, content, tool_calls: a chat's reply, parsed; None, None and empty for a plain prompt.
    index: which of the `n` completions it is.
    seq_seed: the seed of its draws: with it as the request's `seq_seed` the completion can be had again; None at
        temperature 0, where nothing is drawn.
    stop_reason: the stop string, or the id from `stop_token_ids`, that ended it; None for all else, the model's own
        end-of-sequence token among it.
    logprobs: of each of `token_ids`; None unless asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reasoning: str | None = None
    content: str | None = None
    tool_calls: tuple["ParsedToolCall", ...] = ()
    index: int = 0
    seq_seed: int | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Log-probability of all generated tokens together; None unless log-probabilities were asked for."""
        return None if self.logprobs is None else sum(one.logprob for one in self.logprobs)

    @property
    def num_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids)


@dataclass(frozen=True)
class RequestOutput:
    """One request and its completions; outputs stand in the order in which the prompts were given.

    prompt: the text it came from; None for token ids, chats and requests that could not run.
    prompt_token_ids: what the model read, image tokens included; empty if the request could not run.
    outputs: the completions, `n` of them.
    error: why the request did not run, or did not end well; None if it did.
    cached_tokens: tokens of the prompt whose global KV an earlier request had left.
    miss: why no more of the prompt was cached; None if all of it was.
    prompt_logprobs: of each of `prompt_token_ids`, None for the first and for tokens of images; None unless asked for.
    unenforced: JSON paths of what a schema asked for, of the output or of a tool's arguments, and no grammar enforced.
    """

    index: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    error: DeepInferError | None = None
    cached_tokens: int = 0
    miss: str | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    unenforced: tuple[str, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the model read before the first generated one."""
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The generated tokens of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first completion ended."""
        return self.outputs[0].finish_reason

    @classmethod
    def failed(cls, index: int, error: DeepInferError) -> "RequestOutput":
        """Return the output of a request that could not run."""
        return cls(index, None, (), (CompletionOutput("", (), "error"),), error)
