from __future__ import annotations

import pytest

from megarl.observability.memory import MIB, expected_bytes, memory_lines

RANKS = {
    "actor": {"weights": 1, "gradients": 2, "optimizer": 4, "training": 100, "inference": 50},
    "reference": {"weights": 8, "gradients": 0, "optimizer": 0, "training": 0, "inference": 30},
    "critic": {"weights": 16, "gradients": 32, "optimizer": 64, "training": 200, "inference": 70},
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("actor/optimizer", 4),
        ("actor/update_activations", 100),
        ("actor/update_peak", 1 + 2 + 4 + 8 + 100),
        ("actor/log_probs_peak", 1 + 2 + 4 + 8 + 50),
        ("reference/log_probs_peak", 1 + 2 + 4 + 8 + 30),
        ("critic/values_activations", 70),
        ("critic/update_peak", 16 + 32 + 64 + 200),
        ("critic/resident", None),
        ("teacher/weights", None),
    ],
)
def test_a_number_has_the_forecast_of_its_part(name: str, expected: int | None):
    assert expected_bytes(RANKS, name) == expected


def test_every_measured_phase_has_a_line_with_all_its_parts():
    numbers = {
        "memory/actor/weights": 10 * MIB,
        "memory/actor/weights_forecast": 11 * MIB,
        "memory/actor/gradients": 20 * MIB,
        "memory/actor/optimizer": 0.0,
        "memory/actor/log_probs_activations": 3 * MIB,
        "memory/actor/log_probs_peak": 33 * MIB,
        "memory/actor/log_probs_peak_forecast": 40 * MIB,
        "memory/actor/update_activations": 5 * MIB,
        "memory/actor/update_activations_forecast": 6 * MIB,
        "timing_s/step": 1.0,
    }
    assert list(memory_lines(numbers)) == [
        "memory of actor in log_probs, MiB (forecast): "
        "weights 10.0 (11.0), gradients 20.0, optimizer 0.0, activations 3.0, peak 33.0 (40.0)",
        "memory of actor in update, MiB (forecast): "
        "weights 10.0 (11.0), gradients 20.0, optimizer 0.0, activations 5.0 (6.0)",
    ]
