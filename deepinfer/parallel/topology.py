"""How many ranks there are and what each is for: from `ep`, `dp`, `cp`, the environment and the visible devices."""

from dataclasses import dataclass

from deepinfer.config.envs import Environment
from deepinfer.core.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """dp x cp ranks.

    dp: groups that serve requests of their own. cp: ranks that share the rows of one group's long prompts.
    ep: ranks that share the routed experts: all of them, or 1 where every rank has all experts.
    launchers: processes that a user (or torchrun) starts; each starts the rest of its `ranks / launchers` ranks itself.
    nodes: machines.
    """

    ep: int = 1
    dp: int = 1
    cp: int = 1
    launchers: int = 1
    nodes: int = 1

    @property
    def ranks(self) -> int:
        """All processes."""
        return self.dp * self.cp

    @property
    def local(self) -> int:
        """Ranks of one launcher."""
        return self.ranks // self.launchers


def choose_topology(ep: int | None, dp: int | None, cp: int, environment: Environment, devices: int | None) -> Topology:
    """The layout that is asked for; ConfigError if it cannot be.

    `devices`: accelerators that a launcher sees; None: CPUs, on which any number of ranks run. What is not given
    follows: `ep` from `dp` x `cp`, `dp` from `ep` / `cp` (1 where no experts are shared), and with neither given ep is
    launchers (`WORLD_SIZE`) x devices where there are several launchers, else `cp`.
    """
    launchers, on_node = environment.nodes, environment.launchers_on_node
    if launchers > 1 and environment.launcher is None:
        raise ConfigError(
            f"WORLD_SIZE is {launchers}, but RANK is unset; start the launchers with torchrun, or set both"
        )
    if launchers % on_node or (environment.launcher or 0) >= launchers:
        raise ConfigError(
            f"WORLD_SIZE is {launchers}, LOCAL_WORLD_SIZE {on_node}, RANK {environment.launcher}: they take as many "
            "launchers on every node, numbered from 0"
        )
    if ep is None and dp is None:
        ranks = cp if launchers == 1 else launchers * max(1, (devices or 1) // on_node)
        ep = ranks
    if ep == 1 and dp is None:
        dp = 1
    if ep is not None and dp is None:
        if ep % cp:
            raise ConfigError(f"cp is {cp}; it must divide ep, which is {ep}")
        dp = ep // cp
    assert dp is not None
    ranks = dp * cp
    ep = ranks if ep is None else ep
    if ep not in (1, ranks):
        raise ConfigError(f"ep is {ep}; it takes dp x cp = {ranks} (experts are shared by all ranks), or 1 (by none)")
    if ranks % launchers:
        raise ConfigError(f"{ranks} ranks cannot be shared evenly by {launchers} launchers (WORLD_SIZE)")
    room = None if devices is None else devices // on_node
    if room is not None and ranks > 1 and ranks // launchers > room:
        raise ConfigError(
            f"{ranks} ranks need {ranks // launchers} devices a launcher, which sees {room}: ep is at most WORLD_SIZE "
            f"x visible devices = {launchers * room}; set CUDA_VISIBLE_DEVICES or ask for fewer ranks"
        )
    return Topology(ep, dp, cp, launchers, launchers // on_node)
