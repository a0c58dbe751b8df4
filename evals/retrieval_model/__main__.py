"""Remake the retrieval model, or show what deliberate damage does to it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from blasst.evals.errors import EvalsError, InputError


def main() -> int:
    """The exit code: 0 done, 3 time was up before training was over (run it again), 1 and 2 as
    `blasst ruler`."""
    parser = argparse.ArgumentParser(prog="python -m blasst.evals.retrieval_model")
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("train", help="train, resuming from a checkpoint in OUT")
    train.add_argument("--text", type=Path, required=True, help="running text, any language")
    train.add_argument("--out", type=Path, required=True, help="folder for checkpoint and model")
    train.add_argument(
        "--init", type=Path, help="exported folder to go on from, with a curriculum of its own"
    )
    train.add_argument(
        "--tokenizer", type=Path, help="folder whose tokenizer to use instead of building one"
    )
    train.add_argument("--config", type=Path, help="JSON with changes to config.py's defaults")
    damage = verbs.add_parser("damage", help="score under skipping rules, random loss, lost needle")
    damage.add_argument("--model", type=Path, required=True, help="exported folder")
    damage.add_argument("--length", type=int, default=1024, help="tokens a document (%(default)s)")
    damage.add_argument("--count", type=int, default=20, help="documents a task (%(default)s)")
    damage.add_argument("--task", default="multikey", help="of documents.EVALUATED")
    args = parser.parse_args()
    try:
        return _train(args) if args.verb == "train" else _damage(args)
    except EvalsError as e:
        print(f"error: {e}", file=sys.stderr)
        return e.exit_code


def _train(args: argparse.Namespace) -> int:
    from blasst.evals.retrieval_model.config import continued, read
    from blasst.evals.retrieval_model.train import Trainer, export

    try:
        text = args.text.read_text("utf-8", "replace")
    except OSError as e:
        raise InputError(f"--text {args.text} cannot be read: {e.strerror}") from e
    defaults = (
        {"stages": continued(), "rate": 1e-3, "decay": 0.6, "warmup_steps": 30}
        if args.init
        else None
    )
    training = read(args.config, defaults)
    trainer = Trainer(training, text, args.out, _say, args.init, args.tokenizer)
    done = trainer.run()
    export(trainer.model, trainer.tokenizer, args.out / "model")
    for length in training.lengths:
        found = trainer.evaluate(length)
        short = {k: [round(x, 4) for x in (s.exact, s.tokens, s.nll)] for k, s in found.items()}
        _say(json.dumps({"length": length, "step": trainer.progress.step} | short))
    return 0 if done else 3


def _damage(args: argparse.Namespace) -> int:
    from blasst.evals.retrieval_model.experiment import experiment

    for row in experiment(args.model, args.task, args.count, args.length):
        print(json.dumps(row))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
