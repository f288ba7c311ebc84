"""How Serve's own proxy starts and talks to the ingress replicas: chosen before Ray starts, for a cluster that runs has chosen already."""

import os

import ray

ENVIRONMENT = {
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # instead of Ray's object streams, which cost half as much CPU again for each token
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # an answer is one message; beyond Serve's 4 MiB it would be a 500
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # a machine that is busy takes longer than Serve's 5 s, and the proxy would be killed
}
NO_PROXY = "no_grpc_proxy", "no_proxy"  # gRPC reads the second where there is no first


def choose_grpc() -> None:
    """What the environment says already is left as it is. A machine's proxy is for others: gRPC would look for the replicas behind it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    reached_directly = next(filter(None, map(os.environ.get, NO_PROXY)), None)
    os.environ[NO_PROXY[0]] = ",".join(filter(None, (reached_directly, ray.util.get_node_ip_address())))
