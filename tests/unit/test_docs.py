"""What the documents name exists: commands, keys with their values, paths, metrics, phases, exit codes.

Conventions the documents keep, so that this can be tested:
1. A command stands in a code block or in backticks; in a block two spaces end it and start its explanation.
2. ``console`` blocks hold commands after ``$`` and what they print; a line ``...`` leaves lines out.
3. What the reader fills in is in capitals: PRESET, KEY, NAME, RUN/hf.
4. In README's table for verl's users the first column is verl's.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from megarl import cli, errors
from megarl.config.explain import explain
from megarl.config.load import load_sft, load_train
from megarl.config.schema import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
READMES = sorted((ROOT / "megarl").rglob("README.md"))

# Made by runs or brought by users.
NOT_IN_THE_TREE = (".venv", ".cache/", "runs/", "models/", "data/math/", "experiments/", "RUN/", "tensorboard/", "/")
NOT_IN_THE_TREE += ("logs/", "checkpoints/", "hf/", "path/to/", "DIR", "actor/", "critic/", "step_0")
USERS_FILES = {
    "my_reward.py",
    "my_file.py",
    "train.jsonl",
    "test.jsonl",
    "a.jsonl",
    "FILE.py",
    "file.py",
    "configs/NAME.yaml",
    "resolved.yaml",
}
EXTENSIONS = (".py", ".sh", ".md", ".yaml", ".toml", ".txt")
PLACEHOLDERS = {"PRESET": "grpo_tiny", "KEY": "actor.layout.tp", "RUN/resolved.yaml": "grpo_tiny"}

ROOTS = "|".join(TrainConfig.model_fields)
KEY = re.compile(rf"(?<![\w./])~?((?:{ROOTS})(?:\.[a-z0-9_*]+)+)(?:=\S*)?")
METRIC = re.compile(r"[a-z_]+(/[A-Za-z0-9_]+)+")


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch: pytest.MonkeyPatch):
    """Origins are shown relative to the working directory."""
    monkeypatch.chdir(ROOT)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    """A page with verl's column left out."""
    text = page.read_text(encoding="utf-8")
    before, mark, rest = text.partition("| verl | megarl |\n")
    table, end, after = rest.partition("\n\n")
    ours = (line.rpartition(" | ")[2] if " | " in line else line for line in table.splitlines())
    return before + mark + "\n".join(ours) + end + after


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Language and lines of each fenced or indented code block."""
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield language, body.splitlines()
    fenceless = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for body in re.findall(r"(?:^    .*\n)+", fenceless, re.MULTILINE):
        yield "", [line[4:] for line in body.splitlines()]


def inline(text: str) -> list[str]:
    """What stands in backticks outside blocks."""
    fenceless = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", fenceless)]


def commands(page: Path) -> list[str]:
    text = text_of(page)
    lines = [line for language, body in blocks(text) if language != "console" for line in body]
    found = [re.split(r"\s{2,}", line.strip())[0] for line in [*lines, *inline(text)]]
    heads = r"(DRY_RUN=1 )?(bash |sbatch (--\S+ )*)?(megarl |scripts/\S+\.sh|python \S+\.py|python -m megarl)"
    return [command for command in found if re.match(heads, command)]


def check_megarl(words: list[str]) -> None:
    words = [PLACEHOLDERS.get(word, word) for word in words]
    if len(words) == 1 or words[1:] == ["…"]:  # the command's name in a sentence
        assert f"{words[0]} " in cli._parser().format_help()
        return
    if words[0] in ("train", "sft") and words[1] in ("experiments/sums.yaml",):
        return
    options = cli._parser().parse_args([word for word in words if word not in ("key=value", "...", "…")])
    if words[0] == "explain":
        explain(options.key) if options.key else None
    elif words[0] in ("train", "sft"):
        load = load_sft if words[0] == "sft" else load_train
        load(options.preset, options.overrides)


def check_script(words: list[str]) -> None:
    nodes = next((word.removeprefix("--nodes=") for word in words if word.startswith("--nodes=")), None)
    script = next(word for word in words if word.startswith("scripts/"))
    assert (ROOT / script).is_file()
    keys = [word for word in words[words.index(script) + 1 :] if re.match(r"[a-z_.]+=", word) and word != "key=value"]
    source = (ROOT / script).read_text(encoding="utf-8")
    preset = re.search(r"PRESET=(\w+)|megarl train (\w+)", source)
    if keys:
        assert preset is not None, f"{script} takes no keys"
        load_train(preset[1] or preset[2], [*([f"cluster.num_nodes={nodes}"] if nodes else []), *keys])
    for flag in (word for word in words[words.index(script) + 1 :] if word.startswith("--")):
        assert flag in source


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_commands_parse_and_their_keys_bind(page: Path):
    for command in commands(page):
        try:
            words = shlex.split(command)
            if words[0] == "megarl":
                check_megarl(words[1:])
            elif words[0] == "python":
                module = words[2].replace(".", "/") if words[1] == "-m" else words[1].removesuffix(".py")
                assert (ROOT / f"{module}.py").is_file() or (ROOT / module / "__main__.py").is_file()
            else:
                check_script(words)
        except (AssertionError, SystemExit, ValueError, errors.MegarlError) as error:
            pytest.fail(f"{name_of(page)}: {command}: {error}")


def same_but_for_lines(text: str) -> str:
    """Line numbers of presets and sources move with every edit."""
    return re.sub(r"(\.(?:yaml|py)):\d+", r"\1:N", text.rstrip())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_consoles_show_what_is_printed(page: Path, capsys: pytest.CaptureFixture[str]):
    for language, body in blocks(text_of(page)):
        if language != "console":
            continue
        command, *shown = body
        assert command.startswith("$ megarl ")
        cli.main(shlex.split(command)[2:])
        captured = capsys.readouterr()
        printed = [same_but_for_lines(line) for line in (captured.out + captured.err).splitlines()]
        at, may_skip = 0, False
        for line in map(same_but_for_lines, shown):
            if line == "...":
                may_skip = True
                continue
            assert line in printed[at:] if may_skip else printed[at : at + 1] == [line], f"{command}: {line}"
            at, may_skip = printed.index(line, at) + 1, False
        assert may_skip or at == len(printed), f"{command}: {printed[at:]}"


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_keys_exist(page: Path):
    text = text_of(page)
    wrong = []
    for piece in inline(text):
        for found in KEY.finditer(piece):
            if found[1].endswith((*EXTENSIONS, ".json", ".jsonl", ".parquet")) or re.match(
                r"\S+\(", piece[found.end() :]
            ):
                continue
            try:
                explain(found[1])
            except errors.ConfigError:
                wrong.append(found[1])
    assert wrong == []


def is_path(word: str) -> bool:
    word = word.removeprefix("./")
    first = word.partition("/")[0]
    is_top = "/" in word and (ROOT / first).exists() and first not in ("", "..", ".")
    return bool(re.fullmatch(r"[\w.,{}*-]+(/[\w.,{}*-]*)*", word)) and (word.endswith(EXTENSIONS) or is_top)


def exists(word: str, page: Path) -> bool:
    """A path relative to the checkout, the package, or the page; ``a/{b,c}.py`` stands for both."""
    if found := re.search(r"\{([^}]*)\}", word):
        return all(exists(word.replace(found[0], part), page) for part in found[1].split(","))
    word = word.rstrip("/")
    is_below = page.parent != ROOT and any(page.parent.rglob(word))
    return is_below or any(any(base.glob(word)) for base in (ROOT, ROOT / "megarl", page.parent))


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=name_of)
def test_paths_exist(page: Path):
    text = text_of(page)
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    tree = [line.split()[0] for _, body in blocks(text) for line in body if line.strip() and "=" not in line.split()[0]]
    words = [re.sub(r":\d+$", "", word.strip("(),;:")) for piece in inline(text) for word in piece.split()]
    assert [link for link in links if not (page.parent / link).exists()] == []
    missing = [
        word
        for word in dict.fromkeys([*words, *tree])
        if is_path(word) and word not in USERS_FILES and not word.startswith(NOT_IN_THE_TREE) and not exists(word, page)
    ]
    assert missing == []


# -- metrics ---------------------------------------------------------------------------------------------------------


@cache
def strings() -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """String constants of the package, and its formatted strings as patterns with a group for each gap."""
    constants, patterns = set(), set()
    for path in (ROOT / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else "(.+)" for p in node.values]
                if any("/" in part for part in parts):
                    patterns.add("".join(parts))
    return frozenset(constants), tuple(map(re.compile, patterns))


@cache
def computed_metrics() -> frozenset[str]:
    """Names that are put together from too many pieces to be read from the source."""
    import torch

    from megarl.algorithms.correction import Correction, Rejection, correct
    from megarl.algorithms.statistics import batch_metrics

    reject = [Rejection("seq_mean_k3", 1.0)]
    settings = Correction(level="token", upper=2.0, lower=None, normalize=True, rejections=reject)
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    names = [*correct(x, x, mask, settings).metrics]
    names += batch_metrics(mask, token_level_rewards=x, advantages=x, returns=x, values=x)
    return frozenset(name.replace("seq_mean_k3", "STATISTIC") for name in names)


def is_emitted(name: str) -> bool:
    constants, patterns = strings()
    if name in constants or name in computed_metrics():
        return True
    if name.startswith("rollout_corr/"):  # their patterns would match any name
        return False
    roles = {"actor", "critic", "train", "val"}
    fillers = (found.groups() for pattern in patterns if (found := pattern.fullmatch(name)))
    return any(all(part.isupper() or part in roles or part in constants for part in filler) for filler in fillers)


def documented_metrics() -> list[str]:
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_documented_metrics_are_emitted():
    names = documented_metrics()
    assert len(names) == len(set(names)) and len(names) > 50
    assert [name for name in names if not is_emitted(name)] == []
    assert not is_emitted("actor/no_such_metric") and not is_emitted("response_length/median")


def test_emitted_metrics_are_documented():
    """Names written whole in the controller, the trainer and the algorithms, and computed ones."""
    places = ("controller", "train", "data", "algorithms/kl.py", "algorithms/advantages", "algorithms/whitening.py")
    written = set(computed_metrics())
    for place in places:
        path = ROOT / "megarl" / place
        for file in [path] if path.is_file() else path.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Dict):
                    keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                    written |= {key for key in keys if isinstance(key, str) and METRIC.fullmatch(key)}
    assert len(written) > 40
    turned_into_another = {"perf/waited_s"}
    assert sorted(written - turned_into_another - set(documented_metrics())) == []


# -- README ----------------------------------------------------------------------------------------------------------


def test_the_picture_of_the_step_has_its_phases_in_order():
    source = (ROOT / "megarl/controller/step.py").read_text(encoding="utf-8")
    phases = re.findall(r'span\("(\w+)"\)', source)
    (picture,) = (
        body for language, body in blocks((ROOT / "README.md").read_text(encoding="utf-8")) if language == "mermaid"
    )
    assert [found[1] for line in picture if (found := re.match(r'\s+(\w+)\["\1<br/>', line))] == phases


def test_exit_codes_are_those_of_the_errors():
    classes = [errors.MegarlError]
    for cls in classes:
        classes += cls.__subclasses__()
    rows = re.findall(
        r"^\| (\d+) \| (\w+Error(?:, \w+Error)*) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M
    )
    listed = {name: int(code) for code, names in rows for name in names.split(", ")}
    assert listed == {cls.__name__: cls.exit_code for cls in classes if cls.__module__ == "megarl.errors"}


def test_the_example_of_a_reward_scores(tmp_path: Path):
    from megarl.rewards.base import RewardInput, as_result
    from megarl.rewards.function import FunctionReward

    (source,) = (body for language, body in blocks((ROOT / "docs/rewards.md").read_text()) if language == "python")
    file = tmp_path / "my_reward.py"
    file.write_text("\n".join(source))
    reward = FunctionReward(f"{file}:score")
    right, wrong = (as_result(reward(RewardInput("1 + 2 =", response, "3"))) for response in ("1 + 2 = 3", "two"))
    assert (right.score, right.extra) == (1.0, {"accuracy": 1.0, "has_number": 1.0})
    assert (wrong.score, wrong.extra) == (0.0, {"accuracy": 0.0, "has_number": 0.0})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_of_configuration_bind(page: Path, tmp_path: Path):
    """Each YAML block over a preset that leaves open what the block does not say."""
    for number, (_, body) in enumerate(found for found in blocks(page.read_text()) if found[0] == "yaml"):
        lines = body if any(line.startswith("defaults:") for line in body) else ["defaults: [grpo_7b, _self_]", *body]
        own = tmp_path / f"example{number}.yaml"
        own.write_text("\n".join(lines))
        load_train(str(own))
