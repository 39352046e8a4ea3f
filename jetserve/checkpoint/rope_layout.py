"""The order of query and key rows that rotary embeddings expect: Meta's and llama.cpp's against Hugging Face's.

Meta's code and llama.cpp rotate neighbouring elements of a head, (0, 1), (2, 3), …; Hugging Face's rotates element i
with element i + H/2. The same weights in the one or the other layout differ by a permutation of each head's rows, which
this module owns. Rows are output channels, so that permuting them is exact for quantized weights too.
"""

import numpy as np


def half_split_order(rows: int, head_dim: int) -> np.ndarray:
    """For every row in Hugging Face's layout, its row in the interleaved one: `w_hf = w[order]`.

    The inverse of llama.cpp's `w.reshape(N, 2, H // 2, -1).swapaxes(1, 2)` when it converts from Hugging Face.

    Args:
      rows: N * H, all heads' rows.
      head_dim: H, even.

    Raises:
      ValueError: if H is odd or does not divide the rows.
    """
    if head_dim <= 0 or head_dim % 2 or rows % head_dim:
        raise ValueError(
            f"{rows} rows cannot be split into heads of {head_dim}; expected an even size that divides them"
        )
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(rows)
