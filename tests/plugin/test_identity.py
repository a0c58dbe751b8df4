"""What an engine says that it computes with: the same for copies, another after any training."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blasst.kernels.exchange.layout import SERVED
from blasst.plugin import identity as module
from blasst.plugin.identity import digest, identity

SHAPES = {"embed": 5000, "layer.0": 3000, "layer.1": 3000, "norm": 40}


def save(path: Path, values: dict[str, bytes]) -> None:
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, data in values.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}  # type: ignore[dict-item]
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(values.values()))


def tensors(trained: str = "") -> dict[str, bytes]:
    return {name: bytes([7 + (name == trained)]) * size for name, size in SHAPES.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"num_hidden_layers": 2}')
    save(made / "model.safetensors", tensors())
    return made


def test_a_copy_elsewhere_is_the_same(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "of-another-name"
    shutil.copytree(folder, other)
    assert digest(other) == digest(folder)
    assert len(digest(folder)) == 16


@pytest.mark.parametrize("trained", SHAPES)
def test_each_tensor_counts(trained: str, folder: Path) -> None:
    before = digest(folder)
    save(folder / "model.safetensors", tensors(trained))
    assert digest(folder) != before


def test_config_overrides_names_and_files_count(folder: Path) -> None:
    found = {digest(folder), digest(folder, "{'rope_theta': 1e6}")}
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    found.add(digest(folder))
    (folder / "more.safetensors").unlink()
    (folder / "config.json").write_text("{}")
    found.add(digest(folder))
    renamed = {("k" if name == "norm" else name): data for name, data in tensors().items()}
    save(folder / "model.safetensors", renamed)
    found.add(digest(folder))
    assert len(found) == 5


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_files_without_a_list_of_tensors_are_sampled_all_over(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    data = bytearray(3 << 20)
    file.write_bytes(data)
    before = digest(tmp_path)
    data[1 << 20 : (1 << 20) + 4096] = bytes([1]) * 4096
    file.write_bytes(data)
    assert digest(tmp_path) != before
    assert digest(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 1 << 60) + b"x" * 100,
        struct.pack("<Q", 4) + b"[]  " + b"x" * 100,
        struct.pack("<Q", 11) + b'{"a": null}' + b"x" * 100,
        struct.pack("<Q", 32) + b'{"a": {"data_offsets": [0, 999]}}'[:32] + b"x" * 9,
        struct.pack("<Q", 38) + b'{"a": {"data_offsets": [0, Infinity]}}' + b"x" * 9,
    ],
)
def test_a_damaged_file_still_has_a_digest(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(digest(tmp_path)) == 16


def test_many_tensors_are_sampled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SAMPLES", 2)
    read: list[int] = []
    places = module._places

    def noted(fd: int, size: int, most: int) -> Any:
        found = list(places(fd, size, most))
        read.append(len(found))
        return found

    monkeypatch.setattr(module, "_places", noted)
    digest(folder)
    assert read == [3]  # the header and two of the four tensors


def config(model: str, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            dtype="torch.bfloat16",
            quantization=None,
            seed=5,
            revision=None,
            hf_overrides={},
        ),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
    )


def test_an_engine_says_all_of_it(folder: Path) -> None:
    found = identity(config(str(folder)))
    assert tuple(found) == SERVED
    assert found["weights"] == digest(folder, "{}")
    assert (found["dtype"], found["quantization"]) == ("bfloat16", "none")
    assert (found["max_num_batched_tokens"], found["tensor_parallel_size"]) == ("2048", "2")
    assert identity(config("/nowhere", "dummy"))["weights"] == "dummy-5"


def test_weights_that_are_not_here_are_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "weights" not in identity(config("nobody/not-a-model"))
    assert "weights" not in identity(config(str(tmp_path)))
    assert any("not identified" in message for message in caplog.messages)


@pytest.mark.parametrize("model", ["org/name-GGUF:Q4_K_M", "s3://bucket/model", "a/b/c"])
def test_what_is_no_name_on_the_hub_does_not_end_the_start(model: str) -> None:
    assert "weights" not in identity(config(model))


def test_a_name_on_the_hub_is_the_folder_in_its_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    repo = cache / "models--org--name"
    shutil.copytree(folder, repo / "snapshots" / "abc")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    served = config("org/name")
    served.load_config.download_dir = str(cache)
    assert identity(served)["weights"] == digest(folder, "{}")
    (repo / "snapshots" / "abc" / "config.json").unlink()
    assert identity(served)["weights"] not in ("", digest(folder, "{}"))
