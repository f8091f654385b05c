"""The pre-flight's own command, on a cluster whose second node has another version of a package."""

from __future__ import annotations

import os
import sys

from megarl.launch import preflight

if __name__ == "__main__":
    if os.environ["SLURMD_NODENAME"] == "n2":
        sys.path.insert(0, os.environ["BAD"])
    sys.exit(preflight.main())
