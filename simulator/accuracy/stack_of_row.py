"""The software stack that a published run used: framework family, release era, graphs.

A stack is what a host overhead, an overlap and a multiplier belong to; it is told from the
framework's name, the source, the release in the notes and the year, by rules that also give
a source never seen before a sensible family.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from flopwright.simulator.accuracy.rows import Configuration

# (pattern in the text, framework family); the first match counts.
# In source or id: measurements whose framework column names parts of a stack or none.
_BY_SOURCE: Final[tuple[tuple[str, str], ...]] = (
    (r"mlcommons|mlperf", "mlperf"),
    (r"llm-?foundry|mosaicml", "llm_foundry"),
    (r"megatron-bridge|mbridge", "megatron_bridge"),
    (r"torchtitan", "torchtitan"),
)
_BY_FRAMEWORK: Final[tuple[tuple[str, str], ...]] = (
    (r"automodel", "automodel"),
    (r"megatron.?bridge", "megatron_bridge"),
    (r"megatron.?deepspeed|neox", "megatron_deepspeed"),
    (r"nemo", "nemo"),
    (r"mcore|megatron|megascale|mindspeed|galvatron|core_r\d", "megatron"),
    (r"torch.?titan", "torchtitan"),
    (r"interne", "internevo"),
    (r"foundry|composer|mosaic", "llm_foundry"),
    (r"colossal", "colossalai"),
    (r"maxtext|paxml|jax|levanter|xla|alpa", "jax"),
    (r"deepspeed|zero", "deepspeed"),
    (r"fsdp|metaseq|torchtune|kempnerforge|lingua|accelerate|trl|axolotl|llama.?factory|nanogpt"
     r"|litgpt|olmo|verl|swift|xtuner|transformers|hugging ?face|lightning|unsloth|openrlhf"
     r"|fairscale|\bhf\b|\bddp\b", "fsdp"),
    (r"primus|rocm|llmboost", "rocm"),
    (r"pytorch|torch", "fsdp"),
)  # fmt: skip
OTHER: Final = "other"
_TOKEN_DROP_UNTIL: Final = (25, 11)
_FAST_MOE_FROM: Final = (26, 6)


@dataclass(frozen=True, slots=True, order=True)
class StackKey:
    """A software stack.

    Attributes:
        framework: family ("nemo", "megatron_bridge", "fsdp", ...).
        era: release era: a year, a first release ("25.11"), or a mode of execution ("eager").
        family: "dense" or "moe" models, whose host overhead differs.
        graphs: whether the run was captured in CUDA graphs.
    """

    framework: str
    era: str
    family: Literal["dense", "moe"]
    graphs: bool = False

    def label(self) -> str:
        """Returns the key as one word, e.g. "megatron_bridge-25.11-moe"."""
        return "-".join((self.framework, self.era, self.family, *(["graphs"] * self.graphs)))


def stack_of(configuration: Configuration, moe: bool, gpu: str) -> StackKey:
    """Returns the stack of a configuration of a model with experts (or without) on a GPU."""
    framework = framework_of(configuration)
    family: Literal["dense", "moe"] = "moe" if moe else "dense"
    return StackKey(
        framework=framework,
        era=_era(framework, configuration),
        family=family,
        graphs=_graphs(framework, configuration, moe, gpu),
    )


def framework_of(configuration: Configuration) -> str:
    """Returns the framework family of a configuration."""
    where = f"{configuration.text('source')} {configuration.id}".lower()
    named = configuration.text("framework").lower()
    by_source = next((f for pattern, f in _BY_SOURCE if re.search(pattern, where)), None)
    by_name = next((f for pattern, f in _BY_FRAMEWORK if re.search(pattern, named)), None)
    if by_source is not None and not (by_name == "nemo" and by_source == "megatron_bridge"):
        return by_source
    return by_name or next((f for p, f in _BY_FRAMEWORK if re.search(p, where)), OTHER)


def _era(framework: str, configuration: Configuration) -> str:
    text = f"{configuration.id} {configuration.notes}".lower()
    year = configuration.whole("year")
    if framework == "megatron_bridge":
        release = container_release(configuration)
        if release is None:
            return "25.11"
        if release < _TOKEN_DROP_UNTIL:
            return "25.09"
        return "26.06" if release >= _FAST_MOE_FROM else "25.11"
    if framework == "torchtitan":
        return "eager" if re.search(r"\beager\b", text) else "compiled"
    if framework in ("megatron", "megatron_deepspeed"):
        unfused = re.search(r"vtrain|sc21|2021|2022", _named(configuration)) is not None
        return "unfused" if unfused or (year or 2024) <= 2022 else "fused"
    return str(year) if year is not None else "undated"


def _named(configuration: Configuration) -> str:
    return f"{configuration.text('framework')} {configuration.text('source')}".lower()


def container_release(configuration: Configuration) -> tuple[int, ...] | None:
    """Returns the (year, month, patch) of the container that a run names, None without one."""
    for text in (configuration.notes, configuration.text("framework"), configuration.id):
        found = re.search(r"(?<![\d.])(2\d)\.(\d\d)(?:\.(\d\d))?(?![\d])", text)
        if found:
            return tuple(int(part) for part in found.groups() if part)
    return None


def _graphs(framework: str, configuration: Configuration, moe: bool, gpu: str) -> bool:
    said = f"{configuration.notes} {configuration.text('model')}".lower()
    if re.search(r"(without|no) (full )?(cuda|hip) ?graph", said):
        return False
    if re.search(r"(cuda|hip) ?graph", said) and "graphs on moe_router" not in said:
        return True
    # Bridge's own recipes capture dropless experts in graphs on the Grace platforms.
    release = container_release(configuration)
    grace = gpu.startswith("gb")
    dropless = release is not None and release >= _TOKEN_DROP_UNTIL
    return framework == "megatron_bridge" and moe and grace and dropless
