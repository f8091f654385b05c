"""What is converted to vLLM's sharded state is served by a real engine, as transformers computes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.platform.env import rollout_environment
from tests.unit.weights.test_conversion_commands import make_model, tool

pytestmark = pytest.mark.slow

PROMPTS = [[5, 9, 200, 31, 77], [250, 3]]

SERVE = f"""
import json, sys
if __name__ == "__main__":
    from vllm import LLM, SamplingParams
    directory, tp = sys.argv[1:]
    engine = LLM(
        directory, load_format="sharded_state", tensor_parallel_size=int(tp), dtype="float32", max_model_len=64,
        enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=4,
    )
    prompts = [{{"prompt_token_ids": ids}} for ids in {PROMPTS}]
    options = SamplingParams(temperature=0, max_tokens=12, detokenize=False, logprobs=0, ignore_eos=True)
    found = [output.outputs[0] for output in engine.generate(prompts, options, use_tqdm=False)]
    rows = [(list(one.token_ids), [step[t].logprob for t, step in zip(one.token_ids, one.logprobs)]) for one in found]
    print("FOUND " + json.dumps(rows))
"""


def serve(script: Path, directory: Path, tp: int) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log-probs of each prompt."""
    environment = os.environ | rollout_environment("cpu", 1) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    words = [sys.executable, str(script), str(directory), str(tp)]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=380)
    line = next((line for line in result.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line is not None, result.stdout[-2000:] + result.stderr[-2000:]
    found: list[tuple[list[int], list[float]]] = json.loads(line.removeprefix("FOUND "))
    return found


@torch.no_grad()
def log_probs(directory: Path, prompt: list[int], response: list[int]) -> torch.Tensor:
    """[len(response), V]: transformers', of every token after each prefix."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "tied", "tp"), [("qwen2", True, 1), ("llama", False, 2)])
def test_an_engine_loads_its_ranks_files(tmp_path, family, tied, tp):
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    model = make_model(tmp_path, family, hidden_size=128, head_dim=32, tie_word_embeddings=tied)
    tool("reshard.py", model, tmp_path / "engine", "--format", "sharded_state", "--tp", tp, "--no-fsync")
    for prompt, (ids, found) in zip(PROMPTS, serve(script, tmp_path / "engine", tp), strict=True):
        expected = log_probs(model, prompt, ids)
        assert ids == expected.argmax(-1).tolist()
        torch.testing.assert_close(torch.tensor(found), expected.max(-1).values, rtol=0, atol=1e-3)
