"""Plans with the same pipeline: what each chunk of layers costs, and each stage's step end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.plan.schedules.placement import chunk_table
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.alike import Alike, alike_in_micro_batch, alike_on_a_rank
from flopwright.simulator.training.blocks import Blocks
from flopwright.simulator.training.candidates import RECOMPUTES, SCHEDULES, Candidates
from flopwright.simulator.training.combos import ShardCombos
from flopwright.simulator.training.layers import chunk_kinds
from flopwright.simulator.training.micro_batch import MicroBatch, micro_batch
from flopwright.simulator.training.overlap import Classes as Classes
from flopwright.simulator.training.picker import Picker, first_layers
from flopwright.simulator.training.recompute import policy_index
from flopwright.simulator.training.step_end import StepEnd, data_traffic, step_end
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """C plans with one pp, vpp, schedule and layout. Chunk axes first, candidates last.

    Attributes:
        micro: one micro-batch of each of `kinds`; the properties spread it over candidates.
        params: numbers a rank of each stage holds, by `ranks`, (pp, K).
        assumptions: what pricing assumed.
    """

    pp: int
    vpp: int
    candidates: Candidates
    combos: ShardCombos
    kinds: Alike
    ranks: Alike
    micro: MicroBatch
    params: ParamCounts
    end: StepEnd
    assumptions: tuple[str, ...]

    @property
    def pick(self) -> Picker:
        """The layers of each chunk."""
        return self.micro.pick

    @property
    def stages(self) -> NDArray[np.int64]:
        """Chunks by (place on the stage, stage)."""
        return self.pick.stages

    @property
    def forward(self) -> Classes:
        """Exposed seconds of one micro-batch's forward by time class, (chunks, C)."""
        return self._classes(self.micro.forward)

    @property
    def backward(self) -> Classes:
        """Exposed seconds of one micro-batch's backward by time class, (chunks, C)."""
        return self._classes(self.micro.backward)

    @property
    def forward_s(self) -> Array:
        """All classes of the forward together, (chunks, C)."""
        return self.kinds.spread(self.micro.forward_s)

    @property
    def backward_s(self) -> Array:
        """All classes of the backward together, (chunks, C)."""
        return self.kinds.spread(self.micro.backward_s)

    @property
    def weight_s(self) -> Array:
        """Seconds of the backward that make weight gradients, (chunks, C)."""
        return self.kinds.spread(self.micro.weight_s)

    @property
    def kernel_s(self) -> Classes:
        """Seconds of compute of one micro-batch by kernel class (kernels.py), (chunks, C).

        Forward, backward and what runs again, without the factors of time classes.
        """
        scaled = {k: v * self.micro.core_share for k, v in self.pick.classes("kernels").items()}
        return self._classes(scaled)

    @property
    def send_s(self) -> Array:
        """Seconds of moving a micro-batch between chunk c and c + 1, (chunks, C).

        0 where both stand on one stage and for the last chunk.
        """
        return self.kinds.spread(self.micro.send_s)

    @property
    def send_bytes(self) -> Array:
        """What such a move carries, 0 from the last chunk, (chunks, C)."""
        return self.kinds.spread(self.micro.send_bytes)

    @property
    def saved_bytes(self) -> Array:
        """Kept by a chunk for one micro-batch, but what FP8 storage applies to, (chunks, C)."""
        return self.kinds.spread(self.micro.saved_bytes)

    @property
    def saved_fp8_bytes(self) -> Array:
        """What FP8 storage applies to, (chunks, C)."""
        return self.kinds.spread(self.micro.saved_fp8_bytes)

    @property
    def backward_bytes(self) -> Array:
        """The fullest moment of a chunk's backward beyond what it kept, (chunks, C).

        What is made again is included.
        """
        return self.kinds.spread(self.micro.backward_bytes)

    @property
    def flops(self) -> Array:
        """Executed by a rank of each chunk for one micro-batch, (chunks, C)."""
        return self.kinds.spread(self.pick.of("flops"))

    @property
    def comm_bytes(self) -> Classes:
        """Payload by group for one micro-batch, summed over a stage, (pp, C)."""
        return self._classes(self.micro.comm_bytes)

    def _classes(self, values: Classes) -> Classes:
        return {name: self.kinds.spread(v) for name, v in values.items()}


def pipeline_costs(
    scenario: Scenario,
    candidates: Candidates,
    combos: ShardCombos,
    blocks: Blocks,
    calibration: Calibration,
) -> PipelineCosts:
    """Returns the costs of candidates that share pp, vpp, schedule, layout and recompute depth.

    Args:
        combos: with the `index` of exactly these candidates.
    """
    kinds, ranks = alike_in_micro_batch(candidates, combos), alike_on_a_rank(candidates, combos)
    pick = _picker(scenario, candidates, blocks)
    held = _seen_by(pick, ranks)
    params = _with_tied_head(scenario, ranks.candidates, held.params())
    traffic = data_traffic(scenario, ranks.candidates, calibration, params)
    of = ranks.of[kinds.first]  # the rank of each micro-batch
    data_s = (traffic.forward_s[:, of], traffic.backward_s[:, of])
    micro = micro_batch(
        scenario, kinds, calibration, _seen_by(pick, kinds), params.take(of), data_s
    )
    beside = (kinds.spread(micro.beside_s[0]), kinds.spread(micro.beside_s[1]))
    muon_s = (held.by_stage(held.of("muon_dense_s")), held.by_stage(held.of("muon_expert_s")))
    end = step_end(scenario, ranks, calibration, params, traffic, beside, muon_s, blocks.update)
    return PipelineCosts(
        pp=int(candidates.pp[0]),
        vpp=int(candidates.vpp[0]),
        candidates=candidates,
        combos=combos,
        kinds=kinds,
        ranks=ranks,
        micro=micro,
        params=params,
        end=end,
        assumptions=(*blocks.assumptions, *end.assumptions, *micro.assumptions),
    )


def _picker(scenario: Scenario, candidates: Candidates, blocks: Blocks) -> Picker:
    """Returns the layers of each chunk and their tables, nobody's yet."""
    pp, vpp = int(candidates.pp[0]), int(candidates.vpp[0])
    layout = candidates.layouts[candidates.layout[0]] if candidates.layout[0] >= 0 else None
    kinds = chunk_kinds(scenario.model, pp, vpp, layout)
    depth = int(candidates.recompute_layers[0])
    whole = depth < 0 or int(candidates.recompute[0]) != RECOMPUTES.index("full")
    stages = np.array(chunk_table(SCHEDULES[candidates.schedule[0]], pp, vpp))
    nobody = np.zeros(0, np.int64)
    return Picker(
        kinds=kinds,
        again=None if whole else first_layers(kinds, depth),
        tables=tuple(blocks.tables.values()),
        policy=nobody,
        column=nobody,
        stages=stages,
        round=bool((np.diff(stages.ravel()) == 1).all()),
    )


def _seen_by(pick: Picker, kinds: Alike) -> Picker:
    """Returns the layers' tables as these kinds of candidates see them."""
    return replace(pick, policy=policy_index(kinds.candidates), column=kinds.combos.index)


def _with_tied_head(
    scenario: Scenario, candidates: Candidates, params: ParamCounts
) -> ParamCounts:
    """Adds the table's second copy where the head that shares it stands on another stage."""
    model = scenario.model
    if not model.tied_embeddings or len(params.held) == 1:
        return params
    copy = np.zeros(params.held.shape)
    copy[-1] = np.ceil(model.vocab_size * model.hidden_size / candidates.tp)
    return ParamCounts(
        held=params.held + copy,
        dense=params.dense + copy,
        dense_matrix=params.dense_matrix,
        expert=params.expert,
    )
