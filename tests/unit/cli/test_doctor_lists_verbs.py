"""doctor knows every verb but itself."""

from flopwright.cli import VERBS
from flopwright.cli.doctor import NEEDS


def test_every_verb_is_judged() -> None:
    assert set(NEEDS) == set(VERBS) - {"doctor"}
