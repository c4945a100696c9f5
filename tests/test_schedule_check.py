"""The validator: what is wrong with a schedule is said by rank, action and cycle of waits."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paralab as pl
from lowered import lower
from paralab.parallel.schedules import SCHEDULES, Action, build, gpipe, one_f_one_b
from paralab.programs.compile import compiled
from paralab.theory.pipeline import simulate
from paralab.theory.schedule_check import checked, validate
from refusals import refuses


def refused(schedule, **more) -> str:
    with pytest.raises(ValueError, match="; legal: ") as caught:
        validate(schedule, **more)
    return str(caught.value)


# ---- one fault each -----------------------------------------------------------------------------
@pytest.mark.parametrize(("lists", "rank", "position", "action", "said"), [
    (["0F0 0B0 0F1", "1F0 1B0 1F1 1B1"], 0, -1, "0B1", "whole backward of stage 0"),
    (["0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], 0, 2, "0B1", "before 0F1"),
    (["0F0 0I0", "1F0 1B0"], 0, -1, "0W0", "weight half"),
    (["0F0 0B0", "1F0 1B0 1F0"], 1, 2, "1F0", "twice"),
    (["0F0 0B0", "0F0 1B0"], 1, 0, "0F0", "belongs on rank 0"),
    (["0F0 0B0", "1B0 1F0"], 1, 0, "1B0", "before 1F0"),
    (["0F0 0I0 0W0 0B0", "1F0 1B0"], 0, 3, "0B0", "backward runs twice"),
    (["0F0 0B0 0W0", "1F0 1B0"], 0, 2, "0W0", "backward runs twice"),
    (["0F0 0W0 0I0", "1F0 1B0"], 0, 1, "0W0", "before 0I0"),
    (["0F0 0B0", ""], 1, -1, "everything", "nothing to do"),
    (["0F0 0B0 2F0 2B0", "1F0 1B0"], 1, -1, "3F0", "forward of stage 3"),
    (["0F999999999999999 0B999999999999999", "1F0 1B0"], 0, -1, "0F0", "forward of stage 0"),
    ([[Action(np.int64(0), "F", np.int64(0)), Action(np.int64(0), "B", np.int64(1))]],
     0, 1, "0B1", "before 0F1"),
])  # fmt: skip
def test_each_fault_is_named_by_rank_and_action(lists, rank, position, action, said):
    error = refused(lists)
    place = f"schedule[{rank}][{position}]" if position >= 0 else f"missing in schedule[{rank}]"
    assert said in error and error.startswith(f"{place}={action!r}")
    for use in (lower, lambda lists: simulate(lists, forward=1, backward=1)):
        with pytest.raises(ValueError, match=action):
            use(lists)


def test_what_was_asked_for_is_held_against_the_lists():
    schedule = gpipe(2, 3)
    validate(schedule, microbatches=3, stages=2)
    for more, action in (({"microbatches": 4}, "0F3"), ({"microbatches": 2}, "0F2")):
        assert "schedule[0]" in (error := refused(schedule, **more)) and f"={action!r}" in error
    assert "='2F0'" in refused(schedule, stages=4)
    refuses("stages=3.*a multiple of 2", validate, schedule, stages=3)
    refuses("one list of actions per rank", validate, [])


@pytest.mark.parametrize("odd", [Action(0, "Q", 0), Action(0, "F", 0.5), Action("0", "F", 0),
                                 Action(0, None, 0), Action(-1, "F", 0), Action(0, "F", -1),
                                 Action(0, "F", 2**80), Action(0, ["F"], 0),
                                 Action(0, "F", np.float64(0))])  # fmt: skip
def test_an_action_of_nonsense_is_refused(odd):
    refuses("legal", validate, [[odd, Action(0, "B", 0)]])


# ---- deadlock -----------------------------------------------------------------------------------
def test_a_deadlock_is_explained_by_its_circle_of_waits():
    error = refused(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    assert error.startswith("schedule[0][1]='0B0'")
    assert (
        "rank 0 waits at 0B0, which needs 1B0 of rank 1, but there 1B0 comes after 1F1; rank 1 "
        "waits at 1F1, which needs 0F1 of rank 0, but there 0F1 comes after 0B0" in error
    )
    assert error.endswith("for instance 1B0 before 1F1 on rank 1")
    validate(["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"])  # what it proposes


def test_ranks_outside_the_circle_are_left_out_of_it():
    rows = [list(row) for row in one_f_one_b(4, 4)]
    at = {str(a): (r, i) for r, row in enumerate(rows) for i, a in enumerate(row)}
    (r, i), (_, j) = at["3B0"], at["3F2"]
    rows[r].insert(i, rows[r].pop(j))  # the last rank wants 3F2 before 3B0; rank 2 cannot have it
    error = refused(rows)
    assert error.count(" waits at ") == 2 and "rank 2 waits" in error and "rank 3 waits" in error


def test_a_rank_can_wait_for_itself_and_in_the_circle_for_what_another_waits_at():
    assert "rank 0 waits at 1F0, which needs 0F0 of rank 0" in refused(["1F0 0F0 1B0 0B0"])
    error = refused(["0F0 0B0 2F0 2B0", "1F0 1B0 3F0 3B0"])
    assert "0B0, which needs 1B0 of rank 1; rank 1 waits at 1B0, which needs 2B0 of rank 0" in error
    assert error.endswith("for instance 2F0 and 2B0 before 0B0 on rank 0")


# ---- mutants ------------------------------------------------------------------------------------
@st.composite
def mutants(draw):
    """A schedule of the textbook with up to four changes."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 4))
    v = draw(st.integers(1, 3)) if name == "interleaved" else 1
    m = draw(st.integers(1, 3)) * pp if name == "interleaved" else draw(st.integers(1, 6))
    rows = [list(r) for r in build(name, pp=pp, microbatches=m, virtual_stages=v)]
    for _ in range(draw(st.integers(1, 4))):
        row = rows[draw(st.integers(0, pp - 1))]
        if not row:
            continue
        i, j = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
        kinds = ["swap", "swap near", "move", "drop", "double", "lend", "edit"]
        kind = draw(st.sampled_from(kinds))
        if kind == "swap":
            row[i], row[j] = row[j], row[i]
        elif kind == "swap near":
            row[i - 1], row[i] = row[i], row[i - 1]
        elif kind == "move":
            row.insert(j, row.pop(i))
        elif kind == "drop":
            row.pop(i)
        elif kind == "double":
            row.insert(j, row[i])
        elif kind == "lend":
            rows[draw(st.integers(0, pp - 1))].append(row.pop(i))
        else:
            field = draw(st.sampled_from(["stage", "kind", "microbatch"]))
            new = draw(st.sampled_from("FBIW") if field == "kind" else st.integers(-1, 9))
            row[i] = row[i]._replace(**{field: new})
    return rows, m, pp * v


def reference(rows, m, stages):
    """Whether a schedule is valid, in the plainest words there are."""
    wanted = {(s, "F", k) for s in range(stages) for k in range(m)}
    flat = [tuple(a) for row in rows for a in row]
    for s in range(stages):
        for k in range(m):
            split = (s, "I", k) in flat
            wanted |= {(s, x, k) for x in ("IW" if split else "B")}
    if sorted(flat) != sorted(wanted):
        return False
    if any(a.stage % len(rows) != rank for rank, row in enumerate(rows) for a in row):
        return False
    done, left = set(), [list(row) for row in rows]
    while any(left):
        before = len(done)
        for row in left:
            while row:
                s, x, k = row[0]
                needs = {"F": [(s - 1, "F", k)] if s else [], "W": [(s, "I", k)]}.get(x)
                if needs is None:
                    needs = [(s, "F", k)]
                    if s < stages - 1:
                        split = (s + 1, "I", k) in wanted
                        needs.append((s + 1, "I" if split else "B", k))
                if not done.issuperset(needs):
                    break
                done.add(tuple(row.pop(0)))
        if len(done) == before:
            return False
    return True


@settings(max_examples=400, deadline=None)
@given(mutants())
def test_many_mutants_each_run_or_are_refused(mutant):
    rows, m, stages = mutant
    try:
        validate(rows, microbatches=m, stages=stages)
    except ValueError as error:
        assert not reference(rows, m, stages), error
        for use in (lower, lambda lists: simulate(lists, forward=1, backward=1)):
            if all(rows) and "deadlock" in str(error):
                with pytest.raises(ValueError, match="deadlock"):
                    use(rows)
        if fix := re.search(r"for instance (.+) before (\w+) on rank (\d+)$", str(error)):
            row = rows[int(fix[3])] = list(map(str, rows[int(fix[3])]))
            for moved in fix[1].split(" and "):
                row.insert(row.index(fix[2]), row.pop(row.index(moved)))
            checked(rows, microbatches=m, stages=stages)  # which has no fault, but for other cycles
        return
    assert reference(rows, m, stages)
    got = simulate(rows, forward=1.0, backward=1.0, weight_grad=1.0, comm=0.5)
    assert len(got.end) == sum(map(len, rows)) and (got.end > got.start).all()
    assert 0 <= got.bubble_rate < 1
    plan = pl.Plan(pp=len(rows), microbatches=m, schedule=lambda p, m, v: rows)
    plan = plan.replace(virtual_stages=stages // len(rows))
    model = pl.ModelSpec(layers=stages, hidden=4, heads=1, seq_len=4, vocab=256, tied=False)
    compiled(model, plan)  # its checks find a deadlock, whatever order messages are in
