"""Lab 04's warm-up: three schedules that deadlock, to be repaired."""

fixed = {
    "two ranks": [
        ### BEGIN SOLUTION
        ### STUB: "0F0 0B0 0F1 0F2 0B1 0B2",
        ### STUB: "1F0 1F1 1B0 1F2 1B1 1B2",
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        ### END SOLUTION
    ],
    "two chunks": [
        ### BEGIN SOLUTION
        ### STUB: "0F0 0F1 2F0 2F1 0B0 0B1 2B0 2B1",
        ### STUB: "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
        ### END SOLUTION
    ],
    "three ranks": [
        ### BEGIN SOLUTION
        ### STUB: "0F0 0B0 0F1 0B1 0F2 0B2",
        ### STUB: "1F0 1F1 1B0 1F2 1B1 1B2",
        ### STUB: "2F0 2F1 2F2 2B0 2B1 2B2",
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
        "2F0 2B0 2F1 2F2 2B1 2B2",
        ### END SOLUTION
    ],
}
