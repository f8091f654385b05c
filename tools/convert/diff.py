"""Two checkpoints of any formats compared, tensor by tensor and bit by bit. Exit code 1 where they differ.

python tools/convert/diff.py CHECKPOINT MODEL
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
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--config", default=None, help="configuration for one that has none")
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--max-memory", type=num_bytes, default=1 << 30)
    parser.add_argument("--limit", type=int, default=40, help="lines shown (default %(default)s)")
    given = parser.parse_args(arguments)
    from megarl.weights.conversion.compare import compare, difference_lines, option_differences
    from megarl.weights.conversion.session import Settings
    from megarl.weights.conversion.sources import open_source

    first, second = (open_source(path, config=given.config) for path in (given.first, given.second))
    difference = compare(first, second, Settings(given.workers, given.max_memory))
    lines = difference_lines(difference)
    lines += [f"configuration: {line}" for line in option_differences(first.spec, second.spec)]
    for line in lines[: given.limit]:
        print(line)
    if len(lines) > given.limit:
        print(f"and {len(lines) - given.limit} more (--limit)")
    print(f"{len(difference.equal)} tensors are equal, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(run(main))
