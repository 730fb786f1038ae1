"""The picture of the study: losses against tokens beside the bars, logits of the explosion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

COLOURS: Final = {"adamw": "#c2571a", "muonclip": "#1f6f8b"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draws losses against tokens beside the bars, and the logits of the explosion."""
    from matplotlib.figure import Figure

    parts = [part for part in ("main", "explosion") if part in result]
    figure = Figure(figsize=(6.4 * len(parts), 4.2), layout="constrained")
    for axes, part in zip(figure.subplots(1, len(parts), squeeze=False)[0], parts, strict=True):
        (_draw_losses if part == "main" else _draw_logits)(axes, result[part])
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=110)


def _draw_losses(axes: Any, main: Mapping[str, Any]) -> None:
    tokens_of_step = main["tokens"] / main["steps"] / 1e6
    for name, curve in main["curves"].items():
        at = [step * tokens_of_step for step, _ in curve]
        label = f"{name}, rate {main['rates'][name]:g}: held out {main['held_out'][name]:.3f}"
        axes.plot(at, [y for _, y in curve], color=COLOURS[name], label=label)
        axes.plot(at[-1], main["held_out"][name], "o", color=COLOURS[name])
    for bar, style in (("unigram", ":"), ("bigram", "--")):
        label = f"{bar} counts {main[bar]:.3f}"
        axes.axhline(main[bar], color="#555555", linestyle=style, label=label)
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel("nats a token")
    axes.set_title("Training loss; dots: held-out text")


def _draw_logits(axes: Any, found: Mapping[str, Any]) -> None:
    words = {"recorded": "Muon", "clipped": "Muon with QK-Clip"}
    colours = {"recorded": COLOURS["adamw"], "clipped": COLOURS["muonclip"]}
    for name, curve in found["curves"].items():
        axes.semilogy(
            [x for x, _ in curve], [y for _, y in curve], color=colours[name], label=words[name]
        )
    axes.axhline(found["tau"], color="#555555", linestyle="--", label=f"bound {found['tau']:g}")
    axes.set_xlabel(f"steps at learning rate {found['learning_rate']:g}")
    axes.set_ylabel("largest attention logit")
    axes.set_title("A planted explosion")
