"""Lab 09's warm-up: the bandwidth that offload needs."""


def bandwidth_needed(tokens, moved, peak, efficiency):
    """Bytes per second that a link must carry, a float.

    tokens: of a step on this device, b s; moved: bytes per parameter and step over the link
    peak: FLOP/s of the device while it computes; efficiency: share of time it is to compute, 0.9
    """
    ### BEGIN SOLUTION
    intensity = 8 * tokens / moved  # FLOPs per byte moved; Ψ cancels
    # efficiency = intensity * bandwidth / (intensity * bandwidth + peak), solved for bandwidth
    return efficiency / (1 - efficiency) * peak / intensity
    ### END SOLUTION
