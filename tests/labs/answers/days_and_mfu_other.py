"""Lab 11's warm-up by throughput: samples per day, and FLOP/s of one device."""


def days_and_mfu(flops, samples, seconds, total, devices, peak):
    steps_per_second = 1 / seconds
    samples_per_day = samples * steps_per_second * 24 * 60 * 60
    reached = flops * steps_per_second / devices  # FLOP/s of one device
    return total / samples_per_day, reached / peak
