"""Lab 03's warm-up: how many forwards a rank runs before its first backward."""


def warmup(rank: int, p: int, m: int, v: int) -> int:
    """Forwards of this rank before its first backward; 1F1B where v is 1, else interleaved."""
    ### BEGIN SOLUTION
    if v == 1:
        return min(m, p - rank)
    return min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1)
    ### END SOLUTION
