"""Builds the model of a rank that holds a part of the routed experts."""

from collections.abc import Sequence

import torch

from deepinfer.model.experts import ExpertLoads
from deepinfer.model.loading import Weights, load_routed, load_weights
from deepinfer.model.model import InferenceModel
from deepinfer.model.rows import RowOperators
from deepinfer.ops.experts import Experts
from deepinfer.parallel.balancer import Balancer
from deepinfer.parallel.experts import ExpertTable, SharedExperts
from deepinfer.parallel.member import Member
from deepinfer.parallel.model import SharingModel
from deepinfer.parallel.placement import first_placement


def sharing_model(
    checkpoint: Weights,
    classes: Sequence[int],
    operators: RowOperators | None,
    dtype: torch.dtype,
    device: torch.device,
    keep_quantized: bool,
    member: Member,
    extra_experts: int,
    rebalance_steps: int,
) -> tuple[InferenceModel, ExpertLoads]:
    """Read what this rank needs: of routed experts only its own. Raises as `load_weights` does."""
    config, topology, collectives = checkpoint.config, member.topology, member.collectives
    if collectives is None:
        raise ValueError("experts are not shared in this layout")
    layers, experts = config.num_hidden_layers, config.n_routed_experts
    placement = first_placement(experts, extra_experts, topology.ep)
    held = [placement.experts[member.ranks.rank].tolist()] * layers
    weights = load_weights(checkpoint, dtype, device, keep_quantized, held)
    tables = [ExpertTable(placement, experts, device) for _ in range(layers)]
    loads = ExpertLoads(layers, experts, device)
    shared = [loads.counted(layer, SharedExperts(table, collectives)) for layer, table in enumerate(tables)]

    def read(layer: int, wanted: Sequence[int]) -> tuple[Experts, Experts]:
        return load_routed(checkpoint, layer, wanted, dtype, device, keep_quantized)

    held_weights = [layer.experts for layer in weights.layers]
    balancer = Balancer(tables, held_weights, loads, collectives, read, rebalance_steps, topology.nodes)
    return SharingModel(config, weights, classes, operators, shared, member.ranks, collectives, balancer), loads
