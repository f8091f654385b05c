"""Finding who reads a field, and the claim that every field is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config import fields
from megarl.config.explain import all_reads
from megarl.config.readers import find_reads
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.algorithm import AlgorithmConfig


def reads_in(tmp_path: Path, source: str) -> dict[tuple[str, str], list[int]]:
    package = tmp_path / "pkg"
    (package / "config").mkdir(parents=True)
    (package / "config" / "own.py").write_text("def f(run: RunConfig): return run.seed\n", encoding="utf-8")
    (package / "code.py").write_text(source, encoding="utf-8")
    found = find_reads([TrainConfig], package, exclude="config")
    return {key: [read.line for read in reads] for key, reads in found.items()}


@pytest.mark.parametrize(
    ("source", "key", "line"),
    [
        ("def f(c: TrainConfig):\n    return c.run.steps\n", ("RunConfig", "steps"), 2),
        ("def f(c: TrainConfig | SftConfig):\n    return c.run.steps\n", ("RunConfig", "steps"), 2),
        ("def f(c: 'schema.RunConfig'):\n    return c.steps\n", ("RunConfig", "steps"), 2),
        ("def f(c: Loaded[TrainConfig]):\n    r = c.config.run\n    return r.steps\n", ("RunConfig", "steps"), 3),
        ("class A:\n    c: RunConfig\n    def f(self):\n        return self.c.steps\n", ("RunConfig", "steps"), 4),
        (
            "class A:\n    def __init__(self, c: TrainConfig):\n        self.r = c.run\n"
            "    def f(self):\n        return self.r.steps\n",
            ("RunConfig", "steps"),
            5,
        ),
        ("def f(c: DataConfig):\n    return [s.task for s in c.train]\n", ("GymSource", "task"), 2),
        ("def f(c: DataConfig):\n    for i, s in enumerate(c.train):\n        s.path\n", ("FileSource", "path"), 3),
        ("def f(c: ActorConfig | CriticConfig):\n    return c.layout.world_size\n", ("LayoutConfig", "pp"), 2),
        ("def f(c: RunConfig):\n    return getattr(c, 'seed')\n", ("RunConfig", "seed"), 2),
        ("def f(c: TrainConfig):\n    def g():\n        return c.run.seed\n    return g\n", ("RunConfig", "seed"), 3),
        ("def r(c) -> RunConfig: ...\ndef f(c):\n    return r(c).seed\n", ("RunConfig", "seed"), 3),
        ("class B:\n    a: A\n    def f(self):\n        return self.a.c.seed\nclass A:\n    c: RunConfig\n",
         ("RunConfig", "seed"), 4),
        ("def f(c: TrainConfig):\n    return g(**c.reward.model_dump())\n", ("RewardConfig", "workers"), 2),
        ("def f(c: TrainConfig):\n    return c.critic.epochs if c.critic else 1\n", ("CriticConfig", "epochs"), 2),
    ],
)  # fmt: skip
def test_a_read_is_found(tmp_path: Path, source: str, key: tuple[str, str], line: int):
    assert reads_in(tmp_path, source).get(key) == [line]


@pytest.mark.parametrize(
    "source",
    [
        "def f(c):\n    return c.steps\n",  # nobody says what c is
        "def f(c: OtherConfig):\n    return c.steps\n",
        "def f(c: RunConfig):\n    c.steps = 3\n",  # a write
        "steps = 3\nprint(steps)\n",
        "def f(c: TrainConfig):\n    return c.model_dump()\n",  # a configuration that is logged is not read
        "def f(c: RunConfig): ...\ndef g(c):\n    return c.steps\n",  # the annotation is another function's
    ],
)
def test_what_is_no_read(tmp_path: Path, source: str):
    assert ("RunConfig", "steps") not in reads_in(tmp_path, source)


def test_reads_inside_the_configuration_do_not_count(tmp_path: Path):
    assert reads_in(tmp_path, "") == {}


def test_every_field_of_the_schema_is_read():
    reads = all_reads()
    entries = [entry for root in (TrainConfig, SftConfig) for entry in fields.walk(root)]
    # A key that stands for others is used up while loading.
    used_up = {f"algorithm.{AlgorithmConfig.implied({})[1]}"}
    unread = {
        entry.pattern: f"{entry.model.__name__}.{entry.name}"
        for entry in entries
        # A key with one possible value (the tag that chooses a source's class) leaves nothing to read.
        if (entry.model.__name__, entry.name) not in reads
        and len(fields.choices(entry.info.annotation)) != 1
        and entry.pattern not in used_up
    }
    assert not unread, "fields that nothing reads (annotate the receiver with its section class): " + ", ".join(
        sorted(set(unread.values()))
    )
