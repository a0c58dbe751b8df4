"""What `blasst verify` runs for each kernel by default, and for the shapes that it is given."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blasst.kernels.verify.build import INSTALL
from blasst.kernels.verify.subject import Case, Subject, Workbench
from blasst.kernels.verify.subjects.attention import Shape
from blasst.kernels.verify.subjects.masks import MASKS

EDGES = (
    *((256, 640), (70, 70), (0, 5), (100, 64), (1, 1), (129, 300)),
    *((100, 300), (300, 200)),  # a tile without rows for several visits; a last visit with a mask
)
"""(queries, keys) of requests with whole tiles, ragged ends, one row, and no row at all."""
HEADS = ((130, 400), (40, 300))
LONG = (256, 2048)
UNEQUAL = (1000.0, 100.0, 3000.0, 300.0)  # MAGs of requests, again and again
SEEDS = 3


@dataclass
class Plan:
    """cases: with the number of schedules of each."""

    subject: Subject
    cases: list[tuple[Case, int]]
    _bench: list[Workbench] = field(default_factory=list)

    def bench(self) -> Workbench:
        """Built on first use."""
        if not self._bench:
            self._bench.append(Workbench(self.subject))
        return self._bench[0]


def missing(kernel: str) -> str | None:
    """Why a kernel cannot be verified here; None: it can."""
    if kernel == "flashinfer":
        from blasst.kernels.verify.subjects import flashinfer

        return flashinfer.missing()
    if kernel == "fa4":
        from blasst.kernels.verify.subjects import fa4

        return fa4.missing()
    for name, package in (("cutlass", "nvidia-cutlass-dsl"), ("tvm_ffi", "apache-tvm-ffi")):
        if importlib.util.find_spec(name) is None:
            return f"{package} is not installed; {INSTALL}"
    return None


def make(
    kernel: str,
    *,
    shapes: Sequence[tuple[int, ...]] | None,
    mag: float | None,
    skip_rate: float | None,
    page_size: int,
    dense: bool,
    mask: str = "",
    own_p: bool = False,
) -> Plan:
    """shapes: (queries, keys, q heads, kv heads) each; mask: of `subjects.masks.MASKS`, "" = none.

    Raises ValueError for what does not fit.
    """
    if kernel in ("fa4", "flashinfer"):
        if mag is not None or skip_rate is not None or page_size or dense or mask or own_p:
            raise ValueError(
                "--mag, --skip-rate, --page-size, --dense, --own-p and --mask are of our own "
                "kernels"
            )
        return _foreign(kernel, shapes)
    if dense and mag is not None:
        raise ValueError("--mag is of builds with a vote: leave out --dense or --mag")
    if own_p and kernel != "sm100":
        raise ValueError(f"--own-p is of sm100: {kernel} does not choose where P lies")
    if skip_rate is not None and not shapes:
        raise ValueError("--skip-rate needs --shape: its inputs are one request")
    if mask and mask not in MASKS:
        raise ValueError(f"--mask {mask!r} is not one of {', '.join(MASKS)}")
    if shapes:
        wanted = [
            Shape(((q, k),), heads, kv_heads, mag=mag, skip_rate=skip_rate, mask=mask)
            for q, k, heads, kv_heads in shapes
        ]
    else:
        wanted = defaults(mag, mask, dense)
    return _ours(kernel, wanted, page_size, (dense, own_p))


def defaults(mag: float | None, mask: str = "", dense: bool = False) -> list[Shape]:
    """Seeds of which blocks are skipped, and others if a request had the threshold of another."""
    unequal = mag if mag is not None or dense else UNEQUAL
    return [
        Shape(EDGES, mag=unequal, mask=mask, seed=6),
        Shape(HEADS, num_heads=4, num_kv_heads=2, mag=unequal, mask=mask, seed=2),
        Shape((LONG,), num_heads=1, mag=mag if mag is not None or dense else 2500.0, mask=mask,
            seed=1),
    ]  # fmt: skip


def _ours(kernel: str, wanted: list[Shape], page_size: int, without: tuple[bool, bool]) -> Plan:
    """without: votes; cross-stage P."""
    vote = not without[0]
    choices: dict[str, Any] = {
        "dtype": "bfloat16", "head_dim": 128, "causal": True, "page_size": page_size,
        "vote": vote, "count": vote, "block_mask": bool(wanted[0].mask),
    }  # fmt: skip
    if kernel == "sm90":
        from blasst.kernels.hopper.launch import config_for
        from blasst.kernels.verify.subjects import hopper

        config = config_for(**choices)
        cases = [(hopper.case(config, shape), SEEDS) for shape in wanted]
        return Plan(hopper.subject(config), cases)
    from blasst.kernels.blackwell.launch import config_for as blackwell_config
    from blasst.kernels.verify.subjects import blackwell

    sm100 = replace(blackwell_config(**choices), cross_p=not without[1])
    cases = [(blackwell.case(sm100, shape), SEEDS) for shape in wanted]
    return Plan(blackwell.subject(sm100), cases)


def _foreign(kernel: str, shapes: Sequence[tuple[int, ...]] | None) -> Plan:
    lengths = [shape[:2] for shape in shapes] if shapes else [(256, 512), (300, 700)]
    if kernel == "fa4":
        from blasst.kernels.verify.subjects import fa4

        cases = [(fa4.case(queries=q, keys=k, heads=2), SEEDS) for q, k in lengths]
        return Plan(fa4.subject(), cases)
    from blasst.kernels.verify.subjects import flashinfer

    return Plan(
        flashinfer.subject(), [(flashinfer.case(queries=q, keys=k), SEEDS) for q, k in lengths]
    )
