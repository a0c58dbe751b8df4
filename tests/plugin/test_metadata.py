"""A batch split into rows that vote and rows for the stock path, and put together again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from blasst.plugin.metadata import Split, part, split
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
    _num_computed_tokens_cache: torch.Tensor | None = None

    def replace(self, **changes: Any) -> Common:
        return dataclasses.replace(self, **changes)


def batch(**changes: Any) -> Common:
    starts = torch.tensor(STARTS, dtype=torch.int32)
    made = Common(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([30, 11, 25, 12, 40], dtype=torch.int32),
        num_reqs=5,
        num_actual_tokens=14,
        max_query_len=5,
        max_seq_len=40,
        block_table_tensor=torch.arange(10, dtype=torch.int32).view(5, 2),
        slot_mapping=torch.arange(14) + 100,
        positions=torch.arange(14),
        is_prefilling=torch.tensor([True, False, True, False, True]),
        _num_computed_tokens_cache=torch.zeros(5),
    )
    return made.replace(**changes)


def test_vote_rows_and_the_rest() -> None:
    lambdas = [0.5, None, None, None, 0.0]
    done = split(batch(), lambdas, lambda common: common)
    assert done is not None
    assert done.vote.skip_lambda.tolist() == [0.5, 0.0]
    assert done.vote.part.cu_seqlens_q.tolist() == [0, 3, 7]
    assert done.vote.page_table.tolist() == [[0, 1], [8, 9]]
    assert done.vote.seqlens_k.tolist() == [30, 40]
    assert isinstance(done.vote.part.tokens, torch.Tensor)
    assert done.vote.part.tokens.tolist() == [0, 1, 2, 10, 11, 12, 13]
    assert done.stock is not None
    rest, common = done.stock
    assert rest.tokens == slice(3, 10)
    assert common.query_start_loc.tolist() == [0, 1, 6, 7]
    assert (common.num_reqs, common.num_actual_tokens, common.max_query_len) == (3, 7, 5)
    assert common.max_seq_len == 25
    assert common.seq_lens.tolist() == [11, 25, 12]
    assert common.slot_mapping.tolist() == list(range(103, 110))
    assert common.is_prefilling.tolist() == [False, True, False]
    assert common._num_computed_tokens_cache is None
    assert common.positions is None


def test_all_rows_vote() -> None:
    done = split(batch(), [0.1] * 5, lambda common: pytest.fail("no stock rows"))
    assert done is not None
    assert done.stock is None
    assert done.vote.part.tokens == slice(0, 14)


def test_padding_rows_are_left_out() -> None:
    starts = torch.tensor([*STARTS[:4], 9, 9], dtype=torch.int32)
    done = split(batch(query_start_loc_cpu=starts), [None, 0.5, None], lambda common: common)
    assert done is not None
    assert done.stock is not None
    assert done.stock[0].rows.tolist() == [0, 2]


@pytest.mark.parametrize(
    "changes", [{"num_reqs": 4}, {"causal": False}, {"causal": torch.tensor([True])}]
)
def test_a_batch_that_is_not_the_runners_own_is_left_to_the_stock_path(
    changes: dict[str, Any],
) -> None:
    assert split(batch(**changes), [0.5] * 5, lambda common: common) is None


@pytest.mark.parametrize("rows", [[0, 1, 2], [1, 3], [0, 2, 4], [4]])
def test_rows_are_taken_and_put_back(rows: list[int]) -> None:
    t = torch.arange(28.0).view(14, 2)
    before = t.clone()
    chosen = part(rows, STARTS)
    taken = chosen.take(t)
    assert taken.shape[0] == sum(LENGTHS[r] for r in rows) == chosen.num_tokens
    taken.neg_()
    chosen.put(t, taken)
    mine = torch.zeros(14, dtype=torch.bool)
    for r in rows:
        mine[STARTS[r] : STARTS[r + 1]] = True
    assert torch.equal(t[mine], -before[mine])
    assert torch.equal(t[~mine], before[~mine])


def test_split_computes_what_one_call_would() -> None:
    """Attention is a function of its row here: split rows must land where they came from."""
    query = torch.randn(14, 2)
    output = torch.zeros_like(query)
    done = split(batch(), [None, None, 0.5, None, None], lambda common: common)
    assert isinstance(done, Split)
    assert done.stock is not None
    for rows, factor in ((done.vote.part, 2.0), (done.stock[0], 3.0)):
        out = rows.take(output)
        out.copy_(rows.take(query) * factor)
        rows.put(output, out)
    want = query * 3.0
    want[4:9] = query[4:9] * 2.0
    assert torch.equal(output, want)


def test_fields_of_other_releases_are_found_by_name() -> None:
    @dataclass
    class Old:
        _seq_lens_cpu: torch.Tensor
        _num_computed_tokens_cpu: torch.Tensor | None = None

    rows = torch.tensor([1])
    fields = row_fields(Old(torch.tensor([5, 6])), rows)
    assert fields.keys() == {"_seq_lens_cpu"}
    assert fields["_seq_lens_cpu"].tolist() == [6]


def test_cache_layout_is_on_the_layer_or_on_the_impl() -> None:
    from types import SimpleNamespace

    assert cpu_isa(SimpleNamespace(isa="vec"), SimpleNamespace()) == "vec"
    assert cpu_isa(SimpleNamespace(), SimpleNamespace(isa="amx")) == "amx"
    assert cpu_isa(SimpleNamespace(), SimpleNamespace()) == ""
