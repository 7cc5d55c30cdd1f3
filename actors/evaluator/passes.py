"""pass@k: the chance that at least one of k answers solves a problem, estimated without bias from n >= k answers.

pass@k = mean over problems of 1 - C(n - c, k) / C(n, k),  c of n answers correct   (Chen et al., arXiv 2107.03374, eq. 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at(k: int, samples: int, solved: Sequence[int]) -> float:
    """`solved`: c of each problem, 0 <= c <= samples. Binomials are exact integers, so that no n is too large."""
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} answers; expected 1 <= k <= {samples}")
    if not solved:
        raise ValueError(f"pass@{k} of no problem; expected at least one")
    ways = math.comb(samples, k)
    failed = sum(math.comb(samples - correct, k) for correct in solved)
    return 1.0 - failed / (ways * len(solved))
