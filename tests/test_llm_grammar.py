"""Structured output through LLM: 200 generated forms on the bundled checkpoint, mixes, thinking, tools, bad input."""

import json
import re
import subprocess
import sys
import time
from typing import Any

import jsonschema
import pytest
from grammar_tools import MINI, Case, allowed_ids, cases, matcher_of, tokenizer
from llm_tools import caches_of

from deepinfer import LLM, EngineError, RequestError, SamplingParams
from deepinfer.model.model import InferenceModel
from deepinfer.sampling.grammar.constraint import structured_output
from deepinfer.sampling.grammar.grammars import Grammars
from deepinfer.sampling.grammar.matcher import Matcher

END = 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": PERSON}}]
ASK = [{"role": "user", "content": "Look Tina up."}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(MINI, max_num_seqs=64)


def form(seed: int = 0, budget: int = 16, **so_args: Any) -> SamplingParams:
    return SamplingParams(max_tokens=budget, seq_seed=seed, so_args=so_args)


@pytest.mark.slow
def test_200_generated_forms_are_kept(llm: LLM) -> None:
    generated = cases(200, seed=4)
    params = [form(number, **case.so_args) for number, case in enumerate(generated)]
    outputs = llm.generate(["Data:"] * len(params), params, use_tqdm=False)
    ended = {"regex": 0, "json_schema": 0, "ebnf": 0}
    for case, output in zip(generated, outputs, strict=True):
        assert output.error is None
        assert not set(output.token_ids[:-1]) & tokenizer().added_ids
        if output.finish_reason == "stop":
            assert output.token_ids[-1] == END
            assert case.valid(output.text), (case, output.text)
            ended[case.kind] += 1
        else:
            assert output.finish_reason == "length"
            assert len(output.token_ids) == 16
            assert is_prefix(case, output.token_ids), (case, output.text)
    assert min(ended.values()) > 15, ended


def is_prefix(case: Case, token_ids: tuple[int, ...]) -> bool:
    """Whether the tokens can be completed: a greedy way to the end is found, and its text is valid."""
    matcher = matcher_of(structured_output(case.so_args).ebnf)
    for token in token_ids:
        matcher.take(token)
    text = shortest_end(matcher, list(token_ids))
    return text is None or case.valid(text)


def shortest_end(matcher: Matcher, tokens: list[int]) -> str | None:
    """The text when the reply is ended as soon as it may be; None if that takes too many tokens to find."""
    closing = [tokenizer().encode(char)[0] for char in '"}])0a']
    for _ in range(30):
        allowed = allowed_ids(matcher)
        if END in allowed:
            return tokenizer().decode(tokens)
        token = next((one for one in closing if one in allowed), allowed[0])
        matcher.take(token)
        tokens.append(token)
    return None


@pytest.mark.slow
def test_constrained_and_free_requests_mix_in_both_loops(llm: LLM) -> None:
    prompts = ["The number is", "A table is", "Colours: "] * 2
    params = [
        form(1, regex=r"\d{2,4}"),
        SamplingParams(max_tokens=12, temperature=0),
        form(2, ebnf='root ::= ("red" | "green" | "blue") ("," root)?'),
        form(3, json_schema=PERSON),
        SamplingParams(max_tokens=12, seq_seed=9),
        form(4, regex="(yes|no)"),
    ]
    together = llm.generate(prompts, params, use_tqdm=False)
    # Other batches, other loops, other chunks, and pages so few that requests begin again: the same tokens.
    alone = [llm.generate(*pair, use_tqdm=False)[0] for pair in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    tight = LLM(MINI, asynchronous=False, max_chunk=2, page_size=2, max_num_seqs=6, cache_bytes=3_000_000)
    assert [one.token_ids for one in tight.generate(prompts, params, use_tqdm=False)] == [
        one.token_ids for one in alone
    ]
    assert re.fullmatch(r"\d{2,4}", together[0].text)
    assert (
        re.fullmatch("(red|green|blue)(,(red|green|blue))*", together[2].text) or together[2].finish_reason == "length"
    )
    assert together[5].text in ("yes", "no")
    free = llm.generate([prompts[1], prompts[4]], [params[1], params[4]], use_tqdm=False)
    assert [one.token_ids for one in free] == [together[1].token_ids, together[4].token_ids]


@pytest.mark.slow
def test_preempted_requests_go_on_in_their_grammar() -> None:
    small = LLM(MINI, max_num_seqs=4, page_size=8, cache_bytes=caches_of(MINI, 12, 4, 8))
    params = [form(seed, 40, json_schema={"type": "array", "items": PERSON, "minItems": 2}) for seed in range(4)]
    outputs = small.generate(["People: "] * 4, params, use_tqdm=False)
    assert small.statistics.scheduler.preemptions > 0
    schema = jsonschema.Draft202012Validator({"type": "array", "items": PERSON, "minItems": 2})
    for output in outputs:
        assert output.error is None
        if output.finish_reason == "stop":
            schema.validate(json.loads(output.text))
        else:
            matcher = matcher_of(structured_output({"json_schema": dict(schema.schema)}).ebnf)
            for token in output.token_ids:
                matcher.take(token)


def test_several_completions_have_a_matcher_each(llm: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=8, seq_seed=5, so_args={"regex": "[a-z]{3}[0-9]"})
    texts = [one.text for one in llm.generate("Code:", params, use_tqdm=False)[0].outputs]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("[a-z]{3}[0-9]", text) for text in texts)


def test_the_budget_may_end_within_the_grammar(llm: LLM) -> None:
    output = llm.generate("x", form(budget=3, regex="[0-9]{50}"), use_tqdm=False)[0]
    assert output.finish_reason == "length"
    assert re.fullmatch(r"\d{3,}", output.text)


def test_other_options_hold_within_the_grammar(llm: LLM) -> None:
    # min_tokens beyond what the grammar has, a bias towards what is forbidden, top_k of one.
    params = SamplingParams(
        max_tokens=20, min_tokens=15, top_k=1, logit_bias={END: 50.0, 500: 50.0}, so_args={"regex": "(ab|cd)"}
    )
    output = llm.generate("x", params, use_tqdm=False)[0]
    assert (output.text in ("ab", "cd"), output.finish_reason) == (True, "stop")


def test_a_grammar_without_a_way_out_ends_its_own_request_only(llm: LLM) -> None:
    dead = form(ebnf='root ::= "a" lost\nlost ::= "b" lost', budget=12)
    blocked = SamplingParams(max_tokens=9, so_args={"regex": "a"}, logit_bias={67: float("-inf")})
    outputs = llm.generate(["x"] * 3, [dead, blocked, form(regex="(yes|no)")], use_tqdm=False)
    assert (outputs[0].text, outputs[0].finish_reason) == ("a" + "b" * (len(outputs[0].text) - 1), "length")
    assert outputs[1].finish_reason in ("error", "stop")
    assert outputs[2].text in ("yes", "no")


def test_a_failing_matcher_ends_its_own_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    take = Matcher.take

    def failing(self: Matcher, token: int) -> None:
        if self.length == 2:
            raise RuntimeError("a fault in the matcher")
        take(self, token)

    monkeypatch.setattr(Matcher, "take", failing)
    params = [form(regex="[a-z]{9}"), SamplingParams(max_tokens=9, temperature=0), form(regex="[0-9]")]
    outputs = llm.generate(["x"] * 3, params, use_tqdm=False)
    assert outputs[0].finish_reason == "error"
    assert str(outputs[0].error) == (
        "the request's grammar could not be followed: RuntimeError: a fault in the matcher"
    )
    assert isinstance(outputs[0].error, EngineError)
    assert [one.error for one in outputs[1:]] == [None, None]
    assert len(outputs[1].token_ids) == 9
    monkeypatch.undo()
    assert re.fullmatch("[a-z]{9}", llm.generate("x", params[0], use_tqdm=False)[0].text)


def test_a_step_that_fails_while_masks_are_filled_leaves_the_others_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step waits until the masks of the failed one are filled: a matcher has one owner at a time."""
    fill, step, busy, calls = Grammars._fill, InferenceModel.step, [0], [0]

    def slow(*arguments: Any) -> Any:
        busy[0] += 1
        assert busy[0] == 1
        time.sleep(0.05)
        busy[0] -= 1
        return fill(*arguments)

    def failing(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1:
            raise RuntimeError("a fault in the model")
        return step(*arguments, **options)

    monkeypatch.setattr(Grammars, "_fill", slow)
    monkeypatch.setattr(InferenceModel, "step", failing)
    small = LLM(MINI, max_num_seqs=2)
    outputs = small.generate(["x"] * 4, [form(seed, regex="[a-z]{3}[0-9]") for seed in range(4)], use_tqdm=False)
    lost = [output for output in outputs if output.error is not None]
    assert 1 <= len(lost) <= 2
    assert all("a fault in the model" in str(output.error) for output in lost)
    assert all(re.fullmatch("[a-z]{3}[0-9]", output.text) for output in outputs if output.error is None)


def test_the_form_holds_after_the_thinking(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    params = SamplingParams(temperature=0, max_tokens=120, so_args={"json_schema": schema})
    outputs = llm.chat([question] * 2, params, thinking=[True, False], use_tqdm=False)
    for output, thinks in zip(outputs, (True, False), strict=True):
        completion = output.outputs[0]
        assert (completion.reasoning is not None) == thinks
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.content or "")["answer"], int)
    assert outputs[1].finish_reason == "stop"


@pytest.mark.slow
def test_calls_of_declared_tools_are_valid_and_parsed(llm: LLM) -> None:
    # The bundled checkpoint knows no tools; biases towards the markup make it call them, again and again.
    markup = {tokenizer().encode("<")[0]: 15.0, 4092: 30.0}
    params = [SamplingParams(max_tokens=130, seq_seed=seed, logit_bias=markup) for seed in range(3)]
    outputs = llm.chat([ASK] * 3, params, thinking=False, tools=TOOLS, use_tqdm=False)
    whole = []
    for output in outputs:
        calls = output.outputs[0].tool_calls
        whole += calls if output.finish_reason == "stop" else calls[:-1]
    assert whole
    for call in whole:
        assert call.name == "look_up"
        jsonschema.validate(json.loads(call.arguments), PERSON)
    few = SamplingParams(max_tokens=30, seq_seed=1, logit_bias=markup)
    free = llm.chat(ASK, few, thinking=False, tools=TOOLS, tool_grammar=False, use_tqdm=False)[0]
    assert free.token_ids.count(4092) > 10  # nothing holds the markup back


def test_what_tools_ask_for_in_vain_does_not_stop_a_chat(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**PERSON, "minProperties": 1}}}]
    output = llm.chat(ASK, SamplingParams(max_tokens=3), thinking=False, tools=tools, use_tqdm=False)[0]
    assert output.unenforced == ("tools[0].function.parameters.minProperties",)


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of regex, json_schema, ebnf"),
    ({"regex": "a", "ebnf": "b"}, "exactly one of"),
    ({"regex": "a", "strict": True}, "exactly one of"),
    ({"regex": 3}, "takes a string"),
    ({"regex": "a", "partial": 1}, "True or False"),
]


@pytest.mark.parametrize(("so_args", "message"), BAD)
def test_bad_so_args_are_refused_when_they_are_made(so_args: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(so_args=so_args)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "is no regular expression"),
    ({"regex": r"(?=a)b"}, "lookahead"),
    ({"ebnf": "root ::= x"}, "does not compile"),
    ({"ebnf": "root ::= root"}, "matches nothing"),
    ({"json_schema": {"uniqueItems": True}}, r"does not enforce \$.uniqueItems"),
    ({"json_schema": {"$ref": "#"}}, "matches nothing"),
    ({"json_schema": "{"}, "no JSON"),
]


def test_what_does_not_compile_is_refused_at_submission_and_the_rest_runs(llm: LLM) -> None:
    params = [*(form(**so_args) for so_args, _ in REFUSED), form(regex="(yes|no)")]
    outputs = llm.generate(["x"] * len(params), params, on_error="return", use_tqdm=False)
    for (_, message), output in zip(REFUSED, outputs, strict=False):
        assert isinstance(output.error, RequestError)
        assert re.search(message, str(output.error)), output.error
    assert outputs[-1].text in ("yes", "no")
    with pytest.raises(RequestError, match="cannot be served, none was run"):
        llm.generate(["x"] * 2, params[:2])


def test_a_partial_schema_says_what_was_not_enforced(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}
    output = llm.generate("x", form(json_schema=schema, partial=True), use_tqdm=False)[0]
    assert output.unenforced == ("$.uniqueItems",)
    assert json.loads(output.text) in ([], [1], [1, 1])


def test_an_output_that_has_to_end_cannot_ignore_the_end(llm: LLM) -> None:
    with pytest.raises(RequestError, match="ignore_eos is True"):
        llm.generate("x", SamplingParams(ignore_eos=True, so_args={"regex": "a"}))


def test_free_requests_import_and_hold_nothing(llm: LLM) -> None:
    code = (
        "import sys; from deepinfer import LLM, SamplingParams; "
        f"LLM({str(MINI)!r}).generate('x', SamplingParams(max_tokens=2), use_tqdm=False); "
        "assert not {'xgrammar', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
