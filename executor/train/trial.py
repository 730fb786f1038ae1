"""One plan of a launch on one rank: its replica of the model, its groups, its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from flopwright.executor.data.prefetch import Prefetcher, Read
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.measure.kineto import kineto_trace
from flopwright.executor.measure.memory import SavedBytes, buffer_bytes, saved_bytes
from flopwright.executor.measure.timers import ActionTimer, StepTrace
from flopwright.executor.parallel.activations import ActivationStore
from flopwright.executor.parallel.data_parallel.choose import clip_gradients, make_data_parallel
from flopwright.executor.parallel.data_parallel.interface import DataParallel, Trainable
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.parallel.pipeline import Hook, MicroBatch, Runner, StageParts
from flopwright.executor.parallel.qk_clip import QkClip
from flopwright.executor.parallel.sharing import (
    Sharing,
    make_sharing,
    tp_partial_names,
    tp_whole_names,
)
from flopwright.executor.train.feed import Feed
from flopwright.models.moe.module import MixtureOfExperts
from flopwright.models.optim.muon.layout import matrix_layouts
from flopwright.models.transformer.module import Stage, init_weights_
from flopwright.plan.hops import states_into_chunks, sums_held
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.spec.model import ModelSpec
from flopwright.spec.workload import Workload

if TYPE_CHECKING:  # it needs a tokenizer's library, which a check on a bare GPU lacks
    from flopwright.executor.data.opening import RunData
    from flopwright.executor.data.skips import Spans

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step left behind on this rank.

    Attributes:
        loss: mean nats a token over this rank's micro-batches; None off the last stage.
        gradient_norm: before clipping, over the whole model, shape ().
        timed: False for a step that memory was metered in or that was profiled.
        metered: whether memory was.
        sequences: of the step on all ranks.
        loads: tokens of the step, of all ranks, for each expert, by layer of this rank.
        logits: under QK-Clip this rank's (largest attention logit, heads that were clipped).
    """

    step: int
    loss: Tensor | None
    gradient_norm: Tensor
    learning_rate: float
    trace: StepTrace
    timed: bool = True
    metered: bool = False
    sequences: int = 0
    loads: Mapping[int, Tensor] = field(default_factory=dict)
    logits: tuple[Tensor, Tensor] | None = None


@dataclass(slots=True)
class Trial:
    """A plan being trained. Build it with `start_trial`.

    Attributes:
        chunks: this rank's part of the model by pipeline chunk, in model order.
        memory: bytes by class of the metered step; expert_rows: rows at this rank's experts
            over what even routing gives, when it held most (executor/measure/expert_rows.py).
        sequences: of the last step, on all ranks; metered_sequences: of the metered one.
        ahead: what reads batches before their steps come, if anything does.
    """

    entry: RunEntry
    workload: Workload
    mesh: Mesh
    groups: Groups
    sharing: Sharing
    chunks: dict[int, Stage]
    timer: ActionTimer
    dataset: RunData
    device: torch.device
    data_parallel: DataParallel
    trainable: Trainable
    runner: Runner = field(init=False)
    activations: ActivationStore = field(init=False)
    qk_clip: QkClip | None = field(init=False, default=None)
    memory: dict[str, int] = field(default_factory=dict)
    expert_rows: float = 1.0
    current_step: int = 0
    sequences: int = 0
    metered_sequences: int = 0
    ahead: Prefetcher | None = None
    feed: Feed = field(init=False)
    _microbatch_count: int = 0
    _programs: dict[int, Sequence[Action]] = field(default_factory=dict)
    _norm: Tensor = field(default_factory=lambda: torch.zeros(()))
    _loads: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, spec = self.plan, self.spec
        self.activations = ActivationStore(plan, self.chunks, self.timer, self.device)
        dtype = DTYPES[self.workload.precision.weights]
        wide = torch.promote_types(dtype, torch.float32)
        self.feed = Feed(sharing=self.sharing, device=self.device, dtype=wide)
        for stage in self.chunks.values():
            stage.loss_apart = not plan.fused_loss
        tau = self.workload.optimizer.qk_clip_tau
        if tau is not None:
            self.qk_clip = QkClip(self.chunks.values(), self.trainable, tau)
        microbatches = plan.num_microbatches(self.workload.global_batch_size)
        self._programs[microbatches] = lower(plan, microbatches)[self.groups.coordinates["pp"]]
        self.runner = Runner(
            actions=self._programs[microbatches],
            parts=StageParts(
                chunks=self.chunks,
                num_chunks=plan.num_chunks,
                loss_fn=self.loss,
                hidden_shape=self.sharing.hidden_shape(self.workload.seq_len, spec.hidden_size),
                dtype=dtype,
                device=self.device,
                hooks=self._hooks(),
                around=self.activations,
                # Prediction modules make their losses beside the model's own, in the chunk.
                fused_loss=plan.fused_loss or spec.mtp_layers > 0,
                hidden_states=states_into_chunks(spec, plan),
                sums_held=sums_held(spec, plan),
            ),
            groups=self.groups,
            timer=self.timer,
        )
        self.set_microbatches(microbatches)

    def _hooks(self) -> dict[ActionKind, Hook]:
        """Returns what serves the actions that neither compute nor travel between chunks."""
        return {
            ActionKind.GATHER_WEIGHTS: lambda a: self.data_parallel.gather_weights(
                a.chunk, a.microbatch, a.bucket
            ),
            ActionKind.REDUCE_GRADIENTS: lambda a: self.data_parallel.reduce_gradients(
                a.chunk, a.microbatch, a.bucket
            ),
            ActionKind.OPTIMIZER_STEP: lambda _: self._optimizer_step(),
            **self.activations.hooks(),
        }

    def moe_blocks(self) -> dict[int, MixtureOfExperts]:
        """Returns this rank's mixture-of-experts blocks by layer number."""
        return {n: b for stage in self.chunks.values() for n, b in stage.moe_blocks().items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's weights and buffers under the whole model's names; collective.

        They are whole but for what tensor and expert parallelism cut.
        """
        yield from self.data_parallel.full_parameters()
        for stage in self.chunks.values():
            for name, tensor in stage.state_dict().items():
                if name not in self.trainable.parameters:
                    yield name, tensor.detach()

    @property
    def plan(self) -> ParallelPlan:
        """The split of a step."""
        return self.entry.plan.parallel

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.entry.plan.scenario.model

    def run_step(
        self, step: int, *, meter_memory: bool = False, kineto: Path | None = None
    ) -> StepRecord:
        """Runs optimizer step `step` (0-based) and returns its record.

        Args:
            step: fixes the data and the learning rate.
            meter_memory: count tensor bytes by class into `memory`, and experts' rows; the
                step is then slower.
            kineto: where to write this rank's Kineto trace of the step, which is slower too.
        """
        self.current_step = step
        batch = self._microbatches(step)
        allocated = _start_peak(self.device) if meter_memory else 0
        metering = saved_bytes(self.chunks.values()) if meter_memory else nullcontext()
        profiling = kineto_trace(kineto, self.device) if kineto is not None else nullcontext()
        with profiling, metering as meter:
            self.activations.watch = None if meter is None else meter.keep
            self.timer.start_step()
            loss_mean = self.runner.run_step(batch)
            trace = self.timer.finish_step()
        if meter is not None:
            self.memory = self._memory_by_class(meter, allocated)
            self.metered_sequences = self.sequences
            self.expert_rows = meter.peak_rows
        return StepRecord(
            step=step,
            loss=loss_mean,
            gradient_norm=self._norm,
            learning_rate=learning_rate_at(step, self.workload),
            trace=trace,
            timed=not meter_memory and kineto is None,
            sequences=self.sequences,
            metered=meter_memory,
            loads=dict(self._loads),
            logits=None if self.qk_clip is None else self.qk_clip.seen,
        )

    def _microbatches(self, step: int) -> Sequence[MicroBatch]:
        plan = self.plan
        read: Read = self.dataset.rank_batch
        if self.ahead is not None:
            read = self.ahead.reader(self.dataset.skipped)
        batch = read(step, self.groups.coordinates["dp"], plan.dp, plan.micro_batch_size)
        self.sequences = len(batch) * plan.micro_batch_size * plan.dp
        self.set_microbatches(len(batch))
        return [self.feed.micro_batch(batch[m], self.sequences) for m in range(len(batch))]

    def set_skipped(self, skipped: Spans) -> None:
        """Leaves samples out of all further steps."""
        self.dataset = replace(self.dataset, skipped=skipped)

    def set_microbatches(self, count: int) -> None:
        """Lays out the next steps for so many micro-batches on a rank."""
        if count == self._microbatch_count:
            return
        self._microbatch_count = count
        for block in self.moe_blocks().values():
            block.gate.balance_share = 1.0 / count
        for stage in self.chunks.values():
            for index in stage.indexers():
                index.share = 1.0 / count
        if count not in self._programs:
            self._programs[count] = lower(self.plan, count)[self.groups.coordinates["pp"]]
        self.runner.take(self._programs[count])

    def loss(self, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Returns the mean nats a token of this rank's tokens; see `TensorParallel.loss`."""
        return self.sharing.tensor.loss(logits, targets, self.spec.vocab_size, weights)

    def _optimizer_step(self) -> None:
        if self.qk_clip is not None:
            self.qk_clip.prepare()
        clip = self.workload.optimizer.gradient_clip
        self._norm = clip_gradients(self.data_parallel, clip, self.groups.world, self.trainable)
        self.data_parallel.step(learning_rate_at(self.current_step, self.workload))
        self._balance_experts()

    def _balance_experts(self) -> None:
        """Moves the routers' biases by the loads of all tokens of the step, in one message."""
        blocks = {n: b for n, b in self.moe_blocks().items() if b.loads is not None}
        if not blocks:
            return
        loads = torch.stack([b.loads for b in blocks.values() if b.loads is not None])
        with self.timer.action("expert_loads", "dp_comm", loads.numel() * 8):
            self.groups.dp_cp.sum_(loads)
            if self.plan.sequence_parallel:  # each of these ranks routes tokens of its own
                self.groups.tp.sum_(loads)
        self._loads = dict(zip(blocks, loads, strict=True))
        for block, load in zip(blocks.values(), loads, strict=True):
            if block.spec.balance == "sign":
                block.gate.update_bias_(load)
        self._set_quantiles(blocks.values())
        for block in blocks.values():
            block.reset_loads()

    def _set_quantiles(self, blocks: Iterable[MixtureOfExperts]) -> None:
        """Sets the biases of quantile balancing from histograms of all tokens, in one message."""
        gates = [b.gate for b in blocks if b.gate.counts is not None]
        if not gates:
            return
        counts = torch.stack([g.counts for g in gates if g.counts is not None])
        with self.timer.action("expert_quantiles", "dp_comm", counts.numel() * 8):
            self.groups.dp_cp.sum_(counts)
            if self.plan.sequence_parallel:
                self.groups.tp.sum_(counts)
        for gate, own in zip(gates, counts, strict=True):
            gate.update_quantiles_(own)

    def _memory_by_class(self, meter: SavedBytes, allocated_before: int) -> dict[str, int]:
        """Returns bytes by class; on GPUs what the peak has beyond them is temporary."""
        classes = {
            "weights": self.data_parallel.weight_bytes() + buffer_bytes(self.chunks.values()),
            "gradients": self.data_parallel.gradient_bytes(),
            "optimizer_state": self.data_parallel.optimizer_bytes(),
            "activations": meter.peak_bytes,
        }
        if self.device.type == "cuda":
            grown = torch.cuda.max_memory_allocated(self.device) - allocated_before
            kept = classes["gradients"] + classes["activations"]
            classes["temporaries"] = max(0, grown - kept)
        return classes


def _start_peak(device: torch.device) -> int:
    """Starts a new peak of the GPU's allocator; returns the bytes allocated now (0 on CPUs)."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def start_trial(
    entry: RunEntry,
    workload: Workload,
    dataset: RunData,
    registry: GroupRegistry,
    device: torch.device,
    timer: ActionTimer | None = None,
) -> Trial:
    """Returns a trial with its first weights; collective: every rank calls it in the same order.

    Args:
        workload: the plan's with the launch's seed.
        registry: the process groups made so far.
        timer: what is told of every action; None for one of the trial's own.
    """
    plan, spec = entry.plan.parallel, entry.plan.scenario.model
    mesh = Mesh(plan)
    groups = registry.build(mesh)
    timer = timer or ActionTimer(torch.distributed.get_rank(), device)
    sharing, dtype = make_sharing(plan, groups, timer), DTYPES[workload.precision.weights]
    chunks = {
        chunk: sharing.build_chunk(spec, chunk, dtype, device)
        for chunk in chunks_of_stage(plan, groups.coordinates["pp"])
    }
    for stage in chunks.values():
        init_weights_(stage, spec, workload.seed)
        stage.train()
    named = [item for stage in chunks.values() for item in stage.named_parameters()]
    trainable = Trainable(
        parameters={n: p for n, p in named if p.requires_grad},
        chunks=chunks,
        # Tensor-parallel ranks that hold the same experts see other tokens of theirs.
        expert_names=expert_slices(chunks.values())
        if plan.ep * plan.etp * plan.tp > 1
        else frozenset(),
        tp_whole_names=tp_whole_names(chunks.values()),
        tp_partial_names=tp_partial_names(chunks.values()),
        expert_copies=1 if plan.sequence_parallel else plan.tp,
        groups=groups,
        optimizer=workload.optimizer,
        precision=workload.precision,
        timer=timer,
        matrices=matrix_layouts(spec, plan, per_head=workload.optimizer.per_head),
    )
    return Trial(
        entry=entry,
        workload=workload,
        mesh=mesh,
        groups=groups,
        sharing=sharing,
        chunks=chunks,
        timer=timer,
        dataset=dataset,
        device=device,
        data_parallel=make_data_parallel(plan, trainable),
        trainable=trainable,
    )


def expert_slices(stages: Iterable[Stage]) -> frozenset[str]:
    """Returns the names of the stacked expert tensors, of which a rank may hold a slice."""
    return frozenset(
        f"model.layers.{layer}.mlp.experts.{name}"
        for stage in stages
        for layer, block in stage.moe_blocks().items()
        for name, _ in block.experts.named_parameters()
    )
