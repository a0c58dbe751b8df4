"""A batch split into rows that vote and rows for the stock path, and put together again."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from blasst.kernels.threshold import lambda_to_log2
from blasst.plugin.metadata import Rest, Split, Splitter, Votes, narrowed, splits, sub_batch
from blasst.plugin.rank import Rank, RankShape
from blasst.plugin.staging import LambdaTable
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


def votes_of(common: Common, lambdas: Sequence[float | None]) -> Votes:
    """What a rank says of the batch's first rows; the others are padding."""
    lengths = common.query_start_loc_cpu.diff()[: len(lambdas)].numpy()
    rows = [r for r, v in enumerate(lambdas) if v is not None]
    others = [n for r, n in enumerate(lengths.tolist()) if r not in rows]
    return Votes(
        len(lambdas),
        tuple(rows),
        tuple(lengths[rows].tolist()),
        common.seq_lens_cpu_upper_bound[: len(lambdas)].numpy() - lengths,
        [v for v in lambdas if v is not None],
        None if set(others) <= {1} else lengths.tobytes(),
    )


def divide(common: Common, lambdas: Sequence[float | None], splitter: Any = None) -> Split:
    """Stock parts get vLLM's common metadata, as builders that need one do."""
    splitter = splitter or Splitter(8, common.query_start_loc.device)
    return splitter.split(
        common,
        votes_of(common, lambdas),
        lambda rest, changing: sub_batch(common, rest, changing),
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_that_others_stand_between_are_copied_out(device: str) -> None:
    done = divide(batch(device), [0.5, None, None, None, 0.0])
    ((rest, common),) = done.stock
    assert [r.seqlen_q for r in done.batch.requests] == [3, 4]
    assert [r.seqlen_k for r in done.batch.requests] == [30, 40]
    assert [r.q_start for r in done.batch.requests] == [0, 3]
    assert done.batch.log2_lambda == (-1.0, -float("inf"))
    assert isinstance(done.part.tokens, torch.Tensor)
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
        assert done.skip_lambda.tolist() == [0.5, 0.0]
        assert done.cu_seqlens_q.tolist() == [0, 3, 7]
        assert done.page_table.tolist() == [[0, 1], [8, 9]]
        assert done.seqlens_k.tolist() == [30, 40]
        assert done.part.tokens.tolist() == [0, 1, 2, 10, 11, 12, 13]
        assert common.query_start_loc.tolist() == [0, 1, 6, 7]
        assert common.seq_lens.tolist() == [11, 25, 12]
        assert common.slot_mapping.tolist() == list(range(103, 110))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("lambdas", "rows"),
    [
        ([None, None, None, None, 0.5], [slice(0, 4)]),
        ([0.25, 0.5, None, None, None], [slice(2, 5)]),
        ([None, None, 0.5, 0.25, 0.25], [slice(0, 2)]),
        ([None, None, 0.5, None, None], [slice(0, 2), slice(3, 5)]),
        ([None, 0.5, 0.25, None, None], [slice(0, 1), slice(3, 5)]),
    ],
)
def test_neighbours_are_views(device: str, lambdas: list[float | None], rows: list[slice]) -> None:
    common = batch(device)
    done = divide(common, lambdas)
    voting = [r for r, v in enumerate(lambdas) if v is not None]
    # The kernel gets the whole batch and finds its rows by their absolute places.
    assert done.part.take(common.slot_mapping) is common.slot_mapping
    assert [r.q_start for r in done.batch.requests] == [STARTS[r] for r in voting]
    assert [part.rows for part, _ in done.stock] == rows
    for part, sub in done.stock:
        first = STARTS[part.rows.start]
        assert sub.query_start_loc_cpu.tolist() == [
            s - first for s in STARTS[part.rows.start : part.rows.stop + 1]
        ]
        assert sub.num_actual_tokens == STARTS[part.rows.stop] - first
        # vLLM looks for its rows at the beginning of what it is given.
        given = part.take(common.slot_mapping)
        assert given.shape[0] >= sub.num_actual_tokens
        if device == "cpu":
            assert given[0] == 100 + first
            assert sub.slot_mapping.tolist() == given[: sub.num_actual_tokens].tolist()
            assert sub.query_start_loc.tolist() == sub.query_start_loc_cpu.tolist()
            assert sub.seq_lens.tolist() == common.seq_lens[part.rows].tolist()
    if device == "cpu":
        assert done.cu_seqlens_q.tolist() == STARTS[voting[0] : voting[-1] + 2]
        assert done.page_table.data_ptr() == common.block_table_tensor[voting[0]].data_ptr()
        other = done.with_block_table(common.block_table_tensor + 50, common.slot_mapping + 50)
        assert other.page_table[0].tolist() == [2 * voting[0] + 50, 2 * voting[0] + 51]
        for (part, sub), (_, before) in zip(other.stock, done.stock, strict=True):
            assert sub.block_table[0, 0] == 2 * part.rows.start + 50
            assert sub.slot_mapping.tolist() == (before.slot_mapping + 50).tolist()
            assert not hasattr(before, "block_table")


def test_all_rows_vote() -> None:
    done = divide(batch(), [0.1] * 5)
    assert done.stock == ()
    assert done.with_block_table(batch().block_table_tensor, batch().slot_mapping).stock == ()


def test_other_rows_without_tokens_are_no_stock_batch() -> None:
    starts = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    common = batch(query_start_loc_cpu=starts, query_start_loc=starts, num_reqs=3)
    done = divide(common, [0.5, None, 0.5])
    assert done.stock == ()
    assert done.part.take(torch.arange(8)).tolist() == list(range(8))


def test_a_lambda_keeps_its_digits_on_the_host() -> None:
    done = divide(batch(), [0.1, None, None, None, 1 / 3])
    assert done.batch.log2_lambda == (lambda_to_log2(0.1), lambda_to_log2(1 / 3))
    assert done.batch.log2_lambda[0] != lambda_to_log2(float(torch.tensor(0.1)))


def test_padding_rows_are_left_out() -> None:
    starts = torch.tensor([*STARTS[:4], 9, 9], dtype=torch.int32)
    common = batch(query_start_loc_cpu=starts, query_start_loc=starts)
    (before, behind) = divide(common, [None, 0.5, None]).stock
    assert (before[0].rows, behind[0].rows) == (slice(0, 1), slice(2, 3))
    assert before[1].num_actual_tokens + behind[1].num_actual_tokens == 8
    ((rest, _),) = divide(common, [None, None, 0.5]).stock
    assert rest.rows == slice(0, 2)
    ((rest, apart),) = divide(common, [0.25, None, 0.5]).stock
    assert rest.host_rows.tolist() == [1]
    assert apart.num_actual_tokens == 1


@pytest.mark.parametrize(
    "changes", [{"num_reqs": 4}, {"causal": False}, {"causal": torch.tensor([True])}]
)
def test_a_batch_that_is_not_the_runners_own_is_left_to_the_stock_path(
    changes: dict[str, Any],
) -> None:
    votes = votes_of(batch(), [0.5] * 5)
    assert splits(batch(), votes)
    assert not splits(batch(**changes), votes)


PATTERNS = [(0,), (1, 3), (0, 2, 4), (4,), (1, 2), (2,), (0, 1, 2, 3, 4)]


def test_split_computes_what_one_call_would() -> None:
    """Attention is a function of its row here: split rows must land where they came from.

    One splitter for all of them, twice, in tensors that stay and with lengths that change."""
    splitter = Splitter(8, "cpu")
    query, output = torch.randn(14, 2), torch.zeros(14, 2)
    starts, keys = torch.tensor(STARTS, dtype=torch.int32), torch.tensor([30, 11, 25, 12, 40])
    stays = batch(query_start_loc=starts.clone(), seq_lens=keys.int())
    for ends in (STARTS, STARTS, [0, 1, 4, 5, 6, 14], [0, 1, 2, 3, 4, 14], [0, 5, 8, 12, 12, 14]):
        stays.query_start_loc.copy_(torch.tensor(ends, dtype=torch.int32))
        stays.query_start_loc_cpu = torch.tensor(ends, dtype=torch.int32)
        stays.seq_lens += 3
        stays.seq_lens_cpu_upper_bound = stays.seq_lens
        for voting in PATTERNS:
            lambdas = [0.5 if r in voting else None for r in range(5)]
            done = divide(stays, lambdas, splitter)
            check(done, stays, voting)
            output.zero_()
            ours = done.cu_seqlens_q.tolist()
            stock = [(part, (part.ends - part.ends[0]).tolist(), 3.0) for part, _ in done.stock]
            for rows, mine, factor in ((done.part, ours, 2.0), *stock):
                taken, out = rows.take(query), rows.take(output)
                for a, b in itertools.pairwise(mine):
                    out[a:b] = taken[a:b] * factor
                rows.put(output, out)
            want = query * 3.0
            for r in voting:
                want[ends[r] : ends[r + 1]] = query[ends[r] : ends[r + 1]] * 2.0
            assert torch.equal(output, want)


def test_one_layout_serves_any_number_of_tokens_behind_decodes() -> None:
    splitter = Splitter(8, "cpu")
    stays = batch()
    for ends, voting, kept in (
        ([0, 1, 2, 3, 4, 14], (4,), 1),
        ([0, 1, 2, 3, 4, 11], (4,), 1),
        ([0, 1, 2, 3, 10, 14], (3, 4), 2),
        ([0, 1, 2, 3, 5, 14], (3, 4), 2),
        ([0, 1, 2, 3, 5, 14], (4,), 3),  # a longer row of vLLM's: its place depends on lengths
        ([0, 1, 2, 3, 6, 14], (4,), 4),
    ):
        stays.query_start_loc.copy_(torch.tensor(ends, dtype=torch.int32))
        stays.query_start_loc_cpu = torch.tensor(ends, dtype=torch.int32)
        lambdas = [0.5 if r in voting else None for r in range(5)]
        check(divide(stays, lambdas, splitter), stays, voting)
        assert len(splitter._layouts) == kept


def check(done: Split, common: Common, voting: tuple[int, ...]) -> None:
    """Every tensor says what the batch says now."""
    rows = list(voting)
    assert done.seqlens_k.tolist() == common.seq_lens[rows].tolist()
    assert done.page_table.tolist() == common.block_table_tensor[rows].tolist()
    lengths = common.query_start_loc.diff()
    assert done.cu_seqlens_q.diff().tolist() == lengths[rows].tolist()
    assert [r.seqlen_k for r in done.batch.requests] == common.seq_lens[rows].tolist()
    assert [r.seqlen_q for r in done.batch.requests] == lengths[rows].tolist()
    first = (
        0 if isinstance(done.part.tokens, torch.Tensor) else int(common.query_start_loc[rows[0]])
    )
    starts = (lengths[rows].cumsum(0) - lengths[rows] + first).tolist()
    assert [r.q_start for r in done.batch.requests] == starts
    for part, sub in done.stock:
        mine = part.host_rows
        assert sub.seq_lens.tolist() == common.seq_lens[mine].tolist()
        assert sub.query_start_loc.diff().tolist() == lengths[mine].tolist()
        assert sub.max_query_len == int(lengths[mine].max())
        assert sub.max_seq_len == int(common.seq_lens[mine].max())


def test_views_follow_tensors_that_move() -> None:
    splitter, lambdas = Splitter(8, "cpu"), [None, None, None, None, 0.5]
    first = batch()
    before = divide(first, lambdas, splitter)
    again = divide(first, lambdas, splitter)
    assert again.page_table is before.page_table
    moved = batch(block_table_tensor=torch.arange(10, 20, dtype=torch.int32).view(5, 2))
    assert divide(moved, lambdas, splitter).page_table.tolist() == [[18, 19]]
    # A slice of the columns is a part of what is known; what was a slice is not remembered.
    narrow = moved.replace(block_table_tensor=moved.block_table_tensor[:, :1])
    assert divide(narrow, lambdas, splitter).page_table.tolist() == [[18, 19]]
    splitter = Splitter(8, "cpu")
    assert divide(narrow, lambdas, splitter).page_table.tolist() == [[18]]
    assert divide(moved, lambdas, splitter).page_table.tolist() == [[18, 19]]
    (one_column,) = divide(moved, lambdas, splitter).stock
    assert one_column[1].block_table_tensor.shape == (4, 2)
    splitter = Splitter(8, "cpu")  # whole rows first, and a layout that only the slice had
    divide(moved, [None, 0.5, 0.5, None, None], splitter)
    assert divide(narrow, lambdas, splitter).page_table.tolist() == [[18]]
    assert divide(moved, lambdas, splitter).page_table.tolist() == [[18, 19]]
    other = moved.block_table_tensor.view(-1)[:5].view(5, 1)  # at the same address, other rows
    reread = moved.replace(block_table_tensor=other)
    assert divide(reread, lambdas, splitter).page_table.tolist() == [[14]]


def test_lambdas_stay_at_their_address_and_are_copied_when_they_change() -> None:
    held = LambdaTable(8, "cpu")
    first, log2_lambda = held.load([0.5, 0.25])
    assert first.dtype == torch.float32
    assert log2_lambda == (-1.0, -2.0)
    first[0] = 0.125  # what a copy would undo
    assert held.load([0.5, 0.25])[0][0] == 0.125
    again, _ = held.load([0.75])
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
    assert cpu_isa(SimpleNamespace(isa="vec"), SimpleNamespace()) == "vec"
    assert cpu_isa(SimpleNamespace(), SimpleNamespace(isa="amx")) == "amx"
    assert cpu_isa(SimpleNamespace(), SimpleNamespace()) == ""


HOST_BUDGET_S = 50e-6
"""Host work of one step at 256 requests; an idle core takes half of that, or a fifth of it when the
rows that vote are neighbours. A busy machine gets four times that."""

GROWTH = 2
"""Of that work from 16 requests to 256: numpy's and torch's own loops are all that grows."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """What a GPU gathers is gathered here; threads that wait for a busy core would be timed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("voting", [0, 1, 4])
def test_the_hosts_share_of_a_step(voting: int, apart: bool) -> None:
    steps = {count: made_step(count, voting, apart) for count in (16, 256)}
    times: dict[int, list[float]] = {count: [] for count in steps}
    for _ in range(300):
        for count, step in steps.items():
            started = time.thread_time()
            found = step()
            times[count].append(time.thread_time() - started)
            assert found == voting
    few, many = (sorted(t)[len(t) // 4] for t in times.values())
    print(f"{voting} voting rows of 256: {1e6 * many:.1f} us, of 16: {1e6 * few:.1f} us")
    assert many < 4 * HOST_BUDGET_S
    assert many < GROWTH * few


def made_step(count: int, voting: int, apart: bool) -> Callable[[], int]:
    """What the host does of ours in a step with so many requests; how many rows voted."""
    ids = [f"r{i}" for i in range(count)]
    lengths = np.ones(count, dtype=np.int32)
    lengths[2 : 2 + 3 * voting : 3 if apart else 1][:voting] = 2000
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    total = int(starts[-1])
    keys = torch.full((count,), 4000, dtype=torch.int32)
    common = batch(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=keys,
        seq_lens_cpu_upper_bound=keys,
        num_reqs=count,
        num_actual_tokens=total,
        block_table_tensor=torch.zeros(count, 500, dtype=torch.int32),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
    )
    rank = Rank(RankShape("0", "0", "tiny", 32, 8), None, 1.0, "cpu")
    stamps = [SimpleNamespace(extra_args=stamped(None, Stamp(0.5))) for _ in ids]
    rank.note(
        [SimpleNamespace(req_id=r, sampling_params=p) for r, p in zip(ids, stamps, strict=True)], ()
    )
    splitter, computed = Splitter(count, "cpu"), keys.numpy() - lengths

    def narrow(rest: Rest, changing: dict[str, Any]) -> Any:
        return narrowed(common, rest.known, changing)

    def step() -> int:
        votes = rank.rows(ids, lengths, computed, total, ())
        if votes is not None:
            splitter.split(common, votes, narrow)
        rank.end_step()
        return 0 if votes is None else len(votes.rows)

    return step
