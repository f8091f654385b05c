"""GRPO steps of TRL on a prompt file, for benchmarks/step.py: prints one JSON object with the seconds of each step.

Runs in an environment of its own that has trl (see benchmarks/step.py); nothing of megarl is imported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from digits import share_of_digits
from transformers import AutoTokenizer, TrainerCallback


class Clock(TrainerCallback):
    """Wall clock at the end of every optimizer step: what lies between two of them is a whole step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.time())


def reward(completions: list[Any], **_: Any) -> list[float]:
    return [share_of_digits(completion[0]["content"]) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="folder for what TRL writes")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="responses a step")
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True, help="longest prompt, for vLLM")
    parser.add_argument("--microbatch-rows", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--vllm", action="store_true")
    options = parser.parse_args()

    import trl
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(options.threads)
    if options.vllm:
        keep_vllm_weights_loadable()
    rows = [json.loads(line) for line in options.prompts.read_text().splitlines()]
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])
    clock = Clock()
    config = GRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.microbatch_rows,
        gradient_accumulation_steps=options.rows // options.microbatch_rows,
        num_generations=options.group,
        max_completion_length=options.max_tokens,
        temperature=1.0,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=options.dtype == "bfloat16",
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
        model_init_kwargs={"dtype": options.dtype},
        **({"use_vllm": True, "vllm_mode": "colocate", **vllm_options(options)} if options.vllm else {}),
    )
    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    # ``num_tokens`` counts prompts and responses since the start.
    counts = [0.0, *(float(entry["num_tokens"]) for entry in trainer.state.log_history if "num_tokens" in entry)]
    print(json.dumps({"version": trl.__version__, "ends": clock.ends[1:], "tokens": differences(counts)}))


def keep_vllm_weights_loadable() -> None:
    """Let vLLM multiply by plain torch matrices on CPU.

    It repacks them and leaves empty parameters otherwise, on which the update that TRL makes ends with an
    AttributeError: without this the peer cannot be measured at all.
    """
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False


def differences(values: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(values)]


def vllm_options(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": options.prompt_tokens + options.max_tokens,
        "vllm_tensor_parallel_size": 1,
    }


if __name__ == "__main__":
    main()
