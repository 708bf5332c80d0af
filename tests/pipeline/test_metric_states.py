"""What metrics have seen, in states and in attributes of their own, taken over by another process's."""

from __future__ import annotations

import torch
import torchmetrics
from torch import nn

from lightning_bigmodel.pipeline.metrics import MetricLink
from tests.strategies.resume_modules import Kept


class _Root(nn.Module):
    def __init__(self, num_kept: int) -> None:
        super().__init__()
        self.kept = Kept(num_kept)
        self.range = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())
        self.untouched = torchmetrics.MeanMetric()


def test_what_was_seen_is_taken_over_and_settings_stay_those_of_the_code() -> None:
    """A window of the length that an older version of the code had."""
    first, second = _Root(2), _Root(3)
    before, after = MetricLink(first, None, None), MetricLink(second, None, None)
    for value in (4.0, 1.0, 2.0):
        first.kept.update(torch.tensor(value))
        first.range(torch.tensor(value))
    saved = before.saved_states()
    assert set(saved) == {"kept", "range", "range._base_metric"}
    assert set(saved["kept"]["rest"]) == {"values", "least"}
    first.kept.update(torch.tensor(9.0))
    after.load_states(saved)
    assert second.kept.values == [4.0, 1.0, 2.0]
    assert second.kept.compute() == 7 + 100 * 7 + 1000
    assert first.kept.compute() == 16 + 100 * 11 + 1000
    assert {key: float(value) for key, value in second.range.compute().items()} == {"raw": 2.0, "max": 4.0, "min": 1.0}
    assert after.saved_states().keys() == saved.keys()
    for link in (before, after):
        link.close()
