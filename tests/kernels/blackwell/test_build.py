"""What the compiled Blackwell kernel is made of, read from its cubin and PTX."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blasst.kernels
from blasst.kernels.blackwell import proved
from blasst.kernels.blackwell.config import CROSS, Config
from blasst.kernels.blackwell.problems import DENSE, MASKED, VOTING

pytest.importorskip("cutlass", reason="the kernel is compiled by nvidia-cutlass-dsl")
from blasst.kernels.blackwell.edges import EDGES
from blasst.kernels.blackwell.proof import compiled, differing
from blasst.kernels.cute.exponential import POLYNOMIAL, SMALLEST
from blasst.kernels.verify.ablate import ablate
from blasst.kernels.verify.build import Artifact, build, compile_in_process
from blasst.kernels.verify.subjects import blackwell
from blasst.kernels.verify.witness import differences, find_tool, witness

ROOT = Path(__file__).parents[3]
KERNELS = Path(blasst.kernels.__file__).parent


VOTE_WORDS = ("send_vote", "barrier_cta_red", "config.vote", "config.count", "atomic_add")
OWN_P = replace(VOTING, cross_p=False)
MASK_WORDS = ("visit_listed", "visits_at", "codes_ahead", "hide(", "config.block_mask")


def artifact(config: Config) -> Artifact:
    return build(blackwell.subject(config).recipe)


@pytest.mark.parametrize(
    "config",
    [VOTING, DENSE, OWN_P, MASKED],
    ids=["vote", "dense", "own P", "masks"],
)
def test_nothing_spills_and_every_product_is_there(config: Config) -> None:
    found = witness(artifact(config))
    assert found.problems() == []
    assert found.registers * config.roles.threads <= 65536
    assert found.tensor_columns == 512
    assert found.set_registers == ("+192", "-48", "-80")
    # Prologue, loop and epilogue: two tiles, Q @ K.T and P @ V, 8 steps of 16 each.
    assert found.sass["UTCHMMA"] == 2 * 2 * 8 + 2 * 2 * 8
    paths = 2 * 2  # tiles, masked or not
    plan = config.plan
    quarters = [(tile, q) for tile in (0, 1) for q in range(plan.quarters)]
    emulated = sum(2 * plan.emulates(tile, q) for tile, q in quarters)
    assert emulated > 0
    ex2 = sum(n for op, n in found.ptx.items() if op.startswith("ex2"))
    assert ex2 == found.exp2 == paths * 129 - emulated
    votes = sum(n for op, n in found.ptx.items() if "red" in op.split("."))
    assert votes == (paths if config.vote else 0)


@pytest.mark.parametrize("config", [VOTING, DENSE, OWN_P, MASKED])
def test_the_ptx_is_the_one_that_was_proved(config: Config) -> None:
    """Else the table of docs/measurements/sm100-proof.md is of another kernel."""
    assert list(differing(dict([compiled(config)]))) == []


def test_another_ptx_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(proved.PTX, "vote", "0" * 32)
    (line,) = differing({VOTING: "1" * 64})
    assert line.startswith(f"vote: the PTX is {'1' * 32}, but {'0' * 32} was proved")
    monkeypatch.delitem(proved.PTX, "vote")
    (line,) = differing({VOTING: "1" * 64})
    assert "but nothing was proved" in line


def exponentials_before_the_window(config: Config) -> list[int]:
    """Of each path, in the machine code: exp2 between the vote and the wait for P's window."""
    done = subprocess.run(
        [find_tool("nvdisasm"), "-c", str(artifact(config).cubin)],
        capture_output=True,
        text=True,
        check=True,
    )
    code = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?);", done.stdout, re.M)
    found = []
    for vote in (i for i, line in enumerate(code) if "BAR.RED" in line):
        wait = next(i for i in range(vote, len(code)) if "SYNCS.PHASECHK" in code[i])
        branch = next(i for i in range(wait, len(code)) if re.match(r"@!?P\d BRA", code[i]))
        found.append(sum("MUFU.EX2" in line for line in code[vote:branch]))
    return found


@pytest.mark.parametrize("buffered", [None, (4, 2)])
def test_the_assembler_keeps_to_the_store_schedule(buffered: tuple[int, int] | None) -> None:
    config = VOTING
    if buffered is not None:
        config = replace(VOTING, schedule=replace(CROSS, buffered=buffered))
    quarter = config.tile_n // config.plan.quarters
    expected = [
        quarters * quarter for quarters in config.plan.buffered for _ in ("masked", "whole")
    ]
    for count, wanted in zip(exponentials_before_the_window(config), expected, strict=True):
        # One more may be the factor of the old output; the last ones may follow the test.
        assert wanted - 2 <= count <= wanted + 1


def test_the_polynomial_of_exp2() -> None:
    """Within 2.9e-6 of 2**f, 1 at 0: a row's largest exponential is exact."""
    f = torch.arange(0, 1, 1e-4, dtype=torch.float64)
    value = sum(c * f**k for k, c in enumerate(POLYNOMIAL))
    assert value[0] == 1.0
    assert float((value / torch.exp2(f) - 1).abs().max()) < 2.9e-6
    assert SMALLEST + 127 == 0  # the bits of 1.0 less 127 exponents are those of 0


def test_without_blasst_in_the_source_the_build_is_the_same(tmp_path: Path) -> None:
    """All that a vote or a block mask needs is cut out of a copy of the source, functions too."""
    folders = {f"blasst.kernels.{name}": KERNELS / name for name in ("blackwell", "cute")}
    options = {"vote": False, "count": False, "trace": False, "block_mask": False}
    entries = ("compile_prefill", "compile_kernel", "prefill", "run", "main")
    copies = ablate(folders, tmp_path / "source", options, entries)
    text = "".join(p.read_text() for c in copies.values() for p in c.glob("*.py"))
    for word in (*VOTE_WORDS, *MASK_WORDS):
        assert word in "".join(p.read_text() for f in folders.values() for p in f.glob("*.py"))
        assert word not in text, word
    recipe = blackwell.subject(DENSE, lines=False).recipe
    overlay = tuple((package, str(folder)) for package, folder in copies.items())
    ours = compile_in_process(replace(recipe, overlay=overlay), tmp_path)
    assert differences(ours, build(recipe)) == []


def test_the_page_shows_every_barrier() -> None:
    page = (ROOT / "docs/sm100.md").read_text()
    for edge in EDGES:
        row = f"| `{edge.name}` | {edge.producer} | {edge.consumer} | {edge.arrivals} |"
        assert f"{row} {edge.slots} |" in page
