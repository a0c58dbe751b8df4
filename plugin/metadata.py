"""Splits a batch into rows for vLLM's stock attention and rows that vote.

Lengths come from the tensors that vLLM keeps on the host, what the device needs goes there through
pinned memory: nothing here waits for the device. What a step has in common with the one before it
is kept, and nothing is done for each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from blasst.kernels.call import Request
from blasst.kernels.plan import Batch, Plan
from blasst.plugin.staging import LambdaTable, to_device
from blasst.plugin.versions import row_fields

Index = slice | torch.Tensor
Ends = np.ndarray[Any, np.dtype[np.int32]]
WHOLE = slice(None)
KEPT = 1024
"""Layouts of batches that are remembered: one for each number of decodes before what votes."""

FEW = 64
"""Rows of a batch that do not fill a GPU by themselves."""


# What is made in every step is a tuple: a frozen dataclass takes many times as long to make. A
# NamedTuple's own constructor is Python, one function for each class, and an engine's work between
# two steps has driven each of them from the caches: `tuple_of` makes them all.
tuple_of = tuple.__new__


class Votes(NamedTuple):
    """Rows of a batch of `size` that vote, ascending; the tokens and the lambda of each.

    computed: of all rows of the batch, tokens of their requests before it; it may be longer.
    others: tokens of all rows, int32 as bytes; None when each of the other rows has one.
    """

    size: int
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    computed: np.ndarray[Any, Any]
    lambdas: list[float]
    others: bytes | None = None


@dataclass(frozen=True)
class Part:
    """Some rows of a batch: slices when they are neighbours, else index tensors.

    rows, tokens: on the batch's device; host_rows: the same for arrays on the CPU. tokens is WHOLE
    where the kernel finds the rows among the others.
    """

    rows: Index
    host_rows: Any
    tokens: Index

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """The part's query rows: a view when they are neighbours."""
        return _pick(t, self.tokens)

    def put(self, t: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what was computed in the result of `take`; views need no copy."""
        if not isinstance(self.tokens, slice):
            t.index_copy_(0, self.tokens, values)


@dataclass(frozen=True)
class Rest(Part):
    """Up to two parts of a batch are vLLM's. ends: int32 [rows + 1], on the host: their first query
    rows in what `take` gives, and the end of the last. known: of vLLM's metadata, by name, what
    does not change while the layout stays and the runner's tensors stay in their places. few: they
    do not fill a GPU; apart: others stand between."""

    ends: Ends
    known: dict[str, Any]
    few: bool
    apart: bool

    @property
    def num_tokens(self) -> int:
        return int(self.ends[-1] - self.ends[0])

    @property
    def own_tokens(self) -> Index:
        """Where its tokens are: WHOLE stands for those at the beginning."""
        return slice(0, self.num_tokens) if self.tokens is WHOLE else self.tokens


class Layout(NamedTuple):
    """Where rows lie. begin: first query row of those that vote, one behind the other.
    cu_seqlens_q, page_table and seqlens_k, views, are None where rows must be gathered."""

    chosen: Part
    begin: int
    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor | None
    seqlens_k: torch.Tensor | None
    others: tuple[Rest, ...]


class Split(NamedTuple):
    """part, cu_seqlens_q, page_table, seqlens_k, batch, skip_lambda: of the rows that vote, as
    Plan.run takes them. stock: the others, each part with vLLM's own metadata for it alone."""

    part: Part
    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor
    seqlens_k: torch.Tensor
    batch: Batch
    skip_lambda: torch.Tensor
    stock: tuple[tuple[Rest, Any], ...]

    def with_block_table(self, block_table: torch.Tensor, slot_mapping: torch.Tensor) -> Split:
        """The same rows over another cache group's pages."""
        stock = [
            (
                part,
                narrowed(
                    metadata,
                    {"block_table": _pick(block_table, part.rows)},
                    {"slot_mapping": _pick(slot_mapping, part.own_tokens)},
                ),
            )
            for part, metadata in self.stock
        ]
        page_table = _pick(block_table, self.part.rows)
        return self._replace(page_table=page_table, stock=tuple(stock))


@dataclass(frozen=True)
class LayerVote:
    """How an eligible layer attends, and where it counts: int64 [num_kv_heads, 2]."""

    plan: Plan
    counters: torch.Tensor


Narrow = Callable[[Rest, dict[str, Any]], Any]
"""vLLM's metadata for a part alone, given those of its fields that are not `known`. Both together:
num_actual_tokens, max_query_len, max_seq_len, and query_start_loc, seq_lens, block_table,
slot_mapping on the device."""


def narrowed(metadata: Any, known: dict[str, Any], changing: dict[str, Any]) -> Any:
    """A copy of a dataclass's object with these fields; `replace` takes many times as long."""
    made = object.__new__(type(metadata))
    made.__dict__ = metadata.__dict__ | known | changing
    return made


def splits(common: Any, votes: Votes) -> bool:
    """Whether the metadata is that of the batch (not of drafts or dual batches), and causal."""
    return common.causal is True and bool(common.num_reqs >= votes.size)


class Splitter:
    """Splits the batches of one metadata builder, on one device."""

    def __init__(self, max_rows: int, device: torch.device | str) -> None:
        self._lambdas = LambdaTable(max_rows, device)
        self._arange = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        # Keys of each row, on the host. Of a GPU vLLM's own bound, exact for prefill rows.
        on_cpu = self._arange.device.type == "cpu"
        self._host_keys = "seq_lens" if on_cpu else "seq_lens_cpu_upper_bound"
        self._places: tuple[Any, ...] = ()
        self._layouts: dict[tuple[Any, ...], Layout] = {}

    def split(self, common: Any, votes: Votes, narrow: Narrow) -> Split:
        """Rows behind the first votes.size of the batch are padding."""
        table, seq_lens = common.block_table_tensor, common.seq_lens
        strides = table.stride()
        places = (
            common.query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            common.slot_mapping.data_ptr(),
            table.data_ptr(),
            strides,
        )
        # A view keeps its storage, so what is found at its address is the same tensor.
        if places != self._places or len(self._layouts) == KEPT:
            self._places, self._layouts = places, {}
        size, rows, lengths, _, lambdas, others = votes
        # Behind decodes alone (vLLM's newer runner) any number of tokens may vote.
        behind = others is None and rows[0] + len(rows) == size
        key = (rows[0], size) if behind else (size, rows, lengths, others)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._lay_out(common, votes)
            # A slice of a table's columns is a part of the whole rows that are remembered, and
            # begins where they do, in as long strides: its own views would be too narrow for them.
            if table.shape[1] == strides[0]:
                self._layouts[key] = layout
        chosen, begin, cu_seqlens_q, page_table, seqlens_k, rests = layout
        skip_lambda, log2_lambda = self._lambdas.load(lambdas)
        stock = []
        for rest in rests:
            # A bound, by which FlashAttention splits keys of few rows.
            changing = {"max_seq_len": common.max_seq_len}
            if rest.few or rest.apart:
                self._change(changing, common, votes, rest)
            stock.append((rest, narrow(rest, changing)))
        return tuple_of(
            Split,
            (
                chosen,
                cu_seqlens_q,
                _pick(table, chosen.rows) if page_table is None else page_table,
                _pick(seq_lens, chosen.rows) if seqlens_k is None else seqlens_k,
                _batch(begin, votes, log2_lambda),
                skip_lambda,
                tuple(stock),
            ),
        )

    def _change(self, fields: dict[str, Any], common: Any, votes: Votes, rest: Rest) -> None:
        if rest.few and votes.others is None:  # vLLM's tensor takes longer to read
            fields["max_seq_len"] = max(votes.computed[rest.host_rows].tolist()) + 1
        elif rest.few:
            keys = getattr(common, self._host_keys).numpy()
            fields["max_seq_len"] = int(np.maximum.reduce(keys[rest.host_rows]))
        if rest.apart:
            fields["seq_lens"] = _pick(common.seq_lens, rest.rows)
            fields["block_table"] = _pick(common.block_table_tensor, rest.rows)
            fields["slot_mapping"] = _pick(common.slot_mapping, rest.tokens)

    def _lay_out(self, common: Any, votes: Votes) -> Layout:
        starts: Ends = common.query_start_loc_cpu.numpy()
        first, end = votes.rows[0], votes.rows[-1] + 1
        if end - first == len(votes.rows):
            rows = slice(first, end)
            views = common.block_table_tensor[rows], common.seq_lens[rows]
            others = self._around(common, first, end, votes.size, starts)
            return Layout(
                Part(rows, rows, WHOLE),
                int(starts[first]),
                common.query_start_loc[first : end + 1],
                *views,
                others,
            )
        device = common.query_start_loc.device
        voting = np.array(votes.rows)
        *places, ends = _gathered(voting, starts, device)
        rest = _gathered(np.delete(np.arange(votes.size), voting), starts, device)
        others = (self._rest(common, *rest),) if rest[-1][-1] else ()
        cu_seqlens_q = to_device(torch.from_numpy(ends), device)
        return Layout(Part(*places), 0, cu_seqlens_q, None, None, others)

    def _around(
        self, common: Any, first: int, end: int, count: int, starts: Ends
    ) -> tuple[Rest, ...]:
        """The rows before and behind neighbours, where they have tokens. vLLM finds the former by
        itself, for they begin where the batch does."""
        begin, stop, total = int(starts[first]), int(starts[end]), int(starts[count])
        parts = []
        if begin > 0:
            rows = slice(0, first)
            parts.append(self._rest(common, rows, rows, WHOLE, starts[: first + 1].copy()))
        if total > stop:
            rows, ends = slice(end, count), starts[end : count + 1] - stop
            parts.append(self._rest(common, rows, rows, slice(stop, total), ends))
        return tuple(parts)

    def _rest(self, common: Any, rows: Index, host_rows: Any, tokens: Index, ends: Ends) -> Rest:
        count, longest, apart = len(ends) - 1, int(np.diff(ends).max()), not isinstance(rows, slice)
        part = Rest(rows, host_rows, tokens, ends, {}, count < FEW, apart)
        if isinstance(rows, slice) and rows.start == 0:
            cu_seqlens_q = common.query_start_loc[: count + 1]
        elif longest == 1 and part.num_tokens == count:
            cu_seqlens_q = self._arange[: count + 1]
        else:
            cu_seqlens_q = to_device(torch.from_numpy(ends), common.query_start_loc.device)
        part.known.update(
            num_actual_tokens=part.num_tokens, max_query_len=longest, query_start_loc=cu_seqlens_q
        )
        if not apart:
            part.known.update(
                seq_lens=common.seq_lens[rows],
                block_table=common.block_table_tensor[rows],
                slot_mapping=common.slot_mapping[part.own_tokens],
            )
        return part


def _batch(begin: int, votes: Votes, log2_lambda: tuple[float, ...]) -> Batch:
    requests: list[Request] = []
    lengths, computed = votes.lengths, votes.computed
    for index, row in enumerate(votes.rows):
        length = lengths[index]
        request = index, begin, length, computed.item(row) + length
        requests.append(tuple_of(Request, request))
        begin += length
    return tuple_of(Batch, (tuple(requests), log2_lambda))


def sub_batch(common: Any, part: Rest, changing: dict[str, Any]) -> Any:
    """vLLM's common metadata for some rows of a batch alone, for builders that need one."""
    known = part.known | changing
    known["block_table_tensor"] = known.pop("block_table")
    known["query_start_loc_cpu"] = torch.from_numpy(part.ends)
    known["num_reqs"] = len(part.ends) - 1
    return narrowed(common, known, row_fields(common, part.rows, part.host_rows))


def _gathered(
    rows: np.ndarray[Any, np.dtype[np.int64]], starts: Ends, device: torch.device
) -> tuple[Index, Any, Index, Ends]:
    """rows, host_rows, tokens and ends of rows that others stand between."""
    lengths = starts[rows + 1] - starts[rows]
    ends = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=ends[1:])
    tokens = np.repeat(starts[rows] - ends[:-1], lengths) + np.arange(ends[-1])
    there = to_device(torch.from_numpy(np.concatenate([tokens, rows])), device)
    return there[len(tokens) :], rows, there[: len(tokens)], ends


def _pick(t: torch.Tensor, index: Index) -> torch.Tensor:
    if index is WHOLE:
        return t
    return t[index] if isinstance(index, slice) else t.index_select(0, index)
