"""Refuses what no node of this cluster could hold, before anything is started or stopped: Serve would wait for room without an end."""

import math

import ray
from pydantic import ByteSize
from ray._private.state import state  # nothing public tells what a cluster may grow to

from loray.cluster.placement import INGRESS_CPUS, bundles
from loray.deployments.config import ServerArgs

Resources = dict[str, float]


def check_cluster(args: ServerArgs) -> None:
    """For arguments whose device is settled. Raises ValueError, one line."""
    if not ray.is_initialized() or state.get_max_resources_from_cluster_config() is not None:  # such a cluster adds nodes by need
        return
    check_nodes(args, [node["Resources"] for node in ray.nodes() if node["Alive"]])


def check_nodes(args: ServerArgs, nodes: list[Resources]) -> None:
    """nodes: what each has in all, used or not; a replica sits on one of them."""
    ranks, device = args.tensor_parallel_size, args.device
    needed = {name: sum(bundle.get(name, 0.0) for bundle in bundles(ranks, device)) for name in ("GPU", "CPU")}
    for name, amount in needed.items():
        if amount > (most := max((node.get(name, 0.0) for node in nodes), default=0.0)):
            raise ValueError(
                f"tensor_parallel_size: {ranks} rank(s) on {device} need {amount:g} {name}s of one node, and none has more than {most:g}"
            )
    memory = ByteSize(max((node.get("memory", 0.0) for node in nodes), default=0.0))
    if device == "cpu" and 0 < memory < ranks * args.kv_cache.cpu_bytes:
        wanted = args.kv_cache.cpu_bytes.human_readable()
        raise ValueError(
            f"kv_cache.cpu_bytes: {ranks} rank(s) take {wanted} each, and no node has more than {memory.human_readable()} of memory"
        )
    if device == "cpu":
        needed["memory"] = float(ranks * args.kv_cache.cpu_bytes)
    if (num_drivers := args.driver.min_replicas) > (room := sum(_num_held(node, needed) for node in nodes)):
        raise ValueError(f"driver.min_replicas: there is room for {room} on the nodes of this cluster, not for {num_drivers}")
    num_ingresses, all_cpus = args.ingress.min_replicas, sum(node.get("CPU", 0.0) for node in nodes)
    if (cpus := num_drivers * needed["CPU"] + num_ingresses * INGRESS_CPUS) > all_cpus:
        field = "ingress.min_replicas" if num_ingresses > 1 else "tensor_parallel_size"
        parts = f"{num_drivers} driver(s) of {ranks} rank(s) and {num_ingresses} ingress(es)"
        raise ValueError(f"{field}: {parts} need {cpus:g} CPUs, and the cluster has {all_cpus:g}")


def _num_held(node: Resources, needed: Resources) -> int:
    """Replicas. What a node does not tell it has enough of."""
    return int(min(node.get(name, 0.0 if name != "memory" else math.inf) // amount for name, amount in needed.items() if amount))
