"""A few numbers for each row of a matrix, kept to tell how far another matrix is from it where it is not kept itself."""

import torch
from torch import Tensor

NUM_SIGNS = 32  # a distance is told within some tenths of it
ROWS_AT_ONCE = 1024  # of a matrix, which is copied in float32


class RowSketch:
    """Products with random signs: the distance between two rows' sketches is, on average of squares, that of the rows."""

    def __init__(self, matrix: Tensor) -> None:
        generator = torch.Generator(matrix.device).manual_seed(0)
        signs = torch.randn(matrix.shape[1], NUM_SIGNS, generator=generator, device=matrix.device, dtype=torch.float32).sign_()
        self._signs = signs.mul_(NUM_SIGNS**-0.5)  # [columns, signs]
        self.values = self.of(matrix)

    def of(self, rows: Tensor) -> Tensor:  # [rows, columns] -> [rows, signs] float32
        return torch.cat([part.float() @ self._signs for part in rows.split(ROWS_AT_ONCE)])
