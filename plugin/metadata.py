"""Splits a batch into rows for vLLM's stock attention and rows that vote.

Lengths come from the tensors that vLLM keeps on the host, what the device needs goes there through
pinned memory: nothing here waits for the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from blasst.kernels.plan import Batch, Plan, check_batch
from blasst.plugin.versions import row_fields

Index = slice | torch.Tensor
WHOLE = slice(None)


@dataclass(frozen=True)
class Part:
    """Some rows of a batch: slices when they are neighbours, else index tensors.

    rows, tokens: on the batch's device; host_rows: the same on the CPU. ends: int32 [rows + 1], on
    the host: their first query rows in what `take` gives, and the end of the last.
    """

    rows: Index
    host_rows: Index
    tokens: Index
    ends: np.ndarray[Any, np.dtype[np.int32]]

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1] - self.ends[0])

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """The part's query rows: a view when they are neighbours."""
        return _pick(t, self.tokens)

    def put(self, t: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what was computed in the result of `take`; views need no copy."""
        if not isinstance(self.tokens, slice):
            t.index_copy_(0, self.tokens, values)


@dataclass(frozen=True)
class VoteRows:
    """Rows that vote, as Plan.run takes them. skip_lambda: float32 [rows], on the device."""

    part: Part
    batch: Batch
    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor
    seqlens_k: torch.Tensor
    skip_lambda: torch.Tensor


@dataclass(frozen=True)
class Split:
    """stock: the other rows and vLLM's own metadata for them alone; None when all rows vote."""

    vote: VoteRows
    stock: tuple[Part, Any] | None

    def with_block_table(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> Split:
        """The same rows over another cache group's pages."""
        vote = replace(self.vote, page_table=_pick(block_table, self.vote.part.rows))
        if self.stock is None:
            return Split(vote, None)
        rest, metadata = self.stock
        metadata = copy.copy(metadata)
        metadata.block_table = _pick(block_table, rest.rows)
        metadata.slot_mapping = rest.take(slot_mapping)
        return Split(vote, (rest, metadata))


@dataclass(frozen=True)
class LayerVote:
    """How an eligible layer attends, and where it counts: int64 [num_kv_heads, 2]."""

    plan: Plan
    counters: torch.Tensor


class LambdaTable:
    """Lambdas of a batch's voting rows at an address on the device that never changes."""

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        self._table = torch.zeros(max_rows, dtype=torch.float32, device=device)
        self._held: list[float] = []
        self._view = self._table[:0]

    def load(self, values: list[float]) -> torch.Tensor:
        """[len(values)]; copied in stream order, and only when something changed."""
        if values != self._held:
            staged = _staged(torch.tensor(values), self._table.device)
            self._view = self._table[: len(values)]
            self._view.copy_(staged, non_blocking=True)
            self._held = list(values)
        return self._view


def split(
    common: Any,
    lambdas: Sequence[float | None],
    build_stock: Callable[[Any], Any],
    table: LambdaTable,
) -> Split | None:
    """Split a batch. `lambdas`: of its first rows; further ones are padding. None when the
    metadata is not that of the batch (drafts, dual batches) or not causal: all rows are stock."""
    count = len(lambdas)
    if common.num_reqs < count or common.causal is not True:
        return None
    starts = common.query_start_loc_cpu.numpy()[: count + 1]
    keys = _keys(common).numpy()
    voting = _voting(lambdas)
    values = [v for v in map(lambdas.__getitem__, voting) if v is not None]
    first, end = voting[0], voting[-1] + 1
    neighbours = end - first == len(voting)
    device = common.query_start_loc.device
    if neighbours:
        # The kernels find the rows among the others: nothing is cut out or shifted.
        rows = slice(first, end)
        chosen = Part(rows, rows, WHOLE, starts[first : end + 1])
        cu_seqlens_q = common.query_start_loc[first : end + 1]
    else:
        chosen = _gathered(voting, starts, device)
        cu_seqlens_q = _to_device(torch.from_numpy(chosen.ends), device)
    vote = VoteRows(
        part=chosen,
        batch=check_batch(chosen.ends.tolist(), keys[_indices(chosen.host_rows)].tolist(), values),
        cu_seqlens_q=cu_seqlens_q,
        page_table=_pick(common.block_table_tensor, chosen.rows),
        seqlens_k=_pick(common.seq_lens, chosen.rows),
        skip_lambda=table.load(values),
    )
    if chosen.num_tokens == starts[-1]:
        return Split(vote, None)
    if neighbours and starts[end] == starts[-1]:
        rest = _slice(0, first, starts)
    elif neighbours and starts[first] == 0:
        rest = _slice(end, count, starts)
    else:
        rest = _gathered([r for r, v in enumerate(lambdas) if v is None], starts, device)
    return Split(vote, (rest, build_stock(sub_batch(common, rest, keys))))


def _voting(lambdas: Sequence[float | None]) -> list[int]:
    """Rows that vote, in order; from the end, where runners put prefills, until all are found."""
    left = len(lambdas) - list(lambdas).count(None)
    rows: list[int] = []
    row = len(lambdas)
    while left:
        row -= 1
        if lambdas[row] is not None:
            rows.append(row)
            left -= 1
    rows.reverse()
    return rows


def sub_batch(common: Any, rest: Part, keys: np.ndarray[Any, Any]) -> Any:
    """vLLM's common metadata for some rows of a batch alone. keys: of all rows, on the host."""
    device, count = common.query_start_loc.device, len(rest.ends) - 1
    if isinstance(rest.rows, slice) and rest.rows.start == 0:
        ends = common.query_start_loc_cpu[: count + 1]
        cu_seqlens_q = common.query_start_loc[: count + 1]
    else:
        ends = torch.from_numpy(rest.ends)
        cu_seqlens_q = _to_device(ends, device)
    all_decode = rest.num_tokens == count
    fields = {
        "query_start_loc": cu_seqlens_q,
        "query_start_loc_cpu": ends,
        "seq_lens": _pick(common.seq_lens, rest.rows),
        "num_reqs": count,
        "num_actual_tokens": rest.num_tokens,
        "max_query_len": 1 if all_decode else int(np.diff(rest.ends).max()),
        "max_seq_len": int(keys[_indices(rest.host_rows)].max()),
        "block_table_tensor": _pick(common.block_table_tensor, rest.rows),
        "slot_mapping": rest.take(common.slot_mapping),
        **row_fields(common, rest.rows, rest.host_rows),
    }
    # Not `replace`, which takes as long as all of the above: the class computes nothing from them.
    made = object.__new__(type(common))
    vars(made).update(vars(common), **fields)
    return made


def _slice(first: int, end: int, starts: np.ndarray[Any, np.dtype[np.int32]]) -> Part:
    rows, tokens = slice(first, end), slice(int(starts[first]), int(starts[end]))
    return Part(rows, rows, tokens, starts[first : end + 1] - starts[first])


def _gathered(
    rows: list[int], starts: np.ndarray[Any, np.dtype[np.int32]], device: torch.device
) -> Part:
    """Rows that others stand between: they are copied out, and back."""
    ends = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([starts[r + 1] - starts[r] for r in rows], out=ends[1:])
    tokens = torch.cat([torch.arange(int(starts[r]), int(starts[r + 1])) for r in rows])
    host_rows = torch.tensor(rows)
    return Part(_to_device(host_rows, device), host_rows, _to_device(tokens, device), ends)


def _keys(common: Any) -> torch.Tensor:
    """Keys of each row, on the host. Of a GPU vLLM's own bound, exact for prefill rows."""
    known: torch.Tensor = common.seq_lens
    if known.device.type != "cpu":
        known = common.seq_lens_cpu_upper_bound
    return known


def _pick(t: torch.Tensor, index: Index) -> torch.Tensor:
    if index is WHOLE:
        return t
    return t[index] if isinstance(index, slice) else t.index_select(0, index)


def _indices(rows: Index) -> Any:
    """For an array on the host."""
    return rows if isinstance(rows, slice) else rows.numpy()


def _staged(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Where a copy to `device` need not wait: torch keeps the pinned block until it is done."""
    return t.pin_memory() if device.type == "cuda" else t


def _to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _staged(t, device).to(device, non_blocking=True)
