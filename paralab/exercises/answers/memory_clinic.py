"""Lab 06's warm-up: what fills four devices, and the settings that help."""

treatment = {  # patient: (the category that fills most, {setting: its new value, ...})
    "more nodes": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "optimizer",
        {"shard": 8, "recompute": "full"},
        ### END SOLUTION
    ),
    "twice the devices": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "activations",
        {"recompute": "full"},
        ### END SOLUTION
    ),
    "fully sharded": (
        ### BEGIN SOLUTION
        ### STUB: "",
        ### STUB: {},
        "buffers",
        {"prefetch": 1, "recompute": "full"},
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
}
