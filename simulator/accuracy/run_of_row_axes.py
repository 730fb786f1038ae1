"""The sizes of a published run's plan: those a row states, those that follow, those assumed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from flopwright.errors import InputError, Violation, divisors
from flopwright.simulator.accuracy.defaults import Assumed, lora_rank
from flopwright.simulator.accuracy.rows import Configuration
from flopwright.simulator.hardware.nodes.types import usual_node_type
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params

# Bytes a parameter that a first plan must hold: weights, gradients, optimizer state over data
# parallel ranks; with adapters the weights alone. A share of memory is left to activations.
_BYTES_A_WEIGHT: Final = 8.0
_BYTES_A_FROZEN_WEIGHT: Final = 2.0
_SHARE_OF_MEMORY: Final = 0.6
_MOST_EXPERT_RANKS: Final = 8
_MICROBATCHES_A_STAGE: Final = 4
# Columns that a run cannot do without where they are filled in, and those it can.
_NEEDED: Final = ("n_gpus", "tp", "pp", "cp", "mbs", "gbs", "seq", "hidden", "layers", "heads")
_REPLACED: Final = ("vpp", "dp", "ep", "etp", "experts", "topk", "kv_heads", "ffn", "moe_ffn",
                    "vocab")  # fmt: skip
_MULTIPLES: Final = {"": 1.0, "k": 1e3, "m": 2.0**20}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Sizes of a plan.

    Attributes:
        known: axes that the row states, by the planner's names.
        sharded: whether weights are sharded over all ranks, so that tp and pp are 1.
        layers_per_stage: layers of each chunk where embedding and head count as layers.
    """

    num_gpus: int
    seq_len: int
    global_batch_size: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    micro_batch_size: int
    layers_per_stage: tuple[int, ...] | None
    known: Mapping[str, int]
    sharded: bool

    @property
    def num_chunks(self) -> int:
        """Pipeline chunks."""
        return self.pp * self.vpp


def axes_of(
    configuration: Configuration, model: ModelSpec, gpu: str, sharded: bool, assumed: Assumed
) -> Axes:
    """Returns the sizes of a run's plan.

    Args:
        sharded: whether its weights are sharded over all ranks (defaults.shards_weights).

    Raises:
        InputError: sizes that contradict each other.
    """
    _check_sizes(configuration, assumed)
    num_gpus = _num_gpus(configuration)
    tp, pp = configuration.whole("tp"), configuration.whole("pp")
    cp = configuration.whole("cp") or 1
    if tp is None or pp is None:
        tp, pp = _model_ranks(configuration, model, gpu, num_gpus, cp, sharded, assumed)
    dp = _data_parallel(configuration, num_gpus, tp * pp * cp)
    num_gpus = tp * pp * cp * dp
    mbs, batch = _batches(configuration, dp, pp, assumed)
    ep, etp = _expert_ranks(configuration, model, dp * cp * tp, assumed)
    vpp = _virtual_stages(configuration, model, pp, batch // (mbs * dp), assumed)
    names = {"tp": "tp", "pp": "pp", "cp": "cp", "ep": "ep", "vpp": "vpp",
             "micro_batch_size": "mbs"}  # fmt: skip
    stated = {axis: configuration.whole(column) for axis, column in names.items()}
    return Axes(
        num_gpus=num_gpus,
        seq_len=model.max_seq_len if configuration.whole("seq") is None else _seq(configuration),
        global_batch_size=batch,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        micro_batch_size=mbs,
        layers_per_stage=light_ends(model.num_layers, model.mtp_layers, pp * vpp),
        known={axis: value for axis, value in stated.items() if value is not None},
        sharded=sharded,
    )


def light_ends(layers: int, mtp_layers: int, chunks: int) -> tuple[int, ...] | None:
    """Returns layers of each chunk where embedding, head and MTP modules count as layers.

    None where plain layers divide evenly, or nothing does: then they are spread evenly.
    Megatron-LM's account_for_embedding_in_pipeline_split and
    account_for_loss_in_pipeline_split; DeepSeek-V3's layouts place the MTP module so too.
    """
    if chunks == 1 or layers % chunks == 0:
        return None
    for first, last in ((1, 1 + mtp_layers), (0, 1 + mtp_layers), (1, mtp_layers), (1, 2)):
        total = layers + first + last
        each = total // chunks
        if total % chunks == 0 and each > max(first, last):
            return (each - first, *(each,) * (chunks - 2), each - last)
    return None


def _bad(name: str, value: object, rule: str) -> InputError:
    return InputError(Violation(field=name, value=str(value), rule=rule))


def _check_sizes(configuration: Configuration, assumed: Assumed) -> None:
    """Names sizes that are no whole numbers; without some of them a row is of no use."""
    for name in (*_NEEDED, *_REPLACED):
        text = configuration.text(name)
        if not text or configuration.whole(name) is not None or re.fullmatch(r"0(\.0)?", text):
            continue
        if name in _NEEDED and not (name == "gbs" and _tokens_of(text)):
            raise _bad(name, repr(text), "is no whole number above zero")
        if name in _REPLACED:
            assumed.say(f"{name} {text!r} is no whole number: taken as not stated")


def _tokens_of(text: str) -> float | None:
    """Returns the tokens of a batch that is given in them ("4M tokens")."""
    found = re.fullmatch(r"~?(\d+(?:\.\d+)?) ?([km]?) ?tok(?:en)?s?", text.lower())
    return float(found[1]) * _MULTIPLES[found[2]] if found else None


def _batch(configuration: Configuration) -> int | None:
    """Returns the sequences of a step, None where they are not stated."""
    tokens = _tokens_of(configuration.text("gbs"))
    if tokens is None:
        return configuration.whole("gbs")
    return max(1, round(tokens / _seq(configuration)))


def _seq(configuration: Configuration) -> int:
    return configuration.whole("seq") or 1


def _num_gpus(configuration: Configuration) -> int:
    stated = configuration.whole("n_gpus")
    if stated is not None:
        return stated
    sizes = [configuration.whole(c) for c in ("tp", "pp", "dp")]
    if all(s is not None for s in sizes):
        return math.prod(s or 1 for s in sizes) * (configuration.whole("cp") or 1)
    counted = re.match(r"(\d+) ?[x×] ?[a-z]", configuration.text("gpu").lower())
    if counted:
        return int(counted[1])
    raise _bad("n_gpus", "", "the number of GPUs is not stated")


def _model_ranks(
    configuration: Configuration,
    model: ModelSpec,
    gpu: str,
    num_gpus: int,
    cp: int,
    sharded: bool,
    assumed: Assumed,
) -> tuple[int, int]:
    """Returns (tp, pp) of a row that lacks one: as few ranks as hold the weights."""
    tp, pp = configuration.whole("tp"), configuration.whole("pp")
    if num_gpus == 1:
        return 1, 1
    assumed.flags.add("own-plan")
    if sharded:
        cut = tp or _cut_of_batch(configuration, model, num_gpus // (cp * (pp or 1)))
        if cut is not None:
            assumed.say(f"tp {cut} and pp {pp or 1} under sharded weights")
            return cut, pp or 1
    frozen = lora_rank(configuration) is not None
    weight = _BYTES_A_FROZEN_WEIGHT if frozen else _BYTES_A_WEIGHT
    need = (
        num_params(model) * weight / (usual_node_type(gpu).node.gpu.hbm_bytes * _SHARE_OF_MEMORY)
    )
    free = num_gpus // cp
    node = math.gcd(8, model.attention.num_heads)
    options = [
        (t, p)
        for t in ([tp] if tp else divisors(node))
        for p in ([pp] if pp else divisors(free))
        if free % (t * p) == 0 and p <= model.num_layers
    ]
    batch, mbs = _batch(configuration), configuration.whole("mbs") or 1
    if batch is not None:
        options = [o for o in options if batch % (free // math.prod(o) * mbs) == 0]
    if not options:
        raise _bad("tp", f"{tp} x {pp}", f"no plan over {num_gpus} GPUs has it")
    holds = [o for o in options if o[0] * o[1] >= need] or [max(options, key=math.prod)]
    chosen = min(holds, key=lambda o: (math.prod(o), o[1]))
    assumed.say(f"tp {chosen[0]} and pp {chosen[1]}: the fewest ranks that hold the weights")
    return chosen


def _cut_of_batch(configuration: Configuration, model: ModelSpec, ranks: int) -> int | None:
    """Returns the smallest tp under which a batch gives every rank the same; None without one."""
    batch, mbs = _batch(configuration), configuration.whole("mbs") or 1
    if batch is None:
        return 1
    fits = (t for t in divisors(math.gcd(8, model.attention.num_heads)) if ranks % t == 0)
    return next((t for t in fits if batch % (ranks // t * mbs) == 0), None)


def _data_parallel(configuration: Configuration, num_gpus: int, model_ranks: int) -> int:
    if num_gpus % model_ranks == 0:
        return num_gpus // model_ranks
    stated = configuration.whole("dp")
    if stated is not None and configuration.whole("n_gpus") is None:
        return stated
    raise _bad("n_gpus", num_gpus, f"is no multiple of tp*pp*cp ({model_ranks})")


def _batches(configuration: Configuration, dp: int, pp: int, assumed: Assumed) -> tuple[int, int]:
    """Returns (micro-batch size, global batch size), the latter a multiple of mbs * dp."""
    mbs, batch = configuration.whole("mbs"), _batch(configuration)
    if mbs is None:
        if configuration.whole("n_gpus") != 1:
            assumed.flags.add("own-plan")
        mbs = 1
        assumed.say("micro-batch of one sequence")
    if batch is None:
        if configuration.whole("mbs") is None and configuration.value("step_time") is not None:
            raise _bad("gbs", "", "a step time without its batch says nothing")
        steps = re.search(r"(?:gradient accumulation|ga|gradaccum|micro_num)[ =](\d+)|"
                          r"(\d+) gradient accumulation", configuration.notes.lower())  # fmt: skip
        count = int(next(g for g in steps.groups() if g)) if steps else 0
        count = count or (_MICROBATCHES_A_STAGE * pp if pp > 1 else 1)
        assumed.flags.add("assumed-batch")
        assumed.say(f"global batch of {count} micro-batches a rank")
        return mbs, mbs * dp * count
    if batch % (mbs * dp) == 0:
        return mbs, batch
    if batch < mbs * dp and batch % dp == 0:
        assumed.say(f"micro-batch of {batch // dp}: the batch holds no larger one")
        return batch // dp, batch
    near = max(1, round(batch / (mbs * dp))) * mbs * dp
    if abs(near / batch - 1) > 0.1:
        raise _bad("gbs", batch, f"is far from any multiple of mbs*dp ({mbs * dp})")
    assumed.flags.add("gbs-rounded")
    assumed.say(f"global batch {near}: {batch} is no multiple of mbs*dp")
    return mbs, near


def _expert_ranks(
    configuration: Configuration, model: ModelSpec, lending: int, assumed: Assumed
) -> tuple[int, int]:
    """Returns (ep, etp); both 1 of a model without experts."""
    if model.moe is None:
        return 1, 1
    stated, experts = configuration.whole("ep"), model.moe.num_experts
    fits = [d for d in divisors(experts) if lending % d == 0]
    if stated is None:
        ep = max(d for d in fits if d <= _MOST_EXPERT_RANKS)
        if ep > 1:
            assumed.say(f"expert parallelism over {ep} ranks")
    elif stated in fits:
        ep = stated
    else:
        ep = max((d for d in fits if d <= stated), default=1)
        assumed.flags.add("odd")
        assumed.say(f"ep {ep}: {stated} does not divide the ranks or the experts")
    etp = configuration.whole("etp") or 1
    if lending % (ep * etp) or model.moe.expert_intermediate_size % etp:
        assumed.say(f"etp 1: {etp} does not fit")
        etp = 1
    return ep, etp


def _virtual_stages(
    configuration: Configuration, model: ModelSpec, pp: int, microbatches: int, assumed: Assumed
) -> int:
    """Returns vpp, lowered where the layers or the micro-batches do not allow it."""
    stated = configuration.whole("vpp") or 1
    if pp == 1 or stated == 1:
        return 1
    if microbatches % pp:
        assumed.say("no interleaving: micro-batches are no multiple of pp")
        return 1
    vpp = min(stated, max(1, model.num_layers // pp))
    if vpp != stated:
        assumed.say(f"vpp {vpp}: {stated} would leave chunks without layers")
    return vpp
