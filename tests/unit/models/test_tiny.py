"""The tiny model's directory: what transformers loads from it."""

import subprocess
import sys

import pytest

from megarl.errors import ModelError
from megarl.models import load_spec
from megarl.models.tiny import main, tiny_config, tokenizer_size, write_tiny

TEXT = "What is 12 + 35?\nAnswer:  (x-y)*2, it's <eos> done <|user|>. é 日\tü"


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokenizer_returns_every_text(tmp_path, family):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tiny(tmp_path, tiny_config(family)))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    # transformers rebuilds qwen2 tokenizers from the vocabulary; both ways must agree.
    assert tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids == ids
    assert len(tokenizer) == tokenizer_size() == load_spec(tmp_path).vocab_size
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer.encode("1234+5")) == 6


def test_the_chat_template_ends_answers_and_marks_them(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(write_tiny(tmp_path))
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|user|>1+1=<|assistant|>2<eos>"
    assert (
        tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
        == "<|user|>1+1=<|assistant|>"
    )
    marked = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    assert marked["assistant_masks"] == [0] * 6 + [1, 1]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_builds_the_model_the_spec_counts(tmp_path, family, tied):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    write_tiny(tmp_path, tiny_config(family, tie_word_embeddings=tied, num_hidden_layers=2))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    spec = load_spec(tmp_path)
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.num_parameters()
    assert spec.tied_embeddings == tied


def test_the_vocabulary_divides_by_no_usual_shard_count():
    assert all(tokenizer_size() % (64 * tp) for tp in (1, 2, 4, 8))


def test_the_command_writes_the_sizes_it_was_given(tmp_path):
    main([str(tmp_path / "m"), "--family", "qwen3", "--hidden", "96", "--heads", "2", "--head-dim", "64", "--untied"])
    spec = load_spec(tmp_path / "m")
    assert (spec.family, spec.hidden_size, spec.num_heads, spec.head_dim, spec.tied_embeddings) == (
        "qwen3",
        96,
        2,
        64,
        False,
    )


def test_impossible_sizes_are_refused():
    with pytest.raises(ModelError, match="smaller than the tokenizer"):
        tiny_config(vocab_size=100)
    with pytest.raises(ModelError, match="no head_dim of its own"):
        tiny_config("qwen2", head_dim=64)
    with pytest.raises(ModelError, match="3 key-value heads"):
        tiny_config("llama", num_key_value_heads=3)


def test_models_load_no_torch():
    code = "import megarl.models, megarl.models.tiny, megarl.weights.check, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
