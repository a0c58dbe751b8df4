"""PTX that is cut off or wrong ends in one error that says where, never in the tool's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.parse import parse
from blasst.kernels.verify.program import Program

BODY = " mov.b64 {%r0, %r1}, %q0;\n add.s32 %r0, %r1, 1;"


@pytest.mark.parametrize("body", ["mov.b64 {%r0}, %q0;", "mov.b64 {%r0, %r1, %r2}, %q0;",
    "add.s32 %r0;", "mov.u32 ;", "add.s32 %r0, %r1, 0x;", "ld.shared.b32 %r0;",
    "mbarrier.init.shared.b64 [%r0];", "@%p99 bra DONE;",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 , [%r0];", "bra $L9;", "mov.b32 %zz, 1;",
    "add.s33 %r0, %r1, 1;", "{ add.s32 %r0, %r1, 1;"])  # fmt: skip
def test_wrong_statements(body: str, kernel: Callable[..., Any]) -> None:
    with pytest.raises(VerifyError):
        Program.from_text(kernel(body, {}).text())


def test_the_line_is_named(kernel: Callable[..., Any]) -> None:
    text = kernel(BODY + "\n mov.b64 {%r0}, %q0;", {}).text()
    line = next(i for i, each in enumerate(text.split("\n"), 1) if "{%r0}" in each)
    with pytest.raises(VerifyError, match=rf"mov\.b64 \{{%r0\}}.*ptx:{line}"):
        Program.from_text(text)


def test_a_text_that_ends_anywhere(kernel: Callable[..., Any]) -> None:
    text = kernel(BODY, {}).text()
    whole = text.rindex("}")
    for end in range(0, whole, 3):
        with pytest.raises(VerifyError):
            parse(text[:end])
