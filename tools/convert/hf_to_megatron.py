"""A Hugging Face directory as a Megatron checkpoint: torch_dist, or Megatron-LM's mp_rank files.

    python tools/convert/hf_to_megatron.py MODEL TARGET --tp 8 --pp 4
    python tools/convert/hf_to_megatron.py MODEL TARGET --format legacy --tp 2 --vocab-rows-multiple 128

Needs numpy alone: no Megatron, no GPU, no process group. A torch_dist checkpoint loads at any layout; --tp and the
others say how it is cut, so that ranks of that layout read their own bytes only.
"""

from __future__ import annotations

import os
import sys

# The script's own folder has an inspect.py, which must not stand for Python's.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collections.abc import Sequence

from megarl.weights.conversion.sources import open_source
from tools.convert.options import add_layout_options, add_run_options, command, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command(__doc__)
    parser.add_argument("model", help="Hugging Face directory")
    parser.add_argument("target", help="new directory")
    parser.add_argument("--format", choices=("torch_dist", "legacy"), default="torch_dist")
    add_layout_options(parser)
    add_run_options(parser)
    given = parser.parse_args(arguments)
    from tools.convert.recast import to_megatron

    return to_megatron(open_source(given.model), given)


if __name__ == "__main__":
    sys.exit(run(main))
