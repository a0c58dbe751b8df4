"""vLLM's own FlashAttention classes on CPU tensors: its kernel is replaced, all else is real.

Builder, metadata and forward are those of whichever release is installed; the kernel that they call
is our dense attention on the same arguments.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from common import MODEL

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 16
LOW = 12.0  # how far every other block of 128 keys lies below the rest, in natural units


@dataclass
class Row:
    """A row of a batch: query tokens, keys before them, lambda (None = vLLM's own path)."""

    queries: int
    context: int
    skip_lambda: float | None = None


@dataclass
class Batch:
    rows: list[Row]
    impl: str = "cpu"
    padding: int = 0
    heads_first: bool = False
    dtype: str = "float32"
    other_table: bool = False
    stats: dict[str, Any] = field(default_factory=dict)


LONG = Row(300, 700, 0.5)
BATCHES = {
    "decodes, then a chunk that votes": Batch([Row(1, 40), Row(1, 300), LONG]),
    "chunk at the start of a prompt": Batch([Row(500, 0, 0.4)]),
    "dense chunk and voting chunk": Batch([Row(1, 9), Row(100, 50), LONG]),
    "a dense row between voting rows": Batch([LONG, Row(200, 5), Row(33, 600, 0.3)]),
    "decodes around a chunk": Batch(
        [Row(1, 40), Row(1, 300), LONG, Row(1, 5), Row(1, 64), Row(1, 9)]
    ),
    "voting rows, then others": Batch([Row(33, 600, 0.3), LONG, Row(100, 50), Row(1, 9)]),
    "voting rows first": Batch([LONG, Row(1, 64), Row(1, 65)]),
    "graph padding": Batch([Row(1, 40), LONG], padding=27),
    "heads first in memory": Batch([Row(1, 40), LONG], heads_first=True),
    "lambda 0": Batch([Row(1, 40), Row(300, 700, 0.0)]),
    "the oracle's own": Batch([Row(1, 40), Row(90, 300, 0.5)], impl="reference"),
    "another group's pages": Batch([Row(1, 40), LONG], other_table=True),
    "nobody votes": Batch([Row(1, 40), Row(300, 700)]),
    "triton": Batch([Row(1, 40), Row(40, 300, 0.5)], impl="triton", dtype="float16"),
}


def results() -> dict[str, Any]:
    """Of each batch: largest error of rows that vote and that do not, counters and the oracle's."""
    import torch

    torch.manual_seed(0)
    config, spec = engine_config()
    return {name: run(batch, config, spec) for name, batch in BATCHES.items()}


def engine_config() -> Any:
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = EngineArgs(
        model=MODEL, dtype="float32", enforce_eager=True, max_num_seqs=8
    ).create_engine_config()
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=DIM, dtype=torch.float32
    )
    return config, spec


def fake_kernel(calls: list[int]) -> Any:
    """In place of flash_attn_varlen_func: dense attention over pages, written to `out`."""
    from blasst.kernels.api import prefill_attention
    from blasst.kernels.types import AttentionSpec, PagedKV

    def flash_attn_varlen_func(q: Any, k: Any, v: Any, out: Any, **given: Any) -> Any:
        ends = given["cu_seqlens_q"]
        used = int(ends[-1])
        kv = PagedKV(k, v, given["block_table"].int(), given["seqused_k"])
        scale = AttentionSpec(given["softmax_scale"], given["causal"])
        prefill_attention(q[:used], kv, ends, spec=scale, impl="reference", out=out[:used])
        calls.append(used)
        return out

    return flash_attn_varlen_func


def made_up(batch: Batch) -> Any:
    """Query, cache, block table and common metadata; what no row owns is NaN."""
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    dtype = getattr(torch, batch.dtype)
    lengths = [r.queries for r in batch.rows]
    keys = [r.queries + r.context for r in batch.rows]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    total = int(starts[-1])
    query = torch.full((total + batch.padding, HEADS, DIM), torch.nan, dtype=dtype)
    query[:total] = torch.randn(total, HEADS, DIM) * 0.5
    query[:total, :, 0] = DIM**0.5
    pages = [-(-n // PAGE) for n in keys]
    shape = (sum(pages) + 4, PAGE, KV_HEADS, 2 * DIM)
    cache = torch.full(shape, torch.nan, dtype=dtype)
    if batch.heads_first:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.full((len(keys), max(pages) + 1), -1, dtype=torch.int32)
    order = torch.randperm(shape[0]).tolist()
    for row, (n, count) in enumerate(zip(keys, pages, strict=True)):
        for at in range(count):
            table[row, at] = page = order.pop()
            used = min(PAGE, n - at * PAGE)
            cache[page, :used] = torch.randn(used, KV_HEADS, 2 * DIM) * 0.5
            if at * PAGE // 128 % 2 == 0 and n - at * PAGE > 2 * 128:
                cache[page, :used, :, 0] -= LOW
    seq_lens = torch.tensor(keys, dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(keys),
        num_actual_tokens=total,
        max_query_len=max(lengths),
        max_seq_len=max(keys),
        block_table_tensor=table,
        slot_mapping=torch.arange(total),
    )
    # vLLM's logical order: [blocks, kv_heads, block_size, k and v].
    return query, cache.transpose(1, 2), common


def votes_of(batch: Batch) -> Any:
    """What a worker says of the batch."""
    from blasst.plugin.rank import Rank, RankShape

    rank = Rank(RankShape("0", "0", "tiny", 1, KV_HEADS), None, 1.0, "cpu")
    ids = [str(i) for i in range(len(batch.rows))]
    rank._lambdas = {
        i: row.skip_lambda
        for i, row in zip(ids, batch.rows, strict=True)
        if row.skip_lambda is not None
    }
    lengths = np.array([r.queries for r in batch.rows])
    computed = np.array([r.context for r in batch.rows])
    return rank.rows(ids, lengths, computed, int(lengths.sum()), ())


def run(batch: Batch, config: Any, spec: Any) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends import flash_attn

    from blasst.kernels.plan import plan
    from blasst.kernels.types import Geometry, Problem
    from blasst.plugin import request_tap
    from blasst.plugin.cuda_backend import BlasstCUDABuilder, BlasstCUDAImpl
    from blasst.plugin.metadata import LayerVote

    calls: list[int] = []
    flash_attn.flash_attn_varlen_func = fake_kernel(calls)
    query, cache, common = made_up(batch)
    with set_current_vllm_config(config):
        builder = BlasstCUDABuilder(spec, ["layer"], config, torch.device("cpu"))
        impl = BlasstCUDAImpl(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto")
    impl.vllm_flash_attn_version = 3
    impl.dcp_world_size = 1
    geometry = Geometry(64, 64) if batch.impl == "triton" else None
    problem = Problem(DIM, HEADS, KV_HEADS, batch.dtype, page_size=PAGE, geometry=geometry)
    counters = torch.zeros(KV_HEADS, 2, dtype=torch.int64)
    impl.blasst = LayerVote(plan(problem, batch.impl, impl.scale), counters)
    request_tap._votes = votes_of(batch)
    try:
        metadata = builder.build(0, common)
    finally:
        request_tap._votes = None
    differs = different_fields(builder, common, metadata)
    if batch.other_table:
        moved = torch.randperm(cache.shape[0])
        cache = cache[moved]
        back = moved.argsort().int()
        table = common.block_table_tensor
        common.block_table_tensor = torch.where(table < 0, table, back[table.clamp(min=0).long()])
        metadata = builder.update_block_table(
            metadata, common.block_table_tensor, common.slot_mapping
        )
    output = torch.full_like(query, 7.0)
    ones = torch.ones(1)
    layer = SimpleNamespace(_q_scale=ones, _k_scale=ones, _v_scale=ones)
    key = torch.full((query.shape[0], KV_HEADS, DIM), torch.nan, dtype=query.dtype)
    impl.forward(layer, query, key, key, cache, metadata, output)
    return {
        **compare(batch, impl.blasst.plan.geometry, (query, cache, common, output)),
        "counters": counters.tolist(),
        "kernel_tokens": calls,
        "differs": differs,
        "splits": getattr(metadata, "blasst", None) is not None,
        "padding_untouched": bool((output[query.shape[0] - batch.padding :] == 7.0).all()),
    }


def different_fields(builder: Any, common: Any, metadata: Any) -> list[str]:
    """Of each part's metadata, against what vLLM itself builds for its rows alone."""
    import torch
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    from blasst.plugin.metadata import sub_batch

    split = getattr(metadata, "blasst", None)
    found = []
    for part, ours in () if split is None else split.stock:
        names = ("num_actual_tokens", "max_query_len", "max_seq_len", "query_start_loc")
        fields = {n: getattr(ours, n) for n in (*names, "seq_lens", "block_table", "slot_mapping")}
        alone = sub_batch(common, part, fields)
        rows = range(common.num_reqs)[part.rows] if isinstance(part.rows, slice) else part.host_rows
        assert alone.seq_lens.tolist() == common.seq_lens[list(rows)].tolist()
        lengths = common.query_start_loc.diff()[list(rows)]
        assert alone.query_start_loc.diff().tolist() == lengths.tolist()
        assert alone.max_query_len == int(lengths.max())
        theirs = vars(FlashAttentionMetadataBuilder.build(builder, 0, alone, True))
        assert vars(ours).keys() == theirs.keys()
        for name, value in theirs.items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
            if not same(getattr(ours, name), value):
                found.append(name)
    return found


def compare(batch: Batch, geometry: Any, made: Any) -> dict[str, Any]:
    """Every row against the oracle of its own."""
    import torch

    from blasst.kernels.reference import reference_attention
    from blasst.kernels.types import AttentionSpec, PagedKV

    query, cache, common, output = made
    k, v = cache.transpose(1, 2).chunk(2, dim=-1)
    counts = torch.zeros(KV_HEADS, 2, dtype=torch.int64)
    errors = {"vote": 0.0, "stock": 0.0}
    margin = float("inf")
    for i, row in enumerate(batch.rows):
        mine = slice(*common.query_start_loc[i : i + 2].tolist())
        kv = PagedKV(k, v, common.block_table_tensor[i : i + 1], common.seq_lens[i : i + 1])
        given = None if row.skip_lambda is None else torch.tensor([row.skip_lambda])
        want = reference_attention(
            query[mine],
            kv,
            torch.tensor([0, row.queries], dtype=torch.int32),
            spec=AttentionSpec(geometry=geometry),
            skip_lambda=given,
        )
        kind = "stock" if given is None else "vote"
        error = float((output[mine].double() - want.out).abs().max())
        errors[kind] = max(errors[kind], error)
        if given is not None:
            counts += want.counts(KV_HEADS)
            margin = min(margin, want.smallest_margin)
    return {**errors, "expected": counts.tolist(), "margin": margin}


os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel's module is imported
