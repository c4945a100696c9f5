"""The moments of a program: lanes, links and waits as anyone can work them out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

import paralab as pl
from paralab.interpret.costs import Compute, Cost, Costs, Posted
from paralab.interpret.spans import spans
from paralab.interpret.time import Times, time
from paralab.programs.compile import compiled
from paralab.programs.derive import derived
from paralab.programs.instructions import (
    ADD,
    BACKWARD,
    COMPUTE,
    COPY,
    FORWARD,
    KEEP,
    RECEIVE,
    SEND,
    UPDATE,
    WAIT,
    Code,
    Instr,
    all_reduce,
    wait,
)
from paralab.programs.program import Program
from paralab.spec import links
from paralab.theory.work import Work
from stated import FREE

MODEL = pl.ModelSpec(layers=4, hidden=48, heads=4, seq_len=24, vocab=260)
DEVICE = pl.Cluster(
    devices_per_node=8, flops=1e11, memory_bandwidth=3e10, op_overhead=1e-6, intra=FREE
)


def cluster(seconds: float = 0.0, *, inter: float | None = None, **changes) -> pl.Cluster:
    """Devices that compute at once, and links on which every call of a pair takes so many seconds,
    or ``inter`` for each of its messages.
    """
    links = {"intra": pl.Link(alpha=seconds, bandwidth=1e30)}
    links["collectives"] = {"all_reduce": pl.Link(alpha=seconds / 2, bandwidth=1e30)}
    if inter is not None:
        links["inter"] = pl.Link(alpha=inter, bandwidth=1e30)
    fields = {"flops": 1e30, "memory_bandwidth": 1e30, "op_overhead": 0.0, **links, **changes}
    return DEVICE.replace(**fields)


@pytest.fixture
def costly(monkeypatch):
    """Of all that is computed only forward and backward take time: of a whole stage so much."""

    def take(**seconds: float) -> None:
        def of(costs: Costs, pp: int, ins: Instr) -> Cost:
            if ins.op not in COMPUTE:
                return plain(costs, pp, ins)
            i, j = ins.at
            stage = next((a, b) for a, b in costs.program.stages if a <= i < b)
            part = (j - i) / (stage[1] - stage[0])
            return Compute(part * seconds.get(ins.op.lower(), 0.0))

        monkeypatch.setattr(Costs, "of", of)

    plain = Costs.of
    return take


def test_a_message_adds_its_seconds_where_nothing_hides_it(costly):
    """One micro-batch goes down the pipeline and back: 2 (p-1) messages."""
    costly(forward=1.0, backward=2.0)
    program = compiled(MODEL.replace(tied=False), pl.Plan(pp=4))
    assert time(program, cluster(0.5)).seconds == pytest.approx(12 + 6 * 0.5)


# ---- lanes ---------------------------------------------------------------------------------------
def by_hand(plan: pl.Plan, *codes: Code) -> Program:
    """A program of these lists."""
    return replace(compiled(MODEL, plan), codes=[derived(code) for code in codes])


def second(k: int = 0) -> Instr:
    """One second of compute, of micro-batch ``k``, which needs nothing."""
    return Instr(BACKWARD, (0, 1), k)


@pytest.fixture
def seconds(monkeypatch):
    """Every instruction of compute takes one."""
    monkeypatch.setattr(Costs, "_compute", lambda costs, pp, ins: Compute(1.0))


def test_only_what_backward_does_not_cover_is_waited_for(seconds):
    """Three buckets leave behind backward's first, second and fourth second."""
    plan = pl.Plan(dp=2, bucket_bytes=1)
    a, b, c = (all_reduce(unit) for unit in range(3))
    code = [second(), a, second(), b, second(), second(), c]
    for call, step in ((0.5, 4.5), (1.0, 5.0), (1.5, 5.5), (2.0, 7.0), (3.0, 10.0)):
        # Short calls hide but for the last; long ones queue from the first launch on.
        assert time(by_hand(plan, code), cluster(call)).seconds == pytest.approx(step)
    after = [*(second() for _ in range(4)), a, b, c]
    assert time(by_hand(plan, after), cluster(1.0)).seconds == pytest.approx(7.0)


def test_a_group_makes_one_call_after_the_other_and_two_groups_both_at_once(seconds):
    plan = pl.Plan(dp=2, tp=2, bucket_bytes=1)
    over_dp, over_tp = all_reduce(0), all_reduce(1, "tp")
    same = time(by_hand(plan, [over_dp, all_reduce(1)]), cluster(3.0))
    other = time(by_hand(plan, [over_dp, over_tp]), cluster(3.0))
    assert (same.seconds, other.seconds) == (6.0, 3.0)
    assert list(same.ranks[0].calls.values()) == [(0.0, 3.0), (3.0, 6.0)]


def messages(*, to: int, count: int, begin: int = 0) -> Code:
    """Sends, one per second."""
    return [
        ins for k in range(begin, begin + count)
        for ins in (Instr(SEND, 4, k, -1, (("x", 4, k),), (("sent", ("x", 4), k),), "pp", to),
                    second(k))
    ]  # fmt: skip


def receives(*, source: int, count: int, begin: int = 0) -> Code:
    return [
        Instr(RECEIVE, 4, k, -1, (), (("x", 4, k),), "pp", source)
        for k in range(begin, begin + count)
    ]


# Four seconds of latency, and one for the activations of two samples; op 4 has three times as many.
HIGH_LATENCY = pl.Link(alpha=4.0, bandwidth=8.0 * MODEL.seq_len * MODEL.hidden)
ON_GPUS = [(0.0, 7.0), (7.0, 14.0), (14.0, 21.0)]


@pytest.mark.parametrize(("cores", "sent", "received"), [
    (None, ON_GPUS, ON_GPUS),
    (8, [(0.0, 3.0), (3.0, 6.0), (6.0, 9.0)], [(0.0, 7.0), (3.0, 10.0), (6.0, 13.0)]),
], ids=["nccl", "gloo"])  # fmt: skip
def test_a_slow_link_carries_one_message_after_the_other(seconds, cores, sent, received):
    """Over NCCL with its latency, over gloo its bytes alone."""
    sends = [ins for ins in messages(to=1, count=3) if ins.op == SEND]
    codes = [sends + list(map(wait, sends)), receives(source=0, count=3)]
    program = replace(compiled(MODEL, pl.Plan(pp=2)), codes=codes)
    times = time(program, cluster(cores=cores, intra=HIGH_LATENCY))
    assert [list(rank.calls.values()) for rank in times.ranks] == [sent, received]
    assert times.ends[0] == sent[-1][1]  # when all its messages have left


@pytest.mark.parametrize(("cores", "step"), [(None, 2 * 8 * 5.0), (8, 2 * (4 * 5.0 + 1.0))])
def test_of_gpipes_messages_two_are_in_flight_at_once_over_gloo(costly, cores, step):
    """As many as receives are posted: eight forward and eight back, and nothing else takes time."""
    costly()
    plan = pl.Plan(pp=2, microbatches=8, schedule="gpipe")
    links = cluster(cores=cores, intra=HIGH_LATENCY)
    report = pl.predict(MODEL.replace(tied=False), plan, links, steps=1, detail="calls")
    assert report.step_time == pytest.approx(step, rel=1e-6)
    assert report.replay(links).step_time == pytest.approx(step, rel=1e-6)


def test_a_send_waits_for_the_one_before_it_to_the_same_peer(seconds):
    """So that memory does not depend on how fast a link is; see derive.py."""
    program = by_hand(pl.Plan(pp=2), messages(to=1, count=3), receives(source=0, count=3))
    times = time(program, cluster(5.0, wait_overhead=0.5))
    assert times.ends[0] == 15.0  # long over when it is waited for: nothing is slower behind it
    assert times.ends[1] == 15.5


def test_both_directions_of_a_pair_are_lanes_of_their_own(seconds):
    one = [*messages(to=1, count=1), *receives(source=1, count=1, begin=9)]
    other = [*messages(to=0, count=1, begin=9), *receives(source=0, count=1)]
    times = time(by_hand(pl.Plan(pp=2), one, other), cluster(5.0))
    assert set(times.ranks[0].calls.values()) == {(1.0, 6.0)}


def test_a_message_moves_when_both_its_ends_are_posted(seconds):
    late = [second(), second(), second(), *receives(source=0, count=1)]
    times = time(by_hand(pl.Plan(pp=2), messages(to=1, count=1), late), cluster(5.0))
    assert list(times.ranks[1].calls.values()) == [(3.0, 8.0)]


def test_a_call_between_stages_begins_when_the_last_of_them_is_there(seconds):
    norm = ("norm", 0, 0)
    call = Instr("ALL_REDUCE", 0, -1, -1, (norm,), (norm,), "pp", phase="control")
    program = by_hand(pl.Plan(pp=3), [call], [second(), second(), call], [second(), call])
    times = time(program, cluster(5.0))
    # An all-reduce of three is four messages, of half of 5 s each.
    assert [list(rank.calls.values()) for rank in times.ranks] == [[(2.0, 12.0)]] * 3


def test_posting_and_waiting_take_the_rank_s_own_time(seconds):
    plan = pl.Plan(dp=2, bucket_bytes=1)
    code = [all_reduce(0), second(), wait(all_reduce(0)), second()]
    slow = cluster(10.0, call_overhead=0.25, wait_overhead=0.5)
    assert time(by_hand(plan, code), cluster(10.0)).seconds == pytest.approx(11.0)
    times = time(by_hand(plan, code), slow)
    assert times.ranks[0].left[0] == 0.25
    assert times.seconds == pytest.approx(11.5)


def test_little_work_behind_a_wait_pays_little_for_it():
    program = compiled(MODEL, pl.Plan(tp=4, tp_mode="2d"))

    def block(**changes) -> tuple:
        costs = Costs(program, cluster(flops=1e6, wait_overhead=0.5, **changes))
        code = [ins for ins in program.codes[0] if ins.op == FORWARD]
        return max((costs.of(0, ins).inside for ins in code), key=len)

    assert {call.slower for _, call in block() if isinstance(call, Posted)} == {0.5}
    inside = block(wait_work=0.25)
    calls = {ins.writes: call.slower for ins, call in inside if isinstance(call, Posted)}
    waits = [at for at, (ins, _) in enumerate(inside) if ins.op == WAIT]
    for at, until in itertools.pairwise(waits):
        work = sum(cost.seconds for _, cost in inside[at:until] if isinstance(cost, Compute))
        assert calls[inside[at][0].reads] == pytest.approx(0.5 * work / (work + 0.25))
    assert calls[inside[waits[-1]][0].reads] == 0.5  # what follows is another instruction's
    assert len(set(calls.values())) > 2


@pytest.mark.parametrize(("between", "share"), [
    ([], 0.0),  # the next wait is for another call
    ([second()], 0.8),
    ([second(), second()], 8 / 9),
    ([all_reduce(2)], 0.5),  # posted in a quarter of a second
    ([Instr(ADD, 2, 0, -1, (("part", 2, 0),), (("part", 3, 0),))], 1.0),
    ([Instr(KEEP, 2, 0, -1, (("part", 2, 0),), (("part", 3, 0),))], 1.0),
    ([second(), second(1)], 1.0),  # an action ends
], ids=["nothing", "a second", "two", "a call", "add", "keep", "another action"])  # fmt: skip
def test_a_wait_costs_what_the_work_up_to_the_next_needs(seconds, between, share):
    a, b = all_reduce(0), all_reduce(1)
    waits = [wait(a), *between, wait(b)]
    plan, slow = pl.Plan(dp=2, bucket_bytes=1), {"call_overhead": 0.25, "wait_overhead": 0.5}
    program = replace(compiled(MODEL, plan), codes=[[a, b, *waits, second()]])

    def at(which: int, **changes) -> float:
        """What the rank does behind a wait, before it goes on."""
        times = time(program, cluster(1.0, **slow, **changes))
        place = 2 + waits.index(wait((a, b)[which]))
        return times.ranks[0].left[place] - max(
            times.ranks[0].left[place - 1], times.ranks[0].calls[which][1]
        )

    assert [at(which) for which in (0, 1)] == pytest.approx([0.5, 0.5])
    assert at(0, wait_work=0.25) == pytest.approx(0.5 * share)
    assert at(1, wait_work=0.25) == pytest.approx(0.5)  # the list ends behind it


def test_what_comes_from_another_stage_begins_an_action_and_is_taken_for_much_work(seconds):
    x, gathered = ("x", 2, 0), all_reduce(0)
    send = Instr(SEND, 2, 0, -1, (x,), (("sent", x, 0),), "pp", 1)
    receive = Instr(RECEIVE, 2, 0, -1, (), (x,), "pp", 0)
    arrived = wait(receive)._replace(at=RECEIVE)
    slow = cluster(1.0, wait_overhead=0.5, wait_work=0.25)

    def behind(*code: Instr) -> list[float]:
        """What the rank does behind the message, and behind the call."""
        program = replace(compiled(MODEL, pl.Plan(dp=2, pp=2)), codes=[[send], list(code)])
        times = time(program, slow)
        left, calls = [0.0, *times.ranks[1].left], times.ranks[1].calls
        places = (code.index(receive), code.index(arrived)), (0, code.index(wait(gathered)))
        return [left[at + 1] - max(left[at], calls[call][1]) for call, at in places]

    assert behind(gathered, receive, arrived, wait(gathered), second()) == [0.5, 0.5]
    assert behind(gathered, wait(gathered), second(), receive, arrived, second()) == [0.5, 0.5]


def test_an_action_is_one_box_with_all_that_is_begun_and_awaited_in_it():
    plan = pl.Plan(tp=2, microbatches=2)
    program = compiled(MODEL, plan)
    found = spans(program, program.codes[0])
    runs = [span for span, _ in itertools.groupby(found)]
    assert [span and span[:2] for span in runs] == [
        *[(kind, k) for k in range(2) for kind in ("forward", "backward")],
        ("optimizer", -1),
    ]
    pipeline = compiled(MODEL, plan.replace(pp=2))
    inside = spans(pipeline, pipeline.codes[0])
    for span, ins in zip(inside, pipeline.codes[0], strict=True):
        assert (span is None) == (ins.lane == "pp" or ins.phase == "tied")  # between two actions
    adds = compiled(MODEL, pl.Plan(dp=2, zero_stage=2, microbatches=3, bucket_bytes=20_000))
    found = spans(adds, adds.codes[0])  # what is added up behind an action's last compute is not in
    actions = [span for span, _ in itertools.groupby(found) if span and span[1] >= 0]
    assert len(actions) == 6 and ("copy", -1, 0, 0) in found


# ---- which link ----------------------------------------------------------------------------------
def lasting(times: Times, program: Program, lane: str) -> set[float]:
    """How long a lane's calls take on any rank."""
    return {
        round(end - start, 9)
        for code, rank in zip(program.codes, times.ranks, strict=True)
        for position, (start, end) in rank.calls.items()
        if code[position].lane == lane
    }


@pytest.mark.parametrize(("dp", "devices", "tp_level"), [(2, 2, 1.0), (3, 3, 14.0)])
def test_groups_alike_wait_for_the_slowest_of_them_and_no_group_for_another(
    seconds, dp, devices, tp_level
):
    """Of three tp pairs on nodes of three the middle one has a rank on each."""
    program = compiled(MODEL, pl.Plan(dp=dp, tp=2))
    times = time(program, cluster(1.0, inter=7.0, nodes=2, devices_per_node=devices))
    assert lasting(times, program, "tp") == {tp_level}
    if dp == 2:
        assert lasting(times, program, "dp") == {14.0}  # an all-reduce is two messages


def test_each_pipeline_rank_has_the_level_of_its_own_groups(seconds):
    """Ranks 0 to 2 share a node of four, and 3 to 5 do not."""
    program = compiled(MODEL, pl.Plan(pp=2, dp=3))
    times = time(program, cluster(1.0, inter=7.0, nodes=2, devices_per_node=4))
    first, second_ = (
        {round(end - start, 9) for at, (start, end) in rank.calls.items() if code[at].lane == "dp"}
        for code, rank in zip(program.codes, times.ranks, strict=True)
    )
    # Four messages on one node; of two nodes' four, two go from one to the other.
    assert (first, second_) == ({2.0}, {15.0})
    assert lasting(times, program, "pp") == {7.0}  # rank 1 and 4, or 2 and 5


def test_a_group_of_one_sends_nothing_and_takes_no_time():
    program = compiled(MODEL, pl.Plan(dp=2, zero_stage=3, shard=1))
    times = time(program, cluster(1.0))
    assert lasting(times, program, "dp") == {0.0}
    assert lasting(times, program, "replica") == {1.0}


# ---- the device ----------------------------------------------------------------------------------
def test_one_device_takes_what_its_ops_state_and_the_optimizer_moves():
    program = compiled(MODEL, pl.Plan(microbatches=2), optimizer="sgd")
    work = sum((half for op in program.model.ops for half in op.work), Work()) * 2
    tensors = len(program.model.shapes)
    update = Work(0, 12 * MODEL.num_params, 5 * len(program.units[0]) + tensors / 2)
    expected = (work + update).seconds(DEVICE)
    assert math.isclose(time(program, DEVICE).seconds, expected, rel_tol=1e-9)


def test_calls_inside_an_op_are_waited_for_and_those_beside_its_weight_half_hide():
    """Behind a product, or behind the weight half's own message on another axis."""
    plan = pl.Plan(tp=8, tp_mode="3d", microbatch_size=4)
    program, made = compiled(MODEL, plan), pl.dry_run(MODEL, plan).collectives
    calls = sum(
        links.messages(op, len(ranks)) / (1 + (op == "all_reduce"))
        for op, ranks in zip(made["op"], made["ranks"], strict=True)
    )
    ops = program.model.ops
    beside = sum(call.overlapped for op in ops for some in op.calls.values() for call in some)
    assert 0 < beside < calls
    assert time(program, cluster(1.0)).seconds == pytest.approx(calls - beside)
    alone = time(program, cluster(0.0, flops=1e9)).seconds
    more = time(program, cluster(1e-6, flops=1e9)).seconds - alone
    assert more == pytest.approx((calls - beside) * 1e-6)


# ---- other tiers ---------------------------------------------------------------------------------
def test_a_job_begins_when_its_lane_is_free_and_what_it_needs_is_there():
    program = compiled(MODEL, pl.Plan(zero_stage=3, offload="nvme", microbatches=2))
    link = pl.Link(alpha=1.0, bandwidth=1e30)
    times = time(program, cluster(host=link, disk=link, host_bandwidth=1e6))
    there: dict[tuple, float] = {}
    lanes: dict[str, float] = {}
    for position, ins in enumerate(program.codes[0]):
        if position in times.ranks[0].calls:
            start, until = times.ranks[0].calls[position]
            needed = [there.get(v, 0.0) for v in ins.reads]
            assert start >= max([lanes.get(ins.lane, 0.0), *needed])
            lanes[ins.lane] = until
            there |= dict.fromkeys(ins.writes, until)
    assert set(lanes) == {"d2h", "host", "h2d", "disk"}


@pytest.mark.parametrize(("host", "at_once", "delayed"), [(3.0, 13.0, 10.0), (12.0, 22.0, 12.0)])
def test_a_delayed_update_runs_beside_the_next_step(costly, host, at_once, delayed):
    """The device computes for 10 s. Its step ends with the host's update, or runs next to the one
    before and waits for that at its end.
    """
    costly(forward=4.0, backward=6.0)
    links = cluster(host=FREE, host_bandwidth=28 * MODEL.num_params / host)
    for late, step in ((False, at_once), (True, delayed)):
        places = {"gradients": "cpu", "optimizer": "cpu", "delayed": late}
        plan = pl.Plan(zero_stage=2, offload=places)
        assert time(compiled(MODEL, plan), links).seconds == pytest.approx(step, rel=1e-3)


@pytest.mark.parametrize(("fields", "calls", "num_bytes"), [
    ({"zero_stage": 1}, {UPDATE: 6}, 28),
    ({"zero_stage": 1, "precision": "bf16"}, {UPDATE: 7, COPY: 1}, 28 + 6 + 6),
    ({"zero_stage": 1, "precision": "bf16", "grad_dtype": "fp32"}, {UPDATE: 6, COPY: 1}, 28 + 6),
    ({"zero_stage": 3, "precision": "bf16"}, {UPDATE: 8}, 28 + 6 + 6),
    ({"zero_stage": 2, "microbatches": 2}, {UPDATE: 6, ADD: 1}, 28 + 12),
], ids=str)  # fmt: skip
def test_a_job_of_the_hosts_costs_its_calls_and_its_bytes(fields, calls, num_bytes):
    """As many calls as on the device. Gradients are widened, and 16-bit parameters rounded, once:
    by a copy, or in the update where they live on the host too.
    """
    program = compiled(MODEL, pl.Plan(offload="cpu", **fields))
    jobs = [ins for ins in program.codes[0] if ins.lane == "host" and ins.op != WAIT]
    for rates in ({"op_overhead": 1.0}, {"op_overhead": 0.25, "launch_overhead": 1.0}):
        costs = Costs(program, cluster(host=FREE, host_bandwidth=1e30, **rates))
        assert {(ins.op, costs.of(0, ins).seconds) for ins in jobs} == set(calls.items())
    costs = Costs(program, cluster(host=FREE, host_bandwidth=1.0))
    moved = sum(costs.of(0, ins).seconds for ins in jobs)
    assert moved == num_bytes * MODEL.num_params


# ---- no rank can go on ---------------------------------------------------------------------------
def test_a_deadlock_is_no_time(seconds):
    """Both want to receive before they send."""

    def use(k: int) -> Instr:
        return Instr(FORWARD, (4, 5), k, reads=(("x", 4, k),))

    one = [*receives(source=1, count=1), use(0), *messages(to=1, count=1, begin=7)]
    other = [*receives(source=0, count=1, begin=7), use(7), *messages(to=0, count=1)]
    with pytest.raises(ValueError, match="deadlock"):
        time(by_hand(pl.Plan(pp=2), one, other), cluster())
