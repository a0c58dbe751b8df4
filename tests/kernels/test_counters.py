"""SkipCounters, the lazy package, and the benchmark verb."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import blasst.kernels
from blasst.kernels.bench import verb
from blasst.kernels.exchange.layout import rank_fields
from blasst.kernels.exchange.stats import StatsWriter, read_stats
from blasst.kernels.stats import SkipCounters
from blasst.kernels.testing import dialled_inputs


def test_counters_per_layer_reach_a_statistics_page(tmp_path: Path) -> None:
    counters = SkipCounters(3, 2, "cpu")
    d = dialled_inputs(num_heads=4, num_kv_heads=2, head_dim=64, seqlen=900, skip_rate=0.5)
    for _ in range(2):
        blasst.kernels.prefill_attention(
            d.q, d.kv, d.cu_seqlens_q, skip_lambda=d.skip_lambda, counters=counters.layer(1)
        )
    counters.start_copy({"steps": 2})
    number, snapshot, note = counters.newest_copy()
    assert (number, note) == (1, {"steps": 2})
    assert torch.equal(snapshot[1], 2 * d.counts(2))
    assert snapshot[1, :, 1].min() > 0
    assert snapshot[0].sum() == snapshot[2].sum() == 0
    counters.layer(0).add_(1)
    assert snapshot[0].sum() == 0
    writer = StatsWriter(tmp_path, "r", kind="rank", labels={}, fields=rank_fields(3, 2))
    writer.update(tiles=snapshot.numpy().tobytes())
    assert list(read_stats(writer.path).arrays["tiles"]) == snapshot.flatten().tolist()
    writer.close()


def test_layers_are_views_at_a_stable_address() -> None:
    counters = SkipCounters(2, 3, "cpu")
    assert counters.layer(1).data_ptr() == counters.layer(1).data_ptr()
    counters.layer(1)[2, 0] = 9
    assert counters.newest_copy()[0] == 0
    counters.start_copy({})
    assert counters.newest_copy()[1][1, 2].tolist() == [9, 0]


def test_a_copy_that_has_not_arrived_is_not_shown() -> None:
    counters = SkipCounters(2, 1, "cpu")
    for step in range(1, 90):
        counters.layer(0).add_(1)
        counters.start_copy({"step": step})
    assert counters.newest_copy()[0] == 89
    count = len(counters._slots)
    counters._slots[89 % count].tiles.fill_(-1)  # nothing of it
    counters._slots[88 % count].tiles[1, 0, 1] = -1  # all but a last cell
    number, tiles, note = counters.newest_copy()
    assert (number, note, tiles[0].tolist()) == (87, {"step": 87}, [[87, 87]])
    for slot in counters._slots:
        slot.tiles.fill_(-1)
    assert counters.newest_copy()[0] == 0


def test_a_slot_that_is_taken_again_is_not_the_older_copy() -> None:
    counters = SkipCounters(1, 1, "cpu")
    count = len(counters._slots)
    for step in range(1, count + 1):
        counters.layer(0).add_(1)
        counters.start_copy({"step": step})
    # A newer copy has begun in the slot of the first, and nothing has arrived of the others.
    for slot in counters._slots[2:] + counters._slots[:1]:
        slot.tiles.fill_(-1)
    assert counters.newest_copy()[0] == 1
    counters._slots[1].number = count + 1
    assert counters.newest_copy()[0] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_gpu_copies_lag_but_never_wait() -> None:
    counters = SkipCounters(2, 2, "cuda")
    torch.cuda._sleep(100_000_000)
    counters.layer(0).add_(4)
    counters.start_copy({})
    assert counters.newest_copy()[0] == 0
    for _ in range(3):
        counters.start_copy({})
    torch.cuda.synchronize()
    number, tiles, _ = counters.newest_copy()
    assert (number, tiles[0].sum()) == (4, 16)


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "vllm", "triton", "cutlass", "fastapi", "numpy"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
import blasst.kernels, blasst.kernels.threshold, blasst.kernels.types, blasst.kernels.errors
import blasst.kernels.support, blasst.kernels.dispatch, blasst.kernels.bench.verb
import blasst.kernels.exchange.desired, blasst.kernels.exchange.stats
import blasst.kernels.exchange.layout
from blasst.kernels import Impl, AttentionSpec
try:
    blasst.kernels.prefill_attention
except ImportError as e:
    assert "torch is blocked" in str(e), e
else:
    raise SystemExit("torch was not needed?")
"""


def test_what_imports_without_torch() -> None:
    result = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_unknown_attributes_are_named() -> None:
    with pytest.raises(AttributeError, match="no attribute 'prefil'"):
        _ = blasst.kernels.prefil


def _bench(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    return verb.run(parser.parse_args(["attention", *argv]))


SMALL = ("--problem", "smollm2-135m", "--lengths", "256", "--rounds", "1", "--skip-rates", "0.5")


def test_bench_prints_json_and_writes_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = tmp_path / "t.md"
    assert _bench(*SMALL, "--peer", "torch-sdpa", "--json", "--markdown", str(table)) == 0
    result = json.loads(capsys.readouterr().out)
    assert [cell["what"] for cell in result["cells"]] == ["dense", "torch-sdpa", "vote 50%"]
    assert result["cells"][0]["over_dense"] == 1.0
    assert all(cell["wall_s"] > 0 for cell in result["cells"])
    assert result["where"]["torch"] == torch.__version__
    assert "| smollm2-135m | 256 | vote 50% |" in table.read_text()


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (("--problem", "gpt"), 2, "problem 'gpt' is unknown; choose from smollm2-135m"),
        (("--peer", "mkl"), 2, "peer 'mkl' is unknown"),
        (("--rounds", "0"), 2, "must be at least 1"),
        (("--threads", "-1"), 2, "must be at least 1"),
        ((*SMALL, "--impl", "hopper"), 1, "hopper: tensors are on cpu"),
        ((*SMALL, "--impl", "gpu"), 1, "impl 'gpu' is unknown"),
    ],
)
def test_bench_refuses(
    argv: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench(*argv) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("blasst: error: ")
    assert message in error


@pytest.mark.parametrize(
    "argv", [("--lengths", "1"), ("--lengths", "x"), ("--skip-rates", "1"), ("--dtype", "int8"), ()]
)
def test_bench_usage_errors_exit_2(argv: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    verb.configure(parser)
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["attention", *argv] if argv else [])
    assert caught.value.code == 2


def test_the_command_in_the_table_names_no_place() -> None:
    argv = ["bench", "attention", "--markdown", "/somewhere/t.md", "--rounds", "3"]
    assert verb._command(argv) == "blasst bench attention --rounds 3"
