"""Shapes, curriculum and schedule; the defaults remade the model of docs/ruler.md in 15 minutes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blasst.evals.errors import InputError


@dataclass(frozen=True)
class Shape:
    """LlamaForCausalLM with tied embeddings; 25.7 M parameters."""

    hidden: int = 512
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    feed_forward: int = 1408
    vocabulary: int = 4096
    theta: float = 1e6
    positions: int = 32768
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Stage:
    """seconds: time box. lengths: tokens of a document -> share of the tokens. micro: tokens a
    micro-batch; accumulate: of these a step. mix: shares of copy, needles, chains and counting.
    gate: the stage ends early when copy and needles reach this share of answer tokens."""

    seconds: float
    lengths: dict[int, float]
    micro: int
    accumulate: int
    mix: tuple[float, float, float, float]
    gate: float | None = None


def continued() -> tuple[Stage, ...]:
    """For a model that finds needles already: what was added to the tasks, then long documents."""
    tasks = (0.02, 0.43, 0.15, 0.4)
    return (
        Stage(70, {4096: 0.5, 16384: 0.5}, 131072, 1, tasks),
        Stage(130, {4096: 0.15, 16384: 0.4, 32768: 0.45}, 131072, 1, tasks),
    )


def curriculum() -> tuple[Stage, ...]:
    """Induction first, at short lengths and small steps; then ever longer documents."""
    tasks = (0.02, 0.48, 0.15, 0.35)
    return (
        Stage(120, {256: 1.0}, 32768, 1, (0.5, 0.4, 0.1, 0.0), gate=0.9),
        Stage(105, {512: 0.3, 1024: 0.7}, 65536, 1, (0.05, 0.55, 0.2, 0.2)),
        Stage(155, {1024: 0.25, 4096: 0.75}, 131072, 1, (0.03, 0.5, 0.17, 0.3)),
        Stage(305, {1024: 0.1, 4096: 0.2, 16384: 0.7}, 131072, 2, tasks),
        Stage(200, {1024: 0.1, 4096: 0.2, 16384: 0.4, 32768: 0.3}, 131072, 2, tasks),
    )


@dataclass(frozen=True)
class Training:
    """background: share of the other tokens that are trained on too, with weight 0.1. decay: the
    last share of the time in which the rate falls. leg_s: seconds before it saves and stops.
    compiled: blocks are compiled, on a GPU. evaluate: documents a task and length."""

    shape: Shape = field(default_factory=Shape)
    stages: tuple[Stage, ...] = field(default_factory=curriculum)
    rate: float = 2e-3
    weight_decay: float = 0.1
    warmup_steps: int = 100
    decay: float = 0.35
    background: float = 0.05
    workers: int = 14
    leg_s: float = 550.0
    seed: int = 1
    compiled: bool = True
    evaluate: int = 64

    @property
    def lengths(self) -> tuple[int, ...]:
        """The longest of each stage."""
        return tuple(sorted({max(stage.lengths) for stage in self.stages}))

    @property
    def total_s(self) -> float:
        return sum(stage.seconds for stage in self.stages)

    def stage_seconds(self, number: int, elapsed_s: float) -> float:
        """Of a stage that begins after elapsed_s: time that a gate saved is shared by the rest."""
        left = sum(stage.seconds for stage in self.stages[number:])
        share = self.stages[number].seconds / left if left else 0.0
        return share * max(0.0, self.total_s - elapsed_s)


def read(path: Path | None, defaults: dict[str, Any] | None = None) -> Training:
    """defaults with the changes of a JSON file. Raises InputError for an unknown name."""
    try:
        body = dict(defaults or {})
        body |= json.loads(path.read_text("utf-8")) if path is not None else {}
        if isinstance(body.get("shape"), dict):
            body["shape"] = Shape(**body["shape"])
        if "stages" in body:
            body["stages"] = tuple(
                stage if isinstance(stage, Stage) else _stage(stage) for stage in body["stages"]
            )
        return Training(**body)
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise InputError(f"{path} is not a training configuration: {e!r}") from e


def shape_of(folder: Path) -> Shape:
    """Of an exported folder's config.json. Raises InputError when there is none that fits."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            feed_forward=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            theta=config["rope_parameters"]["rope_theta"],
            positions=config["max_position_embeddings"],
        )
    except OSError as e:
        raise InputError(f"{path} cannot be read ({e.strerror}); give an exported folder") from e
    except (ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path} is not the config.json of such a model: {e!r}") from e


def _stage(body: dict[str, Any]) -> Stage:
    lengths = {int(length): float(share) for length, share in body.pop("lengths").items()}
    return Stage(lengths=lengths, mix=tuple(body.pop("mix")), **body)
