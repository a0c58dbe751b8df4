"""Text to token ids: the model's turn format, one start of sequence, the answer prefix last.

Specials are matched in the format only: a user text that holds one is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blasst.evals.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


@dataclass(frozen=True)
class PromptFormat:
    """before + user text + after + answer prefix. The prefix opens the assistant's turn.

    `specials` must be single tokens of the vocabulary. Without a system turn, as RULER sends them.
    """

    name: str
    before: str
    after: str
    specials: tuple[str, ...]


CHATML = PromptFormat(
    "chatml",
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
    ("<|im_start|>", "<|im_end|>"),
)
LLAMA3 = PromptFormat(
    "llama3",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n",
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)
FORMATS = {f.name: f for f in (CHATML, LLAMA3)}


@dataclass(frozen=True)
class EncodedPrompt:
    """ids: the prompt. places: index in `ids` of the token that holds each asked character."""

    ids: tuple[int, ...]
    places: tuple[int, ...]


class PromptEncoder:
    """Prompts for one model folder (tokenizer.json + tokenizer_config.json).

    "Exactly one start" means: the prompt begins with `start` (the format's first token; the
    tokenizer's BOS for a base model), the next token is another, and `start` occurs nowhere that
    the format does not put it. In chatml the start token also opens every turn: two in all.
    """

    def __init__(self, folder: Path, format_name: str = "auto") -> None:
        self.tokenizer, config = _load(folder)
        self.sha256 = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        self.format = self._choose(format_name, config)
        self._specials = _special_texts(self.tokenizer)
        parts = self.format.before + self.format.after
        missing = [s for s in self.format.specials if self.tokenizer.token_to_id(s) is None]
        if missing:
            raise InputError(
                f"the vocabulary of {folder} lacks {', '.join(missing)}, which prompt format "
                f"{self.format.name} needs; choose another format or leave it at auto"
            )
        self.start_id: int | None = None
        self._starts = 0
        if self.format.specials:
            start = self.format.specials[0]
            self.start_id = self.tokenizer.token_to_id(start)
            self._starts = parts.count(start)

    def _choose(self, name: str, config: dict[str, Any]) -> PromptFormat:
        if name in FORMATS:
            return FORMATS[name]
        if name not in ("auto", "plain"):
            known = ", ".join(["auto", *FORMATS, "plain"])
            raise InputError(f"prompt format {name!r} is unknown; choose one of {known}")
        if name == "auto":
            for known_format in FORMATS.values():
                if all(self.tokenizer.token_to_id(s) is not None for s in known_format.specials):
                    return known_format
        bos = config.get("bos_token")
        bos = bos.get("content") if isinstance(bos, dict) else bos
        return PromptFormat("plain", bos or "", "", (bos,) if bos else ())

    def encode(self, user: str, prefix: str, marks: tuple[int, ...] = ()) -> EncodedPrompt:
        """The ids of a prompt; `marks`: character offsets into `user` to find again in the ids."""
        for special in self._specials:
            if special in user or special in prefix:
                raise InputError(f"the text holds the special token {special}; remove it")
        text = self.format.before + user + self.format.after + prefix
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = tuple(encoding.ids)
        self._check_start(ids)
        lead = len(self.format.before)
        places = tuple(_token_at(encoding, lead + mark) for mark in marks)
        return EncodedPrompt(ids, places)

    def count(self, text: str) -> int:
        """Tokens of a piece of text, nothing added."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """The ids of an answer that continues a prompt."""
        ids = tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)
        if not ids:
            raise InputError("an empty answer has no tokens to score")
        return ids

    def decode(self, ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _check_start(self, ids: tuple[int, ...]) -> None:
        if self.start_id is None:
            return
        found = ids.count(self.start_id)
        if ids[0] != self.start_id or ids[1:2] == (self.start_id,) or found != self._starts:
            raise InputError(
                f"the prompt holds the start token {self.start_id} {found} times and begins with "
                f"{list(ids[:2])}; format {self.format.name} has it {self._starts} times, once at "
                "the very start: the tokenizer adds or splits special tokens"
            )


def _token_at(encoding: Encoding, character: int) -> int:
    token: int | None = encoding.char_to_token(character)
    if token is None:
        raise AssertionError(f"no token covers character {character}")
    return token


def _load(folder: Path) -> tuple[Tokenizer, dict[str, Any]]:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder} holds no tokenizer.json; give a Hugging Face model folder")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        config_path = folder / "tokenizer_config.json"
        config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    except Exception as e:  # tokenizers raises plain Exception for a file that it cannot parse
        raise InputError(f"{path} cannot be read: {e}") from e
    return tokenizer, config


def _special_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    added = tokenizer.get_added_tokens_decoder().values()
    return tuple(token.content for token in added if token.special)
