"""Checks of several ranks: what they call wrong, and one run of each program on a CPU."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blasst.plugin import check_faults, check_ranks
from blasst.plugin.bench_step import OURS, _inside
from blasst.plugin.rank import Rank, RankShape
from blasst.plugin.rank_recorder import RankRecorder
from blasst.plugin.stamp import Stamp, stamped

GOOD: dict[str, Any] = {
    "tp": 2,
    "dp": 1,
    "nodes": 1,
    "start_s": 1.0,
    "prompt_tokens": 30,
    "answers": [[1, 2], [3, 4]],
    "tiles": [[100, 40], [100, 50]],
    "vote_tokens": {"a": 30, "b": 30},
    "lambdas": {
        "0-0-11": {"own-0": [0.5], "live-0": [0.25]},
        "0-1-12": {"own-0": [0.5], "live-0": [0.25]},
    },
    "stamped": {"own-0": [0.5, 0], "live-0": [0.25, 1]},
    "written": {"1": 0.25},
    "metrics": {},
}


def changed(*path: Any, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(GOOD)
    at = found
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return found


def test_good_numbers_are_called_good() -> None:
    assert check_ranks.reasons(GOOD) == []
    assert "90 of 200 tiles skipped (45.00%)" in check_ranks.summary(GOOD)
    assert "1 changes met by 1 requests under 1 generations" in check_ranks.summary(GOOD)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("lambdas", "0-1-12", "live-0"), [0.5], "ranks of engine 0 used different lambdas"),
        (("lambdas", "0-0-11", "own-0"), [0.5, 0.25], "was stamped [0.5, 0] and ran with"),
        (("tp",), 4, "2 ranks were recorded, not 4"),
        (("written", "1"), 0.125, "live-0 got 0.25 under generation 1"),
        (("written", "2"), 0.125, "no request was admitted under the changes ['2']"),
        (("vote_tokens", "b"), 29, "ranks count [29, 30] voting tokens of 30"),
        (("tiles",), [[100, 0], [100, 0]], "nothing was skipped"),
    ],
)
def test_each_planted_mistake_is_named(path: tuple[str, ...], value: Any, reason: str) -> None:
    assert any(reason in r for r in check_ranks.reasons(changed(*path, value=value)))


def test_engines_of_data_parallel_ranks_share_the_requests() -> None:
    found = changed("lambdas", value={"0-0-1": {"own-0": [0.5]}, "1-0-2": {"live-0": [0.25]}})
    found |= {"tp": 1, "dp": 2, "vote_tokens": {"a": 10, "b": 20}}
    assert check_ranks.reasons(found) == []


def test_comparison_counts_answers_and_tiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    others = {
        "one": GOOD,
        "near": changed("tiles", 0, value=[100, 40]),
        "answer": changed("answers", 1, value=[3, 5]),
        "visits": changed("tiles", 0, value=[99, 40]),
        "skips": changed("tiles", 1, value=[100, 51]),
    }
    for name, found in others.items():
        files.append(tmp_path / name)
        files[-1].write_text(json.dumps(found))
    assert check_ranks.main(["compare", *map(str, files[:3])]) == 0
    assert "1 of 2 answers of 2 tokens differ" in capsys.readouterr().out
    assert check_ranks.main(["compare", str(files[0]), str(files[3])]) == 1
    assert "DIFFER" in capsys.readouterr().out
    assert check_ranks.main(["compare", str(files[0]), str(files[4])]) == 1
    assert "2.000% apart" in capsys.readouterr().out


def test_the_recorder_writes_what_a_rank_uses(tmp_path: Path) -> None:
    rank = Rank(RankShape("3", "1", "m", 1, 1), None, 1.0, "cpu")
    worker = SimpleNamespace(model_runner=SimpleNamespace(_blasst_rank=rank))
    RankRecorder.blasst_record(worker, str(tmp_path))  # type: ignore[arg-type]
    params = SimpleNamespace(extra_args=stamped(None, Stamp(0.5, 7)))
    rank.note([SimpleNamespace(req_id="a", sampling_params=params)], ())
    votes = rank.rows(["a", "b"], np.array([6, 1]), np.array([0, 9]), 7, ())
    assert (votes.rows, votes.lambdas) == ((0,), [0.5])
    assert rank.rows(["a"], np.array([1]), np.array([6]), 1, ()) is None  # its decodes
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("3-1-")
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"id": "a", "stamped": [0.5, 7]},
        {"id": "a", "lambda": 0.5, "tokens": 6},
    ]


def test_calls_of_the_runtime_inside_our_ranges() -> None:
    def event(name: str, thread: int, start: float, end: float, device: str = "CPU") -> Any:
        return SimpleNamespace(
            name=name,
            thread=thread,
            time_range=SimpleNamespace(start=start, end=end),
            device_type=SimpleNamespace(name=device),
        )

    found = _inside(
        [
            event(OURS + "split", 1, 10, 20),
            event(OURS + "forward", 1, 30, 40),
            event(OURS + "forward", 1, 50, 60, "CUDA"),
            event("cudaDeviceSynchronize", 1, 55, 58),
            event("cudaMemcpyAsync", 1, 12, 13),
            event("cudaLaunchKernel", 1, 40, 41),
            event("cudaStreamSynchronize", 1, 25, 26),
            event("cudaStreamSynchronize", 2, 12, 13),
            event("aten::empty", 1, 12, 13),
        ]
    )
    assert dict(found) == {"cudaMemcpyAsync": 1, "cudaLaunchKernel": 1}


def test_unknown_faults_and_missing_models_are_bad_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, reason in (
        (["none"], "none holds no config.json"),
        ([str(tmp_path), "--faults", "fire"], "fire is not one of memory, page-table"),
    ):
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(SystemExit) as stopped:
            check_faults.main([*command, "--out", str(tmp_path / "out")])
        assert stopped.value.code == 2
        assert reason in capsys.readouterr().err
    out = ["--out", str(tmp_path / "out")]
    for command, reason in (
        (["none"], "none holds no config.json"),
        ([str(tmp_path), "--tp", "2", "--nodes", "3"], "2 ranks cannot be spread evenly over"),
    ):
        with pytest.raises(SystemExit) as stopped:
            check_ranks.main(["serve", *command, *out])
        assert stopped.value.code == 2
        assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("answered", [False, True])
def test_what_was_seen_is_written_before_the_server_ends(
    answered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ends the program may not wait for the server's end."""
    out = tmp_path / "out.json"

    @contextmanager
    def served(args: Any, state: Path, log: Path) -> Iterator[Any]:
        def call(path: str, body: Any) -> None:
            line = json.dumps({"id": "own-0", "stamped": [0.5, 0]})
            Path(body["args"][0], "0-0-7.jsonl").write_text(f'{line}\n{{"id": "ow')

        try:
            yield SimpleNamespace(call=call)
        finally:
            assert out.exists() == answered

    def each(server: Any, state: Path, prompts: Any, found: Any, tokens: int) -> None:
        found.answers = [[1]] if answered else []

    def ended(*given: Any) -> None:
        raise SystemExit(143)

    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    monkeypatch.setattr(check_ranks, "served", served)
    monkeypatch.setattr(check_ranks, "_each_its_own", each)
    monkeypatch.setattr(check_ranks, "_live_changes", ended)
    with pytest.raises(SystemExit):
        check_ranks.main(["serve", str(tmp_path), "--out", str(out)])
    if answered:
        assert json.loads(out.read_text())["stamped"] == {"own-0": [0.5, 0]}


def test_what_is_known_is_kept_between_changes(tmp_path: Path) -> None:
    """A limit may end the check where nothing of ours can run any more."""
    server: Any = SimpleNamespace(complete=lambda *given, **named: time.sleep(0.001))
    found, kept = check_ranks.Found(2, 1), []
    check_ranks._live_changes(
        server,
        tmp_path,
        [[1]] * 25,
        found,
        time.monotonic() + 60,
        lambda: kept.append(len(found.written)),
    )
    assert kept == [10, 20]
    assert len(found.written) == 25


@pytest.mark.vllm
@pytest.mark.slow
def test_two_ranks_use_the_same_lambda_while_it_changes(
    tmp_path: Path,
    tiny_model: Path,
    clean_environment: Callable[[Mapping[str, str]], dict[str, str]],
) -> None:
    """12 changes under load; test_engine compares the answers of two ranks with one."""
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [
            sys.executable, "-P", "-m", "blasst.plugin.check_ranks", "serve", str(tiny_model),
            "--tp", "2", "--requests", "12", "--tokens", "700", "--chunk", "256",
            "--dtype", "float32", "--ready-s", "400", "--out", str(tmp_path / "two.json"),
        ],
        env=clean_environment(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads((tmp_path / "two.json").read_text())
    assert len(found["answers"]) == len(found["written"]) == 12
    assert len(found["lambdas"]) == 2
    assert found["metrics"]["blasst_tiles_skipped_total"] > 0
