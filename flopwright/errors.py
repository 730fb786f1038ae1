"""What went wrong with an input: every violation at once, each with its nearest fix.

User input never ends in a traceback or a bare assertion: it ends in an `InputError`,
which the command line renders and turns into exit code 2.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

EXIT_BAD_INPUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken rule.

    Attributes:
        rule: what must hold, in words.
        field: dotted path of the offending field ("parallel.ep"); empty for the file itself.
        value: what was found, as text; empty if nothing was.
        limit: the bound that was crossed, with its unit, where there is one.
        nearest_fix: the smallest change that would satisfy the rule; empty if unknown.
        file: file the field came from, and `line` its 1-based line (0 if unknown).
    """

    rule: str
    field: str = ""
    value: str = ""
    limit: str = ""
    nearest_fix: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = (
            f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        )
        what = f"{self.field} ({self.value})" if self.value else self.field
        limit = f" (limit: {self.limit})" if self.limit else ""
        fix = f"; {self.nearest_fix}" if self.nearest_fix else ""
        return f"{where}{what}{': ' if what else ''}{self.rule}{limit}{fix}"

    def as_dict(self) -> dict[str, str | int]:
        """Returns the violation as plain data for `--json`."""
        return asdict(self)


class InputError(Exception):
    """Input that cannot be used, with all its violations.

    Args:
        violations: at least one; a bare string is turned into one violation.
    """

    def __init__(self, violations: str | Violation | Iterable[Violation]) -> None:
        if isinstance(violations, str):
            violations = Violation(rule=violations)
        if isinstance(violations, Violation):
            violations = (violations,)
        self.violations: tuple[Violation, ...] = tuple(violations)
        super().__init__("\n".join(str(v) for v in self.violations))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns 'did you mean ...?' for the closest known word, or the list of known words."""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known: {', '.join(names)}" if names else ""


def divisors(of: int) -> list[int]:
    """Returns the divisors of a positive number, sorted."""
    low = [d for d in range(1, math.isqrt(of) + 1) if of % d == 0]
    high = [of // d for d in reversed(low) if d * d != of]
    return low + high


def nearest_divisors(value: int, of: int) -> Sequence[int]:
    """Returns up to two divisors of `of` nearest to `value`, for 'nearest valid' hints."""
    return sorted(sorted(divisors(of), key=lambda d: (abs(d - value), d))[:2])
