"""A byte-level BPE on RULER's words, keys and running text: lossless on any prompt."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING

from blasst.evals import texts
from blasst.evals.errors import InputError
from blasst.evals.official.niah import singular
from blasst.evals.wordlists import word_lists

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIALS = ("<pad>", "<s>", "</s>")
_CHUNK, _TEXT = 20_000, 2_000_000


def read_tokenizer(folder: Path) -> Tokenizer:
    """Of an exported folder. Raises InputError when there is none."""
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no tokenizer.json; give an exported folder")
    return Tokenizer.from_file(str(path))


def build_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """Digits one by one, and the letters of runs of capitals (names of vt) one by one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    rng, lists = random.Random(0), word_lists()
    pairs = [(rng.choice(lists.adjectives), rng.choice(lists.nouns)) for _ in range(20_000)]
    niah = texts.NIAH_TEMPLATE + texts.NIAH_PREFIX
    fixed = [texts.NOISE, niah, singular(niah), texts.VT_TEMPLATE + texts.VT_PREFIX]
    fixed += [texts.FWE_TEMPLATE + texts.FWE_PREFIX, texts.CWE_TEMPLATE + texts.CWE_PREFIX]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(r"[A-Z](?=[A-Z])|(?<=[A-Z])[A-Z]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    lines = [text[i : i + _CHUNK] for i in range(0, min(len(text), _TEXT), _CHUNK)]
    lines += fixed * 200
    lines += [f"One of the special magic numbers for {a}-{n} is: " for a, n in pairs]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    return made
