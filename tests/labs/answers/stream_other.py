"""Lab 09's last exercise in another way: the two halves of the window take turns."""


def my_stream(units, window):
    jobs, before = [], []
    half = max(window // 2, 1)
    buffers = min(2 * half, window)
    for first in range(0, units + half, half):
        group = range(first, min(first + half, units))
        reads = [("read", unit, unit % buffers) for unit in group]
        writes = [("write", unit, unit % buffers) for unit in before]
        # a single buffer has no other half: it is written before it is read into
        jobs += writes + reads if window == 1 else reads + writes
        jobs += [("update", unit, unit % buffers) for unit in group]
        before = group
    return jobs
