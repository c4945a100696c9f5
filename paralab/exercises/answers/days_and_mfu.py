"""Lab 11's warm-up: days of a training, and MFU."""


def days_and_mfu(flops, samples, seconds, total, devices, peak):
    """(days, mfu) of a training on `total` samples; mfu from 0 to 1.

    flops, samples, seconds  of one step: the model's FLOPs, nothing recomputed
    devices, peak            how many, and FLOP/s of each by its data sheet
    """
    ### BEGIN SOLUTION
    days = total / samples * seconds / 86_400
    return days, flops / (seconds * devices * peak)
    ### END SOLUTION
