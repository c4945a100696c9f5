"""Lab 12: a plan for a trillion parameters with fewer days than the published one."""


def my_plan() -> dict:
    """{setting of pl.Plan: value} for the model of a trillion parameters."""
    ### BEGIN SOLUTION
    return {
        "tp": 8,
        "pp": 32,  # half as many stages: a shorter pipeline to fill
        "dp": 12,
        "microbatches": 256,
        "microbatch_size": 1,
        "schedule": "interleaved",  # and each rank's part in two chunks
        "virtual_stages": 2,
        "zero_stage": 1,  # pays for the larger part of the model that a rank holds
        "sequence_parallel": True,
        "recompute": "selective",
        "precision": "fp16",
    }
    ### END SOLUTION
