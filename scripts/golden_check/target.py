"""Cases that run the target or the drafter: text, trace, bounded replay, drafts."""

import re
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from deepinfer.core.errors import CheckpointError
from deepinfer.reference.model import Trace
from golden_check.compare import Group
from golden_check.data import Golden

OUTPUTS = ("logits", "features")
DRAFTED = ("tokens", "base_logits", "logits", "confidence_logits")


def text(golden: Golden) -> Iterator[Group]:
    """Every prompt of the file; those from real text (`prose`) are judged by the median of their rows."""
    held = golden.file("text_fp32")
    for case in held.cases("ids"):
        run = partial(_forward, golden, held[f"{case}.ids"])
        yield Group(f"text {case}", held.parts(case, OUTPUTS), run, by_median=case.startswith("prose"))


def _forward(golden: Golden, ids: Tensor, keep: int | None = None, compact: bool = False) -> dict[str, Tensor]:
    """All rows of a prompt, or its last ``keep`` under bounded replay."""
    start = None if keep is None else torch.tensor([len(ids) - keep])
    output = golden.model(ids[None], replay_start=start, compact=compact)
    last = len(ids) if keep is None else keep
    return {"logits": output.logits[0, -last:], "features": output.features[0, -last:]}


def trace(golden: Golden) -> Iterator[Group]:
    """Intermediate values of one prompt, from a file that is named after it."""
    for path in sorted(golden.directory.glob("trace*_fp32.safetensors")):
        held = golden.file(path.stem)
        case = f"text{path.stem.removeprefix('trace').removesuffix('_fp32')}"
        ids = golden.file("text_fp32")[f"{case}.ids"]
        expected = {what: held[what] for what in sorted(held) if _TRACED.fullmatch(what)}
        expected = {what: _as_set(t, len(ids)) if what.startswith("selected") else t for what, t in expected.items()}
        yield Group(f"trace {case}", expected, partial(_traced, golden, ids, expected))


_TRACED = re.compile(r"(streams_into_layer|attention_out|compressed_kv|index_keys|selected)(\d+)")


def _traced(golden: Golden, ids: Tensor, wanted: dict[str, Tensor]) -> dict[str, Tensor]:
    seen = Trace()
    golden.model(ids[None], trace=seen)
    found = {}
    for what in wanted:
        match = _TRACED.fullmatch(what)
        assert match is not None
        kind, layer = match[1], int(match[2])
        if kind == "streams_into_layer":
            found[what] = seen.streams[layer][0]
        elif kind == "attention_out":
            found[what] = seen.attention[layer][0]
        elif kind == "selected":
            found[what] = _as_set(seen.selected[layer][0], len(ids))
        else:
            shared = seen.shared[layer]
            found[what] = (shared.latents if kind == "compressed_kv" else shared.keys)[0]
    return found


def _as_set(selected: Tensor, positions: int) -> Tensor:
    """Positions [R, K], -1 for none, as a membership table, bool [R, positions]: their order says nothing."""
    member = torch.zeros(len(selected), positions + 1, dtype=torch.bool)
    return member.scatter(1, selected + 1, True)[:, 1:]


def replay(golden: Golden) -> Iterator[Group]:
    """Bounded replay of the last rows, both ways of running it."""
    held = golden.file("replay_fp32")
    for name in held.cases("logits"):
        ids, keep = replayed_prompt(golden, name)
        for mode, compact in (("mask", False), ("compact", True)):
            run = partial(_forward, golden, ids, keep, compact)
            yield Group(f"replay {name} {mode}", held.parts(name, OUTPUTS), run)


def replayed_prompt(golden: Golden, name: str) -> tuple[Tensor, int]:
    """The prompt of a case of bounded replay, and how many of its last rows are replayed."""
    match = re.fullmatch(r"(.+)_keep(\d+)", name)
    if match is None:
        raise CheckpointError(f"{golden.file('replay_fp32').path}: {name} takes the form PROMPT_keepROWS")
    return golden.file("text_fp32")[f"{match[1]}.ids"], int(match[2])


def draft(golden: Golden) -> Iterator[Group]:
    """Greedy blocks from the stored features of the target, with the last token as anchor."""
    held = golden.file("dspark_fp32")
    for case in held.cases("tokens"):
        source = golden.file("text_fp32")
        ids, features = source[f"{case}.ids"], source[f"{case}.features"]
        expected = _confidence_as_row(held.parts(case, DRAFTED))
        yield Group(f"dspark {case}", expected, partial(_drafted, golden, ids, features))


def _drafted(golden: Golden, ids: Tensor, features: Tensor) -> dict[str, Tensor]:
    block = golden.model.draft(ids, features, torch.tensor([len(ids) - 1]))
    parts = (block.tokens[0], block.base_logits[0], block.logits[0], block.confidence[0])
    return _confidence_as_row(dict(zip(DRAFTED, parts, strict=True)))


def _confidence_as_row(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """A block's confidence logits are compared as one row: a single one can be near zero."""
    return {what: part[None] if what == "confidence_logits" else part for what, part in parts.items()}
