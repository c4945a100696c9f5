"""Lab 12, another plan: four chunks on each rank."""


def my_plan() -> dict:
    return {
        "tp": 8,
        "pp": 32,
        "dp": 12,
        "microbatches": 256,
        "microbatch_size": 1,
        "schedule": "interleaved",
        "virtual_stages": 4,
        "zero_stage": 1,
        "sequence_parallel": True,
        "recompute": "selective",
        "precision": "fp16",
    }
