"""The all-reduce of the pre-flight, over gloo."""

from __future__ import annotations

import pytest

from megarl.platform.bandwidth import main


@pytest.mark.slow
def test_two_ranks_measure_a_bandwidth(capsys: pytest.CaptureFixture[str]):
    assert main(["--device=cpu", "--ranks=2", "--mib=1"]) == 0
    assert 0.001 < float(capsys.readouterr().out) < 1000
