"""Builds the application from its arguments: `import_path: loray.deployments.app:build`."""

from pathlib import Path

import ray
from ray import serve

from loray.cluster.placement import DRIVER_CPUS, INGRESS_CPUS, bundles
from loray.deployments.cluster_check import check_cluster
from loray.deployments.config import ReplicaArgs, ServerArgs
from loray.deployments.driver import Driver
from loray.deployments.ingress import Ingress
from loray.deployments.model_check import check_model

DRAIN_S = 120.0  # how long a replica that is replaced may finish what it has
MAX_CALLS = (
    100_000  # at once in a replica. All have limits of their own and say when they are full; in Serve's queue health checks would wait too
)


def build(args: ServerArgs) -> serve.Application:
    """Refuses what can't work before anything is stopped or started, so an old version goes on serving."""
    args = settle(args)
    check_model(args)
    check_cluster(args)
    driver = serve.deployment(Driver).options(
        ray_actor_options={"num_cpus": DRIVER_CPUS},
        placement_group_bundles=bundles(args.tensor_parallel_size, args.device),
        placement_group_strategy="STRICT_PACK",
        max_ongoing_requests=MAX_CALLS,
        autoscaling_config=_autoscaling(args.driver),
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=DRAIN_S,
    )
    ingress = serve.deployment(Ingress).options(
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        max_ongoing_requests=MAX_CALLS,
        autoscaling_config=_autoscaling(args.ingress),
        graceful_shutdown_timeout_s=DRAIN_S,
    )
    return ingress.bind(driver.bind(args), args)


def settle(args: ServerArgs) -> ServerArgs:
    """Decide what `auto` means on this cluster and where relative folders are."""
    device = args.device
    if device == "auto":
        device = "cuda" if ray.cluster_resources().get("GPU", 0) >= args.tensor_parallel_size else "cpu"
    base = config_folder()
    roots = [root if root.is_absolute() else base / root for root in args.adapters.local_roots]
    return args.model_copy(update={"device": device, "adapters": args.adapters.model_copy(update={"local_roots": roots})})


def config_folder() -> Path:
    """The checkout that holds the shipped serve_config.yaml, else the current folder."""
    checkout = Path(__file__).resolve().parents[1]
    return checkout if (checkout / "serve_config.yaml").is_file() else Path.cwd()


def _autoscaling(args: ReplicaArgs) -> dict[str, float]:
    return {
        "min_replicas": args.min_replicas,
        "max_replicas": args.max_replicas,
        "target_ongoing_requests": args.target_ongoing_requests,
    }
