"""Compiled kernels on disk: found again, made again when damaged, never in the way."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from blasst.kernels.hopper.config import Config

CONFIG = Config("bfloat16", 128, True, 16, True, True)


class Compiled:
    """As what CuTe compiles: exports an object."""

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_bytes(b"object of " + function_name.encode())


class Loaded:
    def __init__(self, path: str) -> None:
        if b"broken" in Path(path).read_bytes():
            raise RuntimeError("no object")
        self.blasst = f"loaded {Path(path).name}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from blasst.kernels.cute import cache

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        cache.cute.runtime, "load_module", lambda path, enable_tvm_ffi: Loaded(path)
    )
    return cache


def objects(folder: Path) -> list[Path]:
    return sorted((folder / "blasst" / "cute").glob("*.o"))


def test_a_kernel_is_compiled_once_for_all_processes(cache: Any, tmp_path: Path) -> None:
    made: list[Compiled] = []

    def compiled() -> Compiled:
        made.append(Compiled())
        return made[-1]

    assert cache.kept("hopper", CONFIG, compiled) is made[0]
    (path,) = objects(tmp_path)
    assert cache.kept("hopper", CONFIG, compiled) == f"loaded {path.name}"
    assert len(made) == 1
    other = Config("float16", 128, True, 16, True, True)
    assert cache.kept("hopper", other, compiled) is made[1]
    assert len(objects(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["cut", "broken"])
def test_a_damaged_object_is_made_again(
    cache: Any, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Compiled):
        def export_to_c(self, object_file_path: str, function_name: str) -> None:
            Path(object_file_path).write_bytes(b"broken")

    cache.kept("hopper", CONFIG, Broken if damage == "broken" else Compiled)
    (path,) = objects(tmp_path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "blasst.kernels"):
        assert isinstance(cache.kept("hopper", CONFIG, Compiled), Compiled)
    assert "is made again" in caplog.text
    assert cache.kept("hopper", CONFIG, Compiled) == f"loaded {path.name}"


def test_where_nothing_can_be_kept_the_kernel_is_compiled(
    cache: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blasst").mkdir()
    (tmp_path / "blasst" / "cute").write_text("in the way")
    with caplog.at_level(logging.WARNING, "blasst.kernels"):
        assert isinstance(cache.kept("hopper", CONFIG, Compiled), Compiled)
    assert "compiled kernels are not kept" in caplog.text


def test_an_error_of_the_compiler_stays_one(cache: Any, tmp_path: Path) -> None:
    def fails() -> Any:
        raise RuntimeError("ptxas ended with 255")

    with pytest.raises(RuntimeError, match="ptxas ended"):
        cache.kept("hopper", CONFIG, fails)
    assert objects(tmp_path) == []


def test_the_name_depends_on_the_device_code(
    cache: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {cache.digest("hopper", CONFIG), cache.digest("blackwell", CONFIG)}
    (tmp_path / "cute").mkdir()
    source = tmp_path / "cute" / "vote.py"
    monkeypatch.setattr(cache, "_SOURCES", tmp_path)
    for text in ("a", "b"):
        source.write_text(text)
        cache._fingerprint.cache_clear()
        names.add(cache.digest("hopper", CONFIG))
    cache._fingerprint.cache_clear()
    assert len(names) == 4


BUILD = """
import sys, warnings
warnings.simplefilter("ignore")
from blasst.kernels.hopper import compile as built, launch
compiled, made = built.compile_prefill, []
built.compile_prefill = lambda config: made.append(config) or compiled(config)
config = launch.config_for("bfloat16", 64, causal=True, page_size=16, vote=True, count=True,
                           block_mask=False)
found = launch._compiled(config)
try:
    found(1)
except TypeError as e:
    said = str(e)
print(len(made), "Expects 14 parameters" in said or said)
"""


@pytest.mark.slow
def test_a_second_process_loads_what_the_first_has_compiled(tmp_path: Path) -> None:
    environment = {
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "XDG_CACHE_HOME": str(tmp_path),
        "HOME": str(Path.home()),
        "PATH": "/usr/bin:/bin",
    }
    outs = [
        subprocess.run(
            [sys.executable, "-P", "-c", BUILD],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        for _ in range(2)
    ]
    assert outs[0].stdout.startswith("1 "), outs[0].stderr[-2000:]
    assert outs[1].stdout == "0 True\n", outs[1].stdout + outs[1].stderr[-2000:]
