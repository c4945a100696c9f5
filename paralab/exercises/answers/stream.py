"""Lab 09's exercise: optimizer states that pass through a window of host memory."""


def my_stream(units, window):
    """The jobs of one update, in the order in which they are handed over: (what, unit, buffer).

    what: "read", "update" or "write"; units: how many units' states are in files
    window: how many buffers there are, 1 or more (they are called 0, 1, ...)
    """
    jobs = []
    ### BEGIN SOLUTION
    ahead = window - 1  # units that are read ahead of the one that is written
    for unit in range(units + ahead):
        if unit < units:
            jobs.append(("read", unit, unit % window))
            jobs.append(("update", unit, unit % window))
        if unit >= ahead:
            jobs.append(("write", unit - ahead, (unit - ahead) % window))
    ### END SOLUTION
    return jobs
