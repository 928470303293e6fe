"""Times of rounds: between and beyond what was measured, corrected, kept in a file; and engines that use them."""

import json
from pathlib import Path

import numpy as np
import pytest
from llm_tools import alike, check_at_rest, parts, texts

from deepinfer import LLM, CheckpointError, ConfigError, SamplingParams
from deepinfer.engine.profiling import _tiers
from deepinfer.speculative.times import FILE, Measured, RoundTimes, load_times, save_times

MEASURED = Measured((1, 4, 8), (1.0, 2.0, 1.8), (1, 8), (0.5, 1.0))


def verify(times: RoundTimes, *rows: int) -> list[float]:
    return times.verify(np.array(rows, dtype=np.float64)).tolist()


def test_times_lie_on_lines_and_never_fall() -> None:
    times = RoundTimes(MEASURED)
    assert verify(times, 1, 2, 4, 6, 8, 16) == pytest.approx([1.0, 4 / 3, 2.0, 2.0, 2.0, 4.0])
    assert times.draft(1) == 0.5
    assert times.draft(16) == pytest.approx(2.0)


def test_steps_correct_their_own_size_and_those_never_seen() -> None:
    times = RoundTimes(MEASURED)
    for _ in range(40):
        times.observe(4, 0, 3.0)
    assert verify(times, 4) == pytest.approx([3.0])
    assert verify(times, 1, 8) == pytest.approx([1.5, 3.0])
    for _ in range(40):
        times.observe(1, 1, 1.5)
    assert verify(times, 1, 4) == pytest.approx([1.0, 3.0])
    times.observe(8, 0, 1e9)  # a machine that slept is not believed
    assert verify(times, 8)[0] <= 2.0 * 8


def test_a_table_is_kept_for_each_platform(tmp_path: Path) -> None:
    assert load_times(tmp_path, "here") is None
    save_times(tmp_path, "here", MEASURED)
    save_times(tmp_path, "there", Measured((1,), (2.0,), (1,), (3.0,)))
    assert load_times(tmp_path, "here") == MEASURED
    assert load_times(tmp_path, "elsewhere") is None


@pytest.mark.parametrize(
    "kept",
    [
        "[]", "{", '{"platforms": 3}', '{"platforms": {"here": {"rows": [1]}}}',
        '{"platforms": {"here": {"rows": [2, 1], "verify": [1, 1], "requests": [1], "draft": [1]}}}',
        '{"platforms": {"here": {"rows": [1], "verify": [0], "requests": [1], "draft": [1]}}}',
        '{"platforms": {"here": {"rows": [1, 2], "verify": [1], "requests": [1], "draft": [1]}}}',
    ],
)  # fmt: skip
def test_a_broken_table_is_an_error(tmp_path: Path, kept: str) -> None:
    (tmp_path / FILE).write_text(kept, encoding="utf-8")
    with pytest.raises(CheckpointError, match="deepinfer profile"):
        load_times(tmp_path, "here")


@pytest.mark.parametrize(("most", "tiers"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_sizes(most: int, tiers: list[int]) -> None:
    assert _tiers(most) == tiers


@pytest.mark.parametrize("asynchronous", [True, False])
def test_variable_length_gives_the_same_tokens(tiny_checkpoint: Path, asynchronous: bool) -> None:
    """Times are measured at the start, over the caches that requests then use; random drafts soon do not pay."""
    prompts = texts(5, 6, 3, 40)
    params = [SamplingParams(temperature=n % 2, seq_seed=n, max_tokens=12, ignore_eos=True) for n in range(6)]
    plain = LLM(tiny_checkpoint, nextn=0, max_num_seqs=3)
    llm = LLM(tiny_checkpoint, varlen=True, max_num_seqs=3, asynchronous=asynchronous)
    expected = plain.generate(prompts, params, use_tqdm=False)
    assert alike(llm.generate(prompts, params, use_tqdm=False), expected) >= 0.8
    counted = llm.statistics.speculation
    assert counted.rounds > 0
    assert sum(counted.verified) < 5 * counted.rounds
    check_at_rest(llm)


def test_a_table_beside_the_checkpoint_decides(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Rows that cost nothing are all verified, dear ones are not; the first blocks aside, which nothing is known of."""
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for path in tiny_checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    platform, _ = LLM(directory, max_num_seqs=2)._engine.profile()
    verified = []
    for seconds in ((1.0, 1.0), (1.0, 12.0)):
        save_times(directory, platform, Measured((1, 12), seconds, (1,), (1e-9,)))
        llm = LLM(directory, varlen=True, max_num_seqs=2)
        policy = parts(llm).policy
        assert policy is not None
        policy.observe = lambda rows, drafted, seconds: None
        llm.generate(texts(5, 2, 9, 9), SamplingParams(temperature=0, max_tokens=14, ignore_eos=True), use_tqdm=False)
        verified.append(sum(llm.statistics.speculation.verified) / llm.statistics.speculation.rounds)
    assert verified[0] > 3
    assert verified[1] < 2.5


def test_the_command_measures_and_keeps(tiny_checkpoint: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    for path in tiny_checkpoint.iterdir():
        (directory / path.name).symlink_to(path)
    from deepinfer.cli.main import main

    assert main(["profile", "--model", str(directory), "--max-requests", "2"]) == 0
    kept = json.loads((directory / FILE).read_text(encoding="utf-8"))["platforms"]
    (table,) = kept.values()
    assert table["rows"] == [1, 2, 4, 6, 8, 10, 12]
    assert all(seconds > 0 for seconds in (*table["verify"], *table["draft"]))


def test_without_drafts_there_is_nothing_to_measure(tiny_checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="nextn is 0"):
        LLM(tiny_checkpoint, nextn=0)._engine.profile()
