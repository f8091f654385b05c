"""One small file per model family: which options it has and its weight rules, as data."""
