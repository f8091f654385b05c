"""``megarl sft``: supervised fine-tuning on the engine that reinforcement learning trains with."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.origin import Loaded
from megarl.config.schema import SftConfig
from megarl.controller.dispatch import WorkerGroup
from megarl.controller.saving import Saver
from megarl.controller.session import Session, check_weights, open_session
from megarl.controller.speed import sft_work
from megarl.controller.state import RunState
from megarl.controller.stopping import AbandonedError
from megarl.controller.workers import TrainPlan
from megarl.data.batch import Batch
from megarl.data.sft import SftSource, sft_batch
from megarl.data.sources import open_source
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.observability.logs import set_context
from megarl.observability.metrics import Metrics, Sum, values
from megarl.observability.trace import span
from megarl.platform import signals


def sft(loaded: Loaded[SftConfig], forecast: Mapping[str, Any] | None = None) -> int:
    """Run ``megarl sft``; returns the exit code. ``forecast`` is kept in the run directory for the report.

    Raises:
        MegarlError: whatever ends the run; the class decides the exit code.
    """
    config = loaded.config
    check_weights(config.model)
    tokenizer = load_tokenizer(config.model.path)
    rows = sft_source(config, tokenizer, validation=False)
    held_out = sft_source(config, tokenizer, validation=True) if config.data.validation else None
    with open_session(loaded, forecast) as session:
        with span("start"):
            processes = session.start_processes()
            model = processes.train(plan(config, session.directory.logs), processes.placement.actor)
            model.start(model.rendezvous())
            session.introduce({"actor": model})
            session.load_roles({"actor": model})
        session.load_data(rows)
        session.keep_spans()
        run_steps(session, config, model, rows, held_out)
    return 0


def sft_source(config: SftConfig, tokenizer: Tokenizer, *, validation: bool) -> SftSource:
    """The training or the held-out sequences.

    Raises:
        DataError: a source is missing, empty, or lacks a column.
    """
    data = config.data
    return SftSource(
        [open_source(source.model_dump()) for source in (data.validation if validation else data.train)],
        tokenizer,
        max_tokens=data.max_tokens,
        overlong="drop" if validation and data.overlong == "error" else data.overlong,
        system_prompt=data.system_prompt,
        apply_chat_template=data.apply_chat_template,
        seed=config.run.seed,
        shuffle=data.shuffle and not validation,
    )


def run_steps(
    session: Session, config: SftConfig, model: WorkerGroup, rows: SftSource, held_out: SftSource | None
) -> None:
    """All updates that are left, evaluation, checkpoints, the export and the summary."""
    steps, evaluation = config.run.steps, None if held_out is None else sft_batch(held_out.first(len(held_out)))
    results, finished = dict(session.state.results), session.state
    saver = Saver(
        session.store,
        {"actor": model},
        config.checkpoint,
        session.directory.exports,
        note_seconds=session.stopping.note_save,
    )
    for step in range(session.state.step + 1, steps + 1):
        set_context(step=step)
        session.keep_spans()
        with span("step"):
            batch = sft_batch(rows.next(config.data.sequences_per_step))
            with span("update"):
                metrics: Metrics = model.update_sft(batch, [list(range(len(batch)))])
        metrics |= {**rows.metrics(), "perf/total_num_tokens": Sum(int(batch.sequence_lengths.sum()))}
        if step in (session.state.step + 2, steps):
            metrics |= session.measured_memory({"actor": model})
        session.log_step(step, metrics, sft_work(config, batch.sequence_lengths))
        lines = session.sinks.num_lines
        finished = RunState(step, step, rows.state_dict(), results=dict(results), metrics_lines=lines)
        if session.stopping.is_asked and step < steps:
            session.stop(finished, saver)
        every = config.eval_every_steps
        if evaluation is not None and (step == steps or (every is not None and step % every == 0)):
            try:
                results["val_loss"] = evaluate(session, model, evaluation, step)
            except AbandonedError:
                session.stop(finished, saver)
        saver.look()
        if signals.take_save() or saver.is_due(step, steps):
            saver.save(replace(finished, results=dict(results), metrics_lines=session.sinks.num_lines))
    saver.finish()
    hf = session.directory.hf
    if config.checkpoint.export_hf:
        with span("export"):
            shutil.rmtree(hf, ignore_errors=True)
            model.export_hf(hf)
    session.finish(
        {
            "steps": steps,
            "val_loss": results.get("val_loss"),
            "hf": str(hf) if config.checkpoint.export_hf else None,
        }
    )


def evaluate(session: Session, model: WorkerGroup, evaluation: Batch, step: int) -> float:
    """Loss on the held-out sequences."""
    with span("evaluation"):
        metrics: Metrics = model.eval_sft(evaluation)
    session.log_validation(step, metrics, [])
    return values(metrics)["val/loss"]


def plan(config: SftConfig, logs: Path) -> TrainPlan:
    """What the model's ranks are told."""
    return TrainPlan(
        role="actor",
        model_dir=Path(config.model.path).absolute(),
        random_init=config.model.init == "random",
        layout=config.actor.layout.grid(),
        device=config.cluster.device,
        engine=config.actor.engine,
        optimizer=config.actor.optimizer,
        head="lm",
        seed=config.run.seed,
        total_updates=config.run.steps,
        with_reference=False,
        lora=config.actor.lora,
        collective_timeout_s=config.cluster.collective_timeout_s,
        logs=logs,
    )
