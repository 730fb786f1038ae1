"""How many forwards a stage has run whose backward is not done: what bounds its activations."""

from __future__ import annotations

from flopwright.plan.schedules.placement import Pipeline


def max_in_flight(plan: Pipeline, stage: int, num_microbatches: int) -> int:
    """Returns the most chunk forwards that `stage` holds activations of at once.

    A forward is let go by its backward, or by its weight gradient where the backward is cut
    in two. One chunk of 1/vpp of the stage's layers counts 1.

        gpipe               m                            arXiv 1811.06965
        1f1b                pp - s                       arXiv 2104.04473, 2.2
        interleaved_1f1b    2 (pp - s - 1) + (vpp - 1) pp + 1     Megatron-LM
        the overlapping     one more
        zb_h1               vpp pp, 1f1b's first stage   arXiv 2401.10241, 2.1
        zb_v                2 pp halves, the same        arXiv 2401.10241, 6
        dualpipe_v          2 pp + 1 halves              repo deepseek-ai/DualPipe, README

    and never more than the step has.
    """
    pp, vpp, m = plan.pp, plan.vpp, num_microbatches
    every = m * vpp
    interleaved = 2 * (pp - stage - 1) + (vpp - 1) * pp + 1
    bound = {
        "gpipe": m,
        "1f1b": pp - stage,
        "interleaved_1f1b": interleaved,
        "interleaved_1f1b_overlap": interleaved + 1,
        "zb_h1": vpp * pp,
        "zb_v": min(2 * pp, m + stage + 1),
        "dualpipe_v": 2 * pp + 1,
    }[plan.schedule]
    return min(every, bound)
