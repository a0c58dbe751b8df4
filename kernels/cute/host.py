"""Host side that the kernels share. Nothing here waits for the device, so it can be captured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blasst.kernels.block_lists import GroupLists
from blasst.kernels.call import Call
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.support import grid_reasons
from blasst.kernels.types import LOG2_E, Geometry, PagedKV, Problem, RaggedKV

SMALLEST_TILE = 64  # query rows
COPY_BYTES = 16  # the copy engine's unit: addresses and strides are multiples of it


@dataclass(frozen=True)
class Inputs:
    """Of one launch, as in `prefill_attention`, values unchecked; `out` is filled.

    max_seqlen_q: query rows of the longest request or more; skip_lambda is read on the device when
    the kernel runs. trace: as `trace.start_trace` takes it. lists: of a block mask, for the tiles
    of a thread block. pack: q heads of a group that are rows of one tile.
    """

    q: torch.Tensor
    kv: PagedKV | RaggedKV
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    max_seqlen_q: int
    softmax_scale: float
    causal: bool
    skip_lambda: torch.Tensor | None
    counters: torch.Tensor | None
    trace: torch.Tensor | None = None
    lists: GroupLists | None = None
    pack: int = 1

    @classmethod
    def of(
        cls, call: Call, out: torch.Tensor, counters: torch.Tensor | None, pack: int = 1
    ) -> Inputs:
        return cls(
            call.q,
            call.kv,
            call.cu_seqlens_q,
            out,
            max((r.seqlen_q for r in call.requests), default=0),
            call.softmax_scale,
            call.spec.causal,
            call.skip_lambda,
            counters,
            pack=pack,
        )

    def choices(self) -> dict[str, Any]:
        """What of the inputs decides the Config that is compiled."""
        vote = self.skip_lambda is not None
        return {
            "dtype": str(self.q.dtype).removeprefix("torch."),
            "head_dim": self.q.shape[2],
            "causal": self.causal,
            "page_size": self.kv.k.shape[1] if isinstance(self.kv, PagedKV) else 0,
            "vote": vote,
            "count": vote and self.counters is not None,
            "block_mask": self.lists is not None,
        }

    def grid_reasons(self) -> list[str]:
        """As support.grid_reasons; for the smallest tile that there is."""
        tiles = -(-self.max_seqlen_q * self.pack // SMALLEST_TILE)
        return grid_reasons(tiles, self.kv.k.shape[-2] * (self.cu_seqlens_q.numel() - 1))

    def start(self, reasons: list[str], compiled: Callable[[], Any]) -> torch.Tensor:
        """Starts the kernel, returns lse. Raises UnsupportedError when there are reasons."""
        named = {"q": self.q, "k": self.kv.k, "v": self.kv.v, "out": self.out}
        reasons = [*reasons, *layout_reasons(named), *self.grid_reasons()]
        if reasons:
            raise UnsupportedError(reasons)
        q, kv, vote = self.q, self.kv, self.skip_lambda is not None
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        if self.max_seqlen_q == 0 or q.shape[0] == 0:
            return lse
        compiled()(
            q,
            kv.k,
            kv.v,
            self.out,
            lse,
            self.cu_seqlens_q,
            kv.seqlens_k if isinstance(kv, PagedKV) else kv.cu_seqlens_k,
            kv.page_table if isinstance(kv, PagedKV) else None,
            self.skip_lambda.float() if self.skip_lambda is not None else None,
            self.counters if vote else None,
            self.trace,
            None if self.lists is None else for_each_head(self.lists, q.shape[1]),
            self.softmax_scale * LOG2_E,
            self.max_seqlen_q,
        )
        return lse


def for_each_head(lists: GroupLists, num_heads: int) -> GroupLists:
    """Views with a row for each q head, as the device code reads them."""
    batch, _, rows = lists.spans.shape[:3]
    shape = (batch, num_heads, rows)
    named = {
        name: getattr(lists, name).expand(*shape, *getattr(lists, name).shape[3:])
        for name in ("spans", "blocks", "codes")
    }
    return lists._replace(**named)


def problem_choices(problem: Problem) -> dict[str, Any]:
    """As Inputs.choices, for a problem whose tiles are counted whenever it votes."""
    return {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "causal": problem.causal,
        "page_size": problem.page_size or 0,
        "vote": problem.vote,
        "count": problem.vote,
        "block_mask": problem.block_mask,
    }


def choice_reasons(**allowed: tuple[Any, tuple[Any, ...]]) -> list[str]:
    """name=(value, choices): a reason for each value that is none of its choices."""
    return [
        f"{name} {value} is not one of {', '.join(map(str, choices))}"
        for name, (value, choices) in allowed.items()
        if value not in choices
    ]


def geometry_reasons(problem: Problem, own: Geometry) -> list[str]:
    """Why a kernel of this geometry cannot run the problem; empty: it can. Where nothing votes, the
    lists of larger tiles of query rows are divided."""
    given = problem.geometry or own
    divides = problem.block_mask and not problem.vote and given.tile_m % own.tile_m == 0
    if given == own or (divides and given.tile_n == own.tile_n):
        return []
    what = "visits the lists of a block mask" if problem.block_mask else "votes"
    return [f"it {what} on {own}, not on {problem.geometry}"]


def layout_reasons(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Why the copy engine cannot reach a tensor; empty: it can."""
    reasons = []
    for name, t in tensors.items():
        if t.stride(-1) != 1:
            reasons.append(f"{name} has stride {t.stride(-1)} along head_dim, it must be 1")
            continue
        units = COPY_BYTES // t.element_size()
        if t.data_ptr() % COPY_BYTES or any(s % units for s in t.stride()[:-1]):
            reasons.append(
                f"{name} has strides {t.stride()} at address {t.data_ptr():#x}; the copy engine "
                f"needs multiples of {COPY_BYTES} bytes"
            )
    return reasons
