"""Training sequences: the tokens of the whole template, and a mask of what the assistant wrote."""

from __future__ import annotations

import json

import pytest
import torch

from megarl.data.sft import SftRow, SftSource, sft_batch
from megarl.data.sources import open_source
from megarl.data.tokenizer import render_conversation, render_prompt
from megarl.errors import DataError
from tests.unit.data.chars import MARKED, STABLE, UNSTABLE, char_tokenizer

CHAT = [
    {"role": "user", "content": "1+1="},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+9="},
    {"role": "assistant", "content": "11"},
]


def _learned(tokenizer, ids, mask):
    return tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on])


@pytest.mark.parametrize("template", [STABLE, MARKED])
def test_ids_are_the_templates_and_the_mask_is_the_assistants(template):
    tokenizer = char_tokenizer(template)
    ids, mask = render_conversation(tokenizer, CHAT, system_prompt="s")
    whole = tokenizer.apply_chat_template([{"role": "system", "content": "s"}, *CHAT], tokenize=False)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert _learned(tokenizer, ids, mask) == "2<eos>11<eos>"  # the line break after the end token is not generated


@pytest.mark.parametrize("template", [STABLE, MARKED])
def test_a_single_turn_starts_with_the_prompt_of_reinforcement_learning(template):
    tokenizer = char_tokenizer(template)
    ids, mask = render_conversation(tokenizer, CHAT[:2], system_prompt=None)
    prompt = render_prompt(tokenizer, "1+1=", system_prompt=None, apply_chat_template=True)[1]
    assert ids[: len(prompt)] == prompt and mask.index(True) == len(prompt)


def test_a_template_that_rewrites_earlier_turns_is_refused():
    with pytest.raises(DataError, match="renders message 1 differently once later messages follow"):
        render_conversation(
            char_tokenizer(UNSTABLE),
            [*CHAT[:1], {"role": "assistant", "content": "long"}, *CHAT[2:]],
            system_prompt=None,
        )
    ids, mask = render_conversation(char_tokenizer(UNSTABLE), CHAT[:2], system_prompt=None)
    assert _learned(char_tokenizer(UNSTABLE), ids, mask) == "2<eos>"


def test_there_must_be_something_to_learn():
    with pytest.raises(DataError, match="no assistant message"):
        render_conversation(char_tokenizer(), CHAT[:1], system_prompt=None)


def _source(tmp_path, rows, **options):
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source({"kind": "file", "path": str(path), **options})


def test_prompt_and_answer_columns_make_a_conversation(tmp_path):
    source = _source(tmp_path, [{"q": "1+1=", "a": 2}], prompt_column="q", answer_column="a")
    (row,) = SftSource([source], char_tokenizer(), max_tokens=50).next(1)
    assert char_tokenizer().decode(row.token_ids) == "<|user|>1+1=<|assistant|>2<eos>\n"
    assert _learned(char_tokenizer(), row.token_ids, row.mask) == "2<eos>"
    (row,) = SftSource([source], char_tokenizer(None), max_tokens=50, apply_chat_template=False).next(1)
    assert char_tokenizer().decode(row.token_ids) == "1+1=2<eos>"
    assert _learned(char_tokenizer(), row.token_ids, row.mask) == "2<eos>"


def test_a_gym_task_is_trained_on_its_own_answers():
    source = open_source({"kind": "reasoning_gym", "task": "chain_sum", "size": 3})
    (row,) = SftSource([source], char_tokenizer(), max_tokens=300, shuffle=False).next(1)
    assert _learned(char_tokenizer(), row.token_ids, row.mask) == source.row(0).answer + "<eos>"


def test_without_a_template_an_answer_is_needed(tmp_path):
    with pytest.raises(DataError, match=r"needs an answer .*chat.jsonl:1.*answer_column"):
        SftSource([_source(tmp_path, [{"prompt": "a"}])], char_tokenizer(), max_tokens=9, apply_chat_template=False)


def test_overlong_rows_are_an_error_dropped_or_cut_and_counted(tmp_path):
    rows = [{"prompt": CHAT[:2]}, {"prompt": CHAT}, {"prompt": [{"role": "user", "content": "x" * 30}, CHAT[1]]}]
    source = _source(tmp_path, rows)

    def stream(overlong):
        return SftSource([source], char_tokenizer(), max_tokens=12, overlong=overlong, shuffle=False)

    with pytest.raises(DataError, match=r"has 19 tokens, at most 12.*chat.jsonl:2"):
        stream("error").next(2)
    dropping = stream("drop")
    assert [row.row_id for row in dropping.next(2)] == [0, 0]
    assert dropping.metrics()["data/rows_dropped"].value() == 2
    cutting = stream("truncate-right")
    assert [(row.row_id, len(row.token_ids)) for row in cutting.next(3)] == [(0, 9), (1, 12), (0, 9)]
    # The third row's answer lies beyond the limit: nothing of it could be learned.
    assert cutting.metrics()["data/rows_truncated"].value() == 1
    assert cutting.metrics()["data/rows_dropped"].value() == 1


def test_sequences_resume_exactly(tmp_path):
    source = _source(tmp_path, [{"prompt": [{"role": "user", "content": str(i)}, CHAT[1]]} for i in range(7)])
    stream = SftSource([source], char_tokenizer(), max_tokens=50, seed=2)
    stream.next(5)
    resumed = SftSource([source], char_tokenizer(), max_tokens=50, seed=2)
    resumed.load_state_dict(stream.state_dict())
    assert resumed.next(9) == stream.next(9)


def test_a_batch_starts_its_responses_at_the_first_token_that_counts():
    rows = [
        SftRow(0, [1, 2, 3, 4, 5], [False, False, True, False, True], "a"),
        SftRow(1, [6, 7], [True, True], "a"),
    ]
    batch = sft_batch(rows)
    assert [row.tolist() for row in batch.sequences().rows()] == [[1, 2, 3, 4, 5], [6, 7]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert [row.tolist() for row in batch["response_mask"].rows()] == [[True, False, True], [True]]
    assert batch["response_mask"].dtype == torch.bool


def test_the_tiny_models_tokenizer_is_masked_by_its_markers(tmp_path):
    from megarl.data.tokenizer import load_tokenizer
    from megarl.models.tiny import write_tiny

    write_tiny(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = render_conversation(tokenizer, CHAT[:2], system_prompt=None)
    assert _learned(tokenizer, ids, mask) == "2<eos>"
    assert ids[: mask.index(True)] == render_prompt(tokenizer, "1+1=", system_prompt=None, apply_chat_template=True)[1]
