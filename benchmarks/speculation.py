"""Decode speed with and without drafts, by the number of requests.

    python benchmarks/speculation.py [--on exercises] [--requests 1 4 16 64] [--rounds 3] [--rule equality]
                                     [--temperature 0]

On exercises that the checkpoint was trained for, of which it drafts nearly every token, or on text that it goes on
with, of which it does not. Plain is an engine without a drafter: on a GPU its steps are recorded, as those with drafts
are. Each round runs the same requests plainly, with all drafts verified and with as many as pay, one after the other,
so that whatever else the machine does hits all of them alike; first rounds, in which graphs are recorded, are not
timed. Counted are the tokens and the time of the steps that hold no prompt rows. Length is the mean of tokens that a
step gives a request.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from measure import in_turns, machine, ratio, text

from deepinfer import LLM, SamplingParams
from deepinfer.text.tokenizer import Tokenizer
from eval.questions import Question, QuestionMaker

TASKS = ("add2", "add3", "json")


def exercises(llm: LLM, count: int) -> list[Question]:
    """`count` held-out exercises, the tasks in turn."""
    each = -(-count // len(TASKS))
    maker = QuestionMaker(llm.config, Tokenizer.from_file(llm.directory))
    made = maker.make(dict.fromkeys(TASKS, each), "benchmark", 0)
    by_task = [made[number * each : (number + 1) * each] for number in range(len(TASKS))]
    return [question for turn in zip(*by_task, strict=True) for question in turn][:count]


def solve(llm: LLM, questions: Sequence[Question], temperature: float) -> None:
    """Answer exercises."""
    llm.chat(
        [question.sample.messages for question in questions],
        [SamplingParams(temperature=temperature, max_tokens=question.most_tokens) for question in questions],
        thinking=[question.sample.thinking for question in questions],
        use_tqdm=False,
    )


def go_on(llm: LLM, prompts: Sequence[Sequence[int]], temperature: float) -> None:
    """Continue text."""
    llm.generate(prompts, SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True), use_tqdm=False)


def speed(llm: LLM, run: Callable[[LLM], None]) -> float:
    """Tokens a second of the decode steps of one run."""
    pace = llm.statistics.decode
    rows, spent = pace.rows, pace.seconds
    run(llm)
    return (pace.rows - rows) / (pace.seconds - spent)


def rounds(llm: LLM) -> tuple[int, int]:
    """Rounds so far, and what they gave."""
    return llm.statistics.speculation.rounds, llm.statistics.speculation.tokens


def length(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Tokens a round between two looks."""
    return (after[1] - before[1]) / (after[0] - before[0])


def draw(requests: Sequence[int], speeds: Mapping[str, Sequence[float]], target: Path) -> None:
    """A line for each way of decoding, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"plain": "without drafts", "all": "all drafts verified", "varlen": "variable length"}
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, values in speeds.items():
        axes.plot(requests, values, marker="o", label=names[name])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(requests, [str(count) for count in requests])
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%d"))
    axes.set_xlabel("requests at once")
    axes.set_ylabel("generated tokens/s")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, bbox_inches="tight")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of requests and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--on", choices=("exercises", "text"), default="exercises", help="what requests are about")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns")
    parser.add_argument("--warm_up", type=int, default=1, help="rounds before that; on a GPU, variable length takes 4")
    parser.add_argument("--temperature", type=float, default=0.0, help="of all requests (greedy)")
    parser.add_argument("--rule", choices=("equality", "rejection"), default="equality", help="of drafts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw tokens a second against requests at once")
    options = parser.parse_args(arguments)
    common = {"prefix_cache": False, "max_num_seqs": max(options.requests), "draft_rule": options.rule}
    kinds = {
        "plain": LLM(options.model, nextn=0, **common),
        "all": LLM(options.model, varlen=False, **common),
        "varlen": LLM(options.model, varlen=True, **common),
    }
    print(machine())
    print(f"{'requests':>8}  {'plain':>7}  {'all':>7}  {'varlen':>7}  tokens/s; all / plain; varlen / plain; lengths")
    drawn: dict[str, list[float]] = {name: [] for name in kinds}
    for requests in options.requests:
        if options.on == "text":
            prompts = [text(options.model, 64, 150 * number) for number in range(requests)]
            run = partial(go_on, prompts=prompts, temperature=options.temperature)
        else:
            questions = exercises(kinds["plain"], requests)
            run = partial(solve, questions=questions, temperature=options.temperature)
        for llm in [*kinds.values()] * options.warm_up:
            run(llm)
        before = {name: rounds(llm) for name, llm in kinds.items()}
        taken = in_turns(
            {name: lambda llm=llm, run=run: speed(llm, run) for name, llm in kinds.items()},
            options.rounds,
        )
        lengths = [f"{length(before[name], rounds(kinds[name])):.2f}" for name in ("all", "varlen")]
        for name in kinds:
            drawn[name].append(median(taken[name]))
        speeds = "  ".join(f"{median(taken[name]):7.1f}" for name in kinds)
        ratios = ", ".join(ratio(taken[name], taken["plain"]) for name in ("all", "varlen"))
        print(f"{requests:>8}  {speeds}  {ratios}; {', '.join(lengths)}", flush=True)
    print(*kinds["varlen"].statistics.lines(), sep="\n")
    if options.plot is not None:
        draw(options.requests, drawn, options.plot)


if __name__ == "__main__":
    main()
