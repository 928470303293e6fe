"""Cases that run the engine instead of the reference: all prompts of a file in one batch, in chunks."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepinfer.model.loading import load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.reference.indexer import Ties
from deepinfer.text.images import TEXT, preprocess
from golden_check.compare import Group
from golden_check.data import Golden
from golden_check.engine_run import Prompt, Run, run
from golden_check.engine_ties import EngineGroup, Values, breaking_ties
from golden_check.target import OUTPUTS, replayed_prompt

CPU = torch.device("cpu")
CHUNKS = (1, 7, 64, None)  # most rows of a prompt in a step; None: the whole prompt


@dataclass(frozen=True)
class Case:
    """A prompt with its golden values."""

    name: str
    prompt: Prompt
    expected: Values


def engine(golden: Golden, device: torch.device = CPU) -> Iterator[Group]:
    """Whole prompts with mode `off`, bounded replay with `mask` and `compact`, on `device` in FP32."""
    classes = golden.classes if golden.config.engram_layer_ids else None
    model = InferenceModel(golden.config, load_weights(golden.checkpoint, device=device), classes)
    whole, replayed = [*_texts(golden), *_pictures(golden)], list(_replayed(golden))
    for mode, cases in (("off", whole), ("mask", replayed), ("compact", replayed)):
        for chunk in CHUNKS if cases else ():
            runs = run(model, [case.prompt for case in cases], mode, chunk)
            label = f"chunk {'whole' if chunk is None else chunk}"
            for case, made in zip(cases, runs, strict=True):
                yield _values(golden, case, mode, made, label)


def _texts(golden: Golden) -> Iterator[Case]:
    held = golden.file("text_fp32")
    for name in held.cases("ids"):
        ids = held[f"{name}.ids"]
        yield Case(name, Prompt(ids, torch.full_like(ids, TEXT)), held.parts(name, OUTPUTS))


def _pictures(golden: Golden) -> Iterator[Case]:
    held = golden.file("vision_fp32")
    for name in held.cases("rgb"):
        assert golden.config.vision is not None, "the reference's cases come first and complain"
        image = preprocess(Image.fromarray(held[f"{name}.rgb"].numpy().astype(np.uint8)), golden.config.vision)
        prompt = Prompt(held[f"{name}.ids"], held[f"{name}.types"], images=(image,))
        yield Case(name, prompt, {"logits": held[f"{name}.logits"]})


def _replayed(golden: Golden) -> Iterator[Case]:
    held = golden.file("replay_fp32")
    for name in held.cases("logits"):
        ids, keep = replayed_prompt(golden, name)
        prompt = Prompt(ids, torch.full_like(ids, TEXT), start=len(ids) - keep)
        yield Case(name, prompt, held.parts(name, OUTPUTS))


def _values(golden: Golden, case: Case, mode: str, made: Run, label: str) -> Group:
    """Logits and features of the prompt's rows; those of real text (`prose`) are judged by their median."""

    def labelled(values: Values) -> Values:
        return {f"{what}, {label}": values[what] for what in case.expected}

    def reference(ties: Ties) -> Values:
        logits, features = _reference(golden, case.prompt, mode, ties)
        return labelled({"logits": logits, "features": features})

    return EngineGroup(
        f"engine {case.name} {mode}",
        labelled(case.expected),
        partial(labelled, {"logits": made.logits, "features": made.features}),
        by_median=case.name.startswith("prose"),
        reference=reference,
        golden=golden,
    )


def _reference(golden: Golden, prompt: Prompt, mode: str, ties: Ties) -> tuple[Tensor, Tensor]:
    """Logits and features of the prompt's rows from its start on."""
    start = None if mode == "off" else torch.tensor([prompt.start])
    ids, types = prompt.ids[None], prompt.types.to(torch.int8)[None]
    with breaking_ties(golden.model, ties):
        output = golden.model(ids, types, prompt.images, start, compact=mode == "compact")
    first = prompt.start - output.first
    return output.logits[0, first:], output.features[0, first:]
