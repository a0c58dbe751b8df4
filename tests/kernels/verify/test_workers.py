"""Work over processes, and the file that keeps what is done."""

from __future__ import annotations

import operator
from pathlib import Path

import pytest
import torch

from blasst.kernels.verify.workers import Ledger, spread


def test_every_task_is_done_once_whatever_the_processes() -> None:
    numbers = list(range(7))
    assert list(spread(operator.neg, numbers)) == [-n for n in numbers]
    assert sorted(spread(operator.neg, numbers, workers=2)) == sorted(-n for n in numbers)


def test_a_process_has_one_torch_thread() -> None:
    (threads,) = spread(eval, ["__import__('torch').get_num_threads()"], workers=2)
    assert threads == 1
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_are_raised(workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(spread(eval, ["1", "1 // 0"], workers))


def test_after_the_limit_nothing_starts() -> None:
    assert list(spread(operator.neg, range(3), limit_s=0.0)) == []
    assert list(spread(operator.neg, range(3), workers=2, limit_s=0.0)) == []


def test_a_ledger_keeps_its_rows_and_drops_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    Ledger(path).add({"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    again = Ledger(path)
    assert again.rows == [{"a": 1}]
    again.add({"a": 3})
    assert Ledger(path).rows == [{"a": 1}, {"a": 3}]
    assert Ledger(None).rows == []
