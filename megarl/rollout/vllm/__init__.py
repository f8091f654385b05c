"""vLLM as a rollout engine; the only package that imports vllm."""
