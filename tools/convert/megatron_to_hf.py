"""A Megatron checkpoint, torch_dist or legacy, as a Hugging Face directory.

    python tools/convert/megatron_to_hf.py CHECKPOINT TARGET
    python tools/convert/megatron_to_hf.py CHECKPOINT TARGET --config MODEL

CHECKPOINT is the directory of one iteration, or the one with latest_checkpointed_iteration.txt. --config names the
Hugging Face directory whose configuration and tokenizer belong to the model, where the checkpoint does not carry them.
"""

from __future__ import annotations

import os
import sys

# The script's own folder has an inspect.py, which must not stand for Python's.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collections.abc import Sequence

from tools.convert.options import add_run_options, command, num_bytes, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command(__doc__)
    parser.add_argument("source", help="Megatron checkpoint")
    parser.add_argument("target", help="new directory")
    parser.add_argument("--config", default=None, help="Hugging Face directory with configuration and tokenizer")
    parser.add_argument("--max-shard-size", type=num_bytes, default=5_000_000_000, help="of a file (default 5 GB)")
    add_run_options(parser)
    given = parser.parse_args(arguments)
    from tools.convert.recast import open_for, to_hf

    return to_hf(open_for(given), given)


if __name__ == "__main__":
    sys.exit(run(main))
