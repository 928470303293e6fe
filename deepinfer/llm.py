"""The offline API: prompts or conversations in, finished outputs out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from deepinfer.checkpoint.locate import resolve_model
from deepinfer.config.engine import EngineConfig
from deepinfer.config.envs import read_environment
from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.outputs import RequestOutput
from deepinfer.core.request import Request
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.engine.admission import Conversation, Pending, Prompt
from deepinfer.engine.engine import Engine
from deepinfer.engine.group import EngineGroup, topology_of
from deepinfer.engine.progress import Progress
from deepinfer.engine.statistics import EngineStatistics
from deepinfer.speculative.rounds import Round

OnError = Literal["raise", "return"]
OnOutput = Callable[[RequestOutput], None]
Params = SamplingParams | Sequence[SamplingParams] | None
_Item = TypeVar("_Item")


class LLM:
    """A loaded model that answers batches of prompts.

    >>> llm = LLM()  # the checkpoint that ships with the project
    >>> llm.generate("The first")[0].text
    >>> llm.chat([{"role": "user", "content": "What is 47 + 38?"}])[0].outputs[0].content
    """

    def __init__(self, model: str | Path | None = None, **settings: Any) -> None:
        """Load a checkpoint: a directory, a name, or None for `DEEPINFER_HF_MODEL_DIR` and else the bundled one.

        `settings` are the fields of `EngineConfig` (deepinfer/config/engine.py): how many requests and rows a step
        holds, memory for caches, prefix cache, plain or asynchronous loop, dtype.
        Raises CheckpointError or ConfigError for a checkpoint, a setting or an environment variable that will not do.
        """
        self.directory = resolve_model(model)
        environment, checked = read_environment(), _engine_config(settings)
        topology = topology_of(checked, environment)
        self._engine: Engine | EngineGroup = (
            Engine(self.directory, environment, checked)
            if topology.ranks == 1
            else EngineGroup(self.directory, environment, checked, topology)
        )
        self.config = self._engine.config

    @property
    def statistics(self) -> EngineStatistics:
        """What the engine has done so far; `lines()` of it is a report."""
        return self._engine.statistics

    def record_rounds(self) -> list[Round]:
        """The list that gets every round of speculation from now on: what `deepinfer calibrate` is fitted to.

        ConfigError where nothing is drafted, and where ranks do the work.
        """
        if not isinstance(self._engine, Engine):
            raise ConfigError("rounds are recorded by one rank alone; set ep and dp to 1")
        return self._engine.record_rounds()

    def close(self) -> None:
        """Keep cached pages for the next process, where a disk cache is set; the LLM can still be used."""
        self._engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: text, or token ids that are taken as they are; one prompt or a list of them.

        A prompt with images is `{"prompt": text or token ids, "images": [...]}`: `<｜deepseek_image｜>` in the text, or
        the image token's id, stands for each image, which is a path, bytes, a PIL image, a data URL or a URL.

        `sampling_params` are for all prompts, or a list with one for each. A prompt that cannot be served raises a
        `RequestError`, before anything runs, that lists every bad prompt and why; with `on_error="return"` the others
        run and the output of a bad one has `finish_reason` "error" and its `error`. So does, in either case, the output
        of a request whose step failed while it ran.

        `on_output` is called in the calling thread with each output as soon as it is there, so that it can be kept
        before all others are; what it raises ends the call.
        """
        many = _prompt_list(prompts)
        report = _Report(use_tqdm, on_error, on_output)
        return self._answer("prompt", many, self._engine.admission.prompt, sampling_params, report)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params = None,
        *,
        thinking: bool | Sequence[bool] = True,
        reasoning_effort: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_grammar: bool = True,
        use_tqdm: bool = True,
        on_error: OnError = "raise",
        on_output: OnOutput | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation: a list of messages in OpenAI form, or a list of such lists.

        Content is a string or a list of parts; an image part is `{"type": "image", "image": path, bytes or PIL image}`
        or `{"type": "image_url", "image_url": {"url": URL, data URL or path}}`. URLs are fetched only from the hosts
        that the setting `image_url_hosts` lists. Each output's completion holds `reasoning`, `content` and
        `tool_calls`. `thinking` is for all conversations, or a list with one for each. The rest is as
        for `generate`.

        With `tools`, a reply that calls one is held to the form of calls, the declared names and the schemas of their
        arguments; `tool_grammar=False` leaves the model free. `so_args` of the sampling parameters take the place of
        that; either holds from the end of the thinking on.
        """
        many = _conversation_list(messages)
        modes = _one_each(thinking, bool, len(many), "thinking", "conversation")
        options = {"reasoning_effort": reasoning_effort, "tools": tools}

        def admit(index: int, conversation: Conversation, params: SamplingParams) -> Pending:
            chosen = {"thinking": modes[index], **options}
            return self._engine.admission.chat(index, conversation, params, chosen, tool_grammar=tool_grammar)

        report = _Report(use_tqdm, on_error, on_output)
        return self._answer("conversation", many, admit, sampling_params, report)

    def _answer(
        self,
        noun: str,
        items: Sequence[_Item],
        admit: Callable[[int, _Item, SamplingParams], Pending],
        sampling_params: Params,
        report: "_Report",
    ) -> list[RequestOutput]:
        """Admit every item, then run the good ones; outputs stand in the order of the items."""
        default = SamplingParams() if sampling_params is None else sampling_params
        params = _one_each(default, SamplingParams, len(items), "sampling_params", noun)
        pending, errors = _each(range(len(items)), lambda index: admit(index, items[index], params[index]))
        admitted, late = _each(pending, lambda index: pending[index]())
        requests = _compiled(list(admitted.values()), late)
        errors = dict(sorted({**errors, **late}.items()))
        if errors and report.on_error == "raise":
            raise _summary(errors, noun, len(items))
        outputs = [RequestOutput.failed(index, error) for index, error in errors.items()]
        for output in outputs:
            if report.on_output is not None:
                report.on_output(output)
        with Progress(sum(request.params.n for request in requests), report.use_tqdm) as progress:
            outputs += self._engine.run(requests, progress.step, report.on_output)
        return sorted(outputs, key=lambda output: output.index)


@dataclass(frozen=True)
class _Report:
    """What a caller wants to hear, and when: a progress bar, errors as exceptions, outputs as they come."""

    use_tqdm: bool
    on_error: OnError
    on_output: OnOutput | None

    def __post_init__(self) -> None:
        if self.on_error not in ("raise", "return"):
            raise RequestError(f"on_error is {self.on_error!r}; it takes 'raise' or 'return'")
        if self.on_output is not None and not callable(self.on_output):
            raise RequestError(f"on_output is {self.on_output!r:.80}; it takes a function of one output, or None")


def _compiled(requests: Sequence[Request], errors: dict[int, RequestError]) -> list[Request]:
    """Wait for the grammars of requests, which compile side by side; the errors of those that do not are noted."""
    good = []
    for request in requests:
        try:
            if request.grammar is not None:
                request.grammar.wait()
            good.append(request)
        except RequestError as error:
            errors[request.index] = error
    return good


def _engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            raise ConfigError(f"LLM has no setting {name!r}; it takes {', '.join(known)}")
    return EngineConfig(**settings)


def _each(indices: Iterable[int], make: Callable[[int], _Item]) -> tuple[dict[int, _Item], dict[int, RequestError]]:
    """Return what `make` gives for each index, and the errors of those for which it raises one."""
    made: dict[int, _Item] = {}
    errors: dict[int, RequestError] = {}
    for index in indices:
        try:
            made[index] = make(index)
        except RequestError as error:
            errors[index] = error
    return made, errors


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Tell one prompt from many: text, a prompt with images, and a list that starts with a number, is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_list = isinstance(prompts, Sequence) and not isinstance(prompts, bytes)
    if is_list and prompts and isinstance(prompts[0], int):
        return [cast(Prompt, prompts)]
    return _checked_list(cast(Sequence[Prompt], prompts), "prompts", "text, a list of token ids, or a list of these")


def _conversation_list(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """Tell one conversation from many: a list that starts with a message is one."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return _checked_list(cast(Sequence[Conversation], messages), "messages", "a list of messages, or a list of these")


def _checked_list(items: Sequence[_Item], name: str, takes: str) -> Sequence[_Item]:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        raise RequestError(f"{name} takes {takes}, not {type(items).__name__}")
    return items


def _one_each(value: _Item | Sequence[_Item], kind: type[_Item], count: int, name: str, noun: str) -> Sequence[_Item]:
    """Return one `kind` for each of `count` items from one for all or a list."""
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or not all(isinstance(one, kind) for one in value):
        raise RequestError(f"{name} takes {kind.__name__}, or a list with one for each {noun}, not {value!r:.80}")
    if len(value) != count:
        raise RequestError(
            f"{name} has {len(value)} entries for {count} {noun}s; it takes one for each, or one for all"
        )
    return value


def _summary(errors: Mapping[int, RequestError], noun: str, count: int) -> RequestError:
    """Return one error that lists every bad item."""
    if count == 1:
        return errors[0]
    listed = "; ".join(f"{noun} {index}: {error}" for index, error in errors.items())
    return RequestError(f"{len(errors)} of {count} {noun}s cannot be served, none was run: {listed}")
