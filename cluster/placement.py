"""Where the processes of one replica sit: its placement group's bundles and each rank's place in them."""

from typing import Any

from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# CPUs as Ray counts them. On a CPU they only steer placement (a rank uses every core it is given threads for); they are small so
# that the whole application, ingress and three ranks, fits a cluster of two cores.
INGRESS_CPUS = 0.25
DRIVER_CPUS = 0.25
RANK_CPUS = {"cpu": 0.5, "cuda": 1.0}


def bundles(world_size: int, device: str) -> list[dict[str, float]]:
    """One bundle a rank; the driver shares the first."""
    rank = {"CPU": RANK_CPUS[device]} | ({"GPU": 1.0} if device == "cuda" else {})
    return [rank | {"CPU": rank["CPU"] + DRIVER_CPUS}] + [dict(rank) for _ in range(world_size - 1)]


def total_cpus(world_size: int, device: str, num_ingress: int) -> float:
    """CPUs a cluster must offer before one replica and its ingress can start."""
    return sum(bundle["CPU"] for bundle in bundles(world_size, device)) + num_ingress * INGRESS_CPUS


def rank_options(group: PlacementGroup, rank: int, device: str) -> dict[str, Any]:
    return {
        "num_cpus": RANK_CPUS[device],
        "num_gpus": 1 if device == "cuda" else 0,
        "max_restarts": 0,  # a lost rank is a lost replica; Serve rebuilds the whole group
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
    }
