"""Builds the model of a rank that holds a part of the routed experts."""

from collections.abc import Sequence

from deepinfer.model.experts import ExpertLoads
from deepinfer.model.loading import Form, Share, Weights, load_routed, load_weights
from deepinfer.model.memory import HostTables
from deepinfer.model.model import InferenceModel
from deepinfer.model.row_operators import RowOperators
from deepinfer.model.weights import ModelWeights
from deepinfer.ops.experts import Experts
from deepinfer.parallel.balancer import Balancer
from deepinfer.parallel.collectives import Collectives
from deepinfer.parallel.experts import ExpertTable, SharedExperts
from deepinfer.parallel.member import Member
from deepinfer.parallel.model import SharingModel
from deepinfer.parallel.placement import first_placement
from deepinfer.parallel.tables import SharedTables


def sharing_model(
    checkpoint: Weights,
    classes: Sequence[int],
    operators: RowOperators | None,
    form: Form,
    member: Member,
    extra_experts: int,
    rebalance_steps: int,
) -> tuple[InferenceModel, ExpertLoads]:
    """Read what this rank needs: of routed experts and Engram tables only its own. Raises as `load_weights` does."""
    config, topology, collectives = checkpoint.config, member.topology, member.collectives
    if collectives is None:
        raise ValueError("experts are not shared in this layout")
    rank, layers, experts = member.ranks.rank, config.num_hidden_layers, config.n_routed_experts
    placement = first_placement(experts, extra_experts, topology.ep)
    held = [placement.experts[rank].tolist()] * layers
    share = Share(held) if form.tables_on_host else Share(held, rank, topology.ep)
    weights = load_weights(checkpoint, form.dtype, form.device, form.keep_quantized, share, form.tables_on)
    lookups = [ExpertTable(placement, experts, form.device) for _ in range(layers)]
    loads = ExpertLoads(layers, experts, form.device)
    shared = [loads.counted(layer, SharedExperts(table, collectives)) for layer, table in enumerate(lookups)]

    def read(layer: int, wanted: Sequence[int]) -> tuple[Experts, Experts]:
        return load_routed(checkpoint, layer, wanted, form)

    own = [layer.experts for layer in weights.layers]
    balancer = Balancer(lookups, own, loads, collectives, read, rebalance_steps, topology.nodes)
    tables = _tables(weights, config.engram_num_embeddings, form, collectives)
    together = member.ranks, collectives, balancer
    return SharingModel(config, weights, classes, operators, shared, tables, *together), loads


def _tables(
    weights: ModelWeights, rows: Sequence[int], form: Form, collectives: Collectives
) -> HostTables | SharedTables | None:
    engrams = [*weights.engrams.values()]
    if not engrams:
        return None
    return HostTables(engrams, form.device) if form.tables_on_host else SharedTables(engrams, rows, collectives)
