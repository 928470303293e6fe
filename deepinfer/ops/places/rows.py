"""What is known of rows of requests of their own."""

from typing import NamedTuple

from torch import Tensor


class SingleRows(NamedTuple):
    """Of M rows.

    near: int32 [M, window], ring addresses of the row's own position and those before it, -1 for what no window holds.
    places: int64 [M], where the row's own key goes. slots: int32 [M]. firsts, counts: int32 [M], 0, 1, 2, ... and ones.
    plain, compressed: complex64 [M, F], rotations.
    """

    near: Tensor
    places: Tensor
    slots: Tensor
    firsts: Tensor
    counts: Tensor
    plain: Tensor
    compressed: Tensor
