"""One rank's membership: which layout it is part of, and its end of it."""

from dataclasses import dataclass

from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.ranks import Ranks
from deepinfer.parallel.topology import Topology


@dataclass(frozen=True)
class Member:
    """collectives: of all ranks; None where no experts are shared. group: of those that share prompts; None: alone."""

    topology: Topology
    ranks: Ranks
    collectives: Collectives | None = None
    group: Collectives | None = None
