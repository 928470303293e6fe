"""From an ended job to what its caller gets."""

from dataclasses import replace

from deepinfer.core.errors import DeepInferError
from deepinfer.core.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.scheduler import Job
from deepinfer.text.chat import ChatFormat
from deepinfer.text.tokenizer import Tokenizer


def request_output(
    job: Job, error: DeepInferError | None, tokenizer: Tokenizer, chat_format: ChatFormat
) -> RequestOutput:
    """Decode, and for a chat parse, what `job` generated; it must have ended."""
    sequence = job.sequence
    request, reason = sequence.request, sequence.finish_reason
    if reason is None:
        raise ValueError(f"request {request.index} is still running")
    shown = sequence.generated[:-1] if reason == "stop" else sequence.generated
    completion = CompletionOutput(tokenizer.decode(shown), tuple(sequence.generated), reason)
    if request.reply is not None:
        parsed = chat_format.parse(shown, request.reply)
        completion = replace(
            completion, reasoning=parsed.reasoning, content=parsed.content, tool_calls=tuple(parsed.tool_calls)
        )
    outputs = (completion,)
    return RequestOutput(request.index, request.prompt, request.token_ids, outputs, error, job.hit_tokens, job.miss)
