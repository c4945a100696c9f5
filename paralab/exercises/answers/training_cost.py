"""Lab 11's exercise: FLOPs of a step, days of a training, MFU and HFU."""


def step_flops(model, samples):
    """FLOPs of one step over `samples` samples, every block's forward made twice; attention over
    all s * s pairs, masked or not.
    """
    ### BEGIN SOLUTION
    s, h = model.seq_len, model.hidden
    block = 24 * s * h**2 + 4 * s**2 * h  # forward of one sample: linear layers, attention
    head = 2 * s * h * model.vocab
    return samples * (4 * model.layers * block + 3 * head)
    ### END SOLUTION


def training_days(model, tokens, devices, flops):
    """Days to train on `tokens`, on devices that each make `flops` FLOP/s."""
    ### BEGIN SOLUTION
    work = step_flops(model, 1) * tokens / model.seq_len
    return work / (devices * flops) / 86_400
    ### END SOLUTION


def utilisation(model, samples, seconds, devices, peak):
    """(MFU, HFU), from 0 to 1, of a step over `samples` samples that takes `seconds` on all
    devices together; every block's forward is made twice; peak: FLOP/s of one device.
    """
    ### BEGIN SOLUTION
    s, h = model.seq_len, model.hidden
    forward = samples * (model.layers * (24 * s * h**2 + 4 * s**2 * h) + 2 * s * h * model.vocab)
    could = seconds * devices * peak
    return 3 * forward / could, step_flops(model, samples) / could
    ### END SOLUTION
