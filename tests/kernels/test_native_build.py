"""The compiled kernel: made once, for this machine, by whatever compiler is there, or refused."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blasst.kernels import cpu
from blasst.kernels.api import prefill_attention
from blasst.kernels.errors import UnsupportedError
from blasst.kernels.native import binding, build
from blasst.kernels.reference import reference_attention
from blasst.kernels.testing import cumulative, error_budget
from blasst.kernels.types import AttentionSpec, Geometry, RaggedKV

X86 = platform.machine() in ("x86_64", "AMD64")

SCRIPT = """
import json, logging
logging.basicConfig(level=logging.INFO)
from blasst.kernels.native import build
print(json.dumps({"reasons": build.reasons(), "files": len(list(build.cache_folder().glob("*.so")))
                  if not build.reasons() else 0}))
"""


@pytest.fixture
def fresh() -> Iterator[None]:
    """What is remembered of this process's library is forgotten, before and after."""

    def forget() -> None:
        build.library.cache_clear()
        build.reasons.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def compiler() -> build.Compiler:
    try:
        return build.find_compiler()
    except build.BuildError as e:
        pytest.skip(str(e))


@pytest.fixture
def counted(compiler: build.Compiler, tmp_path: Path) -> Path:
    """A compiler that writes a line to `count` for each thing that it compiles."""
    script = tmp_path / "counted-cc"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo x >> {tmp_path}/count\n'
        f'exec {" ".join(compiler.command)} "$@"\n'
    )
    script.chmod(0o755)
    return script


def start(tmp_path: Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), **env},
    )


def finish(process: subprocess.Popen[str]) -> tuple[dict[str, object], str]:
    out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    return json.loads(out), log


def test_processes_that_start_together_compile_once(counted: Path, tmp_path: Path) -> None:
    for _ in range(2):
        started = [start(tmp_path, CC=str(counted)) for _ in range(4)]
        for process in started:
            result, _ = finish(process)
            assert result == {"reasons": [], "files": 1}
    assert (tmp_path / "count").read_text() == "x\n"
    folder = tmp_path / "cache" / "blasst" / "native"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert sorted(p.suffix for p in folder.iterdir()) == ["", ".so"]


def test_a_damaged_library_is_made_again(counted: Path, tmp_path: Path) -> None:
    finish(start(tmp_path, CC=str(counted)))
    (made,) = (tmp_path / "cache" / "blasst" / "native").glob("*.so")
    made.write_bytes(made.read_bytes()[:1000])
    result, log = finish(start(tmp_path, CC=str(counted)))
    assert result["reasons"] == []
    assert "is made again" in log
    assert (tmp_path / "count").read_text() == "x\nx\n"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"CC": "/no/such/cc"}, ["no C compiler runs (CC=/no/such/cc: not found)", "apt install"]),
        ({"CC": "false"}, ["false --version exits with 1", "set CC"]),
        ({"CC": 'gcc "-O2'}, ['CC=gcc "-O2 cannot be read as a command', "set CC"]),
        ({"PATH": "", "CC": ""}, ["no C compiler runs (cc, gcc, clang", "not found"]),
    ],
)
def test_what_is_missing_is_named(
    env: dict[str, str], words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (reason,) = build.reasons()
    assert all(word in reason for word in words), reason
    assert "\n" not in reason
    with pytest.raises(UnsupportedError) as refused:
        build.library()
    assert refused.value.reasons == (reason,)


@pytest.mark.usefixtures("fresh", "compiler")
def test_a_cache_folder_that_cannot_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    (reason,) = build.reasons()
    assert reason.startswith("no cache folder for the compiled kernel: ")
    assert "set XDG_CACHE_HOME" in reason


@pytest.mark.usefixtures("fresh")
def test_the_compilers_own_words_are_told(
    compiler: build.Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fno-such-flag"))
    (reason,) = build.reasons()
    assert f"({compiler.version}) cannot compile the kernel: " in reason
    assert "-fno-such-flag" in reason or "no-such-flag" in reason
    assert [p.name for p in (tmp_path / "blasst" / "native").iterdir()] == ["lock"]


@pytest.mark.usefixtures("fresh")
def test_words_that_are_not_text_are_told_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "odd-cc"
    script.write_text(
        "#!/bin/sh\n[ \"$1\" = --version ] && exec printf 'odd \\377 1.0'\n"
        "printf 'sorry \\377' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(script))
    (reason,) = build.reasons()
    assert "(odd \ufffd 1.0) cannot compile the kernel: sorry \ufffd; set CC" in reason


@pytest.mark.usefixtures("fresh")
def test_a_library_without_the_functions_is_named(
    compiler: build.Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-fvisibility=hidden"))
    (reason,) = build.reasons()
    assert "lacks a function: " in reason
    assert "blasst_open" in reason


@pytest.mark.usefixtures("fresh")
def test_a_library_that_is_there_needs_no_lock(
    counted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(counted))
    build.library()
    lock = tmp_path / "blasst" / "native" / "lock"
    lock.unlink()
    lock.mkdir()  # as in a folder that cannot be written: it cannot be opened
    build.library.cache_clear()
    build.library()
    assert (tmp_path / "count").read_text() == "x\n"


def test_a_relative_cache_folder_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/cache")
    assert build.cache_folder() == tmp_path / "home" / ".cache" / "blasst" / "native"
    assert [p.name for p in tmp_path.iterdir()] == ["home"]


@pytest.mark.usefixtures("fresh", "compiler")
@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_can_write_is_refused(
    mode: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "blasst" / "native"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    (reason,) = build.reasons()
    assert f"with mode {mode:o}, but only user" in reason
    assert "chmod 700" in reason


def variants() -> list[str]:
    return ["-march=native", "-march=x86-64-v3", "-march=x86-64"] if X86 else [build.native_flag()]


@pytest.fixture(scope="module", params=variants())
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library for vectors of some width."""
    try:
        compiler = build.find_compiler()
    except build.BuildError as e:
        pytest.skip(str(e))
    path = tmp_path_factory.mktemp("native") / "other.so"
    build.compile_library(compiler, (*build.FLAGS, request.param), path)
    library = build.load(path)
    bits = {"-march=x86-64-v3": 256, "-march=x86-64": 128}.get(request.param)
    assert bits in (None, library.blasst_vector_bits())
    return library


@pytest.fixture
def variant(built: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process computes with it."""
    monkeypatch.setattr(cpu, "library", lambda: built)


@pytest.mark.usefixtures("variant")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_vector_width_agrees_with_the_oracle(head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    q = 4 * torch.randn(150, 4, head_dim, generator=generator)
    k, v = (torch.randn(337, 2, head_dim, generator=generator) for _ in range(2))
    kv = RaggedKV(k.to(dtype), v.to(dtype), cumulative([337]))
    q, cu, skip_lambda = q.to(dtype), cumulative([150]), torch.tensor([0.7])
    spec = AttentionSpec(geometry=Geometry(16, 32))
    counters = torch.zeros(2, 2, dtype=torch.int64)
    expected = reference_attention(q, kv, cu, spec=spec, skip_lambda=skip_lambda)
    out, lse = prefill_attention(
        q, kv, cu, spec=spec, skip_lambda=skip_lambda, impl="cpu", counters=counters
    )
    assert float((out.double() - expected.out).abs().max()) <= error_budget(q, kv, cu, causal=True)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=2e-5)
    assert torch.equal(counters, expected.counts(2))
    assert counters[:, 1].sum() > 0


@pytest.mark.usefixtures("variant")
def test_exp2_is_good_to_its_stated_error() -> None:
    x = torch.linspace(-126, 0, 1 << 20)
    y = x.clone()
    cpu.library().blasst_exp2(y.data_ptr(), y.numel())
    exact = x.double().exp2()
    assert float(((y.double() - exact) / exact).abs().max()) < 2e-7
    edge = torch.tensor([0.0, -0.0, -127.0, -1e4, -torch.inf, -3e38, -1.0, -126.0] * 2)
    cpu.library().blasst_exp2(edge.data_ptr(), 16)
    assert edge.tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.5, 2.0**-126] * 2
    tiny = torch.linspace(-127, -126, 1 << 10)
    cpu.library().blasst_exp2(tiny.data_ptr(), tiny.numel())
    assert float(tiny.min()) >= 0.0
    assert float(tiny.max()) <= 2.0**-126


def test_work_that_was_never_opened_is_dropped_quietly() -> None:
    """torch.compile drops objects that it made in part; an error there would only be printed."""
    binding.Work.__new__(binding.Work).__del__()
