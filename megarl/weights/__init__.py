"""Where weights live and how they move: regions, layouts, proofs, checksums, checkpoint files, the sync session.

Importing the package loads no torch; ``region``, ``layout`` and ``check`` are pure arithmetic.
"""
