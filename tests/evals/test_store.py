"""The file of results: one run at a time, nothing of others overwritten, a full disk survived."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blasst.evals.errors import InputError
from blasst.evals.samples import Sample, write_samples
from blasst.evals.store import ResultStore, read_results


def test_two_runs_on_one_file_are_refused(tmp_path: Path) -> None:
    with ResultStore(tmp_path / "r.jsonl"), pytest.raises(InputError, match="another run"):
        ResultStore(tmp_path / "r.jsonl")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "pipe", "no ordinary file")):
        with pytest.raises(InputError, match=words):
            ResultStore(path)


def test_a_run_without_a_record_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with ResultStore(path):
        assert path.exists()
    assert not path.exists()
    with ResultStore(path):
        path.unlink()
        path.write_text("")  # of somebody else
    with ResultStore(path):
        pass
    assert path.exists()
    with ResultStore(path) as store:
        store.append({"kind": "plan"})
    assert path.exists()

    def samples() -> Iterator[Sample]:
        raise InputError("too short")
        yield

    with pytest.raises(InputError, match="too short"):
        write_samples(tmp_path / "s", samples())
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(InputError, match="line 1, is not a result"):
        ResultStore(path)
    assert path.read_text() == "dear diary\n"


def test_a_full_disk_is_one_clear_error_and_the_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ResultStore(path) as store:
        store.append({"kind": "sample", "key": "a"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, hard))
        try:
            with pytest.raises(InputError, match="the same command resumes"):
                store.append({"kind": "sample", "key": "b"})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "b" not in store
    with ResultStore(path) as store:
        assert [r["key"] for r in store.records] == ["a"]
        store.append({"kind": "sample", "key": "b"})
    assert [r["key"] for r in read_results(path)] == ["a", "b"]


def test_half_a_line_is_taken_back_before_another_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several endpoints append in turn: one finds the disk full, the next finds room again."""
    with ResultStore(tmp_path / "r") as store:
        store.append({"kind": "sample", "key": "a"})
        real = store._file

        class Full:
            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

            def write(self, data: memoryview) -> int:
                if len(data) < 10:
                    raise OSError(28, "No space left on device")
                return real.write(data[: len(data) // 2])

        monkeypatch.setattr(store, "_file", Full())
        with pytest.raises(InputError, match="No space left"):
            store.append({"kind": "sample", "key": "b"})
        monkeypatch.setattr(store, "_file", real)
        store.append({"kind": "sample", "key": "c"})
    assert [r["key"] for r in read_results(tmp_path / "r")] == ["a", "c"]
