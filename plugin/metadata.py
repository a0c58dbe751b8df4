"""Splits a batch into rows for vLLM's stock attention and rows that vote."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from blasst.plugin.versions import row_fields


@dataclass(frozen=True)
class Part:
    """Some rows of a batch. tokens: their query rows, a slice when contiguous, else an index
    tensor. cu_seqlens_q: int32 [rows + 1]."""

    rows: torch.Tensor
    tokens: slice | torch.Tensor
    cu_seqlens_q: torch.Tensor
    num_tokens: int

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """The part's query rows: a view when they are contiguous."""
        return t[self.tokens] if isinstance(self.tokens, slice) else t.index_select(0, self.tokens)

    def put(self, t: torch.Tensor, values: torch.Tensor) -> None:
        """Write back what was computed in the result of `take`; views need no copy."""
        if not isinstance(self.tokens, slice):
            t.index_copy_(0, self.tokens, values)


@dataclass(frozen=True)
class VoteRows:
    """Rows that vote, as prefill_attention takes them. skip_lambda: float64 [rows]."""

    part: Part
    skip_lambda: torch.Tensor
    page_table: torch.Tensor
    seqlens_k: torch.Tensor


@dataclass(frozen=True)
class Split:
    """stock: the other rows and vLLM's own metadata for them alone; None when all rows vote."""

    vote: VoteRows
    stock: tuple[Part, Any] | None


def part(rows: Sequence[int], starts: Sequence[int]) -> Part:
    """`starts`: query start of each batch row, and the end of the last."""
    lengths = [starts[r + 1] - starts[r] for r in rows]
    cu = torch.zeros(len(rows) + 1, dtype=torch.int32)
    cu[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    tokens: slice | torch.Tensor
    if all(starts[a + 1] == starts[b] for a, b in itertools.pairwise(rows)):
        tokens = slice(starts[rows[0]], starts[rows[-1] + 1])
    else:
        tokens = torch.cat([torch.arange(starts[r], starts[r + 1]) for r in rows])
    return Part(torch.tensor(rows), tokens, cu, sum(lengths))


def split(
    common: Any, lambdas: Sequence[float | None], build_stock: Callable[[Any], Any]
) -> Split | None:
    """Split a CPU batch. `lambdas`: of its first rows; further ones are padding. None when the
    metadata is not that of the batch (drafts, dual batches) or not causal: all rows are stock."""
    if common.num_reqs < len(lambdas) or common.causal is not True:
        return None
    starts = common.query_start_loc_cpu.tolist()
    voting = [r for r, v in enumerate(lambdas) if v is not None]
    others = [r for r, v in enumerate(lambdas) if v is None and starts[r + 1] > starts[r]]
    chosen = part(voting, starts)
    vote = VoteRows(
        part=chosen,
        skip_lambda=torch.tensor([lambdas[r] for r in voting], dtype=torch.float64),
        page_table=common.block_table_tensor[chosen.rows],
        seqlens_k=common.seq_lens[chosen.rows],
    )
    if not others:
        return Split(vote, None)
    rest = part(others, starts)
    return Split(vote, (rest, build_stock(sub_batch(common, rest))))


def sub_batch(common: Any, rest: Part) -> Any:
    """vLLM's common metadata for some rows of a batch alone."""
    lengths = rest.cu_seqlens_q.diff()
    seq_lens = common.seq_lens[rest.rows]
    fields = row_fields(common, rest.rows)
    return common.replace(
        query_start_loc=rest.cu_seqlens_q,
        query_start_loc_cpu=rest.cu_seqlens_q,
        seq_lens=seq_lens,
        num_reqs=len(rest.rows),
        num_actual_tokens=rest.num_tokens,
        max_query_len=int(lengths.max()),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[rest.rows],
        slot_mapping=rest.take(common.slot_mapping),
        **fields,
    )
