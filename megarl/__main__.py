"""``python -m megarl``: the same as the ``megarl`` command."""

from __future__ import annotations

import sys

from megarl.cli import main

if __name__ == "__main__":
    sys.exit(main())
