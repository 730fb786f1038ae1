"""Seconds of a plan's actions, and the factors by which ranks differ from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array
from flopwright.simulator.training.program import Family, Op, Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of actions; each (chunks or stages, ...) with equal trailing axes.

    Attributes:
        forward_s, backward_s: by chunk, everything that happens inside.
        send_s: by chunk c: from chunk c to c + 1 and, for gradients, back.
        reduce_s, step_s: by stage; norm_s: what all stages wait for before the step.
        weight_s, recompute_s: the parts of `backward_s` that are weight gradients, and what
            is made again; 0 if not given.
        forward_exchange_s, backward_exchange_s: the parts of forward_s and backward_s in
            which ranks exchange tokens with other replicas (experts); 0 if not given.
        forward_comm_s, backward_comm_s, step_comm_s: the parts of forward_s, backward_s and
            step_s in which a rank computes nothing, exchanges apart; 0 if not given.
        offload_s, fetch_s: a micro-batch's copy to the host and back, by chunk.
        gather_s: collecting a chunk's weights, by chunk.
    """

    forward_s: Array
    backward_s: Array
    send_s: Array
    reduce_s: Array
    step_s: Array
    norm_s: ArrayLike = 0.0
    weight_s: Array | None = None
    recompute_s: Array | None = None
    forward_exchange_s: Array | None = None
    backward_exchange_s: Array | None = None
    forward_comm_s: Array | None = None
    backward_comm_s: Array | None = None
    step_comm_s: Array | None = None
    offload_s: Array | None = None
    fetch_s: Array | None = None
    gather_s: Array | None = None

    @property
    def columns(self) -> tuple[int, ...]:
        """The trailing axes."""
        return self.forward_s.shape[1:]

    def parts(self, program: Program) -> tuple[Array, Array]:
        """Returns (own, exchange) seconds by row of the program, (rows, ...).

        An entry takes both, one after the other; a pair's row holds all of it as its own.
        """
        zero = np.zeros((program.num_chunks, *self.columns))

        def given(values: Array | None) -> Array:
            return zero if values is None else values

        f_exchange, b_exchange = given(self.forward_exchange_s), given(self.backward_exchange_s)
        again, weight = given(self.recompute_s), given(self.weight_s)
        backward = self.backward_s - b_exchange
        own = {
            Family.FORWARD: self.forward_s - f_exchange,
            Family.BACKWARD: backward,
            Family.BACKWARD_REST: backward - again,
            Family.INPUT: backward - weight,
            Family.INPUT_REST: backward - weight - again,
            Family.WEIGHT: weight,
            Family.RECOMPUTE: again,
            Family.SEND: self.send_s,
            Family.OFFLOAD: given(self.offload_s),
            Family.FETCH: given(self.fetch_s),
            Family.GATHER: given(self.gather_s),
        }
        exchange = dict.fromkeys(own, zero)
        exchange[Family.FORWARD] = f_exchange
        for family in (Family.BACKWARD, Family.BACKWARD_REST, Family.INPUT, Family.INPUT_REST):
            exchange[family] = b_exchange
        # Chunks that reduce by themselves share their stage's time.
        parts = np.array(program.reductions).reshape(-1, *(1 for _ in self.columns))
        ends = np.concatenate([self.reduce_s / parts, self.step_s])
        own_rows = np.concatenate([*(own[f] for f in own), ends])
        exchange_rows = np.concatenate([*(exchange[f] for f in own), np.zeros_like(ends)])
        assert len(own_rows) == program.num_rows, "as many rows as the program counts"
        if not program.pairs:
            return own_rows, exchange_rows
        first, second = (np.array(side) for side in zip(*program.pairs, strict=True))
        both = pair_seconds(
            own_rows[first], exchange_rows[first], own_rows[second], exchange_rows[second]
        )
        return (
            np.concatenate([own_rows, both]),
            np.concatenate([exchange_rows, np.zeros_like(both)]),
        )

    def comm(self, program: Program) -> Array:
        """Returns the parts of `parts`' own seconds in which a rank computes nothing, (rows,)."""
        out = np.zeros(program.num_rows + len(program.pairs))
        chunks = program.num_chunks
        backwards = (Family.BACKWARD, Family.BACKWARD_REST, Family.INPUT, Family.INPUT_REST)
        for family, seconds in (
            (Family.FORWARD, self.forward_comm_s),
            *((family, self.backward_comm_s) for family in backwards),
        ):
            if seconds is not None:
                out[family * chunks : (family + 1) * chunks] = seconds
        if self.step_comm_s is not None:
            out[program.num_rows - program.num_stages : program.num_rows] = self.step_comm_s
        return out


def pair_seconds(
    own1: ArrayLike, exchange1: ArrayLike, own2: ArrayLike, exchange2: ArrayLike
) -> Array:
    """Returns how long two actions take that hide each other's exchanges behind their own work.

    Each needs its own work and exchange one after the other; the stage works on one of them
    at a time, and so do the links: the longest of the four is how long both take at least.
    """
    work, links = np.add(own1, own2), np.add(exchange1, exchange2)
    each = np.maximum(np.add(own1, exchange1), np.add(own2, exchange2))
    return np.asarray(np.maximum(np.maximum(work, links), each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """How ranks differ: each is a stage of one of the data-parallel replicas.

    Attributes:
        factors: on the seconds of every entry that computes, by stage (places, samples,
            replicas).
        links: on the seconds of what a rank sends, (stages, replicas); a collective is as
            slow as its slowest member.
        group: replicas that exchange tokens with each other, and so wait for each other.
    """

    factors: tuple[Array, ...]
    links: Array
    group: int = 1

    @property
    def samples(self) -> int:
        """Independent steps."""
        return int(self.factors[0].shape[1])

    @property
    def replicas(self) -> int:
        """Data-parallel replicas that differ."""
        return int(self.factors[0].shape[2])

    def only(self, sample: int) -> Disturbance:
        """Returns one sample of it."""
        part = tuple(f[:, sample : sample + 1] for f in self.factors)
        return Disturbance(factors=part, links=self.links, group=self.group)


def disturbed_seconds(
    program: Program, durations: Durations, disturbance: Disturbance
) -> tuple[list[Array], list[Array]]:
    """Returns (own, exchange) seconds of every entry, by stage (places, samples, replicas).

    What a step gathers counts as exchange.
    """
    assert not durations.columns, "one plan at a time is disturbed"
    own, exchange = durations.parts(program)
    comm = durations.comm(program)
    slowest = group_max(disturbance.links, disturbance.group)
    all_own, all_exchange = [], []
    for stage, factors in enumerate(disturbance.factors):
        codes = [c for c in program.codes if c.stage == stage]
        rows = np.array([c.row for c in codes])
        op = np.array([c.op for c in codes])
        links = disturbance.links[stage]
        still = np.where(op == Op.STEP, 0.0, comm[rows])[:, None, None]
        seconds = (own - comm)[rows][:, None, None] * factors + still
        seconds[op == Op.RECEIVE] = 0.0
        sends = (op == Op.LANE) & (rows // program.num_chunks == Family.SEND)
        seconds[sends] = own[rows[sends]][:, None, None] * links
        reduces = op == Op.REDUCE
        seconds[reduces] = own[rows[reduces]][:, None, None] * links.max()
        apart = np.where(op == Op.COMPUTE, exchange[rows], 0.0)[:, None, None] * slowest[stage]
        gathers = np.where(op == Op.STEP, comm[rows], 0.0)[:, None, None] * links.max()
        all_own.append(seconds)
        all_exchange.append(np.broadcast_to(apart + gathers, seconds.shape))
    for i, (halves, exchanges) in pair_parts(program, durations, disturbance).items():
        place = program.codes[i].place
        stage = program.codes[i].stage
        all_own[stage][place] = pair_seconds(halves[0], exchanges[0], halves[1], exchanges[1])
    return all_own, all_exchange


def pair_parts(
    program: Program, durations: Durations, disturbance: Disturbance
) -> dict[int, tuple[tuple[Array, Array], tuple[Array, Array]]]:
    """Returns own and exchange seconds of both halves, by entry of a second half."""
    if not program.pairs:
        return {}
    own, exchange = durations.parts(program)
    comm = durations.comm(program)
    slowest = group_max(disturbance.links, disturbance.group)
    out = {}
    for i, code in enumerate(program.codes):
        if code.op != Op.SECOND:
            continue
        factors = disturbance.factors[code.stage]
        places = (program.codes[code.partner].place, code.place)
        rows = program.pairs[code.row - program.num_rows]
        one, two = (
            (own[row] - comm[row]) * factors[place] + comm[row]
            for row, place in zip(rows, places, strict=True)
        )
        links = slowest[code.stage]
        out[i] = ((one, two), (exchange[rows[0]] * links, exchange[rows[1]] * links))
    return out


def group_max(values: Array, group: int) -> Array:
    """Returns for each replica (the last axis) the largest value in its group of `group`."""
    parts = values.reshape(*values.shape[:-1], -1, group)
    largest = parts.max(axis=-1, keepdims=True)
    return np.asarray(np.broadcast_to(largest, parts.shape).reshape(values.shape))
