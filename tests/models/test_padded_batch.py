"""Rows that join and leave a padded batch attend to what they would attend to alone, in both layouts of keys and values."""

import pytest
import torch
from torch import Tensor

from loray.models.padded_batch import PaddedBatch

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 3, 5
LAYOUTS = pytest.mark.parametrize("is_transposed", [False, True], ids=["head-dim-last", "transposed"])


class Histories:
    """The keys and values of each request on its own, unpadded: [layers, 2, heads, length, head_dim]."""

    def __init__(self, is_transposed: bool) -> None:
        self.is_transposed = is_transposed
        self.parts: dict[int, Tensor] = {}
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator)

    def start(self, lengths: dict[int, int]) -> PaddedBatch:
        """A prefilled batch of new requests; where a row is padded, its keys and values are rubbish."""
        longest = max(lengths.values())
        for slot, length in lengths.items():
            self.parts[slot] = self.random(NUM_LAYERS, 2, NUM_HEADS, length, HEAD_DIM)
        padded = self.random(len(lengths), NUM_LAYERS, 2, NUM_HEADS, longest, HEAD_DIM) * 100
        mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
        for row, (slot, length) in enumerate(lengths.items()):
            padded[row, :, :, :, longest - length :] = self.parts[slot]
            mask[row, longest - length :] = True
        return self.batch(tuple(lengths), mask, padded)

    def batch(self, slots: tuple[int, ...], mask: Tensor, padded: Tensor) -> PaddedBatch:
        """padded: [rows, layers, 2, heads, length, head_dim]"""
        layers = [(padded[:, i, 0], padded[:, i, 1]) for i in range(NUM_LAYERS)]
        if self.is_transposed:
            layers = [(keys.flatten(0, 1).mT.contiguous(), values.flatten(0, 1)) for keys, values in layers]
        return PaddedBatch(slots, mask, tuple(layers), self.is_transposed)

    def advance(self, batch: PaddedBatch) -> PaddedBatch:
        """One more token for each row, appended as a model does it."""
        new = self.random(batch.num_rows, NUM_LAYERS, 2, NUM_HEADS, 1, HEAD_DIM)
        for row, slot in enumerate(batch.slots):
            self.parts[slot] = torch.cat([self.parts[slot], new[row]], 3)
        added = self.batch(batch.slots, torch.ones(batch.num_rows, 1, dtype=torch.bool), new)
        dims = (2, 1) if self.is_transposed else (2, 2)
        layers = [
            (torch.cat([keys, new_keys], dims[0]), torch.cat([values, new_values], dims[1]))
            for (keys, values), (new_keys, new_values) in zip(batch.layers, added.layers, strict=True)
        ]
        return PaddedBatch(batch.slots, torch.cat([batch.attention_mask, added.attention_mask], 1), tuple(layers), self.is_transposed)

    def check(self, batch: PaddedBatch) -> None:
        """Attention over the padded batch equals each request's own."""
        query = self.random(batch.num_rows, NUM_HEADS, HEAD_DIM, 1)
        assert batch.num_tokens == [self.parts[slot].shape[3] for slot in batch.slots]
        for layer, (keys, values) in enumerate(batch.layers):
            if self.is_transposed:
                keys, values = keys.unflatten(0, (batch.num_rows, -1)).mT, values.unflatten(0, (batch.num_rows, -1))
            assert keys.shape == values.shape == (batch.num_rows, NUM_HEADS, batch.length, HEAD_DIM)
            scores = (keys @ query).squeeze(3).masked_fill(~batch.attention_mask[:, None], float("-inf"))
            found = (scores.softmax(2)[:, :, None] @ values).squeeze(2)  # [rows, heads, head_dim]
            for row, slot in enumerate(batch.slots):
                own_keys, own_values = self.parts[slot][layer]
                wanted = ((own_keys @ query[row]).squeeze(2).softmax(1)[:, None] @ own_values).squeeze(1)
                torch.testing.assert_close(found[row], wanted, atol=1e-5, rtol=1e-5)


@LAYOUTS
def test_requests_of_different_lengths_join_and_leave(is_transposed: bool) -> None:
    histories = Histories(is_transposed)
    batch = histories.advance(histories.start({4: 3, 7: 9, 1: 1}))
    histories.check(batch)
    batch = histories.advance(PaddedBatch.concatenate([batch, histories.start({2: 17}), histories.start({9: 2, 8: 2})]))
    assert batch.slots == (4, 7, 1, 2, 9, 8)
    histories.check(batch)
    batch = batch.filter([4, 0, 2])
    assert batch.slots == (9, 4, 1)
    histories.check(batch)
    batch = histories.advance(batch)
    histories.check(batch)
    batch = histories.advance(PaddedBatch.concatenate([histories.start({3: 1}), batch.filter([1])]))
    assert batch.slots == (3, 4)
    histories.check(batch)


@LAYOUTS
def test_the_longest_request_takes_its_columns_along_when_it_leaves(is_transposed: bool) -> None:
    batch = Histories(is_transposed).start({0: 4, 1: 11, 2: 6})
    assert batch.filter([2, 0]).length == 6
    assert batch.filter([0]).length == 4
    assert batch.filter([1, 0]).length == 11


@LAYOUTS
def test_columns_that_nobody_uses_are_cut_from_both_ends(is_transposed: bool) -> None:
    histories = Histories(is_transposed)
    histories.parts[5] = histories.random(NUM_LAYERS, 2, NUM_HEADS, 3, HEAD_DIM)
    padded = torch.full((2, NUM_LAYERS, 2, NUM_HEADS, 8, HEAD_DIM), float("nan"))
    padded[1, :, :, :, 2:5] = histories.parts[5]
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[0] = True
    mask[1, 2:5] = True
    kept = histories.batch((6, 5), mask, padded).filter([1])
    assert kept.length == 3
    histories.check(kept)


@LAYOUTS
def test_two_halves_of_a_batch_can_be_put_together_again(is_transposed: bool) -> None:
    histories = Histories(is_transposed)
    batch = histories.start({0: 4, 1: 11, 2: 6, 3: 1})
    again = PaddedBatch.concatenate([batch.filter([0, 2]), batch.filter([1, 3])]).filter([0, 2, 1, 3])
    assert again.slots == batch.slots
    assert torch.equal(again.attention_mask, batch.attention_mask)
    histories.check(again)


@LAYOUTS
def test_the_padding_that_joining_adds_is_finite(is_transposed: bool) -> None:
    histories = Histories(is_transposed)
    batch = PaddedBatch.concatenate([histories.start({0: 2}), histories.start({1: 30})])
    assert all(part.isfinite().all() for layer in batch.layers for part in layer)
    assert batch.num_tokens == [2, 30]


@LAYOUTS
def test_what_is_left_does_not_hold_the_memory_of_what_went(is_transposed: bool) -> None:
    kept = Histories(is_transposed).start({0: 2, 1: 50}).filter([0])
    assert all(part.untyped_storage().nbytes() == part.nbytes for layer in kept.layers for part in layer)


def test_keeping_everything_copies_nothing() -> None:
    batch = Histories(False).start({0: 4, 1: 6})
    assert batch.filter([0, 1]) is batch
    assert PaddedBatch.concatenate([batch]) is batch


def test_keeping_no_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="without rows"):
        Histories(False).start({0: 4}).filter([])
