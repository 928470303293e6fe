#!/usr/bin/env python3
"""Answers a handful of prompts, text, chats and a picture, with the bundled checkpoint or any other."""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer import LLM, DeepInferError, RequestOutput, SamplingParams
from deepinfer.config.envs import describe_environment

PROMPTS = Path(__file__).with_name("prompts.jsonl")
FORM = '{"prompt": text or token ids} or {"messages": [...], "thinking": true or false}'


class InputError(Exception):
    """A file named on the command line cannot be used; the message says which, where and what would do."""


@dataclass(frozen=True)
class Task:
    """One line of a prompts file: a prompt to continue, or a conversation to answer."""

    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    thinking: bool = True


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"environment variables:\n{describe_environment()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="checkpoint directory (default: DEEPINFER_HF_MODEL_DIR, else the bundled one)")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE", help=f"JSON Lines, each line {FORM}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answers to FILE as JSON, too")
    parser.add_argument("--max_tokens", type=int, default=160, help="most tokens an answer has (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (the default) is greedy")
    parser.add_argument("--seed", type=int, help="seed of the draws at a temperature above 0 (default: a fresh one)")
    parser.add_argument(
        "--no-async",
        dest="asynchronous",
        action="store_false",
        help="plan each step only when the one before it is done",
    )
    for name, about in (
        ("ep", "ranks that share the routed experts"),
        ("dp", "ranks with requests of their own"),
        ("cp", "ranks that share a prompt; must divide ep"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{about} (default: from the others, else 1)")
    parser.add_argument(
        "--check_structured_output",
        action="store_true",
        help="instead of prompts: check a regex, a JSON schema and an EBNF grammar, each by a validator of its own",
    )
    return parser.parse_args(arguments)


def read_tasks(path: Path) -> list[Task]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); --prompts takes a UTF-8 file of JSON Lines") from error
    tasks = [read_task(line, f"{path}, line {n}", path.parent) for n, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise InputError(f"{path} holds no prompts; each line is {FORM}")
    return tasks


def read_task(line: str, where: str, directory: Path) -> Task:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where} is not JSON ({error}); it takes {FORM}") from error
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise InputError(f"{where} has not exactly one of prompt and messages; it takes {FORM}")
    task = Task(**{key: value for key, value in fields.items() if key in ("prompt", "messages", "thinking")})
    if unknown := sorted(fields.keys() - vars(task).keys()):
        raise InputError(f"{where} has the unknown key {unknown[0]!r}; it takes {FORM}")
    if not isinstance(task.thinking, bool):
        raise InputError(f"{where}: thinking takes true or false, not {task.thinking!r}")
    if task.messages is None and not isinstance(task.prompt, str | list):
        raise InputError(f"{where}: prompt takes text or a list of token ids, not {task.prompt!r}")
    if task.messages is not None:
        check_messages(task.messages, where)
        place_images(task.messages, directory)
    return task


def check_messages(messages: Any, where: str) -> None:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise InputError(f'{where}: messages takes a list of objects such as {{"role": "user", "content": text}}')


def parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def place_images(messages: list[dict[str, Any]], directory: Path) -> None:
    """Take the paths of image files as relative to the prompts file."""
    for part in (part for message in messages for part in parts_of(message)):
        image = part.get("image")
        if isinstance(image, str) and not image.startswith("data:") and "://" not in image:
            part["image"] = str(directory / image)


def answer(llm: LLM, tasks: Sequence[Task], params: SamplingParams) -> list[RequestOutput]:
    """Run the prompts as one batch and the chats as another; a bad one gets its error, the others their answers."""
    outputs: dict[int, RequestOutput] = {}
    plain = [index for index, task in enumerate(tasks) if task.messages is None]
    chats = [index for index, task in enumerate(tasks) if task.messages is not None]
    if plain:
        done = llm.generate([tasks[index].prompt for index in plain], params, on_error="return")
        outputs |= zip(plain, done, strict=True)
    if chats:
        conversations = [tasks[index].messages or [] for index in chats]
        done = llm.chat(conversations, params, thinking=[tasks[index].thinking for index in chats], on_error="return")
        outputs |= zip(chats, done, strict=True)
    return [outputs[index] for index in range(len(tasks))]


def question(task: Task) -> str:
    if task.messages is None:
        return str(task.prompt)
    shown = [part.get("text") or f"[{part.get('type')}]" for part in parts_of(task.messages[-1])]
    return " ".join(shown) or str(task.messages[-1].get("content"))


def indented(text: str) -> str:
    """Align the lines of an answer, and keep whatever a model may say from steering the terminal."""
    shown = "".join(char if char.isprintable() or char == "\n" else " " for char in text.strip())
    return shown.replace("\n", "\n" + " " * 12)


def show(number: int, count: int, task: Task, output: RequestOutput) -> None:
    print(f"\n[{number}/{count}] {question(task)}")
    if output.error is not None:
        print(f"  error: {output.error}")
        return
    completion = output.outputs[0]
    if completion.reasoning:
        print(f"  thinking: {indented(completion.reasoning)}")
    text = completion.text if completion.content is None else completion.content
    print(f"  answer:   {indented(text)}")
    print(f"  ({output.num_prompt_tokens} + {completion.num_tokens} tokens, {completion.finish_reason})")


def as_json(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": completion.num_tokens,
        "text": completion.text,
        "reasoning": completion.reasoning,
        "content": completion.content,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "error": None if output.error is None else str(output.error),
    }


def check_structured_output(llm: LLM) -> int:
    """Print each answer with ok or what is wrong with it; 0 if all are ok, else 1."""
    missing = [name for name in ("jsonschema", "lark") if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the check needs {' and '.join(missing)}; ./build.sh test installs them")
    sys.path.insert(0, str(Path(__file__).parent))
    from _structured_output import FORMS, ask, check

    failed = 0
    for form, output in zip(FORMS, ask(llm), strict=True):
        wrong = check(form, output, llm.config.eos_token_id)
        failed += wrong is not None
        print(f"{next(iter(form.so_args)):12}{'ok' if wrong is None else f'WRONG: {wrong}'}: {output.text}")
    return 1 if failed else 0


def run(options: argparse.Namespace) -> int:
    layout = {"ep": options.ep, "dp": options.dp, "cp": 1 if options.cp is None else options.cp}
    if options.check_structured_output:
        return check_structured_output(LLM(options.model, asynchronous=options.asynchronous, **layout))
    tasks = read_tasks(options.prompts)
    if options.json is not None and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise InputError(f"{options.json} cannot be written; --json takes a file in a directory that exists")
    params = SamplingParams(options.temperature, options.max_tokens, seq_seed=options.seed)
    llm = LLM(options.model, asynchronous=options.asynchronous, **layout)
    print(f"model: {llm.directory}")
    begin = time.perf_counter()
    outputs = answer(llm, tasks, params)
    seconds = time.perf_counter() - begin
    for number, (task, output) in enumerate(zip(tasks, outputs, strict=True), 1):
        show(number, len(tasks), task, output)
    tokens = sum(len(output.token_ids) for output in outputs)
    failed = sum(output.error is not None for output in outputs)
    print(f"\n{len(outputs) - failed} answers in {seconds:.1f} s", *llm.statistics.lines(), sep="\n")
    if options.json is not None:
        record = {"model": str(llm.directory), "seconds": seconds, "tokens_per_second": tokens / seconds}
        record |= {"outputs": [as_json(output) for output in outputs]}
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    if failed:
        print(f"error: {failed} of {len(outputs)} prompts could not be served", file=sys.stderr)
    return 2 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return run(parse_arguments(arguments))
    except (DeepInferError, InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
