"""The environment of every rank: each variable with its value, who set it and why."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from dray.facts import Facts
from dray.spec.recipe import Recipe
from dray.spec.site import Site


class Variable(BaseModel):
    """One variable, and whom it beat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: str
    source: str
    why: str = ""
    beats: tuple[str, ...] = ()


def resolve(recipe: Recipe, site: Site, facts: Facts, *, run_id: str, ranks_per_node: int) -> tuple[Variable, ...]:
    """All variables by name. The recipe beats the site, the site beats dray; what was beaten is kept in `beats`."""
    chosen: dict[str, Variable] = {}
    for layer in (_ours(recipe, facts, run_id, ranks_per_node), _sites(site), _recipes(recipe)):
        for variable in layer:
            beaten = chosen.get(variable.name)
            if beaten is not None:
                beats = (*beaten.beats, f"{beaten.value} ({beaten.source})")
                variable = variable.model_copy(update={"beats": beats})  # noqa: PLW2901
            chosen[variable.name] = variable
    return tuple(chosen[name] for name in sorted(chosen))


def _ours(recipe: Recipe, facts: Facts, run_id: str, ranks_per_node: int) -> Iterator[Variable]:
    def ours(name: str, value: str, why: str) -> Variable:
        return Variable(name=name, value=value, source="dray", why=why)

    scratch = f"/tmp/dray-{run_id}"  # noqa: S108  node-local on purpose: compile caches break on shared disks
    threads = max(1, facts.cpus_per_node // ranks_per_node)
    yield ours("HF_HUB_OFFLINE", "1", "offline, a missing name costs 48 s of retries; compute nodes are offline")
    yield ours("OMP_NUM_THREADS", str(threads), f"{facts.cpus_per_node} CPUs for {ranks_per_node} ranks on a node")
    yield ours("PYTHONNOUSERSITE", "1", "packages in ~/.local must not beat the image's")
    yield ours("PYTHONUNBUFFERED", "1", "a rank's last lines must be in its log when it dies")
    yield ours("TOKENIZERS_PARALLELISM", "false", "tokenizers' threads and forked data workers deadlock")
    yield ours("TORCHINDUCTOR_CACHE_DIR", f"{scratch}/inductor", "compile caches race on a shared disk")
    yield ours("TRITON_CACHE_DIR", f"{scratch}/triton", "compile caches race on a shared disk")
    if facts.address is not None and facts.address.startswith("127."):
        yield ours("GLOO_SOCKET_IFNAME", "lo", "all nodes are on loopback; this machine's name may not resolve")
    if recipe.image == "cpu":
        yield ours("CUDA_VISIBLE_DEVICES", "", "the cpu image has no use for GPUs that the node may have")


def _sites(site: Site) -> Iterator[Variable]:
    for setting in site.env:
        yield Variable(name=setting.name, value=setting.value, source=f"site {site.name}", why=setting.why)


def _recipes(recipe: Recipe) -> Iterator[Variable]:
    for name, value in recipe.env.items():
        yield Variable(name=name, value=value, source="recipe")
