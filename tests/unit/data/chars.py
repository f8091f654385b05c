"""Character tokenizers with chosen chat templates, for tests."""

from __future__ import annotations

from functools import cache

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>")

STABLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<eos>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Cuts earlier answers to one character, as templates that strip the thinking of earlier turns do.
UNSTABLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else m.content[:1] }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + STABLE


@cache
def char_tokenizer(template: str | None = STABLE) -> PreTrainedTokenizerFast:
    """One token a character of printable ASCII."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer
