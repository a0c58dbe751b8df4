"""The witness: what a build holds, that builds repeat, and that an unused option is free."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import blasst.kernels
from blasst.kernels.hopper.config import Config
from blasst.kernels.verify.ablate import ablate
from blasst.kernels.verify.build import Artifact, build, compile_in_process
from blasst.kernels.verify.capture import link
from blasst.kernels.verify.errors import ToolError
from blasst.kernels.verify.subjects import hopper
from blasst.kernels.verify.witness import differences, find_tool, fingerprint, witness

DENSE = Config("bfloat16", 128, True, 0, False, False)
ROOT = Path(blasst.kernels.__file__).parent
ENTRIES = ("compile_prefill", "compile_kernel", "prefill", "run", "config_for", "reasons")


@pytest.fixture(scope="module")
def dense() -> Artifact:
    pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
    return build(hopper.subject(DENSE, lines=False).recipe)


@pytest.fixture
def tools() -> None:
    for name in ("cuobjdump", "nvdisasm"):
        try:
            find_tool(name)
        except ToolError as e:
            pytest.skip(str(e))


def test_witness_reads_the_cubin(dense: Artifact, tools: None) -> None:
    found = witness(dense)
    assert found.registers == 128
    assert found.problems() == []
    assert found.set_registers == ("+160", "-32")
    assert found.sass["HGMMA"] == sum(n for op, n in found.ptx.items() if "wgmma.mma" in op)
    assert found.products == found.sass["HGMMA"] > 0
    assert 100 < found.exp2 < found.sass["MUFU"]
    assert found.fingerprint == fingerprint(dense)
    assert "spills: 0" in " ".join(found.describe())


def test_builds_repeat_byte_for_byte(dense: Artifact, tmp_path: Path) -> None:
    """Another process, another hash seed."""
    recipe = hopper.subject(DENSE, lines=False).recipe
    again = compile_in_process(recipe, tmp_path, hash_seed="77")
    assert again.ptx == dense.ptx
    assert again.cubin.read_bytes() == dense.cubin.read_bytes()


def test_without_blasst_in_the_source_the_build_is_the_same(
    dense: Artifact, tmp_path: Path
) -> None:
    """All that the options guard is cut out of a copy of the source, functions included."""
    folders = {f"blasst.kernels.{name}": ROOT / name for name in ("hopper", "cute")}
    options = {"vote": False, "count": False, "trace": False}
    copies = ablate(folders, tmp_path / "source", options, ENTRIES)
    text = "".join(p.read_text() for c in copies.values() for p in c.glob("*.py"))
    for word in ("vetoes", "barrier_cta_red", "config.vote", "config.count", "atomic_add"):
        assert word in "".join(p.read_text() for f in folders.values() for p in f.glob("*.py"))
        assert word not in text, word
    recipe = replace(
        hopper.subject(DENSE, lines=False).recipe,
        overlay=tuple((package, str(folder)) for package, folder in copies.items()),
    )
    assert differences(compile_in_process(recipe, tmp_path), dense) == []


def test_lines_change_nothing_but_line_directives(dense: Artifact) -> None:
    """What is executed with lines is what ships without them."""
    lined = build(hopper.subject(DENSE, lines=True).recipe)
    assert [str(i) for i in lined.module.instructions] == [
        str(i) for i in dense.module.instructions
    ]
    assert fingerprint(lined) == fingerprint(dense)


COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
printf part > "$2"; [ -e {library} ] && echo early >> {log}; sleep 0.2; printf whole > "$2"
"""


def test_a_library_that_others_load_appears_whole(
    dense: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is slow to write; its output is not where others look before it has ended."""
    library, log = tmp_path / "kernel.so", tmp_path / "log"
    (tmp_path / "kernel.o").touch()
    compiler = tmp_path / "cc"
    compiler.write_text(COMPILER.format(library=library, log=log))
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    launcher = link(tmp_path / "kernel.o", "kernel", dense.module)
    assert launcher.library == library
    assert library.read_text() == "whole"
    assert not log.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cc", "kernel.o", "kernel.so"]


def test_differences_are_found(dense: Artifact) -> None:
    with tempfile.TemporaryDirectory() as folder:
        other = Artifact(Path(folder))
        name = dense.module.name
        (other.folder / "kernel.ptx").write_text(
            dense.ptx.replace(name, "f" * 40).replace("add.s32", "sub.s32", 1)
        )
        raw = bytearray(dense.cubin.read_bytes())
        raw[len(raw) // 2] ^= 1
        (other.folder / "kernel.cubin").write_bytes(raw)
        found = differences(dense, other)
        assert fingerprint(dense) != fingerprint(other)
    assert any(line.startswith("PTX differs from line") for line in found)
    assert any("cubin section" in line for line in found)
