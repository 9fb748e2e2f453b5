"""The group that moves most data spans hosts, while another stays within one.

Looks for: of two kinds of groups of a job, the one that crosses hosts moves more bytes in a step than the one that does not.
Saving: its transfers that nothing hides × (1 − its bus bandwidth ÷ that of the groups within a host).
Fix: order the mesh so that the group with most traffic is innermost; or shard within a host and replicate across (HSDP).
"""

from flopwise import units
from flopwise.advice.rank_facts import RankFacts
from flopwise.records.finding import LOW, Finding
from flopwise.records.ranks import GroupKind

CODE = 'mesh = init_device_mesh("cuda", (hosts, gpus_per_host), mesh_dim_names=("replicate", "shard"))'


def check(facts: RankFacts) -> Finding | None:
    across, inside = (_largest(facts, crosses) for crosses in (True, False))
    if across is None or inside is None:
        return None
    (much, slow), (little, fast) = ((one.bytes or 0.0, one.bus_bytes_s or 0.0) for one in (across, inside))
    if much <= little or slow >= fast:
        return None
    exposed = facts.exposed_ns(across)
    saved = exposed * (1 - slow / fast)
    rates = [units.rate(rate, "B/s") for rate in (slow, fast)]
    return Finding(
        rule="sharding_group",
        title=f"{across.group} crosses hosts and moves more than {inside.group}, which does not",
        values={"across_bytes": much, "inside_bytes": little},
        saving_ns=saved,
        arithmetic=f"{units.duration(exposed)} × (1 − {rates[0]} ÷ {rates[1]}) = {units.duration(saved)}",
        evidence=(f"{units.size(much)} of a step cross hosts, {units.size(little)} do not",),
        code=CODE,
        confidence=LOW,
        draws_on={"transfer": saved},
        evidence_ns=exposed,
    )


def _largest(facts: RankFacts, crosses: bool) -> GroupKind | None:
    """The group, other than that of all ranks, that moves most within a host, or between hosts."""
    world = facts.explanation.world
    known = [one for one in facts.explanation.groups if one.bytes and one.bus_bytes_s and one.ranks < world]
    return max((one for one in known if one.across_hosts is crosses), key=lambda one: one.bytes or 0.0, default=None)
