"""From a finished sequence to what its caller gets."""

from deepinfer.core.outputs import CompletionOutput, RequestOutput
from deepinfer.engine.sequence import Sequence
from deepinfer.text.chat import ChatFormat
from deepinfer.text.tokenizer import Tokenizer


def request_output(sequence: Sequence, tokenizer: Tokenizer, chat_format: ChatFormat) -> RequestOutput:
    """Decode, and for a chat parse, what `sequence` generated; it must have ended."""
    request, reason = sequence.request, sequence.finish_reason
    if reason is None:
        raise ValueError(f"request {request.index} is still running")
    shown = sequence.generated[:-1] if reason == "stop" else sequence.generated
    text = tokenizer.decode(shown)
    completion = CompletionOutput(text, tuple(sequence.generated), reason)
    if request.reply is not None:
        parsed = chat_format.parse(shown, request.reply)
        completion = CompletionOutput(
            text, tuple(sequence.generated), reason, parsed.reasoning, parsed.content, tuple(parsed.tool_calls)
        )
    return RequestOutput(request.index, request.prompt, request.token_ids, (completion,))
