"""A file of text domains and mixtures of them by weight. Imports nothing heavy.

    domains:
      code: src/           # as --text takes them, relative to the file
      prose: books.jsonl
    mixtures:
      base: {code: 1, prose: 3}
      anneal: {code: 1, prose: 1}

A workload (a phase of a run) names the mixture that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Self

from pydantic import Field, NonNegativeFloat, StringConstraints, model_validator

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.base import Spec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

# Samples in which every domain has exactly its share.
BLOCK: Final = 1000
# Of domains, which are names of folders too.
DomainName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)
]


class MixtureFile(Spec):
    """Domains of text and mixtures of them.

    Attributes:
        domains: what each is read from, by name.
        mixtures: weights of domains, by name; a domain that is left out has none.
    """

    domains: dict[DomainName, str] = Field(min_length=1)
    mixtures: dict[str, dict[str, NonNegativeFloat]] = Field(min_length=1)

    @model_validator(mode="after")
    def _weights_are_of_domains(self) -> Self:
        for name, weights in self.mixtures.items():
            unknown = sorted(weights.keys() - self.domains.keys())
            if unknown:
                raise ValueError(f"mixture {name!r} weighs {unknown[0]!r}, which is no domain")
            if not sum(weights.values()) > 0:
                raise ValueError(f"mixture {name!r} weighs nothing")
            small = [d for d, w in weights.items() if 0 < w < sum(weights.values()) / BLOCK]
            if small:
                raise ValueError(f"mixture {name!r}: {small[0]!r} is below 1 in {BLOCK}")
        return self


def is_mixture(path: Path | None) -> bool:
    """Whether a text is named by a file of domains."""
    return path is not None and path.suffix in {".yaml", ".yml"}


def load_mixtures(path: Path) -> MixtureFile:
    """Returns a file's domains and mixtures.

    Raises:
        InputError: unreadable or invalid, with line and field.
    """
    found: MixtureFile = validate(MixtureFile, read_yaml(path))
    return found


def chosen_weights(file: MixtureFile, name: str | None, path: Path) -> dict[str, float]:
    """Returns the weights of the mixture that a workload names; of the only one for None.

    Raises:
        InputError: there is no such mixture, or several to choose from.
    """
    if name is None and len(file.mixtures) == 1:
        return dict(next(iter(file.mixtures.values())))
    if name not in file.mixtures:
        known = ", ".join(file.mixtures)
        raise InputError(
            Violation(
                file=str(path),
                field="workload.mixture",
                value=repr(name),
                rule=f"the file has the mixtures {known}",
                nearest_fix="name one of them" if name is None else did_you_mean(
                    name, file.mixtures
                ),
            )
        )  # fmt: skip
    return dict(file.mixtures[name])


def quotas(weights: Mapping[str, float]) -> dict[str, int]:
    """Returns samples of each domain in a block: by weight, largest remainders rounded up."""
    total = sum(weights.values())
    exact = {name: BLOCK * weight / total for name, weight in weights.items()}
    found = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: found[name] - exact[name])
    for name in by_remainder[: BLOCK - sum(found.values())]:
        found[name] += 1
    return found
