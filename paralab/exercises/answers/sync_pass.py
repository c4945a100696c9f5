"""Lab 02's second exercise: a pass that puts the sums of the gradients into a program."""

from paralab.programs import all_reduce, completed, insert


def my_pass(program):
    """Sum every unit's gradient over the data-parallel ranks, while backward still runs."""
    ### BEGIN SOLUTION
    sums = {}
    for position, units in completed(program.code).items():
        sums[position] = [all_reduce(unit) for unit in units]
    return program.replace(insert(program.code, sums))
    ### END SOLUTION
