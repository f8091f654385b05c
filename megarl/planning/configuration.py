"""The configuration's own violations as findings: what ``megarl train`` would refuse, with what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megarl.errors import ConfigError
from megarl.planning.finding import Finding


def of_violations(violations: Sequence[str]) -> list[Finding]:
    """Findings of the lines that loading reports (``config/violations.py``)."""
    return [_finding(line) for line in violations]


def of_error(error: ConfigError) -> list[Finding]:
    """Findings of a configuration that cannot be composed at all."""
    if error.violations:
        return of_violations(error.violations)
    fix = error.fix if error.fix is not None else "correct the file or the overrides"
    return [Finding("configuration", error.where if error.where is not None else "preset", error.problem, fix)]


def _finding(line: str) -> Finding:
    key, _, problem = line.partition(": ")
    return Finding("configuration", key, problem, _fix(key, problem))


def _fix(key: str, problem: str) -> str:
    if key == "command line":
        return "write key=value, key=[a,b], key={a: 1}, +key=value or ~key, quoted for the shell"
    if meant := re.search(r"did you mean (.+?)\?", problem):
        return f"write {meant[1]}"
    if problem.startswith("unknown key"):
        return f"remove {key}, or choose one of the known keys"
    if problem.startswith("required"):
        return f"set {key}"
    if wanted := re.match(r"expected (.+?), found ", problem):
        if "[rule " not in problem:
            return f"set {key} to {_with_article(wanted[1])}"
        keys = re.findall(r"(?:, found|\),) ([\w.]+)=", problem)
        return f"change {_any_of(keys)} to get {wanted[1]}"
    return f"`megarl explain {key}` says what it takes"


def _with_article(expected: str) -> str:
    first = expected.partition(" ")[0]
    article = {"integer": "an ", "number": "a ", "string": "a ", "list": "a ", "mapping": "a ", "section": "a "}
    return article.get(first, "") + expected


def _any_of(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} or {keys[-1]}"
