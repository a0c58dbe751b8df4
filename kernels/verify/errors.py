"""What can go wrong while PTX is read or executed."""

from __future__ import annotations

from blasst.kernels.errors import BlasstError


class VerifyError(BlasstError):
    """Base of the errors of this package."""

    def __init__(self, message: str) -> None:
        super().__init__((message,))


class UnknownOpcodeError(VerifyError):
    """The interpreter has no meaning for an opcode or one of its modifiers."""


class ExecutionError(VerifyError):
    """The kernel did something that no schedule makes right: the run ends here."""


class DeadlockError(ExecutionError):
    """No warp can go on and nothing is in flight."""


class ToolError(VerifyError):
    """A compiler, linker or disassembler is missing or failed."""
