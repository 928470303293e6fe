"""The environment variables of the project: one table, one function that reads it, and no other reader anywhere."""

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepinfer.core.errors import ConfigError

_PREFIXES = ("DEEPINFER_", "EVAL_JUDGE_")  # names with these are ours, so an unknown one is a mistake


@dataclass(frozen=True)
class Environment:
    """What the environment says, checked. Each attribute belongs to one row of `VARIABLES`."""

    accelerator: str
    model_dir: Path | None
    mtp_varlen: bool
    nextn: int
    replay_mode: str
    replay_keep_tokens: int | None
    batch_invariant: bool
    extra_experts: int | None
    nodes: int
    launcher: int | None
    launcher_on_node: int
    launchers_on_node: int
    meeting_host: str
    meeting_port: int
    agent_store: bool
    visible_devices: str | None
    judge_base_url: str | None
    judge_api_key: str | None = field(repr=False)
    judge_model: str | None
    ascend_launch_blocking: bool
    ascend_log_to_stdout: bool


@dataclass(frozen=True)
class Kind:
    """How a value is read: `parse` raises ValueError for what it does not take; `takes` says what it does."""

    takes: str
    parse: Callable[[str], Any]
    empty_is_unset: bool = True


@dataclass(frozen=True)
class Variable:
    """One environment variable; `default` is its value where it is unset (for most: or empty)."""

    name: str
    attribute: str
    kind: Kind
    default: Any
    help: str


def _choice(*names: str) -> Kind:
    def parse(text: str) -> str:
        if text not in names:
            raise ValueError
        return text

    return Kind("one of " + ", ".join(names), parse)


def _integer(low: int) -> Kind:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or int(text) < low:
            raise ValueError
        return int(text)

    return Kind(f"an integer of at least {low}", parse)


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError
    return text


_FLAG = Kind("0 or 1", lambda text: bool(["0", "1"].index(text)))
_TEXT = Kind("any text", str)

VARIABLES = (
    Variable(
        "DEEPINFER_ACCELERATOR",
        "accelerator",
        _choice("cpu", "nvidia", "ascend"),
        "cpu",
        "the platform to build for and to run on",
    ),
    Variable(
        "DEEPINFER_HF_MODEL_DIR",
        "model_dir",
        Kind("a directory", Path),
        None,
        "local checkpoint directory; unset: the small checkpoint that ships with the project",
    ),
    Variable(
        "DEEPINFER_ENABLE_MTP_VARLEN",
        "mtp_varlen",
        _FLAG,
        False,
        "1: verify drafts of variable length, scheduled by their confidence",
    ),
    Variable(
        "DEEPINFER_USE_NEXTN_DECODE",
        "nextn",
        _integer(0),
        5,
        "longest draft in tokens, 0: no speculation; the default gives way to a shorter block of the checkpoint",
    ),
    Variable(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
        "replay_mode",
        _choice("compact", "mask", "off"),
        "compact",
        "how the decoder sees only the end of a prompt: run it alone, mask the rest, or run over everything",
    ),
    Variable(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
        "replay_keep_tokens",
        _integer(1),
        None,
        "prompt tokens that the decoder runs over; unset: the model's window + 12 (140 for the released model)",
    ),
    Variable(
        "DEEPINFER_BATCH_INVARIANT",
        "batch_invariant",
        _FLAG,
        False,
        "1: a sequence's result does not depend on what it is batched with",
    ),
    Variable(
        "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
        "extra_experts",
        _integer(0),
        None,
        "redundant experts for load balancing, rounded up to a multiple of the ranks; unset: 0 (benchmark: 32)",
    ),
    Variable(
        "WORLD_SIZE",
        "nodes",
        _integer(1),
        1,
        "number of launchers, as a rule one a node; ranks are at most this times the visible devices",
    ),
    Variable(
        "RANK",
        "launcher",
        _integer(0),
        None,
        "number of this launcher among WORLD_SIZE; torchrun sets it",
    ),
    Variable(
        "LOCAL_RANK",
        "launcher_on_node",
        _integer(0),
        0,
        "number of this launcher on its node; torchrun sets it",
    ),
    Variable(
        "LOCAL_WORLD_SIZE",
        "launchers_on_node",
        _integer(1),
        1,
        "launchers on each node, which share its visible devices; torchrun sets it",
    ),
    Variable(
        "MASTER_ADDR",
        "meeting_host",
        _TEXT,
        "127.0.0.1",
        "host of launcher 0, where several launchers meet; torchrun sets it",
    ),
    Variable(
        "MASTER_PORT",
        "meeting_port",
        _integer(1),
        29500,
        "port at which they meet; torchrun sets it",
    ),
    Variable(
        "TORCHELASTIC_USE_AGENT_STORE",
        "agent_store",
        Kind("True or False", lambda text: bool(["False", "True"].index(text))),
        False,
        "whether somebody listens at that port already; torchrun sets it",
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "visible_devices",
        Kind("device numbers or ids with commas; empty for none", str, empty_is_unset=False),
        None,
        "the GPUs of this node to use; unset: all",
    ),
    Variable(
        "EVAL_JUDGE_BASE_URL",
        "judge_base_url",
        Kind("a URL that starts with http:// or https://", _url),
        None,
        "where the judge of the evaluations answers (an OpenAI-style API)",
    ),
    Variable(
        "EVAL_JUDGE_API_KEY",
        "judge_api_key",
        _TEXT,
        None,
        "key that the judge's API takes",
    ),
    Variable(
        "EVAL_JUDGE_MODEL",
        "judge_model",
        _TEXT,
        None,
        "model name to ask the judge's API for",
    ),
    Variable(
        "ASCEND_LAUNCH_BLOCKING",
        "ascend_launch_blocking",
        _FLAG,
        False,
        "1: Ascend kernels run synchronously, for debugging; the driver reads it too",
    ),
    Variable(
        "ASCEND_SLOG_PRINT_TO_STDOUT",
        "ascend_log_to_stdout",
        _FLAG,
        False,
        "1: the Ascend driver logs to standard output",
    ),
)


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and check every variable of the table from `environ` (default: the process's environment).

    Raises ConfigError for a value that a variable does not take and for an unknown name with one of our prefixes.
    """
    environ = os.environ if environ is None else environ
    known = {variable.name for variable in VARIABLES}
    for name in sorted(environ):
        if name.startswith(_PREFIXES) and name not in known:
            raise ConfigError(_unknown(name, known))
    return Environment(**{variable.attribute: _value(variable, environ) for variable in VARIABLES})


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a process that works for this one, with `changes`."""
    return {**os.environ, **changes}


def set_variable(name: str, value: str) -> None:
    """Set a variable that a library reads in this process, unless a user has set it."""
    os.environ.setdefault(name, value)


def describe_environment() -> str:
    """The table as text, for `--help`: a line with what a variable takes and its default, a line of explanation."""
    lines = []
    for variable in VARIABLES:
        lines += [
            f"{variable.name} ({variable.kind.takes}; default {_spell(variable.default)})",
            f"    {variable.help}",
        ]
    return "\n".join(lines)


def _spell(default: str | int | None) -> str:
    """A default as one would set it."""
    if default is None:
        return "unset"
    return f"{default:d}" if isinstance(default, int) else default


def _value(variable: Variable, environ: Mapping[str, str]) -> Any:
    text = environ.get(variable.name)
    if text is None or (text == "" and variable.kind.empty_is_unset):
        return variable.default
    try:
        return variable.kind.parse(text)
    except ValueError:
        raise ConfigError(f"{variable.name} takes {variable.kind.takes}, not {text!r}: {variable.help}") from None


def _unknown(name: str, known: set[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1)
    if near:
        return f"{name} is no variable of this project; did you mean {near[0]}?"
    return f"{name} is no variable of this project; it knows {', '.join(sorted(known))}"
