"""The command line: what `memory` and `info` print, and one clear line for every mistake."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
import tiny

from deepinfer.cache.budget import CacheSizes
from deepinfer.checkpoint.layout import tensor_layout
from deepinfer.cli.main import COMMANDS, main
from deepinfer.cli.schedules import listed, ratios
from deepinfer.cli.units import parse_bytes, parse_positive, show_bytes
from deepinfer.cli.weights import part_of, weight_bytes
from deepinfer.config.model import ModelConfig
from deepinfer.config.released import released_config

Output = pytest.CaptureFixture[str]


def numbers(output: str) -> dict[str, int]:
    """name -> exact bytes of every line that states some; sums are under the title of their section."""
    found, title = {}, ""
    for line in output.splitlines():
        if line and not line.startswith(" "):
            title = line
        row = re.match(r"  (\S.*?)\s{2,}([\d,]+) +[\d.]+ [KMGTP]?i?B", line)
        if row:
            name = f"{title}: sum" if row[1] == "sum" else row[1]
            found[name] = int(row[2].replace(",", ""))
    return found


def ran(capsys: Output, *argv: str) -> str:
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: Output, *argv: str) -> str:
    """The one line that a mistake earns."""
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint, tmp_path / "copy")


class TestMemory:
    def test_the_released_shape_needs_no_weights(self, capsys: Output) -> None:
        out = ran(capsys, "memory", "--model", "released", "--context", "131072", "--requests", "64")
        assert "890.0 bytes a token; 131,072 pages of 56,960 bytes" in out
        found = numbers(out)
        assert found["pages"] == 64 * 131072 * 890
        assert found["windows"] == 64 * 40 * 134 * 528
        assert found["draft windows"] == 64 * 3 * 134 * 528
        assert found["pooling pairs"] == 64 * 3 * 4 * 2 * 512 * 4
        # One expert is 17,694,720 bytes of FP4 and 1,105,920 of scales; the tables have rows of 264 bytes.
        assert found["routed experts"] == 40 * 384 * (17_694_720 + 1_105_920)
        assert found["Engram tables"] == 264 * (384_006_168 + 384_016_682)
        assert round(found["weights as stored: sum"] / 1e9) == 510

    def test_sums_are_sums(self, capsys: Output) -> None:
        out = ran(capsys, "memory", "--model", "released", "--context", "4096", "--requests", "3")
        sections = [numbers(section) for section in out.split("\n\n")[1:]]
        long = [section for section in sections if len(section) > 1]
        assert len(long) == 3
        for section in long:
            *parts, total = section.values()
            assert total == sum(parts)

    def test_the_cache_lines_are_what_would_be_allocated(self, capsys: Output) -> None:
        options = ["--context", "5000", "--requests", "7", "--page-size", "32", "--verify-rows", "6"]
        found = numbers(ran(capsys, "memory", "--model", "released", *options))
        sizes = CacheSizes(released_config(), 7, 32, 6)
        assert found["caches: sum"] == sizes.total(7 * 157)
        assert found["page tables"] == sizes.table_bytes(7 * 157)

    def test_tokens_that_fit(self, capsys: Output) -> None:
        shape = ["--model", "released", "--requests", "64", "--context", "4096"]
        out = ran(capsys, "memory", *shape, "--memory", "2000GiB")
        table = out[out.index("tokens of global KV that fit into 1.95 TiB") :]
        fits = [int(number.replace(",", "")) for number in re.findall(r" ([\d,]+)$", table, re.MULTILINE)]
        found, sizes, memory = numbers(out), CacheSizes(released_config(), 64, verify_rows=6), 2000 * 2**30
        workspace = found["workspace of a step (estimate): sum"]
        stored = found["weights as stored: sum"]
        beside = [0, workspace + stored, workspace + stored - found["Engram tables"], workspace + found["all"]]
        assert fits == [64 * sizes.pages_in(memory - other) for other in beside]
        assert min(fits) > 0

    def test_what_does_not_fit_says_how_much_is_missing(self, capsys: Output) -> None:
        out = ran(capsys, "memory", "--model", "released", "--context", "4096", "--memory", "24GiB")
        assert re.search(r"and workspace, weights as stored +0  4\d\d GiB more needed for a first page", out)

    def test_a_checkpoint(self, capsys: Output, tiny_checkpoint: Path) -> None:
        out = ran(capsys, "memory", "--model", str(tiny_checkpoint))
        config = ModelConfig.from_file(tiny_checkpoint / "config.json")
        assert out.startswith(f"{tiny_checkpoint}\n32 requests of 2,048 tokens")
        found = numbers(out)
        assert found["weights as stored: sum"] == sum(spec.stored_bytes for spec in tensor_layout(config).values())
        assert found["caches: sum"] == CacheSizes(config, 32, verify_rows=6).total(32 * 32)

    def test_a_rank_of_many_holds_its_part_and_says_what_it_sends(self, capsys: Output) -> None:
        shape = ("--model", "released", "--requests", "4", "--rows", "100", "--context", "4096")
        whole = numbers(ran(capsys, "memory", *shape, "--verify-rows", "1"))
        part = numbers(
            out := ran(
                capsys, "memory", *shape, "--ep", "8", "--cp", "2", "--extra-experts", "10", "--verify-rows", "1"
            )
        )
        assert "one of 8 ranks: ep 8, dp 4, cp 2" in out
        assert part["routed experts"] * 384 == whole["routed experts"] * (384 + 16) // 8
        assert abs(part["Engram tables"] * 8 - whole["Engram tables"]) < 8 * 2 * 264
        assert part["compressors"] == whole["compressors"]
        # Of six choices 7/8 are elsewhere: each result of 5,120 BF16 numbers comes back, through 20 of 40 layers.
        assert part["results of experts"] == 4 * 40 * 6 * 7 // 8 * 5120 * 2  # the decode step's, which is printed last
        assert "prefill step of 100 rows" in out
        # Half of the rows are another rank's, and get 20 layers' windows and all compressed entries.
        assert part["KV to the group"] == 100 // 2 * (20 * 528 + 890)
        assert part["residual streams"] * 2 == whole["residual streams"]
        alone = ran(capsys, "memory", *shape, "--ep", "1", "--cp", "2")
        assert "KV to the group" in alone
        assert "results of experts" not in alone
        host = ran(capsys, "memory", *shape, "--ep", "8", "--engram-tables", "host")
        assert "Engram tables" not in host.replace("Engram tables elsewhere", "")
        assert "Engram rows" not in host
        assert "cp is 3; it must divide ep" in refused(capsys, "memory", *shape, "--ep", "8", "--cp", "3")
        assert "too many for 384 experts" in refused(capsys, "memory", *shape, "--ep", "2", "--extra-experts", "999")

    def test_the_bundled_checkpoint_is_the_default(
        self, capsys: Output, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
    ) -> None:
        monkeypatch.setenv("DEEPINFER_HF_MODEL_DIR", str(tiny_checkpoint))
        assert ran(capsys, "memory").startswith(str(tiny_checkpoint))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--context", "1048577"], "context is 1048577 tokens; this model takes 1 to 1048576"),
            (["--page-size", "7"], "page size is 7; it takes an even number of tokens, at least 2"),
            (["--model", "/nowhere"], "/nowhere: is no directory"),
        ],
    )
    def test_what_cannot_be(self, options: list[str], message: str, capsys: Output) -> None:
        line = refused(capsys, "memory", "--model", "released", *options)
        assert line.startswith(f"deepinfer memory: error: {message}")

    @pytest.mark.parametrize("flag", ["--context", "--requests", "--page-size", "--rows", "--verify-rows"])
    @pytest.mark.parametrize("value", ["0", "-3", "two", "1.5", "²"])
    def test_numbers_that_are_none(self, flag: str, value: str, capsys: Output) -> None:
        with pytest.raises(SystemExit) as left:
            main(["memory", "--model", "released", f"{flag}={value}"])
        assert left.value.code == 2
        assert f"argument {flag}: takes an integer of at least 1, not '{value}'" in capsys.readouterr().err


class TestInfo:
    def test_the_released_shape(self, capsys: Output) -> None:
        out = ran(capsys, "info", "released")
        for line in (
            "layers                40: 20 encoder, 20 decoder",
            "attention             64 heads of 512 (64 rotary), one shared KV head",
            "selection             32 heads of 128, best 512; after layer 20 among its 2048 blocks of 8",
            "Engram                n-grams of 2 to 4, 8 heads each; 384,006,168, 384,016,682 rows of 256",
            "compression           0-1 window only, 2-19 ratio 2, 20-39 ratio 1",
            "select                2, 8, 14, 20, 24, 28, 32, 36",
            "global KV             890.0 bytes a token",
            "48,496 tensors, by part",
            "checkpoint: none, this is a shape only",
        ):
            assert line in out

    def test_bytes_by_part_and_by_storage_agree(self, capsys: Output) -> None:
        found = numbers(ran(capsys, "info", "released"))
        assert found["48,496 tensors, by part: sum"] == found["by storage: sum"]

    def test_a_complete_checkpoint(self, capsys: Output, golden_checkpoint: Path) -> None:
        out = ran(capsys, "info", str(golden_checkpoint))
        assert out.startswith(f"{golden_checkpoint}\n")
        assert "\ncheckpoint: complete;" in out

    def test_bytes_are_those_on_disk(self, capsys: Output, golden_checkpoint: Path) -> None:
        """The files hold headers too, so they are a little larger than the tensors."""
        stated = numbers(ran(capsys, "info", str(golden_checkpoint)))["by storage: sum"]
        on_disk = sum(path.stat().st_size for path in golden_checkpoint.glob("*.safetensors"))
        assert 0 < on_disk - stated < 0.1 * on_disk

    def test_absent_parts(self, capsys: Output, copy: Path) -> None:
        tiny.edit_config(copy, None, vision_config=None)
        tiny.edit_config(copy, num_nextn_predict_layers=0, compress_ratios=[0, 2, 1, 1], engram_layer_ids=[])
        tiny.edit_config(copy, engram_num_embeddings=[], candidate_source_layer_id=-1)
        assert main(["info", str(copy)]) == 2
        captured = capsys.readouterr()
        for part in ("Engram", "drafter", "vision"):
            assert f"  {part:<22}none" in captured.out
        assert "best 8\n" in captured.out
        assert "unexpected tensor" in captured.err

    def test_a_missing_tensor(self, capsys: Output, copy: Path) -> None:
        index = copy / "model.safetensors.index.json"
        files = json.loads(index.read_text())
        del files["weight_map"]["norm.weight"]
        index.write_text(json.dumps(files))
        line = refused(capsys, "info", str(copy))
        assert "tensor norm.weight" in line

    def test_missing_weights(self, capsys: Output, copy: Path) -> None:
        for path in copy.glob("*.safetensors"):
            path.unlink()
        assert "safetensors" in refused(capsys, "info", str(copy))

    def test_the_shape_is_shown_before_the_weights_are_found_to_be_missing(self, capsys: Output, copy: Path) -> None:
        for path in copy.glob("model*"):
            path.unlink()
        assert main(["info", str(copy)]) == 2
        captured = capsys.readouterr()
        assert "4: 2 encoder, 2 decoder" in captured.out
        assert "weights are missing" in captured.err

    def test_a_config_that_breaks_a_rule(self, capsys: Output, copy: Path) -> None:
        tiny.edit_config(copy, num_key_value_heads=2)
        assert "num_key_value_heads" in refused(capsys, "info", str(copy))

    def test_no_such_model(self, capsys: Output) -> None:
        assert refused(capsys, "info", "/nowhere").startswith("deepinfer info: error: /nowhere: is no directory")

    def test_a_directory_called_released_is_a_directory(
        self, capsys: Output, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shutil.copytree(tiny_checkpoint, tmp_path / "released")
        monkeypatch.chdir(tmp_path)
        assert "complete" in ran(capsys, "info", "released")


class TestMain:
    @pytest.mark.parametrize("argv", [[], ["nothing"], ["memory", "--what"], ["info", "a", "b"]])
    def test_a_bad_command_line_exits_with_2(self, argv: list[str], capsys: Output) -> None:
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 2
        assert "deepinfer" in capsys.readouterr().err

    @pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in ("info", "memory"))])
    def test_help_everywhere(self, argv: list[str], capsys: Output) -> None:
        with pytest.raises(SystemExit) as left:
            main(argv)
        assert left.value.code == 0
        assert "usage: deepinfer" in capsys.readouterr().out

    def test_help_explains_the_environment(self, capsys: Output) -> None:
        with pytest.raises(SystemExit):
            main(["--help"])
        out = capsys.readouterr().out
        assert "DEEPINFER_HF_MODEL_DIR" in out
        assert len(COMMANDS) >= 2

    def test_runs_as_a_module_and_stops_quietly_when_nobody_reads(self) -> None:
        command = f"{sys.executable} -m deepinfer.cli info released | head -1"
        done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("released shape of DeepSeek-V4.1-Flash\n", "")

    def test_exit_code_of_the_module(self) -> None:
        command = [sys.executable, "-m", "deepinfer.cli", "info", "/nowhere"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


class TestUnits:
    @pytest.mark.parametrize(
        ("text", "amount"),
        [
            ("24GiB", 24 * 2**30),
            ("80GB", 80 * 10**9),
            ("80g", 80 * 10**9),
            ("1.5 TiB", 3 * 2**39),
            ("12", 12),
            ("7B", 7),
        ],
    )
    def test_reads_bytes(self, text: str, amount: int) -> None:
        assert parse_bytes(text) == amount

    @pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "3x", "5iB", "1,5GiB", "nan"])
    def test_refuses_what_is_no_size(self, text: str) -> None:
        with pytest.raises(ArgumentTypeError, match="takes a number of bytes such as 24GiB"):
            parse_bytes(text)

    @pytest.mark.parametrize("text", ["0", "-1", "x", "", "٣"])
    def test_refuses_what_is_no_count(self, text: str) -> None:
        with pytest.raises(ArgumentTypeError, match="at least 1"):
            parse_positive(text)

    @pytest.mark.parametrize(
        ("amount", "text"),
        [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (10 * 2**20, "10.0 MiB"),
         (269 * 2**30, "269 GiB"), (1023 * 2**20, "1.00 GiB"), (2**60, "1024 PiB")],
    )  # fmt: skip
    def test_shows_three_figures(self, amount: int, text: str) -> None:
        assert show_bytes(amount) == text


class TestWords:
    def test_runs_of_ratios(self) -> None:
        assert ratios([0, 2, 2, 1, 0, 0]) == "0 window only, 1-2 ratio 2, 3 ratio 1, 4-5 window only"
        assert listed([]) == "none"

    @pytest.mark.parametrize("make", ["released", "tiny"])
    def test_every_tensor_has_a_part_and_every_byte_is_counted_once(self, make: str, tiny_checkpoint: Path) -> None:
        config = released_config() if make == "released" else ModelConfig.from_file(tiny_checkpoint / "config.json")
        layout = tensor_layout(config)
        assert sum(weight_bytes(layout).values()) == sum(spec.stored_bytes for spec in layout.values())
        assert part_of("layers.3.ffn.experts.2.w1.weight") == "routed experts"
        assert part_of("mtp.0.ffn.experts.2.w1.weight") == "drafter"
        assert part_of("layers.1.engram.embed.weight") == "Engram tables"
        assert part_of("vision.blocks.0.attn.wo.weight") == "vision"
        assert part_of("layers.0.attn_norm.weight") == part_of("norm.weight") == "norms"
        assert part_of("layers.2.attn.indexer.k_norm.weight") == "indexers"


class TestDocument:
    def test_the_account_in_the_document_is_what_the_command_prints(self, capsys: Output) -> None:
        document = Path(__file__).parent.parent / "doc" / "cache.md"
        found = re.search(r"^    \$ deepinfer (.*)\n((?:    .*\n|\n)+)", document.read_text(), re.MULTILINE)
        assert found is not None
        command, shown = found.groups()
        assert ran(capsys, *command.split()).rstrip() == textwrap.dedent(shown).rstrip()
