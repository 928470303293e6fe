"""Decode speed of the engine against the reference, which recomputes its sequences for every token.

    python benchmarks/decode_speed.py [--requests 1 8 32] [--prompt 96] [--tokens 32] [--rounds 3]

The engine generates `tokens` tokens for each of R prompts, without drafts; counted are the steps that hold no prompt
rows. The reference runs all R sequences, at the mean length of that run, once: that is what one token of each costs it.
"""

import argparse
from collections.abc import Sequence
from statistics import median

import torch
from measure import in_turns, machine, ratio, seconds, text

from deepinfer import LLM, SamplingParams
from deepinfer.checkpoint.reader import Checkpoint
from deepinfer.reference.loading import load_reference
from deepinfer.reference.model import ReferenceModel
from deepinfer.text.engram_classes import engram_classes
from deepinfer.text.tokenizer import Tokenizer


def engine_speed(llm: LLM, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Tokens a second of the decode steps of one run."""
    pace = llm.statistics.decode
    rows, spent = pace.rows, pace.seconds
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return (pace.rows - rows) / (pace.seconds - spent)


@torch.inference_mode()
def reference_speed(model: ReferenceModel, ids: torch.Tensor) -> float:
    """Tokens a second if each needs a pass over ids [R, T]."""
    return len(ids) / seconds(lambda: model(ids))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of requests and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint directory (default: the bundled one)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32], help="requests at once")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens of each request")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns")
    options = parser.parse_args(arguments)
    llm = LLM(options.model, nextn=0, prefix_cache=False, max_num_seqs=max(options.requests))
    model = load_reference(Checkpoint(llm.directory), engram_classes(Tokenizer.from_file(llm.directory)))
    print(machine())
    print(f"{'requests':>8}  {'engine':>8}  {'reference':>9}  tokens/s; engine / reference")
    for requests in options.requests:
        prompts = [text(options.model, options.prompt, 200 * number) for number in range(requests)]
        longer = torch.tensor([text(options.model, options.prompt + options.tokens // 2)] * requests)
        taken = in_turns(
            {
                "engine": lambda prompts=prompts: engine_speed(llm, prompts, options.tokens),
                "reference": lambda longer=longer: reference_speed(model, longer),
            },
            options.rounds,
        )
        engine, reference = taken["engine"], taken["reference"]
        print(f"{requests:>8}  {median(engine):>8.1f}  {median(reference):>9.2f}  {ratio(engine, reference)}")


if __name__ == "__main__":
    main()
