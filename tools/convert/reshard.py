"""A checkpoint in another layout, naming or format, with its optimizer state where the formats have one.

    python tools/convert/reshard.py CHECKPOINT TARGET --tp 4 --pp 2                    torch_dist, cut for TP4 x PP2
    python tools/convert/reshard.py CHECKPOINT TARGET --format legacy --tp 2           mp_rank files
    python tools/convert/reshard.py MODEL TARGET --format sharded_state --tp 2         what vLLM loads as sharded_state

Optimizer moments and master weights of a torch_dist checkpoint come along unless --no-optimizer. State that belongs to
ranks (random generators) has no counterpart in another layout and is left out.
"""

from __future__ import annotations

import os
import sys

# The script's own folder has an inspect.py, which must not stand for Python's.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collections.abc import Sequence

from tools.convert.options import add_layout_options, add_run_options, command, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command(__doc__)
    parser.add_argument("source", help="checkpoint of any format")
    parser.add_argument("target", help="new directory")
    parser.add_argument("--format", choices=("torch_dist", "legacy", "sharded_state"), default="torch_dist")
    parser.add_argument("--config", default=None, help="Hugging Face directory with configuration and tokenizer")
    parser.add_argument("--no-optimizer", action="store_true", help="weights only")
    add_layout_options(parser)
    add_run_options(parser)
    given = parser.parse_args(arguments)
    from tools.convert.recast import open_for, to_megatron, to_sharded_state

    source = open_for(given)
    if given.format == "sharded_state":
        return to_sharded_state(source, given)
    if source.has_slots and not given.no_optimizer:
        if given.format == "legacy":
            sys.stderr.write("the optimizer state has no place in the legacy format; --no-optimizer says so\n")
            return 8
        source = open_for(given, optimizer=True)
    return to_megatron(source, given)


if __name__ == "__main__":
    sys.exit(run(main))
