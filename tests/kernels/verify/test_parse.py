"""PTX text to instructions."""

from __future__ import annotations

import pytest

from blasst.kernels.verify.errors import VerifyError
from blasst.kernels.verify.parse import parse, split_operands

TEXT = """
.version 9.4
.target sm_90a // a comment {
.file 1 "/somewhere/kernel.py"
.extern .shared .align 1024 .b8 smem[];
.visible .entry f(
  .param .align 64 .b8 f_0[128], .param .u32 f_1,
  .param .f32 f_2
)
.reqntid 128, 1, 1
{
  .reg .b32 %r<3>; /* two
  lines */ .reg .pred p;
  .loc 1 42 5
  mov.u32 %r0, %tid.x;
$L1:
  { .reg .b32 %r0;
    $L1: add.s32 %r0, %r1, 1; bra $L1; }
  @!p bra $L1;
  st.shared.v2.b32 [%r1+8], {%r0, %r1};
  ret;
}
"""


def test_structure() -> None:
    module = parse(TEXT)
    assert (module.name, module.target) == ("f", "sm_90a")
    assert [(p.name, p.size) for p in module.parameters] == [("f_0", 128), ("f_1", 4), ("f_2", 4)]
    assert module.shared == {"smem": (1024, 0)}
    assert [str(i) for i in module.instructions] == [
        "mov.u32 %r0, %tid.x",
        "add.s32 %r0, %r1, 1",
        "bra $L1",
        "@!p bra $L1",
        "st.shared.v2.b32 [%r1+8], {%r0, %r1}",
        "ret",
    ]
    assert module.instructions[0].where == "kernel.py:42"
    assert module.instructions[0].ptx_line == 15


def test_labels_and_registers_have_scopes() -> None:
    module = parse(TEXT)
    inner, outer = module.instructions[2], module.instructions[3]
    assert module.label("$L1", inner.scope) == 1
    assert module.label("$L1", outer.scope) == 1
    assert ("%r0", inner.scope) in module.registers
    assert ("%r0", outer.scope) in module.registers
    assert inner.scope != outer.scope


def test_operands_inside_brackets_stay_together() -> None:
    assert split_operands("[%r1], [%q1, {%r2, %r3}], p|q, -1") == [
        "[%r1]", "[%q1, {%r2, %r3}]", "p|q", "-1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".version 9.4", "0 entries"),
        (TEXT + TEXT, "2 entries"),
        (TEXT.replace("  ret;\n}", ""), "ends inside the function"),
        (TEXT.replace("ret;", ".local .b8 x[4]; ret;"), "declaration"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        parse(text)
