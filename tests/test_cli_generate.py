"""`deepinfer generate`: what goes in, what comes out, and one clear line for every mistake."""

import io
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deepinfer import LLM, CompletionOutput, RequestOutput, SamplingParams
from deepinfer.cli.answers import as_json, show
from deepinfer.cli.main import main
from deepinfer.config.engine import EngineConfig
from deepinfer.engine.engine import Engine

Output = pytest.CaptureFixture[str]
PROMPTS = ["The first", "a", "a longer prompt, of several words"]


@pytest.fixture(scope="module")
def llm(tiny_checkpoint: Path) -> LLM:
    return LLM(tiny_checkpoint)


@pytest.fixture
def command(tiny_checkpoint: Path, capsys: Output) -> Any:
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["generate", "--model", str(tiny_checkpoint), *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def records(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def standard_input(monkeypatch: pytest.MonkeyPatch, text: str | bytes, terminal: bool = False) -> None:
    data = text.encode() if isinstance(text, str) else text
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stream)


class TestAnswers:
    def test_json_holds_what_the_api_returns(self, command: Any, llm: LLM) -> None:
        code, out, _ = command(*PROMPTS, "--max-tokens", "6", "--json")
        expected = llm.generate(PROMPTS, SamplingParams(0, 6), use_tqdm=False)
        assert code == 0
        for record, output, prompt in zip(records(out), expected, PROMPTS, strict=True):
            assert record["prompt"] == prompt
            assert record["index"] == output.index
            assert record["token_ids"] == list(output.token_ids)
            assert record["text"] == output.text
            assert record["prompt_tokens"] == output.num_prompt_tokens
            assert record["completion_tokens"] == len(output.token_ids)
            assert record["finish_reason"] == output.finish_reason
            assert record["error"] is None

    def test_text_shows_prompt_answer_and_counts(self, command: Any, llm: LLM) -> None:
        code, out, _ = command("The first", "--max-tokens", "6")
        (output,) = llm.generate("The first", SamplingParams(0, 6), use_tqdm=False)
        assert code == 0
        assert out.startswith("[1/1] The first\n")
        assert out.endswith(f"  ({output.num_prompt_tokens} + 6 tokens, length)\n")

    def test_statistics_go_to_standard_error(self, command: Any) -> None:
        _, out, err = command(*PROMPTS, "--max-tokens", "5", "--json", "--no-progress")
        lines = err.splitlines()
        assert [line.split()[0] for line in lines] == ["requests", "tokens", "speed", "steps", "cache", "drafts"]
        assert "3 finished, 0 failed" in lines[0]
        assert "15 generated" in lines[1]
        assert len(out.splitlines()) == 3

    def test_chats(self, command: Any, llm: LLM) -> None:
        chat = [{"role": "user", "content": "What is 1 + 1?"}]
        for flags, thinking in (([], True), (["--no-thinking"], False)):
            code, out, _ = command("What is 1 + 1?", "--chat", *flags, "--max-tokens", "8", "--json")
            (output,) = llm.chat(chat, SamplingParams(0, 8), thinking=thinking, use_tqdm=False)
            (record,) = records(out)
            assert code == 0
            assert record["token_ids"] == list(output.token_ids)
            assert record["content"] == output.outputs[0].content
            assert record["reasoning"] == output.outputs[0].reasoning
            assert record["prompt_tokens"] == output.num_prompt_tokens

    def test_a_seed_repeats_a_hot_run(self, command: Any) -> None:
        def tokens(seed: str) -> list[int]:
            _, out, _ = command("Once", "--temperature", "1.5", "--seed", seed, "--max-tokens", "12", "--json")
            made: list[int] = records(out)[0]["token_ids"]
            return made

        assert tokens("3") == tokens("3")
        assert tokens("3") != tokens("4")

    def test_a_model_cannot_steer_the_terminal(self) -> None:
        completion = CompletionOutput("one\n\x1b[2Jtwo", (1, 2), "stop", reasoning="\x07why", content="one\n\x1b[2Jtwo")
        output = RequestOutput(1, "p", (1,), (completion,), cached_tokens=64)
        assert show("p\x1b", output, 3).splitlines() == [
            "[2/3] p ",
            "  thinking:  why",
            "  one",
            "   [2Jtwo",
            "  (1 + 2 tokens, 64 cached, stop)",
        ]
        assert json.loads(as_json("p\udc80", output))["text"] == "one\n\x1b[2Jtwo"
        assert as_json("p\udc80", output).isascii()


class TestSources:
    def test_a_file_comes_after_the_arguments(self, command: Any, tmp_path: Path) -> None:
        path = tmp_path / "prompts.txt"
        path.write_text("two\n\n  \nthree é\n", encoding="utf-8")
        _, out, _ = command("one", "--file", path, "--max-tokens", "1", "--json")
        assert [record["prompt"] for record in records(out)] == ["one", "two", "three é"]

    @pytest.mark.parametrize("arguments", [[], ["--file", "-"]], ids=["by itself", "by name"])
    def test_standard_input(self, command: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
        standard_input(monkeypatch, "one\ntwo\n", terminal=False)
        _, out, _ = command(*arguments, "--max-tokens", "1", "--json")
        assert [record["prompt"] for record in records(out)] == ["one", "two"]

    def test_standard_input_is_left_alone_where_there_are_prompts(
        self, command: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        standard_input(monkeypatch, "never read\n", terminal=True)
        _, out, _ = command("one", "--max-tokens", "1", "--json")
        assert [record["prompt"] for record in records(out)] == ["one"]


class TestSettings:
    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
        """The settings of every engine that is made."""
        found: list[EngineConfig] = []
        original = Engine.__init__

        def note(self: Engine, directory: Path, environment: Any, settings: EngineConfig) -> None:
            found.append(settings)
            original(self, directory, environment, settings)

        monkeypatch.setattr(Engine, "__init__", note)
        return found

    def test_defaults_are_the_engine_s(self, command: Any, made: list[EngineConfig]) -> None:
        command("one", "--max-tokens", "1")
        assert made == [EngineConfig()]

    def test_every_option_reaches_the_engine(self, command: Any, made: list[EngineConfig], tmp_path: Path) -> None:
        code, _, _ = command(
            "one", "--max-tokens", "1", "--max-requests", "3", "--max-rows", "40", "--chunk", "7", "--page-size", "8",
            "--cache", "2MiB", "--host-cache", "1MB", "--disk-cache", tmp_path / "kv", "--disk-cache-size", "3MB",
            "--no-prefix-cache", "--no-async", "--dtype", "bfloat16", "--nextn", "2", "--draft-rule", "rejection",
            "--varlen",
            "--encoder-patches", "9", "--image-cache", "5MB", "--max-images", "4", "--max-image-size", "6MB",
            "--max-image-pixels", "7", "--image-host", "a", "--image-host", "b:80", "--image-seconds", "1.5",
            "--engram-tables", "host",
        )  # fmt: skip
        assert code == 0
        everything = EngineConfig(
            max_num_seqs=3,
            max_num_batched_tokens=40,
            max_chunk=7,
            page_size=8,
            cache_bytes=2 << 20,
            host_cache_bytes=10**6,
            disk_cache=str(tmp_path / "kv"),
            disk_cache_bytes=3 * 10**6,
            prefix_cache=False,
            asynchronous=False,
            dtype="bfloat16",
            nextn=2,
            draft_rule="rejection",
            varlen=True,
            max_encoder_patches=9,
            image_cache_bytes=5 * 10**6,
            max_images=4,
            max_image_bytes=6 * 10**6,
            max_image_pixels=7,
            image_url_hosts=["a", "b:80"],  # type: ignore[arg-type]
            image_url_seconds=1.5,
            engram_tables="host",
        )
        assert made == [everything]
        no_options = {"keep_quantized", "load_format", "count_experts"}  # for measurements
        no_options |= {"ep", "dp", "cp", "rebalance_steps"}  # several processes: tested as such
        usual = {name: value for name, value in vars(EngineConfig()).items() if name not in no_options}
        assert all(getattr(everything, name) != value for name, value in usual.items())

    def test_tokens_do_not_depend_on_the_loop(self, command: Any) -> None:
        runs = [command(*PROMPTS, "--max-tokens", "9", "--json", *flags)[1] for flags in ([], ["--no-async"])]
        assert runs[0] == runs[1]

    def test_a_disk_cache_serves_the_next_run(self, command: Any, tmp_path: Path) -> None:
        prompt = "many words, " * 10
        arguments = (prompt, "--max-tokens", "2", "--page-size", "8", "--disk-cache", tmp_path / "kv", "--json")
        first, second = (records(command(*arguments)[1])[0] for _ in range(2))
        assert first["cached_tokens"] == 0
        assert second["cached_tokens"] >= 0.8 * second["prompt_tokens"]


class TestMistakes:
    def refused(self, command: Any, *arguments: str | Path) -> str:
        """The one line that a mistake earns."""
        code, out, err = command(*arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1, err
        assert err.startswith("deepinfer generate: error: ")
        return str(err)

    def test_no_prompt(self, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        standard_input(monkeypatch, "", terminal=True)
        assert "there is no prompt; pass prompts as arguments, --file FILE" in self.refused(command)
        standard_input(monkeypatch, "\n \n")
        assert "standard input holds no prompt" in self.refused(command)

    def test_files_that_cannot_be_read(self, command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert "absent.txt cannot be read" in self.refused(command, "--file", tmp_path / "absent.txt")
        (tmp_path / "bytes").write_bytes(b"\xff\xfe")
        assert "it takes UTF-8 text, a prompt a line" in self.refused(command, "--file", tmp_path / "bytes")
        (tmp_path / "empty").write_text("\n")
        assert "empty holds no prompt" in self.refused(command, "--file", tmp_path / "empty")
        standard_input(monkeypatch, b"\xff\xfe")
        assert "standard input cannot be read" in self.refused(command)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--max-tokens", "0"], "max_tokens is 0; it takes a whole number >= 1"),
            (["--temperature", "-1"], "temperature is -1.0; it takes a finite number >= 0"),
            (["--seed", "-1"], "seq_seed is -1"),
            (["--page-size", "3"], "page_size is 3; it takes an even number"),
            (["--max-requests", "0"], "max_num_seqs is 0; it takes a whole number >= 1"),
            (["--max-rows", "4"], "max_num_batched_tokens is 4"),
            (["--chunk", "0"], "max_chunk is 0"),
            (["--cache", "1KiB"], "cache_bytes"),
            (["--no-thinking"], "--no-thinking is for chats; pass --chat with it"),
            (["--model", "/no/such/model"], "/no/such/model"),
        ],
        ids=lambda value: value[0] if isinstance(value, list) else "",
    )
    def test_bad_options(self, command: Any, arguments: list[str], words: str) -> None:
        assert words in self.refused(command, "one", *arguments)

    @pytest.mark.parametrize("arguments", [["--cache", "much"], ["--max-tokens", "x"], ["--dtype", "int8"]])
    def test_words_that_are_no_values(self, command: Any, capsys: Output, arguments: list[str]) -> None:
        with pytest.raises(SystemExit) as exit_info:
            command("one", *arguments)
        assert exit_info.value.code == 2
        assert f"error: argument {arguments[0]}" in capsys.readouterr().err

    def test_a_bad_prompt_stops_no_other(self, command: Any, llm: LLM) -> None:
        code, out, err = command("", "a", "b" * 3000, "--max-tokens", "3", "--json", "--no-progress")
        found = records(out)
        assert code == 2
        assert found[0]["error"] == "the prompt is empty; it takes at least one character"
        assert found[1]["token_ids"] == list(llm.generate("a", SamplingParams(0, 3), use_tqdm=False)[0].token_ids)
        assert "the context of 2048" in found[2]["error"]
        complaints = [line for line in err.splitlines() if "error" in line]
        assert complaints[0].startswith("deepinfer generate: error: prompt 1: the prompt is empty")
        assert complaints[1].startswith("deepinfer generate: error: prompt 3: the prompt has 3001 tokens")

    @pytest.mark.parametrize("arguments", [["--top-p", "0.9"], ["--top-k", "5"], ["--min-p", "0.1"], ["-n", "2"]])
    def test_options_of_draws_without_draws(self, command: Any, arguments: list[str]) -> None:
        assert f"{arguments[0]} is for draws; pass a --temperature above 0" in self.refused(command, "one", *arguments)

    def test_half_a_checkpoint(self, tiny_checkpoint: Path, tmp_path: Path, capsys: Output) -> None:
        half = shutil.copytree(tiny_checkpoint, tmp_path / "half")
        for shard in half.glob("*.safetensors"):
            shard.unlink()
        assert main(["generate", "--model", str(half), "one"]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("deepinfer generate: error: ")
        assert shown.err.count("\n") == 1

    def test_an_interrupt_ends_with_one_line(
        self, command: Any, monkeypatch: pytest.MonkeyPatch, capsys: Output
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(LLM, "generate", interrupt)
        assert command("one") == (130, "", "deepinfer generate: stopped\n")


class TestSampling:
    def test_every_option_reaches_the_engine(self, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[SamplingParams] = []
        generate = LLM.generate

        def noted(llm: LLM, prompts: Any, params: SamplingParams, **options: Any) -> Any:
            given.append(params)
            return generate(llm, prompts, params, **options)

        monkeypatch.setattr(LLM, "generate", noted)
        code, out, _ = command(
            "one", "--max-tokens", "3", "--temperature", "0.8", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01",
            "--seed", "7", "-n", "2", "--stop", "ab", "--stop", "c", "--stop-token-id", "5", "--min-tokens", "1",
            "--ignore-eos", "--presence-penalty", "0.1", "--frequency-penalty", "0.2", "--repetition-penalty", "1.1",
            "--logit-bias", "9=-inf", "--logit-bias", "8=2.5", "--logprobs", "2", "--prompt-logprobs", "1", "--json",
        )  # fmt: skip
        assert code == 0
        everything = SamplingParams(
            0.8, 3, (5,), True, 7, 0.9, 40, 0.01, 1, ("ab", "c"), 0.1, 0.2, 1.1, {9: -math.inf, 8: 2.5}, 2, 1, 2
        )
        assert given == [everything]
        unset = {"so_args"}
        assert all(
            getattr(everything, name) != value for name, value in vars(SamplingParams()).items() if name not in unset
        )
        first, second = records(out)
        assert (first["completion"], second["completion"]) == (0, 1)
        assert first["seq_seed"] == 7
        for record in (first, second):
            assert len(record["logprobs"]) == record["completion_tokens"]
            assert all(len(one["top"]) == 2 and one["logprob"] <= 0 for one in record["logprobs"])
            assert record["prompt_logprobs"][0] is None
            assert len(record["prompt_logprobs"]) == record["prompt_tokens"]

    def test_completions_and_stops_for_people(self, command: Any) -> None:
        _, out, _ = command("one", "--max-tokens", "3", "--temperature", "2", "-n", "2", "--seed", "4", "--ignore-eos")
        assert out.splitlines()[0] == "[1/1] one"
        assert "  1. " in out
        assert "  2. " in out
        assert ", length, seed 4)" in out
        _, free, _ = command("one", "--max-tokens", "3", "--ignore-eos", "--json")
        token = records(free)[0]["token_ids"][1]
        _, out, _ = command("one", "--max-tokens", "3", "--ignore-eos", "--stop-token-id", token)
        assert f", stop {token})" in out

    @pytest.mark.parametrize("value", ["5", "a=1", "5=x"])
    def test_a_bias_is_a_token_and_a_number(self, command: Any, capsys: Output, value: str) -> None:
        with pytest.raises(SystemExit):
            command("one", "--logit-bias", value)
        assert "error: argument --logit-bias" in capsys.readouterr().err


def test_help_names_every_option(capsys: Output) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    assert exit_info.value.code == 0
    for word in ("PROMPT", "--file", "--chat", "--max-tokens", "--json", "--no-async", "--disk-cache", "examples:"):
        assert word in shown


def test_as_a_process_with_a_progress_bar(tiny_checkpoint: Path) -> None:
    line = [sys.executable, "-m", "deepinfer.cli", "generate", "--model", str(tiny_checkpoint), "--max-tokens", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, input="one\ntwo\n", capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "[1/2] one"
    assert "2/2" in done.stderr
    assert "8 generated" in done.stderr


class TestImages:
    def test_they_are_shown_before_the_prompt(self, command: Any, llm: LLM, tmp_path: Path) -> None:
        paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
        for number, path in enumerate(paths):
            Image.new("RGB", (30, 20), (0, 90 * number, 0)).save(path)
        shown = [part for path in paths for part in ("--image", path)]
        code, out, _ = command("--chat", "--no-thinking", *shown, "--max-tokens", "4", "--json", "Well?")
        parts = [{"type": "image", "image": path} for path in paths] + [{"type": "text", "text": "Well?"}]
        expected = llm.chat([{"role": "user", "content": parts}], SamplingParams(0, 4), thinking=False, use_tqdm=False)
        assert code == 0
        assert records(out)[0]["token_ids"] == list(expected[0].token_ids)
        assert records(out)[0]["prompt_tokens"] == expected[0].num_prompt_tokens

    def test_a_bad_one_and_one_without_a_chat(self, command: Any) -> None:
        code, _, err = command("--chat", "--image", "absent.png", "Well?")
        assert (code, "image 0: image 'absent.png' cannot be read" in err) == (2, True)
        code, _, err = command("--image", "absent.png", "Well?")
        assert (code, "--image is for chats; pass --chat with it" in err) == (2, True)
        code, _, err = command("--chat", "--image", "http://localhost:1/x", "--image-host", "localhost:1", "Well?")
        assert (code, "cannot be fetched: ConnectionRefusedError" in err) == (2, True)
