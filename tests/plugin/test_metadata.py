"""A batch split into rows that vote and rows for the stock path, and put together again."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from blasst.kernels.threshold import lambda_to_log2
from blasst.plugin.metadata import LambdaTable, Split, split
from blasst.plugin.rank import Rank, RankShape
from blasst.plugin.stamp import Stamp, stamped
from blasst.plugin.versions import cpu_isa, row_fields

LENGTHS = (3, 1, 5, 1, 4)
STARTS = [0, 3, 4, 9, 10, 14]


@dataclass
class Common:
    """The part of vLLM's CommonAttentionMetadata that is read; extra fields as in some releases."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True
    positions: torch.Tensor | None = None
    is_prefilling: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    req_idx: Any = None
    _num_computed_tokens_cache: torch.Tensor | None = None

    def replace(self, **changes: Any) -> Common:
        return dataclasses.replace(self, **changes)


def batch(device: str = "cpu", **changes: Any) -> Common:
    """device "meta": tensors without values, so that whoever reads one fails."""
    starts = torch.tensor(STARTS, dtype=torch.int32)
    seq_lens = torch.tensor([30, 11, 25, 12, 40], dtype=torch.int32)
    made = Common(
        query_start_loc=starts.to(device),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(device),
        num_reqs=5,
        num_actual_tokens=14,
        max_query_len=5,
        max_seq_len=40,
        block_table_tensor=torch.arange(10, dtype=torch.int32).view(5, 2).to(device),
        slot_mapping=(torch.arange(14) + 100).to(device),
        positions=torch.arange(14).to(device),
        is_prefilling=torch.tensor([True, False, True, False, True]),
        seq_lens_cpu_upper_bound=seq_lens,
        req_idx=np.arange(5) * 10,
        _num_computed_tokens_cache=torch.zeros(5),
    )
    return made.replace(**changes)


def divide(common: Common, lambdas: list[float | None]) -> Split | None:
    table = LambdaTable(8, common.query_start_loc.device)
    return split(common, lambdas, lambda common: common, table)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_that_others_stand_between_are_copied_out(device: str) -> None:
    done = divide(batch(device), [0.5, None, None, None, 0.0])
    assert done is not None
    assert done.stock is not None
    vote, (rest, common) = done.vote, done.stock
    assert vote.part.ends.tolist() == [0, 3, 7]
    assert [r.seqlen_k for r in vote.batch.requests] == [30, 40]
    assert [r.q_start for r in vote.batch.requests] == [0, 3]
    assert vote.batch.log2_lambda == (-1.0, -float("inf"))
    assert isinstance(vote.part.tokens, torch.Tensor)
    assert isinstance(rest.tokens, torch.Tensor)
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (3, 7, 5)
    assert common.max_seq_len == 25
    assert common.is_prefilling.tolist() == [False, True, False]
    assert common.seq_lens_cpu_upper_bound.tolist() == [11, 25, 12]
    assert common.req_idx.tolist() == [10, 20, 30]
    assert common.query_start_loc_cpu.tolist() == [0, 1, 6, 7]
    assert common._num_computed_tokens_cache is None
    assert common.positions is None
    if device == "cpu":
        assert vote.skip_lambda.tolist() == [0.5, 0.0]
        assert vote.cu_seqlens_q.tolist() == [0, 3, 7]
        assert vote.page_table.tolist() == [[0, 1], [8, 9]]
        assert vote.seqlens_k.tolist() == [30, 40]
        assert vote.part.tokens.tolist() == [0, 1, 2, 10, 11, 12, 13]
        assert common.query_start_loc.tolist() == [0, 1, 6, 7]
        assert common.seq_lens.tolist() == [11, 25, 12]
        assert common.slot_mapping.tolist() == list(range(103, 110))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("lambdas", "rows", "tokens"),
    [
        ([None, None, None, None, 0.5], slice(0, 4), slice(0, 10)),
        ([0.25, 0.5, None, None, None], slice(2, 5), slice(4, 14)),
        ([None, None, 0.5, 0.25, 0.25], slice(0, 2), slice(0, 4)),
    ],
)
def test_neighbours_are_views(
    device: str, lambdas: list[float | None], rows: slice, tokens: slice
) -> None:
    common = batch(device)
    done = divide(common, lambdas)
    assert done is not None
    assert done.stock is not None
    vote, (rest, sub) = done.vote, done.stock
    voting = [r for r, v in enumerate(lambdas) if v is not None]
    # The kernel gets the whole batch and finds its rows by their absolute places.
    assert vote.part.take(common.slot_mapping) is common.slot_mapping
    assert vote.part.ends.tolist() == STARTS[voting[0] : voting[-1] + 2]
    assert [r.q_start for r in vote.batch.requests] == [STARTS[r] for r in voting]
    assert (rest.rows, rest.tokens) == (rows, tokens)
    assert sub.query_start_loc_cpu.tolist() == [
        s - STARTS[rows.start] for s in STARTS[rows.start : rows.stop + 1]
    ]
    assert sub.num_actual_tokens == tokens.stop - tokens.start
    if device == "cpu":
        assert vote.cu_seqlens_q.tolist() == vote.part.ends.tolist()
        assert vote.page_table.data_ptr() == common.block_table_tensor[voting[0]].data_ptr()
        assert sub.query_start_loc.tolist() == sub.query_start_loc_cpu.tolist()
        assert sub.seq_lens.tolist() == common.seq_lens[rows].tolist()
        other = done.with_block_table(common.block_table_tensor + 50, common.slot_mapping + 50)
        assert other.vote.page_table[0].tolist() == [2 * voting[0] + 50, 2 * voting[0] + 51]
        assert other.stock is not None
        assert other.stock[1].block_table[0, 0] == 2 * rows.start + 50
        assert not hasattr(sub, "block_table")


def test_all_rows_vote() -> None:
    done = split(batch(), [0.1] * 5, lambda common: pytest.fail("no stock rows"), table())
    assert done is not None
    assert done.stock is None
    assert done.with_block_table(batch().block_table_tensor, batch().slot_mapping).stock is None


def test_other_rows_without_tokens_are_no_stock_batch() -> None:
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    common = batch(query_start_loc_cpu=starts, query_start_loc=starts, num_reqs=3)
    done = split(common, [0.5, None, 0.5], lambda common: pytest.fail("no stock rows"), table())
    assert done is not None
    assert done.stock is None
    assert done.vote.part.num_tokens == 8


def test_a_lambda_keeps_its_digits_on_the_host() -> None:
    done = divide(batch(), [0.1, None, None, None, 1 / 3])
    assert done is not None
    assert done.vote.batch.log2_lambda == (lambda_to_log2(0.1), lambda_to_log2(1 / 3))
    assert done.vote.batch.log2_lambda[0] != lambda_to_log2(float(torch.tensor(0.1)))


def table() -> LambdaTable:
    return LambdaTable(8, "cpu")


def test_padding_rows_are_left_out() -> None:
    starts = torch.tensor([*STARTS[:4], 9, 9], dtype=torch.int32)
    common = batch(query_start_loc_cpu=starts, query_start_loc=starts)
    done = divide(common, [None, 0.5, None])
    assert done is not None
    assert done.stock is not None
    assert isinstance(done.stock[0].rows, torch.Tensor)
    assert done.stock[0].rows.tolist() == [0, 2]
    assert done.stock[1].num_actual_tokens == 8
    last = divide(common, [None, None, 0.5])
    assert last is not None
    assert last.stock is not None
    assert last.stock[0].rows == slice(0, 2)


@pytest.mark.parametrize(
    "changes", [{"num_reqs": 4}, {"causal": False}, {"causal": torch.tensor([True])}]
)
def test_a_batch_that_is_not_the_runners_own_is_left_to_the_stock_path(
    changes: dict[str, Any],
) -> None:
    assert divide(batch(**changes), [0.5] * 5) is None


@pytest.mark.parametrize("voting", [(0,), (1, 3), (0, 2, 4), (4,), (1, 2), (0, 1, 2, 3, 4)])
def test_split_computes_what_one_call_would(voting: tuple[int, ...]) -> None:
    """Attention is a function of its row here: split rows must land where they came from."""
    query = torch.randn(14, 2)
    output = torch.zeros_like(query)
    done = divide(batch(), [0.5 if r in voting else None for r in range(5)])
    assert done is not None
    parts = [(done.vote.part, 2.0)] + ([] if done.stock is None else [(done.stock[0], 3.0)])
    for rows, factor in parts:
        taken, out = rows.take(query), rows.take(output)
        for a, b in zip(rows.ends[:-1], rows.ends[1:], strict=True):
            out[a:b] = taken[a:b] * factor
        rows.put(output, out)
    want = query * 3.0
    for r in voting:
        want[STARTS[r] : STARTS[r + 1]] = query[STARTS[r] : STARTS[r + 1]] * 2.0
    assert torch.equal(output, want)


def test_lambdas_stay_at_their_address_and_are_copied_when_they_change() -> None:
    held = table()
    first = held.load([0.5, 0.25])
    assert first.dtype == torch.float32
    first[0] = 0.125  # what a copy would undo
    assert held.load([0.5, 0.25])[0] == 0.125
    again = held.load([0.75])
    assert again.tolist() == [0.75]
    assert again.data_ptr() == first.data_ptr()


def test_fields_of_other_releases_are_found_by_name() -> None:
    @dataclass
    class Old:
        seq_lens: torch.Tensor
        _seq_lens_cpu: torch.Tensor
        _num_computed_tokens_cpu: torch.Tensor | None = None

    rows = torch.tensor([1])
    fields = row_fields(Old(torch.tensor([5, 6]), torch.tensor([5, 6])), rows, rows)
    assert fields.keys() == {"_seq_lens_cpu"}
    assert fields["_seq_lens_cpu"].tolist() == [6]


def test_cache_layout_is_on_the_layer_or_on_the_impl() -> None:
    from types import SimpleNamespace

    assert cpu_isa(SimpleNamespace(isa="vec"), SimpleNamespace()) == "vec"
    assert cpu_isa(SimpleNamespace(), SimpleNamespace(isa="amx")) == "amx"
    assert cpu_isa(SimpleNamespace(), SimpleNamespace()) == ""


HOST_BUDGET_S = 50e-6
"""Host work of one step at 256 requests, on an idle core; a busy machine gets four times that."""


@pytest.mark.parametrize("voting", [0, 1, 4])
def test_the_hosts_share_of_a_step_with_256_requests(voting: int) -> None:
    from types import SimpleNamespace

    ids = [f"r{i}" for i in range(256)]
    lengths = [1] * (256 - voting) + [2000] * voting
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    keys = torch.full((256,), 4000, dtype=torch.int32)
    common = batch(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=keys,
        seq_lens_cpu_upper_bound=keys,
        num_reqs=256,
        num_actual_tokens=int(starts[-1]),
        block_table_tensor=torch.zeros(256, 500, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        is_prefilling=torch.zeros(256, dtype=torch.bool),
        req_idx=np.arange(256),
    )
    rank = Rank(RankShape("0", "0", "tiny", 32, 8), None, 1.0, "cpu")
    stamps = [SimpleNamespace(extra_args=stamped(None, Stamp(0.5))) for _ in ids]
    rank.note(
        [SimpleNamespace(req_id=r, sampling_params=p) for r, p in zip(ids, stamps, strict=True)], ()
    )
    tokens, lambdas = dict(zip(ids, lengths, strict=True)), LambdaTable(256, "cpu")

    def step() -> None:
        rows = rank.rows(ids, tokens, ())
        if rows is not None:
            split(common, rows, lambda common: common, lambdas)
        rank.end_step()

    times = []
    for _ in range(300):
        started = time.thread_time()
        step()
        times.append(time.thread_time() - started)
    assert sorted(times)[len(times) // 4] < 4 * HOST_BUDGET_S
    print(f"{voting} voting rows of 256: {1e6 * sorted(times)[len(times) // 4]:.1f} us")
