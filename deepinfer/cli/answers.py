"""Finished requests as text for people and as JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

from deepinfer.core.outputs import CompletionOutput, RequestOutput, TokenLogprobs

_INDENT = "  "


def show(prompt: str, output: RequestOutput, count: int) -> str:
    """The prompt, what the model said, and how many tokens that took, as several lines."""
    lines = [f"[{output.index + 1}/{count}] {_printable(prompt)}"]
    if output.error is not None:
        return "\n".join([*lines, f"{_INDENT}error: {output.error}"])
    for completion in output.outputs:
        number = f"{completion.index + 1}. " if len(output.outputs) > 1 else ""
        if completion.reasoning:
            lines.append(_indented(f"{number}thinking: {completion.reasoning}"))
        lines.append(_indented(number + (completion.text if completion.content is None else completion.content)))
        lines.append(f"{_INDENT}({_facts(output, completion)})")
    return "\n".join(lines)


def as_json(prompt: str, output: RequestOutput) -> str:
    """A line of JSON a completion, in ASCII, with everything that is known of it."""
    return "\n".join(json.dumps(_record(prompt, output, completion)) for completion in output.outputs)


def _facts(output: RequestOutput, completion: CompletionOutput) -> str:
    counts = f"{output.num_prompt_tokens} + {completion.num_tokens} tokens"
    cached = f", {output.cached_tokens} cached" if output.cached_tokens else ""
    stop = "" if completion.stop_reason is None else f" {completion.stop_reason!r}"
    seed = "" if completion.seq_seed is None else f", seed {completion.seq_seed}"
    return f"{counts}{cached}, {completion.finish_reason}{stop}{seed}"


def _record(prompt: str, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "completion": completion.index,
        "prompt": prompt,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "content": completion.content,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seq_seed": completion.seq_seed,
        "logprobs": _logprobs(completion.logprobs),
        "prompt_logprobs": _logprobs(output.prompt_logprobs),
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": completion.num_tokens,
        "cached_tokens": output.cached_tokens,
        "miss": output.miss,
        "error": None if output.error is None else str(output.error),
    }


def _logprobs(found: Sequence[TokenLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    if found is None:
        return None
    return [None if one is None else {"logprob": one.logprob, "top": one.top} for one in found]


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line for line in _printable(text).strip("\n").split("\n"))


def _printable(text: str) -> str:
    """Keep whatever a model may say from steering the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)
