"""Finished requests as text for people and as JSON for programs."""

import json

from deepinfer.core.outputs import RequestOutput

_INDENT = "  "


def show(prompt: str, output: RequestOutput, count: int) -> str:
    """The prompt, what the model said, and how many tokens that took, as several lines."""
    lines = [f"[{output.index + 1}/{count}] {_printable(prompt)}"]
    if output.error is not None:
        return "\n".join([*lines, f"{_INDENT}error: {output.error}"])
    completion = output.outputs[0]
    if completion.reasoning:
        lines.append(_indented("thinking: " + completion.reasoning))
    lines.append(_indented(completion.text if completion.content is None else completion.content))
    counts = f"{output.num_prompt_tokens} + {completion.num_tokens} tokens"
    cached = f", {output.cached_tokens} cached" if output.cached_tokens else ""
    return "\n".join([*lines, f"{_INDENT}({counts}{cached}, {completion.finish_reason})"])


def as_json(prompt: str, output: RequestOutput) -> str:
    """One line of JSON, in ASCII, with everything that is known of the request."""
    completion = output.outputs[0]
    record = {
        "index": output.index,
        "prompt": prompt,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "content": completion.content,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": completion.num_tokens,
        "cached_tokens": output.cached_tokens,
        "miss": output.miss,
        "error": None if output.error is None else str(output.error),
    }
    return json.dumps(record)


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in _printable(text).strip("\n").split("\n"))


def _printable(text: str) -> str:
    """Keep whatever a model may say from steering the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)
