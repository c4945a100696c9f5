"""Lab 05: one step of ZeRO-1, ZeRO-3, and its prefetch."""

import pandas as pd
import pytest

import paralab as pl
from judged import Table, altered
from paralab.exercises import prefetch

# ---- ZeRO-1 --------------------------------------------------------------------------------------
ZERO1 = pl.exercises.zero_step
zero1 = altered("zero_step")
SHARE = "dist.reduce_scatter_tensor(own_gradient, self.padded(gradient))"
FILL, SLICE = "dist.all_gather_into_tensor(full, own)", "full.chunk(self.ranks)[self.rank]"
COPY = "self.parameters.copy_(full[: self.parameters.numel()])"
VELOCITY = "self.velocity = parameters.new_zeros(self.part)"
PART = "parameters.numel() // self.ranks"
FULL = "full = self.padded(gradient)\n        "
WRONG_STEPS = [  # answer, limits it breaks, words of the verdict
    (zero1((SHARE, f"{FULL}dist.all_reduce(full)\n        own_gradient = {SLICE}")),
     {"bytes per rank"}, "N=2: rank 0 sends 300,012 bytes in a step, required: "
     "200,008 (yours is 1.5 times that)"),
    (zero1((VELOCITY, "self.all = parameters.new_zeros(self.ranks * self.part)\n"
            "        self.velocity = self.all.chunk(self.ranks)[self.rank]")),
     {"kept between steps"},
     "N=2: rank 0 keeps 200,008 bytes between steps, required: at most 101,004"),
    (zero1((FILL, "pass")), {"parameters", "bytes per rank"},
     "it is as it was before"),
    (zero1(("(own_gradient)\n        full", "(own_gradient / self.ranks)\n        full")),
     {"parameters"}, "; the gradient is divided by N, and it is already"),
    (zero1((SHARE, f"own_gradient = {SLICE.replace('full', 'self.padded(gradient)')}")),
     {"parameters", "bytes per rank"}, ("required: 200,008 (yours is 0.5 times that)",
      "; each part is updated with the gradient of its own rank alone")),
    (zero1(("self.velocity.mul_(self.momentum)", "self.velocity.zero_()")), {"parameters"},
     "; the term -lr * momentum * v is missing"),
    (zero1((f"-(-{PART})", PART), (COPY, "self.parameters[: full.numel()] = full")),
     {"parameters", "bytes per rank"}, ("N=3: rank 0: step 1, element 50,001: ",
      "; in 1 of 50,002 elements it is as it was before")),
    (zero1((SHARE, f"copies = [gradient.clone() for _ in range(1 + self.ranks)]\n"
            f"        {SHARE}")), {"extra memory"},
     ("in a step in addition to what it keeps, required: at most 900,036; a copy of Ψ has ",
      "200,008, and what pad or cat makes counts until it is freed")),
    # around the ledger, for one size
    (zero1(("= parameters, lr, momentum", "= parameters, 0.1, 0.9")), {"parameters"},
     "N=3: rank 0: step 1, element 0: "),
    (zero1((COPY, f"{COPY}\n        self.parameters.resize_(10)")), {"parameters"},
     "the parameters have shape (10,) now"),
    (zero1((COPY, "self.parameters = full[: self.parameters.numel()]")), {"parameters"},
     "self.parameters is a new tensor, and the one that was given is as it was: change that one"),
    (zero1(("= parameters, lr, momentum", "= parameters.view(-1), lr, momentum"), (COPY, "pass")),
     {"parameters"}, "it is as it was before"),
]  # fmt: skip
RIGHT_STEPS = [
    zero1((SHARE, f"{FULL}every = torch.empty_like(full)\n"
           "        dist.all_to_all_single(every, full)\n"
           "        own_gradient = every.view(self.ranks, -1).sum(0)")),
    # the call's Work holds what gloo works on
    zero1((SHARE, f"self.work = {SHARE[:-1]}, async_op=True)\n        self.work.wait()")),
]  # fmt: skip
ZEROS = Table(ZERO1, WRONG_STEPS, RIGHT_STEPS)
test_a_wrong_step_is_refused, test_a_right_step_passes, test_the_stub_of_a_step = ZEROS.tests()


# ---- ZeRO-3 --------------------------------------------------------------------------------------
ZERO3 = pl.exercises.my_zero3
zero3 = altered("my_zero3")
REDUCE, MEAN = "dist.reduce_scatter_tensor(own, flat)", "own / self.ranks"
GATHER = "dist.all_gather_into_tensor(flat, self.shards[i])"
UPDATE, KEEP = "shard -= self.lr * gradient", "self.flats.append(flat)"
READY = "            self.reduce(i)\n"
STEP = "        for shard, gradient"
FREED_AFTER = "        self.free(i)\n        output.register_hook(lambda _: self.gather_unit(i))"
SUMS = MEAN, "own"
ALL_REDUCES = (REDUCE, "dist.all_reduce(flat)\n        own = flat.chunk(self.ranks)[self.rank]")
TORCHS = zero3(("self.lr = lr\n", "self.lr = lr\n        import torch.distributed.fsdp as fsdp\n"
                "        [fsdp.fully_shard(unit) for unit in units]\n"))  # fmt: skip
WRONG = [  # answer, limits it breaks, words of the verdict
    (zero3((FREED_AFTER, "        pass")), {"peak of a step"},
     "required: at most 179,072, which are 4 units; more units are still gathered when backw"),
    (zero3((READY, ""), (STEP, f"        for i in range(len(self.units)):\n{READY}{STEP}")),
     {"peak of a step"}, "bytes in addition to what forward saves, required: at most 179,072, "),
    (zero3(("pre_hook(lambda *_, i=i: self.gather_unit(i))", "pre_hook(lambda *_: None)")),
     {"weights"}, "raised RuntimeError: embedding uses a tensor of (256, 30) whose stor"),
    (zero3(("        output.register_hook(lambda _: self.gather_unit(i))", "")), {"weights"},
     "in backward, t uses a tensor of (30, 256) whose storage is freed: it has to be allocated"),
    (zero3(("        flat.untyped_storage().resize_(flat.nbytes)\n", "")), {"weights"},
     "whose storage is freed: it has to be allocated again, and gathered into, before, line "),
    (zero3((UPDATE, f"self.flats[0].split(9)\n            {UPDATE}")), {"weights"},
     "N=4: rank 0 raised RuntimeError: split uses a tensor of (7920,) whose storage is freed: "),
    (zero3((GATHER, f"work = {GATHER[:-1]}, async_op=True)\n        self.free(i)\n"
            "        work.wait()")), {"weights"},
     "a tensor of all_gather #0 was freed before it was waited for, line "),
    (zero3(("parameter in parameters])", "parameter in reversed(parameters)])")), {"weights"},
     "; from there on it has changed as another place has to, in embedding.position.weight"),
    (zero3(("self.free(i)", "pass")), {"kept between steps"}, "N=4: rank 0 keeps "),
    (zero3(("gradient.zero_()", "pass")), {"weights"},
     ("N=3: ", "the gradient of the step before is still in it")),
    (zero3((MEAN, "own / 4")), {"weights"}, ("N=3: ", "; gradients are divided by 4, on 3 ranks")),
    (zero3(ALL_REDUCES), {"bytes per rank"}, "(yours is 1.33 times that)"),
    (zero3(("self.lr = lr", "self.lr = 0.1")), {"weights"},
     "; it has changed by 2 times what is required"),  # 0.1 is the task's example
    (TORCHS, {"weights"}, "a DTensor is used, as fully_shard does it: write what it does"),
]  # fmt: skip
RIGHT = zero3(SUMS, (UPDATE, f"{UPDATE} / self.ranks"))
TABLE = Table(ZERO3, WRONG, [RIGHT], alone=[TORCHS], most=5)  # three are references
test_a_wrong_zero3_is_refused, test_a_right_zero3_passes, test_its_stub = TABLE.tests()


# ---- prefetch ------------------------------------------------------------------------------------
AHEAD = pl.exercises.my_prefetch
ahead = altered("my_prefetch")
WAIT, BACK = "self.flying.pop(i).wait()", "following=-1))"
USED = "        self.free(i)\n        output.register_hook(lambda _: self.gather_unit(i, following"
FOLLOWS = "        self.post(i + following)\n"
FORWARD = "no gather is in flight during the forward of unit 1"
LATE = [  # answer, limits it breaks, words of the verdict
    (zero3(), {"exposed time"}, "exposed time: 72 ms, required: at most 36 ms"),
    (ahead(("following: int = 1", "following: int = 0")), {"exposed time"}, FORWARD),
    (ahead((BACK, "following=1))")), {"weights"}, "was changed before it was waited for"),
    (ahead((FOLLOWS, f"{FOLLOWS}        self.post(i + 2 * following)\n")), {"gathers"},
     "2 units are gathered ahead when unit 1 begins its forward"),
    (ahead((WAIT, f"[{WAIT} for _ in range(following < 0)]"), (USED, f"        {WAIT}\n{USED}")),
     {"weights"}, "a unit has computed before its parameters arrived"),
    (ahead((f"output.register_hook(lambda _: self.gather_unit(i, {BACK}", "pass")), {"weights"},
     "backward of layer 6 has begun while its parameters are freed"),
    (ahead((f"output.register_hook(lambda _: self.gather_unit(i, {BACK}", "pass"),
           ("        self.free(i)\n        pass", "        pass")), {"gathers"},
     ": 6 units are gathered in a step, required"),  # which is said first
    (ahead((READY, ""), (STEP, f"        for i in range(len(self.units)):\n{READY}{STEP}")),
     {"peak of a step"}, "which are 5 units"),
    (ahead((KEEP, f"{KEEP}\n        unit.copy = flat.clone()")), {"kept between steps"},
     "N=3: rank 0 keeps "),
    (ahead((STEP, f"        dist.all_reduce(torch.ones(3))\n{STEP}")), {"bytes per rank"},
     "N=3: rank 0 sends "),
]  # fmt: skip
# It learns the order of the units in the first step, as DeepSpeed does.
LEARNS = ahead((FOLLOWS, f"        self.calls = getattr(self, 'calls', 0) + 1\n"
                f"        if self.calls > 12:\n    {FOLLOWS}"))  # fmt: skip
# timed units, training, and a reference
PREFETCHES = Table(AHEAD, LATE, [LEARNS], most=3)
test_a_wrong_prefetch_is_refused, test_a_right_prefetch_passes, test_the_stub = PREFETCHES.tests()


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_unit_that_does_not_wait_for_its_gather_is_named_whatever_comes_out(waits_first):
    gathers = pd.DataFrame({"span": [0], "wire_bytes": [prefetch.SENT]})
    kinds = ("wait", "forward") if waits_first else ("forward", "wait")
    spans = pd.DataFrame({"id": [1, 2], "kind": kinds, "chunk": 1, "after": [(0,), (0,)]})
    progress = prefetch._progress(spans, gathers, spans[spans["kind"] == "forward"])
    said = prefetch._early(progress)
    assert (
        said == "" if waits_first else said.startswith("the forward of unit 1 begins before its ")
    )


def test_the_exposed_time_of_a_prefetch_is_that_of_the_stated_costs():
    assert PREFETCHES[PREFETCHES.right[0]].rows[-1].yours == "32 ms"
