"""Every operator at the shapes of the released model, on random data; here the products, attention, index, experts."""

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.ops.experts import Fp4Experts, tile_experts
from deepinfer.ops.experts import cuda as experts_cuda
from deepinfer.ops.experts import torch as experts_torch
from deepinfer.ops.indexer import cuda as indexer_cuda
from deepinfer.ops.indexer import triton as indexer_triton
from deepinfer.ops.kv_formats import pack_index, pack_latent, pack_window, unpack_index
from deepinfer.ops.linear import Fp8Rows
from deepinfer.ops.linear import torch as linear_torch
from deepinfer.ops.linear import triton as linear_triton
from deepinfer.ops.rope import torch as rope_torch
from deepinfer.ops.rows.index import Index
from deepinfer.ops.sparse_attention import cuda as attention_cuda
from deepinfer.ops.sparse_attention import torch as attention_torch
from op_bench.inputs import DIM, EXPERTS, HEADS, HIDDEN, L2_BYTES, WIDTH, fp8_weight, randn, turns
from op_bench.row_operators import (
    activation,
    index_queries,
    outputs,
    queries,
    rounding,
    router,
    statistics,
    streams,
    window,
)
from op_bench.timing import Case, Prepared, Work, relative


def cases() -> Iterator[Case]:
    """All of them, the most important first."""
    for rows in (6, 48, 288, 768, 6144, 49152):
        yield experts(rows)
    for rows, compressed in ((1, True), (6, True), (64, True), (128, True), (4096, True), (4096, False)):
        yield attention(rows, compressed)
    for rows, keys in ((1, 8192), (64, 8192), (128, 8192), (128, 131072), (4096, 8192), (4096, 65536)):
        yield scores(rows, keys)
    yield scores(128, 4096, ratio=2)
    for rows in (1, 128):
        yield scores(rows, 65536, listed=True)
    for rows, keys in ((1, 8192), (128, 8192), (1, 8200), (128, 8200), (128, 131072), (4096, 8192)):
        yield selection(rows, keys)
    for columns, features in ((5120, 1792), (1280, 32768), (8192, 5120), (5120, 4608), (2304, 5120)):
        for rows in (1, 64, 128, 16384):
            yield dense(rows, columns, features)
    for rows in (1, 128, 16384):
        yield from (groups(rows), streams(rows), statistics(rows), rounding(rows), queries(rows), outputs(rows))
        yield from (window(rows), router(rows), index_queries(rows), activation(rows))


def experts(rows: int) -> Case:
    """Dispatch, both products with SwiGLU, and the sum, for `rows` visits: six a row, loads of spread e^(0.4 N)."""
    chosen = visits(rows)
    weight_bytes = int(chosen.unique().numel()) * 3 * HIDDEN * WIDTH * 17 / 32

    def prepare() -> Prepared:
        x = randn(rows // 6, HIDDEN)
        routing = torch.rand(len(x), 6, device="cuda")
        w13, w2 = expert_weights()

        def call() -> Tensor:
            return experts_cuda.routed_experts(x, chosen, routing, w13, w2, 10.0)

        def error() -> float:
            some = slice(-256, None)
            wanted = experts_torch.routed_experts(x[some], chosen[some], routing[some], w13, w2, 10.0)
            return relative(call()[some], wanted)

        return Prepared([call] * (3 if rows < 10000 else 1), error)

    work = Work(weight_bytes + rows * (2 * HIDDEN + 3 * WIDTH + 2 * HIDDEN), 6 * rows * HIDDEN * WIDTH)
    return Case("experts", f"{rows} visits", work, 2e-2, prepare)


def visits(count: int) -> Tensor:
    """Six different experts of 48 for each of count / 6 rows, int64, with loads of spread e^(0.4 N)."""
    loads = torch.exp(0.4 * torch.randn(EXPERTS, device="cuda"))
    return torch.multinomial(loads.expand(count // 6, EXPERTS), 6)


_EXPERT_WEIGHTS: list[Fp4Experts] = []


def expert_weights() -> tuple[Fp4Experts, Fp4Experts]:
    """Of 48 experts, made once."""
    if not _EXPERT_WEIGHTS:
        for rows, columns, paired in ((2 * WIDTH, HIDDEN, True), (HIDDEN, WIDTH, False)):
            parts = []
            for _ in range(EXPERTS):
                codes = torch.randint(0, 256, (1, rows, columns // 2), device="cuda", dtype=torch.int32).to(torch.uint8)
                scales = 118 - torch.randint(0, 3, (1, rows, columns // 32), device="cuda", dtype=torch.int32)
                parts.append(tile_experts(codes, scales.to(torch.uint8), paired)[0])
            tiles, row_scales = (torch.cat([getattr(p, n) for p in parts]) for n in ("tiles", "scales"))
            _EXPERT_WEIGHTS.append(Fp4Experts(tiles, row_scales, paired))
    return _EXPERT_WEIGHTS[0], _EXPERT_WEIGHTS[1]


def attention(rows: int, compressed: bool) -> Case:
    """Attention over 512 entries and 128 window keys, some of them missing, or over the window alone."""
    entries = 512 if compressed else 0
    gathered = rows * (entries * 288 + 128 * 528)

    def prepare() -> Prepared:
        latents = pack_latent(randn(1 << 14, DIM, dtype=torch.float32)).repeat(8, 1)
        windows = pack_window(randn(max(rows, 8) * 16, DIM, dtype=torch.float32))
        q, sink = randn(rows, HEADS, DIM).half(), randn(HEADS, dtype=torch.float32)
        chosen = torch.randint(0, len(latents), (rows, 512), device="cuda", dtype=torch.int32)
        near = torch.randint(0, len(windows), (rows, 128), device="cuda", dtype=torch.int32)
        chosen[torch.rand(rows, 512, device="cuda") < 0.1] = -1
        near[torch.rand(rows, 128, device="cuda") < 0.1] = -1
        far = (latents, chosen) if compressed else (None, None)

        def call() -> Tensor:
            return attention_cuda.attend_rows(q, windows, near, *far, sink)

        def error() -> float:
            some = slice(-16, None)
            picked = (latents, chosen[some]) if compressed else (None, None)
            return relative(call()[some], attention_torch.attend_rows(q[some], windows, near[some], *picked, sink))

        return Prepared([call] * (5 if rows < 1000 else 1), error)

    work = Work(gathered + rows * 4 * HEADS * DIM, 4 * rows * HEADS * DIM * (entries + 128), "fp16")
    return Case("attention" if compressed else "attention, window", f"{rows} rows", work, 5e-3, prepare)


def scores(rows: int, keys: int, ratio: int = 1, listed: bool = False) -> Case:
    """Index scores: each of up to 128 rows on a request of its own, more rows on one; or of candidate blocks of 8."""
    requests = rows if rows <= 128 else 1
    scored = 16384 if listed else keys

    def prepare() -> Prepared:
        entries = 64 // ratio
        pages = keys // entries
        distinct = min(requests, 8)
        stored = pack_index(randn(distinct * keys, 128, dtype=torch.float32))
        cache = stored.repeat(-(-requests // distinct), 1)[: requests * keys]
        q, weights = randn(rows, 32, 128), randn(rows, 32)
        codes, scaled = indexer_triton.queries(q, turns(rows), weights, 0.015)
        each = 1 if requests > 1 or rows == 1 or listed else indexer_cuda.ROWS
        firsts = torch.arange(0, rows, each, device="cuda", dtype=torch.int32)
        slots = firsts if requests > 1 else torch.zeros_like(firsts)
        blocks = torch.randperm(keys // 8, device="cuda")[: scored // 8].sort().values.int()
        index = Index(
            keys=cache,
            page_table=torch.arange(requests * pages, device="cuda").view(requests, pages),
            page_size=64,
            ratio=ratio,
            slots=slots,
            visible=torch.full((rows,), keys, device="cuda", dtype=torch.int32),
            length=scored,
            group_slots=slots,
            group_firsts=firsts,
            group_counts=torch.full_like(firsts, each),
            blocks=blocks.repeat(rows, 1) if listed else None,
            block=8,
        )

        def call() -> Tensor:
            return indexer_cuda.scores(codes, scaled, index)

        def error() -> float:
            row = rows - 1
            request = row if requests > 1 else 0
            known = unpack_index(cache[request * keys : (request + 1) * keys], torch.float32)
            if listed:
                known = known.view(-1, 8, 128)[blocks.long()].flatten(0, 1)
            rounded = rope_torch.rotate(q[row : row + 1], turns(rows)[row : row + 1, None])
            rounded = unpack_index(pack_index(rounded), torch.float32)[0]
            wanted = ((rounded @ known.T).relu() * weights[row].float()[:, None] * 0.015).sum(0)
            return relative(call()[row], wanted)

        return Prepared([call] * 3, error)

    moved = requests * scored * 68 + rows * scored * 4
    name = "index scores, candidates" if listed else "index scores" if ratio == 1 else "index scores, pairs"
    limit = 1e-3 if requests == 1 and rows > 1 else 1e-4
    return Case(name, f"{rows} x {keys}", Work(moved, 2 * 32 * 128 * rows * scored), limit, prepare)


def selection(rows: int, keys: int) -> Case:
    """The 512 best of each row, in as many columns as the next power of two; as addresses."""

    def prepare() -> Prepared:
        values = randn(rows, 1 << (keys - 1).bit_length(), dtype=torch.float32)
        slots = torch.zeros(rows, device="cuda", dtype=torch.int32)
        index = Index(
            keys=torch.empty(0, 68, dtype=torch.uint8, device="cuda"),
            page_table=torch.arange(values.shape[1] // 64, device="cuda")[None],
            page_size=64,
            ratio=1,
            slots=slots,
            visible=torch.full_like(slots, keys),
            length=values.shape[1],
            group_slots=slots,
            group_firsts=slots,
            group_counts=slots,
        )

        def call() -> Tensor:
            return indexer_cuda.best_entries(values, index)

        def error() -> float:
            wanted = values[-64:, :keys].topk(512).indices.sort(-1).values
            return (call()[-64:].long().sort(-1).values != wanted).float().mean().item()

        return Prepared([call] * 5, error)

    return Case("best 512", f"{rows} x {keys}", Work(rows * keys * 4), 0.0, prepare)


def dense(rows: int, columns: int, features: int) -> Case:
    """An FP8 product of rounded rows."""

    def prepare() -> Prepared:
        copies = max(1, min(24, int(2.5 * L2_BYTES / (columns * features))))
        weights = [fp8_weight(features, columns) for _ in range(copies)]
        x = linear_triton.quantize_rows(randn(rows, columns))

        def error() -> float:
            some = Fp8Rows(x.codes[-64:], x.scales[-64:])
            return relative(
                linear_triton.linear(x, weights[0])[-64:], linear_torch.fp8_linear(some, weights[0], torch.float32)
            )

        return Prepared([lambda w=w: linear_triton.linear(x, w) for w in weights] * max(1, 6 // copies), error)

    moved = columns * features + rows * (columns + 2 * features)
    return Case(
        f"dense {columns} -> {features}", f"{rows} rows", Work(moved, 2 * rows * columns * features), 5e-3, prepare
    )


def groups(rows: int) -> Case:
    """The first output projection: eight products of 4,096 -> 1,024."""

    def prepare() -> Prepared:
        weights = [fp8_weight(8, 1024, 4096) for _ in range(4)]
        x = linear_triton.quantize_rows(randn(rows, 8, 4096))
        if rows > linear_triton.FEW_GROUPED_ROWS:  # group by group, as `output_rows` leaves them
            x = Fp8Rows(x.codes.transpose(0, 1).contiguous().transpose(0, 1), x.scales.t().contiguous().t())

        def error() -> float:
            some = Fp8Rows(x.codes[-64:], x.scales[-64:])
            wanted = linear_torch.fp8_grouped_linear(some, weights[0], torch.float32)
            return relative(linear_triton.grouped_linear(x, weights[0])[-64:], wanted)

        return Prepared([lambda w=w: linear_triton.grouped_linear(x, w) for w in weights], error)

    size = 8 * 1024 * 4096
    return Case(
        "dense 8 x (4096 -> 1024)",
        f"{rows} rows",
        Work(size + rows * 8 * (4096 + 2048), 2 * rows * size),
        5e-3,
        prepare,
    )
