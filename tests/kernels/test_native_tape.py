"""Recorded calls of native.c: they do what the calls themselves would do, with whatever is in the tensors then."""

import threading

import pytest
import torch
from torch import Tensor

from loray.kernels import native
from loray.kernels.native_tape import Tape, _arrange, _Buffer

BACKEND = pytest.mark.parametrize("backend", ["native"])


class Chain:
    """Some layers of calls, each of which needs what several before it gave."""

    def __init__(self, num_tokens: int, size: int = 24) -> None:
        self.ids = torch.arange(num_tokens, dtype=torch.int32)
        self._table = torch.randn(50, size)
        self._weights = [torch.rand(size) for _ in range(5)]

    def run(self) -> Tensor:
        x = native.embed(self.ids, self._table)
        for weight in self._weights:
            normed = native.rms_norm(x, weight, 1e-5)
            both = native.rms_norm(x, weight, 1e-3, added=normed)
            halves = native.silu_gate(torch.Tensor.view(both, len(x) // 2, -1)) if len(x) % 2 == 0 else both
            native.rms_norm(x, weight, 1e-2, added=halves.view(-1, x.shape[1]) if len(halves.view(-1, x.shape[1])) == len(x) else both)
        return native.rms_norm(x, self._weights[0], 1e-5)


@BACKEND
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16])
def test_a_replay_does_what_the_calls_do_with_other_inputs(backend: str, num_tokens: int) -> None:
    chain = Chain(num_tokens)
    _, recorded = native.recorded(chain.run)
    assert recorded is not None
    for first in (0, 3, 30):
        chain.ids.copy_(torch.arange(first, first + num_tokens))
        expected = chain.run()
        for _ in range(2):
            recorded.replay()
            torch.testing.assert_close(recorded.output, expected, rtol=0, atol=0)


@BACKEND
def test_buffers_share_an_arena(backend: str) -> None:
    chain = Chain(16)
    _, recorded = native.recorded(chain.run)
    assert recorded is not None
    assert recorded.output.untyped_storage().nbytes() <= 4 * 4 * 16 * 24  # four at once, of the sixteen that there were


@BACKEND
@pytest.mark.parametrize(
    "spoilt",
    [lambda x: x + 1, lambda x: x.mul_(2), lambda x: x.clone(), lambda x: torch.empty_like(x).copy_(x), lambda x: x[x[:, 0] > 0]],
    ids=["a sum", "in place", "a copy", "memory that is not the tape's", "what depends on numbers"],
)
def test_what_torch_computes_is_noticed(backend: str, spoilt: object) -> None:
    chain, weight = Chain(4), torch.ones(24)
    assert native.recorded(lambda: native.rms_norm(spoilt(chain.run()), weight, 1e-5))[1] is None  # type: ignore[operator]
    assert native._recording.tape is None


@BACKEND
def test_views_are_fine(backend: str) -> None:
    chain, weight = Chain(4), torch.ones(24)
    _, recorded = native.recorded(lambda: native.rms_norm(chain.run().view(2, -1)[:, :24][1:], weight, 1e-5))
    assert recorded is not None
    recorded.replay()
    torch.testing.assert_close(recorded.output, native.rms_norm(chain.run()[2:3], weight, 1e-5), rtol=0, atol=0)


@BACKEND
def test_what_another_thread_calls_meanwhile_is_not_recorded(backend: str) -> None:
    chain, other = Chain(4), Chain(7)

    def run() -> Tensor:
        thread = threading.Thread(target=other.run)
        thread.start()
        thread.join()
        return chain.run()

    recorded, alone = native.recorded(run)[1], native.recorded(chain.run)[1]
    assert recorded is not None and alone is not None
    assert len(recorded._calls) == len(alone._calls)


@BACKEND
def test_an_error_ends_the_recording(backend: str) -> None:
    def fails() -> Tensor:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        native.recorded(fails)
    assert native._recording.tape is None


@pytest.mark.parametrize("seed", range(30))
def test_no_two_buffers_in_use_overlap(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(below: int) -> int:
        return int(torch.randint(below, (1,), generator=generator))

    buffers = []
    for _ in range(40):
        first = number(60)
        buffers.append(_Buffer(torch.empty(1 + number(90)), first, first + number(12)))
    size = _arrange(buffers)
    for i, one in enumerate(buffers):
        assert one.place % 16 == 0 and one.place + one.tensor.numel() <= size
        for other in buffers[:i]:
            if one.first_call <= other.last_call and other.first_call <= one.last_call:
                assert one.place + one.tensor.numel() <= other.place or other.place + other.tensor.numel() <= one.place


def test_a_tape_without_calls_is_whole() -> None:
    assert Tape().is_whole


@BACKEND
def test_rows_beyond_a_table_are_its_last(backend: str) -> None:
    table = torch.randn(5, 3)
    assert native.embed(torch.tensor([0, 4, 5, -1, 900], dtype=torch.int32), table).equal(table[[0, 4, 4, 4, 4]])
    cos, sin = native.take_angles(torch.tensor([4, 5, 0]), table, 2 * table)
    assert cos.squeeze(1).equal(table[[4, 4, 0]]) and sin.squeeze(1).equal(2 * table[[4, 4, 0]])
