"""Errors of the evaluation tools: each is one line for the user, with the exit code it ends in.

EvalsError (1)
|-- InputError (2)      an argument, file or length that cannot work
`-- ServerError (1)     the server is unreachable, refuses, or does not do what it was told
"""

from __future__ import annotations

MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a JSON value raises that is not of the form it should have."""


class EvalsError(Exception):
    """Base. The message names the value, the rule and the remedy in one line."""

    exit_code = 1


class InputError(EvalsError):
    """What the user gave cannot work."""

    exit_code = 2


class ServerError(EvalsError):
    """The server is unreachable, refuses a request, or contradicts what it was told."""
