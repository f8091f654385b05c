"""Prompt streams: order, resume, limits; and what a prompt is made into."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from megarl.data.prompts import PromptSource
from megarl.data.sources import open_source
from megarl.data.tokenizer import load_tokenizer, render_prompt
from megarl.errors import DataError
from tests.unit.data.chars import NO_SYSTEM, STABLE, char_tokenizer


def _file(tmp_path, name, size, weight=1.0, length=1):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name}{i}" + "x" * (length - 1)}) + "\n" for i in range(size)))
    return {"kind": "file", "path": str(path), "weight": weight}


def _stream(*sources, **options):
    options = {"max_prompt_tokens": 20, **options}
    return PromptSource([open_source(source) for source in sources], char_tokenizer(), **options)


def _ids(prompts):
    return [prompt.prompt_id for prompt in prompts]


def test_every_epoch_visits_every_row_once_in_another_order(tmp_path):
    stream = _stream(_file(tmp_path, "a", 13), seed=3)
    epochs = [_ids(stream.next(13)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] != _ids(_stream(_file(tmp_path, "a", 13), seed=4).next(13))
    assert _ids(_stream(_file(tmp_path, "a", 5), shuffle=False).next(7)) == [0, 1, 2, 3, 4, 0, 1]


def test_the_order_is_the_same_on_every_machine(tmp_path):
    # Computed with plain Python integers: an order that changes with a library's release would break resumed runs.
    assert _ids(_stream(_file(tmp_path, "a", 8), seed=1).next(10)) == [5, 1, 6, 7, 3, 2, 0, 4, 6, 3]


@pytest.mark.parametrize("before", [0, 1, 7, 20])
def test_a_resumed_stream_continues_exactly(tmp_path, before):
    sources = (_file(tmp_path, "a", 5, weight=2), _file(tmp_path, "b", 4), _file(tmp_path, "long", 3, length=30))
    stream = _stream(*sources, seed=9, overlong="drop")
    stream.next(before)
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = _stream(*sources, seed=9, overlong="drop")
    resumed.load_state_dict(state)
    assert resumed.metrics() == stream.metrics()
    assert resumed.next(25) == stream.next(25)


def test_sources_are_drawn_in_proportion_to_their_weights(tmp_path):
    stream = _stream(_file(tmp_path, "a", 100, weight=3), _file(tmp_path, "b", 4, weight=1))
    for count in (4, 8, 40):
        drawn = Counter(prompt.data_source for prompt in stream.next(count))
        assert drawn["a"] == 3 * drawn["b"] == count * 3 // 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 6}, r"the rows of a changed \(5 rows before, 6 now\)"),
        ({"length": 2}, "the rows of a changed"),
        ({"seed": 2}, "seed was 1, is 2"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"weight": 2.0}, "weights were"),
        ({"name": "c"}, r"sources were \['a', 'b'\], are \['c', 'b'\]"),
    ],
)
def test_changed_data_is_refused_on_resume(tmp_path, change, message):
    other = _file(tmp_path, "b", 3)
    state = _stream(_file(tmp_path, "a", 5), other, seed=1).state_dict()
    options = {key: change[key] for key in ("seed", "shuffle") if key in change}
    source = {"name": "a", "size": 5, **{key: value for key, value in change.items() if key not in options}}
    with pytest.raises(DataError, match=message) as raised:
        _stream(_file(tmp_path, **source), other, **{"seed": 1, **options}).load_state_dict(state)
    assert "restore the data of the checkpoint" in str(raised.value)


def test_a_text_that_is_held_out_is_never_drawn(tmp_path):
    source = _file(tmp_path, "a", 6)
    first, second = _stream(source, shuffle=False).first(2)
    training = _stream(source, held_out={first.text, second.text})
    drawn = [prompt.text for prompt in training.next(12)]
    assert not {first.text, second.text} & set(drawn)
    assert len(set(drawn)) == 4
    assert training.metrics()["data/prompts_dropped"].value() >= 2
    with pytest.raises(DataError, match="held out for validation"):
        _stream(source, held_out={prompt.text for prompt in _stream(source).first(6)}).next(1)


def test_overlong_prompts_are_an_error_dropped_or_cut_and_counted(tmp_path):
    sources = (_file(tmp_path, "a", 4), _file(tmp_path, "long", 4, length=40))
    with pytest.raises(DataError, match=r"has 46 tokens, at most 20 .*long.jsonl:1.*max_prompt_tokens"):
        _stream(*sources, shuffle=False).next(2)
    dropping = _stream(*sources, overlong="drop")
    assert all(prompt.data_source == "a" for prompt in dropping.next(8))
    assert 7 <= dropping.metrics()["data/prompts_dropped"].value() <= 8
    cutting = _stream(*sources, overlong="truncate-left", shuffle=False)
    _, long = cutting.next(2)
    assert len(long.token_ids) == 20 and long.token_ids[-1] == char_tokenizer().convert_tokens_to_ids("<|assistant|>")
    assert cutting.metrics()["data/prompts_truncated"].value() == 1
    with pytest.raises(DataError, match="no prompts are left: all are longer"):
        _stream(_file(tmp_path, "long", 4, length=40), overlong="drop").next(1)


def test_first_takes_each_row_once_and_moves_nothing(tmp_path):
    stream = _stream(_file(tmp_path, "a", 5, weight=1e-6), _file(tmp_path, "b", 2), seed=5)
    assert sorted(_ids(stream.first(100))) == list(range(7))
    assert _ids(stream.first(3)) == _ids(stream.first(3)) == [5, 6, 0]
    assert stream.metrics()["data/epoch"].value() == 0


def test_a_prompt_is_the_templates_text_with_the_generation_prompt(tmp_path):
    tokenizer = char_tokenizer()
    text, ids = render_prompt(tokenizer, "hi", system_prompt="be good", apply_chat_template=True)
    assert text == "<|system|>be good<|user|>hi<|assistant|>"
    assert tokenizer.decode(ids) == text and len(ids) == 12
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "hi"}]
    assert render_prompt(tokenizer, own, system_prompt="be good", apply_chat_template=True)[0].startswith(
        "<|system|>mine"
    )
    assert render_prompt(tokenizer, "hi", system_prompt=None, apply_chat_template=False) == (
        "hi",
        tokenizer("hi")["input_ids"],
    )


def test_what_cannot_be_rendered_names_the_fix(tmp_path):
    plain, messages = char_tokenizer(None), [{"role": "user", "content": "hi"}]
    with pytest.raises(DataError, match=r"no chat template \[x\] Fix: set data.apply_chat_template=false"):
        render_prompt(plain, "hi", system_prompt=None, apply_chat_template=True, where="x")
    with pytest.raises(DataError, match="need the chat template"):
        render_prompt(plain, messages, system_prompt=None, apply_chat_template=False)
    with pytest.raises(DataError, match="system prompt needs the chat template"):
        render_prompt(plain, "hi", system_prompt="s", apply_chat_template=False)
    with pytest.raises(DataError, match="refuses the messages: no system role"):
        render_prompt(char_tokenizer(NO_SYSTEM), "hi", system_prompt="s", apply_chat_template=True)
    with pytest.raises(DataError, match="no chat template"):
        PromptSource([open_source(_file(tmp_path, "a", 1))], plain, max_prompt_tokens=5)
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"has no tokens.*empty.jsonl:1"):
        _stream({"kind": "file", "path": str(empty)}, apply_chat_template=False)


def test_gym_prompts_carry_what_their_scorer_needs():
    prompt = _stream({"kind": "reasoning_gym", "task": "chain_sum", "size": 4}, max_prompt_tokens=300).next(1)[0]
    assert prompt.data_source == "chain_sum" and prompt.metadata["entry"]["question"] in prompt.text
    assert prompt.answer == prompt.metadata["entry"]["answer"]


def test_a_tokenizer_is_loaded_from_its_directory_or_said_to_be_missing(tmp_path):
    char_tokenizer(STABLE).save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(tmp_path / "model")
    assert loaded("1+1=")["input_ids"] == char_tokenizer()("1+1=")["input_ids"] and loaded.chat_template == STABLE
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"no tokenizer; the directory holds config.json .*copy tokenizer.json"):
        load_tokenizer(tmp_path / "bare")
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(tmp_path / "absent")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path / "model")
