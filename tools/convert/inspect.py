"""What a checkpoint holds and where: formats, keys, sizes, files, and the places of one tensor.

python tools/convert/inspect.py CHECKPOINT                            what its files really hold
python tools/convert/inspect.py CHECKPOINT --tensor NAME              file, byte, rows of one Hugging Face tensor
python tools/convert/inspect.py MODEL --tensor NAME --tp 8 --pp 4     where it lives in that layout: stage, rank, rows
"""

from __future__ import annotations

import os
import sys

# The script's own folder has an inspect.py, which must not stand for Python's.
sys.path.pop(0)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from collections.abc import Sequence

from megarl.errors import CheckpointError
from tools.convert.options import add_layout_options, command, layout_options_given, run


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = command(__doc__)
    parser.add_argument("source", help="checkpoint of any format")
    parser.add_argument("--config", default=None, help="Hugging Face directory with the model's configuration")
    parser.add_argument("--tensor", default=None, help="a Hugging Face name, or a part of one")
    parser.add_argument("--limit", type=int, default=40, help="lines of a list (default %(default)s)")
    add_layout_options(parser)
    given = parser.parse_args(arguments)
    from tools.convert.describe import describe, places_in_files, places_in_layout

    has_layout = bool(layout_options_given(given))
    if given.tensor is None and has_layout:
        raise CheckpointError("a layout says where a tensor lives, and none is named", fix="give --tensor NAME")
    if given.tensor is None:
        return describe(given)
    return places_in_layout(given) if has_layout else places_in_files(given)


if __name__ == "__main__":
    sys.exit(run(main))
