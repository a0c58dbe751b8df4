"""What the attention classes of both platforms share: rows that vote leave vLLM's own path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from blasst.kernels.types import PagedKV
from blasst.plugin.metadata import LayerVote, Narrow, Split, Splitter, Votes, splits
from blasst.plugin.request_tap import current_votes


class VotingBuilder:
    """Mixed into vLLM's metadata builder: `.blasst`, a Split, is there only when a row votes."""

    vllm_config: Any
    _splitter: Splitter | None = None

    def votes_of(self, common: Any) -> Votes | None:
        """What votes in the batch that is being computed; None: it is vLLM's alone."""
        votes = current_votes()
        return votes if votes is not None and splits(common, votes) else None

    def split_batch(self, common: Any, votes: Votes, narrow: Narrow) -> Split:
        """The split of the batch that is being computed."""
        if self._splitter is None:
            max_rows = int(self.vllm_config.scheduler_config.max_num_seqs)
            self._splitter = Splitter(max_rows, common.query_start_loc.device)
        return self._splitter.split(common, votes, narrow)


class VotingImpl:
    """Mixed into vLLM's attention implementation; one object a layer."""

    blasst: LayerVote | None = None
    """Set when the engine starts; None: the layer is not eligible."""

    _viewed: tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None] = None, None

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
        for rest, metadata in rows.stock:
            out = rest.take(output)
            # Keys and values of this step are in the cache already (do_kv_cache_update).
            q, k, v = rest.take(query), rest.take(key), rest.take(value)
            stock(layer, q, k, v, kv_cache, metadata, out, *args, **kwargs)
            rest.put(output, out)
        out = rows.part.take(output)
        self.blasst.plan.run(
            rows.part.take(query),
            PagedKV(*self._views(kv_cache), rows.page_table, rows.seqlens_k),
            rows.cu_seqlens_q,
            rows.batch,
            skip_lambda=rows.skip_lambda,
            out=out,
            counters=self.blasst.counters,
        )
        rows.part.put(output, out)
        return output

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the last step, while vLLM hands the same cache over."""
        cache, views = self._viewed
        if views is None or cache is not kv_cache:
            views = self.cache_views(kv_cache)
            self._viewed = kv_cache, views
        return views
