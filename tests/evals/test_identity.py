"""A file of results is of one server: which is noted, and another one does not continue it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.cells import collect
from blasst.evals.errors import InputError
from blasst.evals.identity import RECORD_VERSION, SERVED, UNKNOWN, Engine, same_server
from blasst.evals.progress import Progress
from blasst.evals.report import markdown
from blasst.evals.runner import Runner
from blasst.evals.samples import Sample
from blasst.evals.store import ResultStore, read_results
from blasst.evals.sweep import Plan, run_sweep
from blasst.evals.thresholds import parse_points
from blasst.kernels.exchange import layout

Connect = Callable[..., Runner]
POINTS = parse_points(["dense"], [], [])
SAYS = {
    "weights": "5d07a10c62c41a3b",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
    "quantization": "none",
    "max_num_batched_tokens": "2048",
    "tensor_parallel_size": "1",
    "pipeline_parallel_size": "1",
}


def sweep(connect: Connect, path: Path, plan: Plan, **options: Any) -> tuple[int, str]:
    said = io.StringIO()
    with ResultStore(path) as store:
        return run_sweep(connect(store, **options), plan, Progress(0, said)), said.getvalue()


def plan_of(path: Path) -> dict[str, Any]:
    return next(r for r in reversed(read_results(path)) if r["kind"] == "plan")


def test_the_names_are_those_of_the_statistics_pages() -> None:
    assert SERVED == layout.SERVED == tuple(SAYS)


def test_what_the_server_says_is_noted(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.served, fake.impl, fake.geometry = SAYS, "hopper", "64x128"
    sweep(connect, tmp_path / "r", Plan(POINTS, samples[:1]))
    server = plan_of(tmp_path / "r")["server"]
    assert {name: server[name] for name in SERVED} == SAYS
    assert (server["kernel"], server["record_version"]) == ("hopper:64x128", RECORD_VERSION)
    text = markdown(collect(read_results(tmp_path / "r")))
    assert "* weights: `5d07a10c62c41a3b`" in text
    assert "* max num batched tokens: `2048`" in text
    assert "did not say" not in text


@pytest.mark.parametrize(
    "name",
    [*SERVED, "model", "root", "max_model_len", "min_context", "kernel", "geometry", "version"],
)
def test_another_server_does_not_continue_the_results(
    name: str, tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path, plan = tmp_path / "r", Plan(POINTS, samples[:2])
    fake.served, fake.impl, fake.geometry = SAYS, "hopper", "64x128"
    sweep(connect, path, Plan(POINTS, samples[:1]))
    before, options = path.read_bytes(), {}
    if name in SAYS:
        fake.served = SAYS | {name: "7"}
        words = f"{name} {SAYS[name]} then, 7 now"
    elif name == "model":
        fake.name, words = "another", "model fake-model then, another now"
    elif name == "root":
        fake.root, words = "/m/fake-model-2", "root fake-model then, fake-model-2 now"
    elif name == "max_model_len":
        fake.max_model_len, words = 2048, "max_model_len 4096 then, 2048 now"
    elif name == "min_context":
        options, words = {"min_context": 600}, "min_context 512 then, 600 now"
    elif name == "kernel":
        fake.impl, words = "triton", "kernel hopper:64x128 then, triton:64x128 now"
    elif name == "geometry":
        fake.geometry, words = "", "kernel hopper:64x128 then, hopper now"
    else:
        fake.version, words = "0.1-fake", "vllm_version 0.0-fake then, 0.1-fake now"
    with pytest.raises(InputError, match=r"results are not of http.*give another --out") as caught:
        sweep(connect, path, plan, **options)
    assert words in str(caught.value)
    assert path.read_bytes() == before
    fake.served, fake.name, fake.root, fake.version = SAYS, "fake-model", "", "0.0-fake"
    fake.max_model_len, fake.impl, fake.geometry = 4096, "hopper", "64x128"
    assert sweep(connect, path, plan)[0] == 1


def test_a_server_that_cannot_say_is_unknown_and_the_report_says_so(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r"
    sweep(connect, path, Plan(POINTS, samples[:1]))
    assert {plan_of(path)["server"][name] for name in SERVED} == {UNKNOWN}
    words = "The server did not say its weights, dtype, kv cache dtype, quantization, max num"
    assert words in markdown(collect(read_results(path)))
    # What was not noted cannot differ: continued, said, and still unknown afterwards.
    fake.served = SAYS
    done, said = sweep(connect, path, Plan(POINTS, samples[:2]))
    assert done == 1
    assert "the results do not note their server's weights, dtype" in said
    assert plan_of(path)["server"]["weights"] == UNKNOWN
    assert collect(read_results(path)).others == 0
    fake.served = {}
    assert sweep(connect, path, Plan(POINTS, samples[:3]))[0] == 1


def test_a_server_that_no_longer_says_is_another_one(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    fake.served = SAYS
    sweep(connect, tmp_path / "r", Plan(POINTS, samples[:1]))
    fake.served = {}
    with pytest.raises(InputError, match=r"weights 5d07a10c62c41a3b then, unknown now; dtype"):
        sweep(connect, tmp_path / "r", Plan(POINTS, samples[:1]))


def as_written_before(path: Path, **changes: Any) -> None:
    """As the releases of record_version 2 did."""
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        record["fingerprint"] = "f" * 32
        if record["kind"] == "plan":
            server = {k: v for k, v in record["server"].items() if k not in (*SERVED, "kernel")}
            record["server"] = server | {"record_version": 2} | changes
        else:
            record.pop("key", None)
        lines.append(json.dumps(record))
    path.write_text("\n".join(lines) + "\n")


def test_results_of_the_release_before_are_continued_where_what_they_say_agrees(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    path = tmp_path / "r"
    fake.served, fake.impl, fake.geometry = SAYS, "hopper", "64x128"
    sweep(connect, path, Plan(POINTS, samples[:1]))
    as_written_before(path)
    old = collect(read_results(path))
    assert old.cells[0].samples == 1
    done, said = sweep(connect, path, Plan(POINTS, samples[1:2]))
    assert done == 1
    assert "do not note their server's weights" in said
    found = collect(read_results(path))
    assert (found.plan["fingerprint"], found.others) == ("f" * 32, 0)
    assert sum(cell.samples for cell in found.cells) == 2
    assert found.plan["server"]["kernel"] == "hopper:64x128"
    fake.impl = "triton"
    with pytest.raises(InputError, match="kernel hopper:64x128 then, triton:64x128 now"):
        sweep(connect, path, Plan(POINTS, samples[1:2]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_model_len": 2048}, "max_model_len 2048 then, 4096 now"),
        ({"record_version": 9}, "record_version 9, this release writes 3"),
        ({"record_version": None}, "do not say which server"),
    ],
)
def test_old_results_that_disagree_are_refused(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    fake: Any,
    connect: Connect,
    samples: list[Sample],
) -> None:
    sweep(connect, tmp_path / "r", Plan(POINTS, samples[:1]))
    as_written_before(tmp_path / "r", **changes)
    with pytest.raises(InputError, match=words):
        sweep(connect, tmp_path / "r", Plan(POINTS, samples[:1]))


def test_ranks_are_joined_and_one_that_does_not_say_makes_it_unknown() -> None:
    rank = {"impl": "cpu", "geometry": "128x128", "alive": True, "served": SAYS}
    other = rank | {"served": SAYS | {"dtype": "float16"}, "impl": "triton", "geometry": ""}
    gone = rank | {"alive": False, "impl": "hopper", "served": SAYS | {"dtype": "float32"}}
    found = Engine.of([rank, other, gone])
    assert found.kernels == "cpu:128x128, triton"
    assert found.served["dtype"] == "bfloat16, float16"
    assert Engine.of([rank, rank | {"served": None}]).served["dtype"] == UNKNOWN
    assert set(Engine.of([gone]).served.values()) == {UNKNOWN}


def test_files_of_two_releases_put_together_are_one_where_they_agree(
    tmp_path: Path, fake: Any, connect: Connect, samples: list[Sample]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    fake.served, fake.impl, fake.geometry = SAYS, "hopper", "64x128"
    for path, sample in ((old, samples[0]), (new, samples[1])):
        sweep(connect, path, Plan(POINTS, [sample]))
    as_written_before(old)
    for parts in ((old, new), (new, old)):
        both = [record for path in parts for record in read_results(path)]
        found = collect(both)
        assert (found.others, sum(cell.samples for cell in found.cells)) == (0, 2)
        assert found.plan["server"].get("weights", UNKNOWN) == UNKNOWN
        assert "did not say its weights" in markdown(found)
    as_written_before(old, min_context=600)
    assert collect(read_results(old) + read_results(new)).others == 1
    fake.served = SAYS | {"dtype": "float16"}
    sweep(connect, tmp_path / "other", Plan(POINTS, [samples[2]]))
    found = collect(read_results(new) + read_results(tmp_path / "other"))
    assert (found.others, found.plan["server"]["dtype"]) == (1, "float16")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"weights": "a"}, {"dtype": "float16"}, True),
        ({"weights": "a", "dtype": UNKNOWN}, {"weights": UNKNOWN, "dtype": "float16"}, True),
        ({"weights": "a"}, {"weights": "a", "dtype": "float16"}, True),
        ({"weights": "a", "dtype": "float16"}, {"weights": "b"}, False),
        ({"kernel": "hopper", "dtype": "float16"}, {"kernel": "hopper:64x128"}, True),
        ({"kernel": "hopper", "dtype": "float16"}, {"kernel": "triton:64x128"}, False),
    ],
)
def test_plans_are_of_one_server_where_nothing_that_both_say_differs(
    one: dict[str, str], other: dict[str, str], same: bool
) -> None:
    plans = [
        {"fingerprint": str(i), "server": {"record_version": 3} | server}
        for i, server in enumerate((one, other))
    ]
    assert same_server(*plans) is same
    assert same_server(*reversed(plans)) is same
