"""``megarl doctor``: everything that would end or slow a run, found in seconds before it starts, each with its fix.

A check that needs what another found broken is left out and named in ``unchecked``: nothing is reported twice, and
nothing is silently not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megarl.config.load import Inspected, inspect_sft, inspect_train
from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.violations import touches
from megarl.errors import ConfigError, LayoutError, ModelError
from megarl.models import ModelSpec, load_spec
from megarl.planning import configuration
from megarl.planning.finding import Finding, Level, errors, exit_code
from megarl.planning.forecast import check_memory, forecast
from megarl.planning.fp8 import check_fp8
from megarl.planning.gpus import Gpu, gpu_named
from megarl.planning.inputs import check_data, check_reward, check_setup
from megarl.planning.known_models import known_spec
from megarl.planning.model_files import check_tokenizer, check_weights
from megarl.planning.model_fit import check_specs
from megarl.planning.placement import Nodes, check_batch, check_placement
from megarl.planning.storage import check_disk, check_resume


@dataclass(slots=True)
class Diagnosis:
    """Findings in the order of the checks, and what could not be checked with the reason."""

    preset: str
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Of the first error; 0 where there are warnings at most."""
        return exit_code(self.findings)

    def text(self) -> str:
        """For a person: errors, warnings, what was not checked, and the count last."""
        lines = []
        for level in ("error", "warning"):
            for finding in (one for one in self.findings if one.level == level):
                lines.append(f"{level}: {finding.key}: {finding.problem}\n  fix: {finding.fix}")
        lines += [f"not checked: {text}" for text in self.unchecked]
        num_errors = len(errors(self.findings))
        num_warnings = len(self.findings) - num_errors
        lines.append(f"doctor: {self.preset}: {num_errors} errors, {num_warnings} warnings")
        return "\n".join(lines)

    def json(self) -> str:
        """For a script: ``{preset, exit_code, findings: [{area, key, problem, fix, level}], unchecked}``."""
        found = [asdict(finding) for finding in self.findings]
        report = {"preset": self.preset, "exit_code": self.exit_code, "findings": found, "unchecked": self.unchecked}
        return json.dumps(report, indent=2)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the doctor knows of the place the run will be in.

    Args:
        nodes: Slurm's allocation; None where there is none.
        settings: the environment's MEGARL_* entries.
        in_job: the run would start from here, so that missing packages are errors.
        gpu: kind of GPU (``gpus.py``).
        host_bytes: memory of a node; None where it is not known.
    """

    nodes: Nodes | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    in_job: bool = False
    gpu: str = "h100"
    host_bytes: int | None = None


def diagnose(
    preset: str, overrides: Sequence[str], *, sft: bool = False, around: Surroundings | None = None
) -> Diagnosis:
    """All findings about a preset with overrides.

    Args:
        preset: name of a preset, or path of a YAML file.
        overrides: ``key=value``.
        sft: the configuration is one of ``megarl sft``.
        around: nodes, environment; None knows nothing.
    """
    diagnosis = Diagnosis(preset)
    surroundings = Surroundings() if around is None else around
    inspected: Inspected[TrainConfig] | Inspected[SftConfig]
    try:
        inspected = inspect_sft(preset, overrides) if sft else inspect_train(preset, overrides)
    except ConfigError as error:
        diagnosis.findings += configuration.of_error(error)
        diagnosis.unchecked.append("everything else: the configuration cannot be composed")
        return diagnosis
    diagnosis.findings += configuration.of_violations(inspected.violations)
    if inspected.config is None:
        diagnosis.unchecked.append("everything else: the configuration cannot be completed")
        return diagnosis
    _check(diagnosis, inspected.config, inspected.broken, surroundings)
    return diagnosis


def _check(diagnosis: Diagnosis, config: TrainConfig | SftConfig, broken: frozenset[str], around: Surroundings) -> None:
    def keep(findings: Iterable[Finding]) -> None:
        diagnosis.findings += [found for found in findings if not touches(found.key.partition("=")[0], broken)]

    specs = _read_specs(diagnosis, config, broken)
    gpu = gpu_named(around.gpu) if config.cluster.device == "cuda" else None
    if specs is not None:
        keep(check_specs(config, *specs))
        keep(check_fp8(config, *specs, gpu))
    placed = [*check_batch(config), *check_placement(config, around.nodes)]
    # What only slows a run is said of values that were given: a broken one stands as its default here.
    keep(placed if not broken else errors(placed))
    if specs is not None:
        keep(_memory(diagnosis, config, specs, gpu, around))
        keep(_files(config, *specs))
        keep(check_disk(config, *specs))
    keep(check_resume(config))
    # A login node may lack what the nodes or the container have.
    absent: Level = "error" if around.in_job and not around.settings.get("MEGARL_ENV") else "warning"
    keep(check_data(config, absent=absent))
    if isinstance(config, TrainConfig):
        keep(check_reward(config.reward, absent=absent))
    keep(check_setup(config, around.settings, in_job=around.in_job))


def _memory(
    diagnosis: Diagnosis,
    config: TrainConfig | SftConfig,
    specs: tuple[ModelSpec, ModelSpec],
    gpu: Gpu | None,
    around: Surroundings,
) -> list[Finding]:
    try:
        expected = forecast(config, *specs, gpu)
    except LayoutError:  # reported by the checks of the model
        diagnosis.unchecked.append("memory: the model does not divide into a layout")
        return []
    if around.host_bytes is None:
        diagnosis.unchecked.append("host memory: a node's is not known (--node-memory-gib)")
    return list(check_memory(config, expected, gpu=gpu, host_bytes=around.host_bytes))


def _read_specs(
    diagnosis: Diagnosis, config: TrainConfig | SftConfig, broken: frozenset[str]
) -> tuple[ModelSpec, ModelSpec] | None:
    """Specs of policy and critic, the policy's again where the critic starts from it."""
    specs: list[ModelSpec] = []
    known: list[str] = []
    critic = config.critic if isinstance(config, TrainConfig) else None
    paths = {"model.path": config.model.path}
    if critic is not None and critic.path is not None:
        paths["critic.path"] = critic.path
    for key, path in paths.items():
        if touches(key, broken):
            continue
        try:
            specs.append(load_spec(path))
        except ModelError as error:
            fix = error.fix if error.fix is not None else "use a model of a family that megarl knows"
            diagnosis.findings.append(Finding("model", f"{key}={path}", error.problem, fix))
            if not Path(path).exists() and (spec := _known(path)) is not None:
                specs.append(spec)
                known.append(key)
            elif specs:  # of the critic: the policy's stands for it in the rest
                specs.append(specs[0])
                diagnosis.unchecked.append(f"{key}: its weights; its numbers are taken to be the policy's")
    if len(specs) < len(paths):
        diagnosis.unchecked.append(
            "model, checkpoint, tokenizer, memory and disk: no model's config.json could be read"
        )
        return None
    for key in known:
        diagnosis.unchecked.append(f"{key}: weights and tokenizer; its numbers are those of the model of that name")
    return specs[0], specs[-1]


def _known(path: str) -> ModelSpec | None:
    """The model that a directory is named after, where megarl has its numbers."""
    try:
        return known_spec(Path(path).name)
    except ModelError:
        return None


def _files(config: TrainConfig | SftConfig, spec: ModelSpec, critic_spec: ModelSpec) -> list[Finding]:
    findings: list[Finding] = []
    directory = Path(config.model.path)
    if directory.exists():  # else it is a finding already
        if config.model.init == "checkpoint":
            findings += check_weights("model.path", directory, spec)
        findings += check_tokenizer("model.path", directory, spec, needs_template=config.data.apply_chat_template)
    critic = config.critic if isinstance(config, TrainConfig) else None
    if critic is not None and critic.path is not None and Path(critic.path).exists():
        findings += check_weights("critic.path", Path(critic.path), critic_spec, value_head=True)
    return findings
