"""Planted bottlenecks that are explained, on the seeds that the rules were tuned on."""

import pytest

from benchmarks import explain


@pytest.mark.parametrize("cause", ["train", "replica"])
def test_explanation_names_a_planted_cause_and_predicts_its_override(cause, monkeypatch):
    monkeypatch.setattr(explain, "STEPS", 12)
    result = explain.judge(cause, seed=0, held_out=False)
    assert result.is_right
    assert sum(result.explanation.seconds.values()) == pytest.approx(
        sum(step.end - step.start for step in result.explanation.steps)
    )
    assert result.explanation.predictions[0].gain == pytest.approx(result.gain, abs=0.4 * (1 + result.gain))
