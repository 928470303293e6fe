"""Where rows find and leave their keys: ring rows of windows, addresses of entries, rotations of both.

Contract. For M rows of requests of their own, all int64 [M]:
`single_rows(positions, slots, lowest, window, ring, plain, compressed)` gives what is in `SingleRows`; the last two are
FP32 [F], angles per position step.
`entry_rows(rows int64 [W], positions, slots, page_table int64 [slots, columns], page_size, ratio, freqs FP32 [F])`
gives for the entries whose last tokens are `rows` their addresses int64 [W] and rotations complex64 [W, F].
"""

from deepinfer.ops.choice import choose
from deepinfer.ops.places import dispatch
from deepinfer.ops.places import torch as plain
from deepinfer.ops.places.rows import SingleRows

entry_rows = choose(dispatch.entry_rows, plain.entry_rows)
single_rows = choose(dispatch.single_rows, plain.single_rows)

__all__ = ["SingleRows", "entry_rows", "single_rows"]
