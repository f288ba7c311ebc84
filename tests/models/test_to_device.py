"""Arrays of any kind arrive as they are, by one copy."""

import numpy as np
import torch

from loray.models.sampler import SAMPLING_ROW
from loray.models.to_device import to_device

CPU = torch.device("cpu")


def test_arrays_of_any_type_and_shape_arrive_beside_each_other() -> None:
    arrays = [
        np.arange(3, dtype=np.int64),
        np.empty(0, np.int64),
        np.array([[1.5], [2.5], [-np.inf]], np.float32),
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([True, False, True]),
        np.empty((0, 2), np.float32),
    ]
    found = to_device(CPU, *arrays)
    for tensor, array in zip(found, arrays, strict=True):
        assert tensor.dtype == torch.from_numpy(array).dtype and tensor.shape == array.shape and tensor.is_contiguous()
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 1, "one copy for all"


def test_a_field_of_one_row_arrives_too() -> None:
    rows = np.zeros(1, SAMPLING_ROW)
    rows["top_p"], rows["seed"] = 0.25, 7
    top_p, seed = to_device(CPU, rows["top_p"], rows["seed"].astype(np.int64))
    assert (top_p.tolist(), seed.tolist()) == ([0.25], [7])


def test_what_arrived_is_a_copy() -> None:
    values = np.zeros(4, np.float32)
    (tensor,) = to_device(CPU, values)
    values += 1
    assert tensor.tolist() == [0.0] * 4
