"""Lab 11: one rate from measured steps, with its error in and out of sample."""


def own_fit(rows: list[tuple[float, int, float]]) -> tuple[float, float, float]:
    """(FLOP/s of one device, mean error in sample, mean error out of sample).

    rows: (FLOPs of a step, devices, measured seconds); errors are shares, 0.1 for 10 %
    """
    ### BEGIN SOLUTION
    import math

    def fitted(some):
        logs = [math.log(flops / (devices * seconds)) for flops, devices, seconds in some]
        return math.exp(sum(logs) / len(logs))

    def error(rate, row):
        flops, devices, seconds = row
        predicted = flops / (devices * rate)
        return abs(predicted / seconds - 1)

    rate = fitted(rows)
    seen = [error(rate, row) for row in rows]
    unseen = [error(fitted(rows[:i] + rows[i + 1 :]), row) for i, row in enumerate(rows)]
    return rate, sum(seen) / len(seen), sum(unseen) / len(unseen)
    ### END SOLUTION
