"""Cases around the target: number formats, Engram hashes, images."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from deepinfer.checkpoint import formats
from deepinfer.config.model import VisionConfig
from deepinfer.core.errors import CheckpointError, RequestError
from deepinfer.reference.engram import EngramHashing, lookback, row_ids
from deepinfer.text.images import START, TEXT, ImageInput, expand_images, plan_grid, preprocess
from golden_check.compare import Group
from golden_check.data import Golden

ROUND_TRIPS: dict[str, Callable[[Tensor], Tensor]] = {
    "window_fp8": formats.window_fp8,
    "latent_nvfp4": formats.latent_nvfp4,
    "index_mxfp4": formats.index_mxfp4,
}
# What the released model's images are planned with; the sizes of the tower play no part in it.
RELEASED = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=1024,
    patch_size=14,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=544**2,
)


def number_formats(golden: Golden) -> Iterator[Group]:
    """The cache round trips, to the bit, so that the sign of zero counts."""
    held = golden.file("formats")
    for name in held.cases("in"):
        if name not in ROUND_TRIPS:
            raise CheckpointError(f"{held.path}: {name} is no round trip; they are {', '.join(ROUND_TRIPS)}")
        expected = held[f"{name}.out"].view(torch.int32)
        yield Group("formats", {name: expected}, partial(_round_trip, name, held[f"{name}.in"]))


def _round_trip(name: str, x: Tensor) -> dict[str, Tensor]:
    return {name: ROUND_TRIPS[name](x).view(torch.int32)}


def engram(golden: Golden) -> Iterator[Group]:
    """Token classes, hash constants, and table rows of a text without and with masked tokens."""
    held = golden.file("engram")
    if not held:
        return
    if not golden.config.engram_layer_ids:
        raise CheckpointError(f"{held.path}: the checkpoint has no Engram layers")
    yield Group("engram", {"token_map": held["token_map"]}, lambda: {"token_map": torch.tensor(golden.classes)})
    hashing = EngramHashing.from_config(golden.config)
    constants = {name: torch.from_numpy(getattr(hashing, name)) for name in ("primes", "offsets", "multipliers")}
    yield Group("engram", {name: held[name] for name in constants}, lambda: constants)
    ids, masked = held["ids"], held["token_mask"]
    for name, is_text in (("hash", torch.ones_like(masked)), ("hash_masked", masked)):
        yield Group("engram", {name: held[name]}, partial(_hashes, golden, name, constants, ids, is_text))


def _hashes(golden: Golden, name: str, constants: dict[str, Tensor], ids: Tensor, is_text: Tensor) -> dict[str, Tensor]:
    """Table rows [N, layers, columns] of every Engram layer."""
    config, classes = golden.config, torch.tensor(golden.classes)
    pad = golden.classes[config.engram_pad_token_id]
    back = lookback(classes[ids][None], is_text[None], config.engram_max_ngram_size, pad)
    layers = zip(*(constants[name] for name in ("primes", "offsets", "multipliers")), strict=True)
    return {name: torch.stack([row_ids(back, *layer, config.engram_n_heads)[0] for layer in layers], dim=1)}


def vision(golden: Golden) -> Iterator[Group]:
    """Images from their pixels: patches, grid, prompt, embeddings, logits."""
    held = golden.file("vision_fp32")
    for case in held.cases("rgb"):
        if golden.config.vision is None:
            raise CheckpointError(f"{held.path}: the checkpoint has no vision_config")
        image = preprocess(Image.fromarray(held[f"{case}.rgb"].numpy().astype(np.uint8)), golden.config.vision)
        ids, types = held[f"{case}.ids"], held[f"{case}.types"]
        exact = held.parts(case, ("patches", "grid", "ids", "types"))
        yield Group(f"vision {case}", exact, partial(_prepared, golden, image, ids, types), limit=0.0)
        computed = held.parts(case, ("aligned", "logits"))
        yield Group(f"vision {case}", computed, partial(_seen, golden, image, ids, types))


def _prepared(golden: Golden, image: ImageInput, ids: Tensor, types: Tensor) -> dict[str, Tensor]:
    """Our own preparation of a prompt whose image span has been reduced to one placeholder."""
    placeholder = ids[(types == TEXT) | (types == START)].tolist()
    made_ids, made_types = expand_images(placeholder, [image.grid], golden.config.image_token_id)
    grid = image.grid
    return {
        "patches": image.patches,
        "grid": torch.tensor([grid.vit_rows, grid.vit_cols, grid.rows, grid.cols]),
        "ids": torch.tensor(made_ids),
        "types": torch.tensor(made_types),
    }


def _seen(golden: Golden, image: ImageInput, ids: Tensor, types: Tensor) -> dict[str, Tensor]:
    aligned = golden.model.embed_images([image])
    return {"aligned": aligned, "logits": golden.model(ids[None], types[None], [image]).logits[0]}


def image_grids(golden: Golden) -> Iterator[Group]:
    """The planned grid of many sizes; where an error is expected, all sides count as -1."""
    path = golden.directory / "image_grids.json"
    if not path.is_file():
        return
    for name, entries in json.loads(path.read_text(encoding="utf-8")).items():
        settings = RELEASED if name == "released" else golden.config.vision
        if settings is None:
            raise CheckpointError(f"{path}: {name} needs a vision_config, which the checkpoint does not have")
        expected = torch.tensor([_sides(entry[2:]) for entry in entries])
        sizes = [entry[:2] for entry in entries]
        yield Group("image grids", {name: expected}, partial(_planned, name, sizes, settings))


def _sides(values: list[Any]) -> list[int]:
    return values if len(values) == 6 and all(isinstance(value, int) for value in values) else [-1] * 6


def _planned(name: str, sizes: list[list[int]], settings: VisionConfig) -> dict[str, Tensor]:
    rows = []
    for width, height in sizes:
        try:
            g = plan_grid(width, height, settings)
            rows.append([g.height, g.width, g.vit_rows, g.vit_cols, g.rows, g.cols])
        except RequestError:
            rows.append([-1] * 6)
    return {name: torch.tensor(rows)}
