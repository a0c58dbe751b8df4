"""How long a refusal takes tells nothing of the token: measured, beside a way that does tell."""

from __future__ import annotations

import statistics
import time

import pytest

from blasst.server.tokens import Tokens

TOKEN = b"0123456789abcdef" * 4
ROUNDS, BATCH = 60, 50
MOST = 0.05
"""Difference of the medians, as a share; the same guess against itself stays below it, too."""


def naive(token):
    """Leaves at the first byte that differs, as nobody should."""
    return len(token) == len(TOKEN) and all(a == b for a, b in zip(token, TOKEN, strict=True))


def spread(compare, guesses):
    """Largest difference between the guesses' median times, as a share of the smallest; batches
    take turns, so that other work of the machine meets all alike."""
    times = [[] for _ in guesses]
    for _ in range(ROUNDS):
        for number, guess in enumerate(guesses):
            began = time.thread_time_ns()
            for _ in range(BATCH):
                compare(guess)
            times[number].append(time.thread_time_ns() - began)
    medians = [statistics.median(t) for t in times]
    return (max(medians) - min(medians)) / min(medians)


@pytest.fixture
def tokens(tmp_path):
    for name, token in (("write", TOKEN), ("read", TOKEN[::-1])):
        (tmp_path / name).write_bytes(token)
        (tmp_path / name).chmod(0o600)
    return Tokens(tmp_path / "write", tmp_path / "read")


def test_a_refusal_takes_as_long_however_much_of_a_guess_is_right(tokens):
    guesses = [TOKEN[:n] + b"x" * (len(TOKEN) - n) for n in (0, 16, 32, 48, 63)]
    assert all(tokens.role(guess) is None for guess in guesses)
    # Three tries: a machine that is taken away for a moment is no leak, a leak is there each time.
    seen = []
    for _ in range(3):
        seen.append(spread(tokens.role, guesses))
        if seen[-1] < MOST:
            break
    print(f"spread of a refusal's time over guesses: {min(seen):.1%}")
    assert min(seen) < MOST, seen
    assert spread(naive, guesses) > 2 * MOST
