"""Errors of blasst.kernels.

BlasstError
+-- InvalidInputError   (ValueError)   the call breaks the contract of the API; wrong everywhere
+-- UnsupportedError    (RuntimeError) a correct call that this implementation or machine cannot run
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


class BlasstError(Exception):
    """Every error of this package; `reasons` lists all that is wrong, not only the first."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


class InvalidInputError(BlasstError, ValueError):
    """Wrong shapes, dtypes, devices or values."""


class UnsupportedError(BlasstError, RuntimeError):
    """No implementation, or not the one asked for, can run this problem here."""


def refuse(message: str, code: int) -> int:
    """Print the one line of a command that ends with an error; its exit code, as given."""
    print(f"blasst: error: {message}", file=sys.stderr)
    return code
