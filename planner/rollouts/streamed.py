"""An asynchronous loop of the search: its versions in steady state."""

from __future__ import annotations

from flopwright.planner.rollouts.candidate import Candidate
from flopwright.planner.rollouts.simulated import Fidelity
from flopwright.simulator.rollouts.drivers import Kind
from flopwright.simulator.rollouts.streaming import Lending, StreamReport, stream


def lending_of(candidate: Candidate) -> Lending | None:
    """Returns how the GPUs that train generate too while they wait; None: they do not."""
    over = candidate.hand_over
    if not candidate.choice.elastic:
        return None
    return Lending(
        instances=over.lent_gpus // candidate.choice.gpus_per_instance,
        switch_s=over.lend_s,
        back_s=over.give_back_s,
        below=over.lent_below,
    )


def streamed(candidate: Candidate, fidelity: Fidelity, seed: int, loop: Kind) -> StreamReport:
    """Returns steady versions of an asynchronous candidate.

    Raises:
        InputError: the round cannot run.
    """
    assert candidate.scenario is not None
    bound = candidate.choice.staleness_bound
    assert bound is not None
    return stream(
        candidate.scenario,
        bound,
        rounds=fidelity.rounds,
        seed=seed,
        lending=lending_of(candidate),
        loop=loop,
        warmup=bound + 1 if fidelity.short else None,
    )
