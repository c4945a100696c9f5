"""Lab 06's exercise: what fills four devices, and the setting that helps."""

treatment = {  # patient: (the category that fills most, {setting: its new value})
    "twice the devices": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "activations",
        {"recompute": "full"},
        ### END SOLUTION
    ),
    "a small model": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "buffers",
        {"bucket_bytes": 64 * 1024},
        ### END SOLUTION
    ),
    "fully sharded": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "buffers",
        {"prefetch": 1},
        ### END SOLUTION
    ),
    "more nodes": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "optimizer",
        {"shard": 8},
        ### END SOLUTION
    ),
}
