"""Lab 09's warm-up, from times: how long may the copies of one parameter take?"""


def bandwidth_needed(tokens, moved, peak, efficiency):
    computing = 8 * tokens / peak  # seconds for one parameter
    copying = computing * (1 / efficiency - 1)  # what is left of the step
    return moved / copying
