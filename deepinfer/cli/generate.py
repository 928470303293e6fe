"""`deepinfer generate`: answers prompts from the command line, a file or standard input."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from deepinfer.cli.answers import as_json, show
from deepinfer.cli.prompts import STDIN, read_prompts
from deepinfer.cli.sampling import add_sampling, sampling_params
from deepinfer.cli.units import parse_bytes
from deepinfer.config.engine import DRAFT_RULES, DTYPES, TABLE_PLACES, EngineConfig
from deepinfer.core.errors import RequestError
from deepinfer.core.outputs import RequestOutput

_ABOUT = "continues prompts, or answers them as chats"
_MODEL_HELP = "a checkpoint's directory or name (default: DEEPINFER_HF_MODEL_DIR, else the bundled checkpoint)"
_EPILOG = """examples:
  deepinfer generate "The following functions return" "A table is"
  deepinfer generate --chat "What is 47 + 38?"
  deepinfer generate --chat --no-thinking --image examples/number.png "What number is in the image?"
  deepinfer generate --file prompts.txt --json > answers.jsonl
  echo "What is 83 - 47?" | deepinfer generate --chat --temperature 0.7 --seed 1"""


def add_command(commands: Any) -> None:
    """Add `generate` to the subcommands."""
    parser = commands.add_parser(
        "generate",
        help=_ABOUT,
        description=f"{_ABOUT.capitalize()}. Answers go to standard output, progress and statistics to standard error.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a prompt (default: those on standard input)")
    parser.add_argument("--file", metavar="FILE", help=f"a prompt a line, after those given; {STDIN}: standard input")
    parser.add_argument("--model", help=_MODEL_HELP)
    parser.add_argument("--chat", action="store_true", help="take each prompt as what a user says in a chat")
    parser.add_argument(
        "--image", action="append", default=[], help="with --chat: show this file or URL before each prompt; repeatable"
    )
    parser.add_argument("--no-thinking", action="store_true", help="with --chat: answer without reasoning first")
    parser.add_argument("--json", action="store_true", help="write each completion as a line of JSON")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar")
    add_sampling(parser.add_argument_group("sampling"))
    _add_settings(parser.add_argument_group("engine"))
    parser.set_defaults(run=run)


def _add_settings(group: Any) -> None:
    """Options whose names are those of `EngineConfig`; one that is not given leaves the default there."""

    def setting(flag: str, name: str, about: str, **options: Any) -> None:
        group.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=about, **options)

    setting("--max-requests", "max_num_seqs", "most requests at once (32)", type=int, metavar="N")
    setting("--max-rows", "max_num_batched_tokens", "most rows of a step (4096)", type=int, metavar="N")
    setting("--chunk", "max_chunk", "most prompt tokens of a request in a step (no limit)", type=int, metavar="N")
    setting("--page-size", "page_size", "tokens of a page of KV, even (64)", type=int, metavar="N")
    setting("--cache", "cache_bytes", "memory for caches (a quarter of what is free)", type=parse_bytes, metavar="SIZE")
    setting("--host-cache", "host_cache_bytes", "memory for evicted pages (none)", type=parse_bytes, metavar="SIZE")
    setting("--disk-cache", "disk_cache", "directory for evicted pages, kept between runs (none)", metavar="DIR")
    setting("--disk-cache-size", "disk_cache_bytes", "its budget (1GiB)", type=parse_bytes, metavar="SIZE")
    setting("--no-prefix-cache", "prefix_cache", "share no equal beginnings of prompts", action="store_false")
    setting("--nextn", "nextn", "longest draft, 0 for none (DEEPINFER_USE_NEXTN_DECODE)", type=int, metavar="N")
    setting(
        "--varlen", "varlen", "verify only as many drafts as pay (DEEPINFER_ENABLE_MTP_VARLEN)", action="store_true"
    )
    setting("--draft-rule", "draft_rule", "how drafts of random requests are judged (equality)", choices=DRAFT_RULES)
    setting("--no-async", "asynchronous", "plan a step only when the one before it is done", action="store_false")
    setting("--encoder-patches", "max_encoder_patches", "most image patches of a step (4096)", type=int, metavar="N")
    setting(
        "--image-cache", "image_cache_bytes", "memory for encoded images (512MiB)", type=parse_bytes, metavar="SIZE"
    )
    setting("--max-images", "max_images", "most images of a prompt (64)", type=int, metavar="N")
    setting("--max-image-size", "max_image_bytes", "largest image file (64MiB)", type=parse_bytes, metavar="SIZE")
    setting("--max-image-pixels", "max_image_pixels", "most pixels of an image (89478485)", type=int, metavar="N")
    setting("--image-host", "image_url_hosts", "fetch images from it, too; repeatable", action="append", metavar="HOST")
    setting("--image-seconds", "image_url_seconds", "most time for an image from the web (10)", type=float, metavar="T")
    setting("--ep", "ep", "ranks that share the routed experts (1)", type=int, metavar="N")
    setting("--dp", "dp", "ranks with requests of their own (as many as --ep)", type=int, metavar="N")
    setting("--engram-tables", "engram_tables", "where Engram tables lie (device)", choices=TABLE_PLACES)
    setting("--dtype", "dtype", "of weights and activations (float32 on a CPU, bfloat16 on a GPU)", choices=DTYPES)


def run(arguments: argparse.Namespace) -> int:
    """Answer; 2 if a prompt could not be served. Raises DeepInferError for what makes the whole run impossible."""
    from deepinfer.llm import LLM  # here: with it comes all of the engine, which no other command needs

    for option in ("no_thinking", "image"):
        if getattr(arguments, option) and not arguments.chat:
            raise RequestError(f"--{option.replace('_', '-')} is for chats; pass --chat with it")
    prompts = read_prompts(arguments.prompts, arguments.file)
    params = sampling_params(arguments)
    known = [field.name for field in fields(EngineConfig)]
    llm = LLM(arguments.model, **{name: value for name, value in vars(arguments).items() if name in known})
    progress = not arguments.no_progress
    if arguments.chat:
        chats = [_chat(prompt, arguments.image) for prompt in prompts]
        thinking = not arguments.no_thinking
        outputs = llm.chat(chats, params, thinking=thinking, use_tqdm=progress, on_error="return")
    else:
        outputs = llm.generate(prompts, params, use_tqdm=progress, on_error="return")
    for prompt, output in zip(prompts, outputs, strict=True):
        print(as_json(prompt, output) if arguments.json else show(prompt, output, len(outputs)))
    sys.stdout.flush()
    print(*llm.statistics.lines(), sep="\n", file=sys.stderr)
    llm.close()
    return _report(outputs)


def _chat(prompt: str, images: Sequence[str]) -> list[dict[str, Any]]:
    """What a user says, and what they show before it."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": prompt}] if parts else prompt}]


def _report(outputs: list[RequestOutput]) -> int:
    """A line for every prompt that could not be served."""
    failed = [output for output in outputs if output.error is not None]
    for output in failed:
        print(f"deepinfer generate: error: prompt {output.index + 1}: {output.error}", file=sys.stderr)
    return 2 if failed else 0
