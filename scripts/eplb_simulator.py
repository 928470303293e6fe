"""Replays loads of experts on many ranks: how uneven the ranks are before balancing, and after.

    python scripts/eplb_simulator.py                      # the table of doc/parallel.md
    python scripts/eplb_simulator.py --ranks 256 --extra 128 --nodes 32 --zipf 0.8

Recorded loads come from the bundled checkpoint, or `--model`, reading `--text`, in two halves: experts are placed by
the first and judged by the second. The released model has 384 experts, so each layer's loads are stretched to as many:
sorted by the first half and interpolated, both halves alike, so that spread and drift stay. Synthetic loads are a power
law, `rank ** -exponent`, both halves drawn from it. In both cases a half is `--tokens` tokens that draw `--visits`
experts each. A figure is the load of the busiest rank over the mean of all, the mean (and the worst) over layers.
"""

import argparse
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepinfer import LLM, SamplingParams
from deepinfer.config.envs import read_environment
from deepinfer.core.errors import DeepInferError
from deepinfer.parallel.placement import balanced_placement, first_placement
from deepinfer.parallel.replication import slot_count

Loads = npt.NDArray[np.float64]
ROOT = Path(__file__).parent.parent
CHUNK = 2048  # characters a request that is read
SYNTHETIC_LAYERS = 4


def texts() -> list[Path]:
    """The project's own pages and modules, in an order that mixes them."""
    files = [*ROOT.glob("*.md"), *ROOT.glob("doc/*.md"), *ROOT.glob("deepinfer/**/*.py")]
    return sorted(files, key=lambda file: blake2b(file.name.encode()).digest())


def record(model: str | None, files: list[Path], most: int) -> tuple[Loads, Loads]:
    """Visits [layers, experts] of the two halves of the text, in which requests take turns."""
    read_environment()
    llm = LLM(model, count_experts=True, prefix_cache=False)
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    pieces = [text[begin : begin + CHUNK] for begin in range(0, len(text), CHUNK)][:most]
    params = SamplingParams(temperature=1, max_tokens=8, seq_seed=0)
    seen = []
    for half in (0, 1):
        llm.generate(pieces[half::2], params, use_tqdm=False)
        visits = llm.statistics.expert_visits
        assert visits is not None
        seen.append(visits.double().numpy())
    return seen[0], seen[1] - seen[0]


def stretch(first: Loads, second: Loads, experts: int) -> tuple[Loads, Loads]:
    """Loads of few experts [layers, e] to those of many [layers, experts], by interpolating their logarithms."""
    order = (-first).argsort(1)
    places = np.linspace(0, first.shape[1] - 1, experts)
    known = np.arange(first.shape[1])

    def many(loads: Loads) -> Loads:
        logs = np.log(np.take_along_axis(loads, order, 1).clip(min=0.5))
        stretched = np.exp([np.interp(places, known, row) for row in logs])
        return stretched / stretched.sum(1, keepdims=True)

    return many(first), many(second)


def zipf(experts: int, exponent: float) -> Loads:
    shares = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return np.tile(shares / shares.sum(), (SYNTHETIC_LAYERS, 1))


def sampled(shares: Loads, visits: int, seed: int) -> Loads:
    source = np.random.default_rng(seed)
    return np.array([source.multinomial(visits, layer) for layer in shares], dtype=np.float64)


def simulate(first: Loads, second: Loads, extra: int, ranks: int, nodes: int) -> tuple[list[float], list[float]]:
    """Imbalance on `second` of every layer, in the order of the experts and as balanced by `first`."""
    experts = first.shape[1]
    slots = slot_count(experts, extra, ranks)
    before = first_placement(experts, 0, ranks)
    after = [balanced_placement(layer, slots, ranks, nodes) for layer in first]
    shuffled = [layer[np.random.default_rng(0).permutation(experts)] for layer in second]  # sorted ids would be unfair
    return (
        [before.imbalance(layer) for layer in shuffled],
        [place.imbalance(layer) for place, layer in zip(after, second, strict=True)],
    )


def report(title: str, first: Loads, second: Loads, options: argparse.Namespace) -> None:
    hottest = (second.max(1) / second.mean(1)).mean()
    print(f"\n{title}: {first.shape[1]} experts, the busiest {hottest:.1f} times the mean")
    extras = options.extra
    print("| ranks | before | " + " | ".join(f"{extra} extra" for extra in extras) + " |")
    print("|---|---|" + "---|" * len(extras))
    for ranks in options.ranks:
        nodes = max(1, options.nodes or ranks // 8)
        cells: list[list[float]] = []
        for extra in extras:
            before, after = simulate(first, second, extra, ranks, nodes if options.hierarchical else 1)
            cells = [before, *cells[1:], after]
        print(f"| {ranks} | " + " | ".join(f"{np.mean(cell):.3f} ({np.max(cell):.3f})" for cell in cells) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint whose loads are recorded (default: the bundled one)")
    parser.add_argument("--text", type=Path, nargs="+", default=texts(), help="what it reads")
    parser.add_argument("--pieces", type=int, default=120, help="most requests to record (default: %(default)s)")
    parser.add_argument("--experts", type=int, default=384, help="experts to stretch to (default: %(default)s)")
    parser.add_argument("--visits", type=int, default=6, help="experts a token visits (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens of a half (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--extra", type=int, nargs="+", default=[0, 32, 64])
    parser.add_argument("--zipf", type=float, nargs="*", default=[0.3, 0.6, 1.0], help="exponents of synthetic loads")
    parser.add_argument("--hierarchical", action="store_true", help="copies stay within a node")
    parser.add_argument("--nodes", type=int, help="nodes, with --hierarchical (default: one for 8 ranks)")
    options = parser.parse_args()
    visits = options.tokens * options.visits
    try:
        recorded = record(options.model, options.text, options.pieces)
        print(f"recorded {int(recorded[0].sum() + recorded[1].sum()):,} visits of {len(options.text)} files")
        halves = [sampled(shares, visits, seed) for seed, shares in enumerate(stretch(*recorded, options.experts))]
        report("recorded", *halves, options)
        for exponent in options.zipf:
            shares = zipf(options.experts, exponent)
            report(f"power law {exponent}", sampled(shares, visits, 0), sampled(shares, visits, 1), options)
    except DeepInferError as error:
        print(f"eplb_simulator: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
