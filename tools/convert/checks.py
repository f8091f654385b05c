"""What verify.py checks, one after the other."""

from __future__ import annotations

import argparse
from pathlib import Path

from megarl.errors import CheckpointError
from megarl.weights.conversion.compare import (
    argument_differences,
    check_receipt,
    compare,
    difference_lines,
    option_differences,
)
from megarl.weights.conversion.receipt import MANIFEST, read_receipt
from megarl.weights.conversion.session import Settings
from megarl.weights.conversion.source import Source
from megarl.weights.conversion.sources import open_source

_SHOWN = 20


def verify(given: argparse.Namespace) -> int:
    """Runs the checks that the options ask for; 0 if all hold, else 8."""
    settings = Settings(given.workers, given.max_memory)
    if given.logits and given.against is None:
        raise CheckpointError("--logits compares with a Hugging Face directory", fix="give it with --against")
    source = open_source(given.source, config=given.config or _config_of(given.against))
    if given.logits and not 0 < given.tokens <= source.spec.max_position:
        most = source.spec.max_position
        raise CheckpointError(f"--tokens is {given.tokens}, expected 1 to {most}, the positions that the model has")
    answers = [_say("structure", [], f"{len(source.dtypes)} tensors, {source.format}, {source.spec.family}")]
    home = Path(given.source)
    if (home / MANIFEST).exists():
        problems = check_receipt(source, read_receipt(home), settings)
        answers.append(_say("receipt", problems, "every checksum is what the conversion noted"))
    elif given.against is None:
        raise CheckpointError("no receipt, and nothing to compare with", where=given.source, fix="give --against")
    answers.append(_say("arguments", argument_differences(source.spec, source.arguments), "no contradiction"))
    if given.against is not None:
        other = open_source(given.against)
        difference = compare(other, source, settings)
        answers.append(_say("bits", difference_lines(difference), f"{len(difference.equal)} tensors equal"))
        problems = option_differences(other.spec, source.spec)
        answers.append(_say("configuration", problems, "sizes, rotary embeddings, norms, router agree"))
        if given.logits:
            answers.append(_logits(source, other, given.tokens))
    return 0 if all(answers) else CheckpointError.exit_code


def _config_of(against: str | None) -> str | None:
    return against if against is not None and (Path(against) / "config.json").exists() else None


def _logits(source: Source, other: Source, count: int) -> bool:
    from megarl.weights.conversion.logits import TOLERANCE, compare_layers

    # Any tokens do; these are far apart in the vocabulary and the same every time.
    tokens = [(7919 * place + 11) % source.spec.vocab_size for place in range(count)]
    largest = 0.0
    for found in compare_layers(source, other.directory, tokens):
        if not found.is_close:
            return _say(
                "logits", [f"{found.layer} is the first that diverges ({found.relative:.1e} of its largest)"], ""
            )
        largest = max(largest, found.relative)
    return _say("logits", [], f"every layer within {largest:.1e} of its largest entry (limit {TOLERANCE:.0e})")


def _say(check: str, problems: list[str], good: str) -> bool:
    print(f"{check:14} {'NO' if problems else 'yes'}  {good if not problems else problems[0]}")
    for problem in problems[1:_SHOWN]:
        print(" " * 19 + problem)
    if len(problems) > _SHOWN:
        print(" " * 19 + f"and {len(problems) - _SHOWN} more")
    return not problems
