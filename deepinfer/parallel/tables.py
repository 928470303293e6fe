"""Engram tables whose rows lie on many ranks: a step's rows are asked for once, all layers and tokens together."""

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer.model.memory import TableRows
from deepinfer.model.weights import EngramWeights
from deepinfer.parallel.collectives import Collectives


def rows_each(rows: int, ranks: int) -> int:
    """Rows of a table that a rank holds; the last one may hold fewer."""
    return -(-rows // ranks)


class SharedTables:
    """Rank r holds the r-th part of every table's rows. All ranks call it together, some for no rows."""

    def __init__(self, weights: Sequence[EngramWeights], rows: Sequence[int], collectives: Collectives) -> None:
        """`weights`, a layer each, hold this rank's part of tables that have `rows` in all."""
        self._collectives = collectives
        self._each = [rows_each(count, collectives.size) for count in rows]
        self._codes = [layer.codes for layer in weights]
        self._scales = [layer.scales for layer in weights]

    def __call__(self, wanted: Sequence[Tensor]) -> list[TableRows]:
        """For each layer, rows int64 [A] of its table -> what they hold."""
        keys = [_key(rows, each, layer) for layer, (rows, each) in enumerate(zip(wanted, self._each, strict=True))]
        asked, places = torch.unique(torch.cat(keys), return_inverse=True)
        found = self._ask(asked)[places]
        width = self._codes[0].shape[1]
        parts = torch.split(found, [len(rows) for rows in wanted])
        return [TableRows(part[:, :width].contiguous(), part[:, width:].contiguous()) for part in parts]

    def stand_by(self) -> None:
        """Answer the others."""
        self([torch.empty(0, dtype=torch.int64, device=codes.device) for codes in self._codes])

    def _ask(self, keys: Tensor) -> Tensor:
        """Keys int64 [U], ascending, so in the order of their ranks -> uint8 [U, C + C/32]."""
        counts = (keys >> _RANK_BIT).bincount(minlength=self._collectives.size)
        coming = self._collectives.swap(counts[:, None])[:, 0]
        sizes, sizes_coming = counts.tolist(), coming.tolist()
        asked = self._collectives.send_rows(keys[:, None], sizes, sizes_coming)()[:, 0]
        return self._collectives.send_rows(self._read(asked), sizes_coming, sizes)()

    def _read(self, keys: Tensor) -> Tensor:
        layer, row = (keys >> _LAYER_BIT) & _LAYERS, keys & ((1 << _LAYER_BIT) - 1)
        width = self._codes[0].shape[1]
        read = torch.empty(len(keys), width + self._scales[0].shape[1], dtype=torch.uint8, device=self._codes[0].device)
        for number, (codes, scales) in enumerate(zip(self._codes, self._scales, strict=True)):
            here = (layer == number).nonzero()[:, 0]
            rows = row[here]
            read[here] = torch.cat((codes.index_select(0, rows), scales.index_select(0, rows)), 1)
        return read


_LAYER_BIT, _RANK_BIT = 40, 48
_LAYERS = (1 << (_RANK_BIT - _LAYER_BIT)) - 1


def _key(rows: Tensor, each: int, layer: int) -> Tensor:
    """A number by which a row is asked for: its rank, its layer, and where it lies there."""
    return ((rows // each) << _RANK_BIT) | (layer << _LAYER_BIT) | (rows % each)
