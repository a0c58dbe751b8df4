"""The plugin's benchmark: its prompts, and where its skip rates come from. No engine is started."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blasst.kernels.exchange.layout import RANK, rank_fields
from blasst.kernels.exchange.stats import StatsWriter
from blasst.plugin import bench, bench_start, bench_step
from blasst.plugin.bench_engines import limit_steps, on_cpu, share_weights, tiles
from blasst.plugin.bench_start import read_log


def _arguments(prompts: Path | None = None, model: Path | None = None) -> argparse.Namespace:
    return argparse.Namespace(prompts=prompts, model=str(model))


def test_random_prompts_are_the_same_in_every_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    made = bench._prompts(_arguments(model=tmp_path), 40, 3)
    assert [len(p) for p in made] == [40, 40, 40]
    assert made == bench._prompts(_arguments(model=tmp_path), 40, 3)
    assert made[0] != made[1]


def test_prompts_of_a_file_the_longest_first(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": [7] * n}) for n in (3, 9, 5, 8)))
    assert [len(p) for p in bench._prompts(_arguments(file), 8, 2)] == [8, 5]
    with pytest.raises(SystemExit, match="holds 3 prompts of at most 8 tokens, 4 are needed"):
        bench._prompts(_arguments(file), 8, 4)


def test_tiles_are_summed_over_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: None)
    writers = []
    for rank in range(2):
        writer = StatsWriter(tmp_path, f"r{rank}", kind=RANK, labels={}, fields=rank_fields(2, 1))
        tiles = b"".join(n.to_bytes(8, "little") for n in (10, 1 + rank, 20, 2))
        writer.update(tiles=tiles)
        writers.append(writer)
    assert bench._tiles(tmp_path) == (60, 7)
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("main", [bench.main, bench_step.main])
def test_a_model_that_is_not_there_is_bad_usage(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["overhead", "none"] if main is bench.main else ["none", "--out", str(out)]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "none holds no config.json" in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_part_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_step.main(["llama-8b", "--parts", "decode,hosts", "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert "hosts is no part" in capsys.readouterr().err


@pytest.mark.vllm
def test_a_large_model_without_a_gpu_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    if not on_cpu():
        pytest.skip("vLLM has a GPU here")
    with pytest.raises(SystemExit) as stopped:
        bench.main(["overhead", "llama-8b"])
    assert stopped.value.code == 2
    assert "need a GPU, and vLLM sees none here" in capsys.readouterr().err


def test_bad_usage_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["latency", "model"])
    assert stopped.value.code == 2
    assert "invalid choice: 'latency'" in capsys.readouterr().err


def test_a_start_says_when_it_was_ready_and_what_the_kernel_took() -> None:
    log = (
        "INFO [rank_setup.py:1] blasst: the hopper kernel is ready after 2.6 s\n"
        'blasst-start {"imports_s": 7.5, "engine_s": 12.25}\nbye\n'
    )
    assert read_log(log) == {"imports_s": 7.5, "engine_s": 12.25, "kernel_s": 2.6}
    assert read_log("blasst-start {}") == {}
    assert read_log("Traceback") is None


@pytest.mark.parametrize(("only", "count"), [("", 6), ("at once", 2), ("stock", 2), ("none", 0)])
def test_some_of_the_starts_can_be_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only: str, count: int
) -> None:
    out = tmp_path / "start.json"
    monkeypatch.setattr(bench_start, "_starts", lambda *given: [{"engine_s": 1.0}])
    code = bench_start.main(["llama-8b", "--only", only, "--out", str(out)])
    assert code == (0 if count else 1)
    assert not count or len(json.loads(out.read_text())) == count


class _Engine:
    """What the helpers of benchmarks touch of an engine of this process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.scheduler = SimpleNamespace(max_num_scheduled_tokens=2048)
        self.llm_engine = self
        self.engine_core = SimpleNamespace(engine_core=self)

    def apply_model(self, what: Callable[[torch.nn.Module], Any]) -> list[Any]:
        return [what(self.model)]


def test_engines_share_weights() -> None:
    one, two = _Engine(torch.nn.Linear(3, 2)), _Engine(torch.nn.Linear(3, 2))
    share_weights(one, two)
    for name, parameter in two.model.named_parameters():
        assert parameter.data_ptr() == one.model.get_parameter(name).data_ptr()


def test_tiles_are_read_from_the_layers_that_count() -> None:
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(3)))
    for layer, counts in zip(model, ([[10, 1], [20, 2]], [[30, 4], [40, 8]]), strict=False):
        layer.impl = SimpleNamespace(blasst=SimpleNamespace(counters=torch.tensor(counts)))
    model[2].impl = SimpleNamespace(blasst=None)  # not eligible
    assert tiles(_Engine(model)) == (100, 15)


def test_steps_are_limited_where_the_scheduler_looks() -> None:
    engine = _Engine(torch.nn.Identity())
    limit_steps(engine, 512)
    assert engine.scheduler.max_num_scheduled_tokens == 512
