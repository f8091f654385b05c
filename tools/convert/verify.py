"""Is a checkpoint what it should be: structure, bits, configuration, and logits layer by layer.

    python tools/convert/verify.py CHECKPOINT                              structure, and bits against its receipt
    python tools/convert/verify.py CHECKPOINT --against MODEL              bits and configuration against the original
    python tools/convert/verify.py CHECKPOINT --against MODEL --logits     and each layer's output against transformers

Exit code 8 where something is not as it should be; the first line that says NO says what. --logits computes the
forward pass from a Megatron checkpoint's files as they lie, on CPU in float32, and names the first layer that diverges;
it needs torch and transformers, and memory for the model.
"""

from __future__ import annotations

import os
import sys

# The script's own folder has an inspect.py, which must not stand for Python's.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collections.abc import Sequence

from tools.convert.options import command, num_bytes, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command(__doc__)
    parser.add_argument("source", help="checkpoint of any format")
    parser.add_argument("--against", default=None, help="checkpoint to compare with, usually the original")
    parser.add_argument("--config", default=None, help="Hugging Face directory with the model's configuration")
    parser.add_argument("--logits", action="store_true", help="compare every layer's output with transformers'")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the compared sequence (default %(default)s)")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--max-memory", type=num_bytes, default=1 << 30)
    given = parser.parse_args(arguments)
    from tools.convert.checks import verify

    return verify(given)


if __name__ == "__main__":
    sys.exit(run(main))
