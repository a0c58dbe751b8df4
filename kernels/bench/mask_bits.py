"""`blasst bench masks`, sections about bits: what repeats, and what a neighbour changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from blasst.kernels.bench import mask_cases as cases
from blasst.kernels.bench.mask_cases import Run
from blasst.kernels.bench.masks import TENSORS, Plan, Row, flex_form, refusal, tensors
from blasst.kernels.masks.segments import Segments

REPEATS = 12
FLOOR_REPEATS = 24
"""FlashAttention-4 may repeat itself many times and then not."""
SETTINGS = {"off": (False, False), "warn_only": (True, True), "strict": (True, False)}
"""Of torch.use_deterministic_algorithms: (mode, warn_only)."""
FORMS = ("mask", "score", "plain")


def determinism(plan: Plan) -> Iterator[Row]:
    """12 repeats of forward + backward on the same inputs, under each setting of torch."""
    for setting in SETTINGS:
        for name in plan.masks:
            case = plan.case(name, plan.small)
            mask = cases.bound(case)
            qkv, grad = cases.inputs(case)
            for route in plan.routes:
                run = plan.run(route, mask, qkv, grad)
                where: Row = {"setting": setting, "mask": name, "route": route}
                yield where | _repeated(run, setting)


def settings(plan: Plan) -> Iterator[Row]:
    """The same of FlexAttention itself: a block mask, a score_mod, and neither."""
    for setting in SETTINGS:
        for backend in ("TRITON", "FLASH") if plan.device == "cuda" else ("TRITON",):
            for form in FORMS:
                yield form_under(plan, setting, backend, form)


def form_under(plan: Plan, setting: str, backend: str, form: str) -> Row:
    """12 repeats of one form; on a CPU, where FlexAttention has no backward, forward only."""
    case = plan.case("shared_prefix", plan.small)
    mask = cases.bound(case)
    qkv, grad = cases.inputs(case)
    attend = flex_form(mask, form, backend)
    forward = cases.forward(attend, qkv)
    run = cases.both(attend, qkv, grad) if plan.device == "cuda" else lambda: [forward()]
    where: Row = {"setting": setting, "backend": backend, "form": form}
    return where | _repeated(run, setting)


def _repeated(run: Run, setting: str) -> Row:
    with _under(setting):
        why = refusal(run)
        return _spread(run, REPEATS) if why is None else {"left_out": why}


@contextmanager
def _under(setting: str) -> Iterator[None]:
    mode, warn_only = SETTINGS[setting]
    try:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _spread(run: Run, repeats: int) -> Row:
    """How many repeats differ from the first, and by how much, for each tensor."""
    first = [t.clone() for t in tensors(run)]
    row: Row = {"repeats": repeats}
    for label, _ in zip(TENSORS, first, strict=False):
        row[label], row[f"{label}_differ"] = 0.0, 0
    for _ in range(repeats - 1):
        for label, a, b in zip(TENSORS, first, tensors(run), strict=False):
            row[label] = max(row[label], float((a.float() - b.float()).abs().max()))
            row[f"{label}_differ"] += not torch.equal(a, b)
    return row


class Setup(NamedTuple):
    """A request beside neighbours: its layout, rows of the batch, and the seed of all else."""

    layout: Segments
    batch: int
    seed: int


def invariance(plan: Plan) -> Iterator[Row]:
    """Whether neighbours change one request's bits: batch size, neighbours' data and layout.

    First the run-to-run noise of each axis; a difference above it is a neighbour's.
    """
    own = plan.small // 4
    for name in plan.masks:
        for route in plan.routes:
            for axis, length, setups in (
                ("batch size", plan.small, _batches(plan)),
                ("neighbours' data", own, _drawn(plan, own)),
                ("neighbours' layout", own, _divided(plan, own)),
            ):
                where: Row = {"mask": name, "route": route, "axis": axis}
                yield where | _axis(plan, name, route, setups, length)


def _axis(plan: Plan, name: str, route: str, setups: Sequence[Setup], own: int) -> Row:
    def run(setup: Setup = setups[0]) -> list[torch.Tensor]:
        return _pinned(plan, name, route, setup, own)

    if (why := refusal(run)) is not None:
        return {"left_out": why}
    floor = _spread(run, FLOOR_REPEATS)
    results = [run(setup) for setup in setups]
    largest = [
        max(float((r[i].float() - results[0][i].float()).abs().max()) for r in results)
        for i in range(len(results[0]))
    ]
    return {
        "cells": len(setups),
        **{f"{label}_floor": floor[label] for label in TENSORS if label in floor},
        **dict(zip(TENSORS, largest, strict=False)),
    }


def _pinned(plan: Plan, name: str, route: str, setup: Setup, own: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of the first `own` tokens of row 0; all else is drawn from the seed."""
    mask = cases.packed(name, setup.layout, plan.device)
    drawn, grad = cases.inputs(plan.case(name, setup.layout.seqlen, setup.batch), seed=setup.seed)
    fixed, fixed_grad = cases.inputs(plan.case(name, own), seed=1)
    for t, own_part in zip((*drawn, grad), (*fixed, fixed_grad), strict=True):
        t[0, :own] = own_part[0]
    run = plan.run(route, mask, drawn, grad)
    return [t[0, :own].clone() for t in tensors(run)]


def _batches(plan: Plan) -> list[Setup]:
    return [Setup(cases.segments(plan.small, n), n, n) for n in (1, 2, 4, 8)]


def _drawn(plan: Plan, own: int) -> list[Setup]:
    layout = cases.documents([own, plan.small - own], plan.small)
    return [Setup(layout, 1, seed) for seed in range(3, 7)]


def _divided(plan: Plan, own: int) -> list[Setup]:
    rest = plan.small - own
    ragged = rest * 377 // 1201
    splits = [[rest], [rest // 3] * 3, [rest // 6] * 6, [ragged, rest - ragged]]
    for split in splits:
        split[-1] += rest - sum(split)
    return [Setup(cases.documents([own, *split], plan.small), 1, 9) for split in splits]
