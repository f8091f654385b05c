"""A run that continues takes each part of its checkpoint, or starts by name what is allowed to start afresh."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_train
from megarl.config.origin import Loaded
from megarl.config.schema import TrainConfig
from megarl.controller.checkpoints import CheckpointStore, contents_of
from megarl.controller.loop import training_prompts
from megarl.controller.session import open_session
from megarl.controller.state import RunState
from megarl.data.tokenizer import Tokenizer
from megarl.errors import CheckpointError, DataError
from tests.unit.data.chars import char_tokenizer


class Group:
    """Stands for a role's ranks: what they were told to load."""

    def __init__(self) -> None:
        self.loads: list[tuple[Path, Sequence[str]]] = []

    def load(self, directory: Path, fresh: Sequence[str]) -> None:
        self.loads.append((directory, sorted(fresh)))


@pytest.fixture
def tokenizer() -> Tokenizer:
    return char_tokenizer()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": "1"}) + "\n" for number in range(9)))
    return path


def run(rows: Path, *overrides: str) -> Loaded[TrainConfig]:
    source = f"data.train=[{{name: sums, path: {rows}, answer_column: answer}}]"
    return load_train("grpo_tiny", [f"run.dir={rows.parent / 'run'}", "logging.console=off",
                                    "logging.tensorboard=false", source, *overrides])  # fmt: skip


def stopped(loaded: Loaded[TrainConfig], tokenizer: Tokenizer) -> list[Any]:
    """A run that logged three lines, was saved after two of them in step 2 and killed in step 3; its next prompts."""
    prompts = training_prompts(loaded.config, tokenizer, ())
    prompts.next(5)
    with open_session(loaded) as session:
        session.sinks.log(1, {"a": 1.0})
        session.sinks.log(2, {"a": 2.0})
        state = RunState(2, 2, prompts.state_dict(), metrics_lines=session.sinks.num_lines)
        partial = session.store.begin(state)
        (partial.directory / "actor").mkdir()
        session.store.commit(partial)
        session.sinks.log(2, {"val/accuracy": 0.5})
        session.sinks.log(3, {"a": 3.0})
    return prompts.next(4)


def metrics(loaded: Loaded[TrainConfig]) -> list[tuple[int, dict[str, float]]]:
    lines = (Path(loaded.config.run.dir) / "metrics.jsonl").read_text().splitlines()
    return [(entry["step"], entry["metrics"]) for entry in map(json.loads, lines)]


def test_roles_data_and_metrics_go_on_where_the_checkpoint_was_made(rows: Path, tokenizer: Tokenizer):
    loaded = run(rows)
    coming = stopped(loaded, tokenizer)
    group, prompts = Group(), training_prompts(loaded.config, tokenizer, ())
    with open_session(loaded) as session:
        session.load_roles({"actor": group})  # type: ignore[dict-item]
        session.load_data(prompts)
        newest = session.store.newest()
        assert newest is not None and group.loads == [(newest / "actor", [])]
        session.sinks.log(3, {"a": 4.0})
    assert prompts.next(4) == coming
    # The line of step 2 that was written after the save is done again too.
    assert metrics(loaded) == [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 4.0})]


def test_parts_that_the_checkpoint_has_otherwise_start_afresh_by_name(rows: Path, tokenizer: Tokenizer):
    stopped(run(rows), tokenizer)
    sgd = ["actor.optimizer.kind=sgd", "actor.optimizer.distributed=false"]
    with pytest.raises(CheckpointError, match="actor/optimizer: adam there, sgd here"), open_session(run(rows, *sgd)):
        pass
    group = Group()
    with open_session(run(rows, *sgd, "resume.allow_fresh=[optimizer]")) as session:
        session.load_roles({"actor": group})  # type: ignore[dict-item]
    assert [fresh for _, fresh in group.loads] == [["optimizer"]]


def test_metrics_that_a_checkpoint_does_not_count_are_kept_to_its_step(rows: Path, tokenizer: Tokenizer):
    loaded = run(rows)
    stopped(loaded, tokenizer)
    store = CheckpointStore(Path(loaded.config.run.dir) / "checkpoints", keep=1)
    manifest = store.complete()[0] / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["contents"] == contents_of(loaded.config)
    del content["contents"]["metrics"]
    manifest.write_text(json.dumps(content))
    with open_session(run(rows, "resume.allow_fresh=[metrics]")):
        pass
    assert metrics(loaded) == [(1, {"a": 1.0}), (2, {"a": 2.0}), (2, {"val/accuracy": 0.5})]


def test_changed_data_is_refused_unless_it_may_start_afresh(rows: Path, tokenizer: Tokenizer):
    loaded = run(rows)
    stopped(loaded, tokenizer)
    rows.write_text(rows.read_text().replace("3+1=", "3+2="))
    with open_session(loaded) as session, pytest.raises(DataError, match="the rows of sums changed"):
        session.load_data(training_prompts(loaded.config, tokenizer, ()))
    prompts = training_prompts(loaded.config, tokenizer, ())
    with open_session(run(rows, "resume.allow_fresh=[data]")) as session:
        session.load_data(prompts)
    assert prompts.next(9) == training_prompts(loaded.config, tokenizer, ()).next(9)
