"""What the attention classes of both platforms share: rows that vote leave vLLM's own path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blasst.kernels.types import PagedKV
from blasst.plugin.metadata import LambdaTable, LayerVote, Split, split
from blasst.plugin.request_tap import current_rows


class VotingBuilder:
    """Mixed into vLLM's metadata builder: `.blasst`, a Split, is there only when a row votes."""

    vllm_config: Any
    _lambdas: LambdaTable | None = None

    def split_batch(self, common: Any, build_stock: Callable[[Any], Any]) -> Split | None:
        """The split of the batch that is being computed; None: it is vLLM's alone."""
        rows = current_rows()
        if rows is None:
            return None
        if self._lambdas is None:
            max_rows = int(self.vllm_config.scheduler_config.max_num_seqs)
            self._lambdas = LambdaTable(max_rows, common.query_start_loc.device)
        return split(common, rows, build_stock, self._lambdas)


class VotingImpl:
    """Mixed into vLLM's attention implementation; one object a layer."""

    blasst: LayerVote | None = None
    """Set when the engine starts; None: the layer is not eligible."""

    def cache_views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k, v: [blocks, block_size, kv_heads, head_dim] views of vLLM's cache."""
        raise NotImplementedError

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        stock: Callable[..., torch.Tensor] = super().forward  # type: ignore[misc]
        rows: Split | None = getattr(attn_metadata, "blasst", None)
        if rows is None or self.blasst is None:
            return stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if rows.stock is not None:
            rest, metadata = rows.stock
            out = rest.take(output)
            # Keys and values of this step are in the cache already (do_kv_cache_update).
            q, k, v = rest.take(query), rest.take(key), rest.take(value)
            stock(layer, q, k, v, kv_cache, metadata, out, *args, **kwargs)
            rest.put(output, out)
        vote = rows.vote
        out = vote.part.take(output)
        self.blasst.plan.run(
            vote.part.take(query),
            PagedKV(*self.cache_views(kv_cache), vote.page_table, vote.seqlens_k),
            vote.cu_seqlens_q,
            vote.batch,
            skip_lambda=vote.skip_lambda,
            out=out,
            counters=self.blasst.counters,
        )
        vote.part.put(output, out)
        return output
