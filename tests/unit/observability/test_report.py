from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl import cli
from megarl.errors import ConfigError
from megarl.observability.report import report

MIB = 2**20
FORECAST = {
    "capacity": 80 * 1024 * MIB,
    "ranks": {
        "actor": {
            "weights": 10 * MIB, "gradients": 20 * MIB, "optimizer": 60 * MIB,
            "training": 30 * MIB, "inference": 5 * MIB,
        },
        "reference": {"weights": 10 * MIB, "gradients": 0, "optimizer": 0, "training": 0, "inference": 5 * MIB},
    },
}  # fmt: skip


def line(step: int, **metrics: float) -> str:
    return json.dumps({"step": step, "time": 0, "metrics": {"timing_s/rollout": 2.0, "timing_s/step": 3.0, **metrics}})


def write(directory: Path, *lines: str, forecast: object = FORECAST) -> Path:
    (directory / "metrics.jsonl").write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
    if forecast is not None:
        (directory / "forecast.json").write_text(json.dumps(forecast), encoding="utf-8")
    return directory


def test_forecast_stands_beside_what_was_measured(tmp_path: Path):
    measured = {
        "memory/actor/weights": 10 * MIB,
        "memory/actor/optimizer": 50 * MIB,
        "memory/actor/update_peak": 125 * MIB,
    }
    text = report(write(tmp_path, line(1, **{"timing_s/step": 9.0}), line(2, **measured)))
    rows = {" ".join(row.split()[:2]): row.split()[2:] for row in text.splitlines()}
    assert rows["actor weights"] == ["10.0", "10.0", "+0.0%"]
    assert rows["actor optimizer"] == ["60.0", "50.0", "+20.0%"]
    # State of actor and reference, and the pass: 90 + 10 + 30.
    assert rows["actor update_peak"] == ["130.0", "125.0", "+4.0%"]
    assert "step                  3.000" in text, "the first step warms up"


def test_a_number_without_a_forecast_is_shown_alone(tmp_path: Path):
    measured = {"memory/critic/weights": 10 * MIB, "memory/actor/update_activations": 24 * MIB}
    logged = {**measured, "memory/actor/update_activations_forecast": 30 * MIB}
    text = report(write(tmp_path, line(2, **logged)))
    rows = {" ".join(row.split()[:2]): row.split()[2:] for row in text.splitlines()}
    assert rows["critic weights"] == ["10.0"]
    assert rows["actor update_activations"] == ["30.0", "24.0", "+25.0%"]
    assert "_forecast" not in text


def test_predicted_seconds_stand_beside_those_of_the_run(tmp_path: Path):
    text = report(
        write(tmp_path, line(2), forecast={**FORECAST, "seconds": {"rollout": 2.5, "turns": 1.0, "step": 2.4}})
    )
    rows = {row.split()[0]: row.split()[1:] for row in text.splitlines()}
    assert rows["rollout"] == ["2.000", "2.500", "+25.0%"]
    assert rows["step"] == ["3.000", "2.400", "-20.0%"]
    assert "turns" not in rows, "a phase that was not measured has nothing to stand beside"
    assert "forecast is for" not in report(write(tmp_path, line(2)))


def test_a_run_without_forecast_or_measurement_says_so(tmp_path: Path):
    assert "no forecast.json" in report(write(tmp_path, line(1), forecast=None))
    assert "not measured yet" in report(write(tmp_path, line(1)))


def test_a_directory_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is missing"):
        report(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 2
    write(tmp_path, line(1))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "rollout" in capsys.readouterr().out
