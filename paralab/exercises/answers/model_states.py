"""Lab 00's exercise: what a model's states weigh, and how many devices hold them."""

import math


def model_states(model, recipe):
    """Bytes of each state of `model`: {state: bytes}. recipe: {state: bytes per parameter}."""
    ### BEGIN SOLUTION
    return {state: model.num_params * size for state, size in recipe.items()}
    ### END SOLUTION


def devices_needed(model, recipe, memory_gb):
    """How many devices of `memory_gb` GB (10**9 bytes each) hold these states and nothing else."""
    ### BEGIN SOLUTION
    total = sum(model_states(model, recipe).values())
    return math.ceil(total / (memory_gb * 10**9))
    ### END SOLUTION
