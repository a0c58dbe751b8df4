"""The example trainer: packing gives the loss and the gradients of separate sequences."""

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from blasst.kernels.masks.mods import Role

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "train_packed.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("train_packed", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)

    sys.modules["train_packed"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["train_packed"]


def test_packing_equals_separate_sequences(example: Any) -> None:
    sizes = ["--prefix", "90", "--suffix", "12", "--suffixes", "4", "--turns", "3", "--rounds", "1"]
    result = example.main(["same", *sizes])
    separate, shared = result["prefix"]
    assert shared["loss"] == pytest.approx(separate["loss"], rel=1e-12)
    assert shared["gradient_difference"] < 1e-13
    assert shared["targets"] == separate["targets"] == sum(range(12, 16))
    assert shared["tokens"] < separate["tokens"] / 2
    passes, exact, one_copy = result["chat"]
    assert exact["loss"] == pytest.approx(passes["loss"], rel=1e-12)
    assert exact["gradient_difference"] < 1e-13
    assert exact["targets"] == one_copy["targets"] == passes["targets"]
    assert one_copy["tokens"] < exact["tokens"] < passes["tokens"]
    # One copy of each token is another model of history: near, and not the same.
    assert 1e-4 < one_copy["gradient_difference"] < 0.5


def test_training_learns_and_holds_its_masks(example: Any) -> None:
    result = example.main(["train", "--steps", "24"])
    assert result["last_loss"] < 0.5 * result["first_loss"]
    assert result["mask_misses"] == 8
    assert result["mask_hits"] == 16


def test_history_is_judged_as_inference_runs(
    example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--steps", "2", "--seeds", "1", "--turns", "2", "--chats", "2"]
    rows = example.main(["history", *arguments])["history"]
    said = capsys.readouterr().err.splitlines()
    assert said == [str(row) for row in rows]
    assert [row["way"] for row in rows] == ["exact", "mask", "mask, positions of inference"]
    assert rows[0]["tokens"] > rows[1]["tokens"] == rows[2]["tokens"] > 0
    assert all(0 < row["loss_at_inference"] < 10 for row in rows)


def test_positions_of_inference_are_those_of_exact_history(example: Any) -> None:
    """Of user, thinking and first answer, in every turn; only the answers' copies have others."""
    chat = example.sums_chat(random.Random(3), 3)
    one, exact = (
        example.pack([example.conversation(chat, example.ascii_tokens, strip=strip)])
        for strip in ("mask", "exact")
    )
    moved = example.at_inference(one).segments
    kept = []
    for turn in range(3):
        mine = exact.segments.turn_ids[0] == turn
        trunk = exact.segments.segment_ids[0] == 0
        thinks = bool((exact.segments.segment_ids[0][mine] > 0).any())
        copy = trunk & (exact.segments.role_ids[0] == Role.ANSWER) if thinks else trunk & ~trunk
        kept += exact.segments.position_ids[0][mine & ~copy].tolist()
    assert moved.position_ids[0].tolist() == kept
