"""From ended jobs to what their caller gets."""

from dataclasses import replace

from deepinfer.core.errors import DeepInferError, EngineError
from deepinfer.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from deepinfer.core.request import TEXT
from deepinfer.engine.scheduler import Job
from deepinfer.text.chat import ChatFormat
from deepinfer.text.tokenizer import Tokenizer


def completion_output(job: Job, tokenizer: Tokenizer, chat_format: ChatFormat) -> CompletionOutput:
    """Decode, and for a chat parse, what `job` generated; it must have ended."""
    sequence = job.sequence
    request, reason, stops = sequence.request, sequence.finish_reason, sequence.stops
    if reason is None:
        raise ValueError(f"request {request.index} is still running")
    stopped = stops is not None and stops.matched is not None
    shown = sequence.generated[:-1] if reason == "stop" and not stopped else sequence.generated
    completion = CompletionOutput(
        text=tokenizer.decode(shown),
        token_ids=tuple(sequence.generated),
        finish_reason=reason,
        index=request.completion,
        seq_seed=request.seed if request.params.temperature else None,
        stop_reason=sequence.stop_reason,
        logprobs=None if request.params.logprobs is None else tuple(sequence.logprobs),
    )
    if request.reply is not None:
        parsed = chat_format.parse(shown, request.reply)
        completion = replace(
            completion, reasoning=parsed.reasoning, content=parsed.content, tool_calls=tuple(parsed.tool_calls)
        )
    if stops is None or not stopped:
        return completion
    if completion.content is None:
        return replace(completion, text=stops.text)
    content = _without_tail(completion.content, stops.tail)
    return replace(completion, text=_without_tail(completion.text, stops.tail), content=content)


class Answer:
    """Gathers the completions of one request as they end."""

    def __init__(self, completions: int) -> None:
        self._wanted = completions
        self._ended: dict[int, tuple[Job, CompletionOutput]] = {}

    @property
    def complete(self) -> bool:
        """Whether all completions have ended."""
        return len(self._ended) == self._wanted

    def take(self, job: Job, completion: CompletionOutput) -> None:
        """Add a completion and the job that made it."""
        self._ended[completion.index] = job, completion

    def output(self) -> RequestOutput:
        """What the caller gets; all completions must be there. The first one ran the prompt."""
        jobs, completions = zip(*(self._ended[index] for index in range(self._wanted)), strict=True)
        first = jobs[0]
        request = first.sequence.request
        errors = [job.error for job in jobs if job.error is not None]
        return RequestOutput(
            index=request.index,
            prompt=request.prompt,
            prompt_token_ids=request.token_ids,
            outputs=completions,
            error=_for_caller(errors[0]) if errors else None,
            cached_tokens=first.hit_tokens,
            miss=first.miss,
            prompt_logprobs=_prompt_logprobs(first),
            unenforced=() if request.grammar is None else request.grammar.unenforced,
        )


def _for_caller(error: Exception) -> DeepInferError:
    if isinstance(error, DeepInferError):
        return error
    return EngineError(f"a step of the model failed: {type(error).__name__}: {error}")


def _without_tail(text: str, tail: str) -> str:
    """`text` before `tail`, whose beginning a parser may have left out."""
    for begin in range(len(tail)):
        if text.endswith(tail[begin:]):
            return text[: len(text) - len(tail) + begin]
    return text


def _prompt_logprobs(job: Job) -> tuple[TokenLogprobs | None, ...] | None:
    request, found = job.sequence.request, job.sequence.prompt_logprobs
    if request.params.prompt_logprobs is None:
        return None
    # The marker that stands for every token of an image is never drawn, so it has no probability.
    return tuple(found.get(place) if kind == TEXT else None for place, kind in enumerate(request.token_types))
