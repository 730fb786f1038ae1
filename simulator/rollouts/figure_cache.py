"""The use of the cache over one generation phase, as a panel of a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from flopwright.simulator.rollouts.figure import BLUE, LIGHT, RED, head
from flopwright.simulator.rollouts.record import RoundRecord
from flopwright.simulator.rollouts.state import KINDS


def draw_cache(axis: Any, record: RoundRecord, capacity_tokens: int | None) -> None:
    """Draws the fullest and the mean instance's cache over the phase, and the preemptions."""
    times, fullest, mean, lost = cache_over_time(record)
    scale = 1e6 if max(fullest, default=0) >= 2e6 else 1e3
    axis.plot(times, [v / scale for v in fullest], color=BLUE, linewidth=1.6, label="fullest")
    if mean != fullest:
        axis.plot(times, [v / scale for v in mean], color=LIGHT, linewidth=1.6, label="mean")
    if capacity_tokens is not None:
        axis.axhline(capacity_tokens / scale, color=RED, linewidth=1, linestyle="--")
        axis.annotate(
            "capacity", (0, capacity_tokens / scale), xytext=(4, -11),
            textcoords="offset points", color=RED, fontsize=9,
        )  # fmt: skip
    if lost:
        axis.plot(
            lost, [0.02] * len(lost), "|", color=RED, markersize=7,
            transform=axis.get_xaxis_transform(), label=f"{len(lost):,} preemptions",
        )  # fmt: skip
    axis.set_xlim(left=0)
    axis.set_ylim(0, 1.08 * max(*fullest, capacity_tokens or 0, 1) / scale)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
    unit = "million" if scale == 1e6 else "thousand"
    head(axis, "cache over one generation phase", "s", f"{unit} tokens of an instance")


def cache_over_time(
    record: RoundRecord, points: int = 400
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Returns times, tokens of cache of the fullest and of the mean instance, and preemptions.

    `record` must have its log. Between two of the times the most is taken; the last list has
    the seconds at which a cache was taken away.
    """
    log = record.phase.log
    assert log is not None
    count = max(1, int(log.instance.max(initial=0)) + 1)
    now = np.zeros(count)
    edges = np.linspace(0.0, max(record.phase.end_s, 1e-9), points)
    fullest, mean = np.zeros(points), np.zeros(points)
    cell = np.searchsorted(edges, log.time_s).clip(0, points - 1)
    at = 0
    for place, instance, tokens in zip(
        cell.tolist(), log.instance.tolist(), log.kv_tokens.tolist(), strict=True
    ):
        while at < place:
            at += 1
            fullest[at], mean[at] = now.max(), now.mean()
        if instance >= 0:
            now[instance] = tokens
            fullest[at], mean[at] = max(fullest[at], now.max()), max(mean[at], now.mean())
    fullest[at + 1 :], mean[at + 1 :] = now.max(), now.mean()
    lost = log.time_s[log.kind == KINDS.index("preempt")]
    return edges.tolist(), fullest.tolist(), mean.tolist(), lost.tolist()
