"""What a sample must be, whatever the tokenizer."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from blasst.evals.errors import InputError
from blasst.evals.essays import essay_words, sentences
from blasst.evals.prompts import PromptEncoder
from blasst.evals.samples import Sample, generate, read_samples, write_samples
from blasst.evals.tasks import Haystack, tasks

TASKS = ("niah_single_2", "niah_multivalue", "vt")
ALL = tuple(tasks())


def make(
    task: str, length: int, count: int, encoder: PromptEncoder, haystack: Haystack, seed: int = 42
) -> list[Sample]:
    return list(generate(task, length, count, seed=seed, encoder=encoder, haystack=haystack))


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_depends_on_seed_task_length_and_index_alone(
    task: str, encoder: PromptEncoder, haystack: Haystack
) -> None:
    many = make(task, 1024, 4, encoder, haystack)
    assert make(task, 1024, 2, encoder, haystack) == many[:2]
    assert len({s.prompt for s in many}) == 4
    assert make(task, 1024, 1, encoder, haystack, seed=43)[0].prompt != many[0].prompt
    longer = make(task, 1536, 1, encoder, haystack)[0]
    assert longer.answers != many[0].answers
    assert [s.id for s in many] == [f"balanced/{task}/1024/42/{i}" for i in range(4)]


@pytest.mark.parametrize("length", [1024, 2048, 4000])
@pytest.mark.parametrize("task", TASKS)
def test_the_length_is_filled_and_never_exceeded(
    task: str, length: int, encoder: PromptEncoder, haystack: Haystack
) -> None:
    unit = 60 if task == "vt" else 15
    for sample in make(task, length, 5, encoder, haystack):
        reserve = max(tasks()[task].max_tokens, len(sample.gold))
        assert len(sample.prompt) + reserve <= length
        assert len(sample.prompt) + reserve > length - unit - 40


@pytest.mark.parametrize("task", TASKS)
def test_one_start_token_and_the_prefix_inside_the_assistant_turn(
    task: str, encoder: PromptEncoder, haystack: Haystack
) -> None:
    for sample in make(task, 1024, 3, encoder, haystack):
        text = encoder.decode(sample.prompt)
        assert text.startswith("<|im_start|>user\n")
        assert text.count("<|im_start|>") == 2
        turn = text.rpartition("<|im_start|>assistant\n")[2]
        ends = {"vt": "they are: ", "niah_single_2": "text is", "niah_multivalue": "text are"}
        assert turn.endswith(ends[task])
        assert "<|im_end|>" not in turn


def test_a_single_needle_is_at_its_recorded_depth(
    encoder: PromptEncoder, haystack: Haystack
) -> None:
    for sample in make("niah_single_2", 2048, 8, encoder, haystack):
        (place,) = sample.needles
        found = encoder.decode(sample.prompt[place : place + 60])
        assert re.match(r" ?One of the special magic numbers for \S+ is: \d{7}\.", found)
        assert sample.answers[0] in found
        assert encoder.decode(sample.gold) == " " + sample.answers[0]
        text = encoder.decode(sample.prompt)
        assert text.count(sample.answers[0]) == 1
        assert "What is the special magic number for" in text


def test_depths_vary_over_the_whole_prompt(encoder: PromptEncoder, haystack: Haystack) -> None:
    depths = [s.depths[0] for s in make("niah_single_2", 1024, 40, encoder, haystack)]
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_multivalue_has_four_values_of_one_key_in_document_order(
    encoder: PromptEncoder, haystack: Haystack
) -> None:
    for sample in make("niah_multivalue", 2048, 8, encoder, haystack):
        text = encoder.decode(sample.prompt)
        found = re.findall(r"One of the special magic numbers for (\S+) is: (\d+)\.", text)
        assert [value for _, value in found] == list(sample.answers)
        assert len(set(sample.answers)) == 4
        assert len({key for key, _ in found}) == 1
        a, b, c, d = sample.answers
        assert encoder.decode(sample.gold) == f" {a}, {b}, {c}, and {d}"
        assert list(sample.needles) == sorted(set(sample.needles))
        for place, value in zip(sample.needles, sample.answers, strict=True):
            assert value in encoder.decode(sample.prompt[place : place + 60])


def test_the_chain_of_variables_holds_and_the_example_is_another(
    encoder: PromptEncoder, haystack: Haystack
) -> None:
    for sample in make("vt", 1024, 8, encoder, haystack):
        text = encoder.decode(sample.prompt)
        example, real = text.split("\n\n\n")
        value = re.search(r"variables are assigned the value (\d+), they are: $", real)
        assert value
        held = {"": ""}
        for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", real):
            held[name] = held.get(source, source)
        assert [n for n, v in held.items() if v == value[1]] == list(sample.answers)
        assert len(sample.answers) == 5
        assert encoder.decode(sample.gold) == " ".join(sample.answers)
        solved = re.search(r"they are: ((?:[A-Z]{3} ?){5})$", example)
        assert solved
        assert not set(solved[1].split()) & set(sample.answers)
        for place in sample.needles:
            assert encoder.decode(sample.prompt[place : place + 4]).lstrip().startswith("VAR")


def test_needles_survive_an_essay_that_must_be_repeated(encoder: PromptEncoder) -> None:
    short = Haystack(("Only", "a", "few", "words."))
    sample = make("niah_multivalue", 1024, 1, encoder, short)[0]
    assert all(encoder.decode(sample.prompt).count(v) == 1 for v in sample.answers)
    assert len(sample.prompt) > 850


def test_samples_come_back_from_a_file_as_they_were(
    tmp_path: Path, encoder: PromptEncoder, haystack: Haystack
) -> None:
    made = make("vt", 1024, 3, encoder, haystack)
    path = tmp_path / "s.jsonl"
    assert write_samples(path, iter(made)) == 3
    assert read_samples(path) == made
    path.write_text(path.read_text() + '{"id": "x"}\n')
    with pytest.raises(InputError, match="line 4"):
        read_samples(path)


@pytest.mark.parametrize(("length", "message"), [(511, "outside 512"), (600, "too short for")])
def test_lengths_that_cannot_work_are_refused(
    length: int, message: str, encoder: PromptEncoder, haystack: Haystack
) -> None:
    with pytest.raises(InputError, match=message):
        make("vt", length, 1, encoder, haystack)


def test_unknown_task_names_those_there_are(encoder: PromptEncoder, haystack: Haystack) -> None:
    with pytest.raises(InputError, match=r"unknown task 'cwe9'.*niah_single_2"):
        make("cwe9", 1024, 1, encoder, haystack)


def test_specials_in_the_text_are_refused(encoder: PromptEncoder) -> None:
    with pytest.raises(InputError, match="special token"):
        encoder.encode("ignore this <|im_end|>", " is")


def test_a_tokenizer_that_splits_the_start_token_is_found_out(
    tmp_path: Path, tiny_model: Path
) -> None:
    data = json.loads((tiny_model / "tokenizer.json").read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "<|im_end|>"]
    del data["model"]["vocab"]["<|im_end|>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"lacks <\|im_end\|>"):
        PromptEncoder(tmp_path, "chatml")


def test_plain_format_starts_with_the_bos_of_a_base_model(tiny_model: Path) -> None:
    encoder = PromptEncoder(tiny_model, "plain")
    ids = encoder.encode("Some text", " is").ids
    assert ids[0] == encoder.start_id
    assert ids.count(ids[0]) == 1
    with pytest.raises(InputError, match="unknown"):
        PromptEncoder(tiny_model, "alpaca")


def test_sentences_are_the_words_again_and_end_where_they_should() -> None:
    text = (
        'He met Dr. Smith e.g. in Rome. "Was it so?" She left! It cost 3.50 then. '
        "J. R. wrote it. And so on... but not here. The end"
    )
    found = sentences(text.split())
    assert " ".join(found) == text
    assert found == [
        "He met Dr. Smith e.g. in Rome.",
        '"Was it so?"',
        "She left!",
        "It cost 3.50 then.",
        "J. R. wrote it.",
        "And so on... but not here.",
        "The end",
    ]


def test_essay_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text('{"text": "  "}')
    with pytest.raises(InputError, match="no words"):
        essay_words(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="not an essay file"):
        essay_words(path)
