"""The device a process computes on, and the one reader of the process environment. Loads no torch by itself."""
