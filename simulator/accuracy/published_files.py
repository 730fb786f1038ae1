"""Published runs as files of the repository: scenario, plan, measured value and where it stands.

`scenarios/published/` holds a representative spread of public runs, one YAML file each,
written from measured rows by `scripts/published_scenarios.py`. They need no other data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

import flopwright
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.accuracy.run_of_row import PublishedRun, PublishedRuns
from flopwright.simulator.accuracy.run_of_row_cluster import NOTED, as_noted
from flopwright.simulator.accuracy.stack_of_row import StackKey
from flopwright.simulator.hardware.nodes.types import cluster_of, node_type
from flopwright.spec.base import Spec
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.workload import Workload
from flopwright.spec.yaml_lines import read_yaml
from flopwright.units import Bytes, BytesPerS, Seconds

FOLDER: Final = Path(flopwright.__file__).parent / "scenarios" / "published"


class PublishedStack(Spec):
    """The fields of StackKey."""

    framework: str
    era: str
    family: Literal["dense", "moe"]
    graphs: bool = False


class PublishedCluster(Spec):
    """A cluster by the type of its nodes.

    Attributes:
        gpus_per_node, network: where they differ from the type's; `network` is a GPU's share
            of the links between nodes.
    """

    node_type: str
    gpus: int
    gpus_per_node: int | None = None
    network_bytes_per_s: BytesPerS | None = Field(default=None, alias="network")

    def cluster(self) -> ClusterSpec:
        """Returns the cluster."""
        named = node_type(self.node_type)
        kind = as_noted(named, self.gpus_per_node, self.network_bytes_per_s)
        return cluster_of(kind, self.gpus)


class PublishedFile(Spec):
    """A published run in a file.

    Attributes:
        rows: ids of the measured rows that it stands for.
        url: where the value can be read.
        metric: what was published; `measured_step` is the step time it amounts to.
        memory: measured bytes, by definition.
        framework, year, notes: the software as it is spelled, when, and what else is said.
        assumed: what the publication does not say.
    """

    id: str
    rows: tuple[str, ...]
    source: str
    url: str
    metric: str
    measured_step_s: Seconds = Field(alias="measured_step")
    memory: dict[str, Bytes] = Field(default_factory=dict)
    gpu: str
    model_family: str
    sweep: str
    framework: str = ""
    year: int | None = None
    notes: str = ""
    stack: PublishedStack
    cluster: PublishedCluster
    model: ModelSpec
    workload: Workload
    plan: ParallelPlan
    assumed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()

    def run(self) -> PublishedRun:
        """Returns the run that the file describes."""
        scenario = Scenario(
            name=re.sub(r"[^A-Za-z0-9_.-]+", "_", self.id),
            model=self.model,
            cluster=self.cluster.cluster(),
            workload=self.workload,
        )
        return PublishedRun(
            id=self.id,
            row_ids=self.rows,
            source=self.source,
            model_name=self.model_family,
            gpu=self.gpu,
            stack=StackKey(**self.stack.model_dump()),
            cell=f"{self.source} | {self.model_family} | {self.gpu}",
            scenario=scenario,
            plan=self.plan,
            num_gpus=self.cluster.gpus,
            measured_step_s=self.measured_step_s,
            metric=self.metric,
            memory=dict(self.memory),
            assumed=self.assumed,
            flags=frozenset(self.flags),
            sweep=self.sweep,
            where=self.url,
            framework=self.framework,
            year=self.year,
            notes=self.notes,
        )


def load_published(folder: Path = FOLDER) -> PublishedRuns:
    """Returns the runs of a folder's files, by file name.

    Raises:
        InputError: a file that is none of a published run, with its line.
    """
    paths = sorted(folder.glob("*.yaml"))
    return PublishedRuns(tuple(validate(PublishedFile, read_yaml(p)).run() for p in paths), ())


def published_file(run: PublishedRun) -> PublishedFile:
    """Returns the file of a run that was measured in time."""
    assert run.measured_step_s is not None
    data: dict[str, Any] = {
        "id": run.id,
        "rows": run.row_ids,
        "source": run.source,
        "url": url_of(run.where),
        "metric": run.metric,
        "measured_step_s": run.measured_step_s,
        "memory": {k: round(v) for k, v in run.memory.items()},
        "gpu": run.gpu,
        "model_family": run.model_name,
        "sweep": run.sweep,
        "framework": run.framework,
        "year": run.year,
        "notes": run.notes,
        "stack": PublishedStack(
            framework=run.stack.framework,
            era=run.stack.era,
            family=run.stack.family,
            graphs=run.stack.graphs,
        ),
        "cluster": _cluster(run.scenario.cluster, run.num_gpus),
        "model": run.scenario.model,
        "workload": run.scenario.workload,
        "plan": run.plan,
        "assumed": run.assumed,
        "flags": tuple(sorted(run.flags)),
    }
    return PublishedFile.model_construct(**data)


def _cluster(cluster: ClusterSpec, gpus: int) -> PublishedCluster:
    name = cluster.name.split("_", 1)[1]
    kind = node_type(name)
    network = cluster.network
    return PublishedCluster.model_construct(
        node_type=name,
        gpus=gpus,
        gpus_per_node=cluster.node.gpus if cluster.node.gpus != kind.node.gpus else None,
        network_bytes_per_s=network.bytes_per_s if network and network.name == NOTED else None,
    )


def file_name(run: PublishedRun) -> str:
    """Returns the name of a run's file."""
    return re.sub(r"[^a-z0-9]+", "_", run.id.lower()).strip("_") + ".yaml"


def url_of(source: str) -> str:
    """Returns the address that a source means, as far as it names one."""
    text = source.strip()
    if re.match(r"https?://", text):
        return text.split()[0]
    paper = re.match(r"arXiv[:\s]*(\d{4}\.\d{4,5})", text, re.IGNORECASE)
    if paper:
        return f"https://arxiv.org/abs/{paper[1]}"
    gist = re.match(r"gist ([\w-]+/[0-9a-f]+)", text)
    if gist:
        return f"https://gist.github.com/{gist[1]}"
    issue = re.match(r"([\w.-]+/[\w.-]+) issue (\d+)", text)
    if issue:
        return f"https://github.com/{issue[1]}/issues/{issue[2]}"
    if re.match(r"(docs\.|www\.|github\.com/)", text):
        return "https://" + _with_blob(text)
    found = re.match(r"([\w.-]+/[\w.-]+)(?:@([\w.-]+))?(?::\s*([^\s@]+))?(?:@(\w+))?", text)
    if not found:
        return text
    repo, tag, path, commit = found.groups()
    if not path or not re.search(r"[/.]", path):
        return f"https://github.com/{repo}"
    where = "tree" if "." not in path.rsplit("/", 1)[-1] else "blob"
    return f"https://github.com/{repo}/{where}/{tag or commit or 'HEAD'}/{path}"


def _with_blob(text: str) -> str:
    """Returns "github.com/owner/repo path" as an address."""
    first, _, rest = text.partition(" ")
    if first.startswith("github.com/") and rest and "." in rest:
        return f"{first}/blob/HEAD/{rest.split()[0]}"
    return first
