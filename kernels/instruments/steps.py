"""The steps whose ends a traced kernel marks, and their names in pictures."""

from __future__ import annotations

from enum import IntEnum


class Step(IntEnum):
    """What has just ended when it is marked; a step that a visit leaves out is not marked.

    START ends nothing. WAIT_*: for keys, values, scores (Q @ K.T), P @ V, or an empty stage.
    """

    START = 0
    WAIT_KEYS = 1
    ISSUE = 2
    WAIT_SCORES = 3
    MAX = 4
    VOTE = 5
    EXP2 = 6
    WAIT_PV = 7
    STORE_P = 8
    WAIT_VALUES = 9
    WAIT_EMPTY = 10
    LOAD = 11
    OUTPUT = 12


STEPS = 16  # places of a visit in the buffer

NAMES = {
    Step.WAIT_KEYS: "wait keys",
    Step.ISSUE: "issue products",
    Step.WAIT_SCORES: "wait scores",
    Step.MAX: "max",
    Step.VOTE: "vote",
    Step.EXP2: "exp2",
    Step.WAIT_PV: "wait P.V",
    Step.STORE_P: "store P",
    Step.WAIT_VALUES: "wait values",
    Step.WAIT_EMPTY: "wait empty",
    Step.LOAD: "load",
    Step.OUTPUT: "output",
}
