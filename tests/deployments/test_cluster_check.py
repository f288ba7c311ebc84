"""What no node could hold is refused by its field, before Serve stops the version that serves."""

from typing import Any

import pytest

from loray.deployments.cluster_check import Resources, check_nodes
from loray.deployments.config import GIB, ServerArgs

SMALL: Resources = {"CPU": 2.0, "memory": 16.0 * GIB}
LARGE: Resources = {"CPU": 32.0, "GPU": 4.0, "memory": 500.0 * GIB}


def check(nodes: list[Resources], **args: Any) -> None:
    check_nodes(ServerArgs.model_validate(args), nodes)


def test_what_fits_is_let_through() -> None:
    check([SMALL], device="cpu", tensor_parallel_size=3)
    check([SMALL, LARGE], device="cuda", tensor_parallel_size=4)
    check([SMALL, LARGE], device="cpu", kv_cache={"cpu_bytes": "400GiB"})
    check([SMALL], device="cpu", driver={"min_replicas": 2, "max_replicas": 2})
    check([{"CPU": 2.0}], device="cpu", driver={"min_replicas": 2, "max_replicas": 2})
    check([LARGE, SMALL], device="cuda", tensor_parallel_size=2, driver={"min_replicas": 2, "max_replicas": 2})


@pytest.mark.parametrize(
    ("nodes", "args", "words"),
    [
        ([SMALL], {"device": "cuda"}, r"tensor_parallel_size: 1 rank\(s\) on cuda need 1 GPUs of one node, and none has more than 0"),
        (
            [LARGE, LARGE],
            {"device": "cuda", "tensor_parallel_size": 5},
            r"tensor_parallel_size: 5 rank\(s\) on cuda need 5 GPUs of one node",
        ),
        ([SMALL] * 4, {"device": "cpu", "tensor_parallel_size": 4}, r"tensor_parallel_size: 4 rank\(s\) on cpu need 2.25 CPUs of one node"),
        (
            [{"CPU": 1.75, "memory": 1e12}],
            {"device": "cpu", "tensor_parallel_size": 3},
            r"tensor_parallel_size: 1 driver\(s\) of 3 rank\(s\) and 1 ingress\(es\) need 2 CPUs, and the cluster has 1.75",
        ),
        (
            [SMALL],
            {"device": "cpu", "kv_cache": {"cpu_bytes": "900GiB"}},
            r"kv_cache.cpu_bytes: 1 rank\(s\) take 900.0GiB each, .* 16.0GiB",
        ),
        ([SMALL], {"device": "cpu", "tensor_parallel_size": 3, "kv_cache": {"cpu_bytes": "6GiB"}}, r"kv_cache.cpu_bytes: 3 rank\(s\)"),
        ([], {"device": "cpu"}, "none has more than 0"),
        (
            [SMALL],
            {"device": "cpu", "driver": {"min_replicas": 50, "max_replicas": 50}},
            "driver.min_replicas: there is room for 2 .* not for 50",
        ),
        (
            [SMALL, SMALL],
            {"device": "cpu", "kv_cache": {"cpu_bytes": "9GiB"}, "driver": {"min_replicas": 3, "max_replicas": 3}},
            "driver.min_replicas: there is room for 2 .* not for 3",
        ),
        (
            [LARGE, SMALL],
            {"device": "cuda", "tensor_parallel_size": 2, "driver": {"min_replicas": 3, "max_replicas": 3}},
            "driver.min_replicas: there is room for 2",
        ),
        (
            [SMALL],
            {"device": "cpu", "ingress": {"min_replicas": 100, "max_replicas": 100}},
            r"ingress.min_replicas: 1 driver\(s\) of 1 rank\(s\) and 100 ingress\(es\) need 25.75 CPUs, and the cluster has 2",
        ),
    ],
)
def test_what_fits_nowhere_is_refused(nodes: list[Resources], args: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check(nodes, **args)
