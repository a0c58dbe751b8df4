"""A worker's page and promises, and the tap that reads who sits in which batch row."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blasst.kernels.exchange.layout import RANK_COUNTERS
from blasst.kernels.exchange.stats import StatsPage, iter_stats
from blasst.kernels.types import Geometry
from blasst.plugin import request_tap
from blasst.plugin.patching import wrap_method
from blasst.plugin.rank import Rank, RankShape
from blasst.plugin.stamp import Stamp, stamped

SHAPE = RankShape("1", "3", "tiny", num_layers=2, num_kv_heads=2, first_layer=4, impl="cpu")


def new(req_id: str, stamp: Stamp | None = None, pooling: bool = False) -> Any:
    extra = None if stamp is None else stamped(None, stamp)
    params = None if pooling else SimpleNamespace(extra_args=extra)
    return SimpleNamespace(req_id=req_id, sampling_params=params)


def step(rank: Rank, tokens: dict[str, int], drafts: tuple[str, ...] = ()) -> Any:
    """Lambda of each row, None where it does not vote; None: no row does."""
    lengths = np.array(list(tokens.values()), dtype=np.int32)
    computed = 100 * np.arange(len(tokens), dtype=np.int32)
    votes = rank.rows(list(tokens), lengths, computed, int(lengths.sum()), drafts)
    rank.end_step()
    if votes is None:
        return None
    assert votes.size == len(tokens)
    assert list(votes.lengths) == lengths[list(votes.rows)].tolist()
    assert votes.computed is computed
    others = [n for row, n in enumerate(lengths.tolist()) if row not in votes.rows]
    assert votes.others == (None if set(others) <= {1} else lengths.tobytes())
    found = dict(zip(votes.rows, votes.lambdas, strict=True))
    return [found.get(row) for row in range(len(tokens))]


@pytest.mark.parametrize("seed", range(8))
def test_rows_and_counts_are_those_of_a_plain_loop(seed: int) -> None:
    """Chunks behind decodes take a shorter way than rows that lie anywhere."""
    rng = np.random.default_rng(seed)
    r, expected = rank(), dict.fromkeys(RANK_COUNTERS, 0)
    promised = {f"r{i}": [None, 0.0, 0.5, 0.25][i % 4] for i in range(12)}
    r.note([new(name, Stamp(value)) for name, value in promised.items()], ())
    for _ in range(200):
        names = list(rng.permutation(list(promised))[: rng.integers(1, 6)])
        tokens = {str(name): 1 for name in names}
        for name in names if rng.integers(2) else names[-1:]:
            tokens[str(name)] = int(rng.choice([1, 1, 2, 7, 1800]))
        drafts = tuple(str(name) for name in names if rng.integers(5) == 0)
        wanted: list[float | None] = []
        for name, count in tokens.items():
            value = promised[name] if count > 1 and name not in drafts else None
            wanted.append(value)
            decode = count == 1 or name in drafts
            kind = "decode" if decode else "dense" if value is None else "vote"
            expected["decode_tokens" if decode else f"prefill_tokens_{kind}"] += count
            if not decode:
                expected[f"prefill_requests_{kind}"] += 1
        found = step(r, tokens, drafts)
        assert (found or [None] * len(tokens)) == wanted
    assert r.counts == expected


def rank(folder: Path | None = None, shape: RankShape = SHAPE, interval_s: float = 0.05) -> Rank:
    return Rank(shape, folder, interval_s, "cpu")


def page(folder: Path) -> StatsPage:
    (found,) = iter_stats(folder, "rank")
    return found


def test_rows_get_the_lambda_of_their_request() -> None:
    r = rank()
    r.note([new("a", Stamp(0.5)), new("b", Stamp(None)), new("c", Stamp(0.0))], ())
    assert step(r, {"b": 10, "a": 5, "c": 7}) == [None, 0.5, 0.0]
    assert step(r, {"c": 3, "a": 1}) == [0.0, None]  # one token: decode
    assert step(r, {"b": 10}) is None
    assert step(r, {"a": 1, "b": 1, "c": 1}) is None
    assert step(r, {"a": 4, "c": 4}, drafts=("a",)) == [None, 0.0]  # a verifies drafts
    r.note([], ("a", "c"))
    assert step(r, {"a": 5, "c": 5}) is None
    assert r.counts == {
        "prefill_requests_vote": 4,
        "prefill_requests_dense": 4,
        "prefill_tokens_vote": 5 + 7 + 3 + 4,
        "prefill_tokens_dense": 10 + 10 + 5 + 5,
        "decode_tokens": 1 + 3 + 4,
        "unstamped_requests": 0,
    }
    assert r._lambdas == {}


def test_requests_without_a_stamp_run_dense_and_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    r = rank()
    r.note([new("x"), new("y"), new("_v2_mixed_warmup_x"), new("_warmup_0_")], ())
    r.note([new("z", pooling=True)], ())
    assert step(r, {"x": 9, "y": 9}) is None
    assert r.counts["unstamped_requests"] == 2
    assert len([m for m in caplog.messages if "did not pass our admission" in m]) == 1


def test_a_worker_that_cannot_skip_keeps_no_promises() -> None:
    import dataclasses

    r = rank(shape=dataclasses.replace(SHAPE, refusal="amx"))
    r.note([new("a", Stamp(0.5))], ())
    assert step(r, {"a": 9}) is None
    assert r.counts["prefill_tokens_dense"] == 9


def test_the_last_step_shows_although_no_further_comes(tmp_path: Path) -> None:
    r = rank(tmp_path)
    assert page(tmp_path).arrays["tiles"] == (0,) * 8
    r.note([new("a", Stamp(0.5))], ())
    r.rows(["a"], np.array([9]), np.array([0]), 9, ())
    r.counters.layer(1)[0] += 7
    time.sleep(0.2)
    assert page(tmp_path).scalar("prefill_tokens_vote") == 0  # not before the step ends
    r.end_step()
    end = time.monotonic() + 5
    while page(tmp_path).scalar("prefill_tokens_vote") == 0 and time.monotonic() < end:
        time.sleep(0.01)
    found = page(tmp_path)
    assert found.scalar("prefill_tokens_vote") == 9
    assert found.arrays["tiles"] == (0, 0, 0, 0, 7, 7, 0, 0)
    assert found.name.startswith("rank-1-3-")
    assert found.labels["first_layer"] == "4"
    r.close()


def test_the_page_is_not_written_while_nothing_happens(tmp_path: Path) -> None:
    r = rank(tmp_path)
    first = page(tmp_path).updated_at
    time.sleep(0.3)
    assert page(tmp_path).updated_at == first
    r.close()


class Runner:
    """What the tap needs of vLLM's runners. V1 keeps its batch, V2 returns it."""

    def __init__(self, returns_batch: bool) -> None:
        self.input_batch = SimpleNamespace(req_ids=[], num_reqs=0, num_computed_tokens_cpu=[])
        self.returns_batch = returns_batch
        self.seen: Any = "nothing"
        self._blasst_rank = rank()

    def prepare(self, scheduler_output: Any, lengths: Any) -> Any:
        ids = list(scheduler_output.num_scheduled_tokens)
        batch = SimpleNamespace(req_ids=[*ids, "stale"], num_reqs=len(ids))
        computed = 10 * np.arange(1, len(ids) + 2)
        if self.returns_batch:
            batch.num_scheduled_tokens = np.append(lengths, 77)
            batch.num_computed_tokens_np = computed
            return batch
        batch.num_computed_tokens_cpu = computed
        self.input_batch = batch
        return (1, 2, 3)

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> str:
        if scheduler_output.num_scheduled_tokens:
            tokens = np.array(list(scheduler_output.num_scheduled_tokens.values()))
            self.prepare(scheduler_output, tokens)
        votes = request_tap.current_votes()
        self.seen = votes and dict(zip(votes.rows, votes.lambdas, strict=True))
        assert votes is None or votes.computed[1] == 20
        if self.seen == {0: 0.25}:
            raise RuntimeError("the model failed")
        return "output"


wrap_method(Runner, "execute_model", request_tap._follow_step)
wrap_method(Runner, "prepare", request_tap._read_rows)


def scheduled(new_requests: list[Any], tokens: dict[str, int]) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=new_requests,
        finished_req_ids=set(),
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={},
    )


@pytest.mark.parametrize("returns_batch", [False, True], ids=["V1", "V2"])
def test_rows_hold_during_the_step_only(returns_batch: bool) -> None:
    runner = Runner(returns_batch)
    output = scheduled([new("a", Stamp(0.5)), new("b", Stamp(None))], {"b": 2, "a": 9})
    assert runner.execute_model(output) == "output"
    assert runner.seen == {1: 0.5}
    assert request_tap.current_votes() is None
    runner.execute_model(scheduled([], {}))
    assert runner.seen is None
    with pytest.raises(RuntimeError, match="the model failed"):
        runner.execute_model(scheduled([new("c", Stamp(0.25))], {"c": 3}))
    assert request_tap.current_votes() is None


def test_other_engines_in_the_process_are_left_alone() -> None:
    runner = Runner(returns_batch=False)
    del runner._blasst_rank
    runner.execute_model(scheduled([new("a", Stamp(0.5))], {"a": 9}))
    assert runner.seen is None


def test_wrapping_twice_wraps_once() -> None:
    before = Runner.execute_model
    wrap_method(Runner, "execute_model", request_tap._follow_step)
    assert Runner.execute_model is before


def test_a_method_that_vllm_no_longer_has_is_an_error() -> None:
    with pytest.raises(KeyError, match="gone"):
        wrap_method(Runner, "gone", request_tap._follow_step)


def test_a_step_is_counted_once_although_the_next_one_has_no_rows() -> None:
    r = rank()
    step(r, {"a": 5})
    r.end_step()  # nothing was scheduled
    assert r.counts["prefill_tokens_dense"] == 5


def test_two_engines_of_a_process_have_a_page_each(tmp_path: Path) -> None:
    first, second = rank(tmp_path), rank(tmp_path)
    step(first, {"a": 5})
    step(second, {"a": 7})
    for r in (first, second):
        r.close()
    found = sorted(p.scalar("prefill_tokens_dense") for p in iter_stats(tmp_path, "rank"))
    assert found == [5, 7]


def test_a_removed_page_is_put_back_only_in_a_state_folder(tmp_path: Path) -> None:
    kept = Rank(SHAPE, tmp_path / "kept", 0.05, "cpu", keeps_page=True)
    gone = Rank(SHAPE, tmp_path / "gone", 0.05, "cpu")
    for r, folder in ((kept, tmp_path / "kept"), (gone, tmp_path / "gone")):
        step(r, {"a": 5})
        shutil.rmtree(folder)
    end = time.monotonic() + 5
    while not (tmp_path / "kept").exists() and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.15)
    kept.close()
    assert page(tmp_path / "kept").scalar("prefill_tokens_dense") == 5
    gone.close()
    assert not (tmp_path / "gone").exists()


def test_the_page_says_what_votes_as_one_and_which_generation_came(tmp_path: Path) -> None:
    shape = RankShape(
        "0", "0", "tiny", 1, 1, impl="cpu", geometry=Geometry(64, 128), layers_voting=1
    )
    counting = rank(tmp_path, shape)
    for generation in (4, 9, 7):
        step_of = f"r{generation}"
        counting.note([new(step_of, Stamp(None, generation))], [])
        step(counting, {step_of: 5})
    counting.close()
    found = page(tmp_path)
    assert (found.labels["tile_m"], found.labels["tile_n"]) == ("64", "128")
    assert (found.scalar("generation_seen"), found.scalar("layers_voting")) == (9, 1)
