"""examples/benchmark.py with prompts of images: they are encoded in every round, and the steps read them."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import benchmark
from benchmarking.rig import Rig, Shape, make_rig
from benchmarking.steps import prefill_plans, time_encoder, time_prefill

SHORT = ["--context_length", "160", "--non_cached_tokens", "80", "--prefill_batch_size", "160", "--prefill_rounds", "1"]


def test_prompts_of_images(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--prompt_mode", "image", "--image_size", "40x24", *SHORT]
    path = tmp_path / "out.json"
    assert benchmark.main([*arguments, "--decode_num_requests", "1", "--decode_steps", "2", "--json", str(path)]) == 0
    prefill = json.loads(path.read_text())["prefill"]
    assert prefill["images_per_s"] > 0
    assert prefill["rows_per_step"] == 160
    assert "encoder: " in capsys.readouterr().out


def test_a_bad_size(tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(tiny_checkpoint), "--prompt_mode", "image", "--image_size", "big", *SHORT]
    assert benchmark.main(arguments) == 2
    assert "the image size is 'big'" in capsys.readouterr().err


@pytest.mark.parametrize("batch", [160, 30])
def test_every_round_encodes_and_reads_every_image(tiny_checkpoint: Path, batch: int) -> None:
    """In whole prompts and in chunks that cut images."""
    rig: Rig = make_rig(Shape(str(tiny_checkpoint), False, 1, 1 << 20, 16, picture=(40, 24)), 2, 180)
    encoded: list[str] = []
    original = rig.runner.vision.run
    rig.runner.vision.run = lambda encodes, image_of: (
        encoded.extend(one.digest for one in encodes) or original(encodes, image_of)
    )
    plans = prefill_plans(rig, 160, 80, batch)
    images = [image.digest for request in rig.requests.values() for image in request.images]
    assert len(set(images)) == len(images) >= 2
    time_prefill(rig, plans, 2)
    assert sorted(encoded) == sorted(images * 3)
    assert time_encoder(rig, plans, 2).rows == 2 * len(images)
