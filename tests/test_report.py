"""Promises of Report: merging ranks, numbers from the tables, saving, refusing bad files."""

import dataclasses
import errno
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paralab as pl
import synthetic
from paralab.report import amounts, metrics, tables
from paralab.report.facts import shared_cores
from paralab.report.report import Report, load
from paralab.report.storage import VERSION, save_part, seal
from paralab.report.summary import readable
from paralab.spec import Cluster, Link, Plan
from patience import HANG_S
from refusals import refuses

MODEL = synthetic.MODEL
ABSENT = object()
PSI = 4 * MODEL.num_params  # bytes
CLUSTER = Cluster(flops=1e11, memory_bandwidth=1e10, intra=Link(alpha=1e-5, bandwidth=1e9),
                  collectives={"all_reduce": Link(alpha=2e-5, bandwidth=3e9)}, cores=2)  # fmt: skip
few = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def same(a: Report, b: Report) -> bool:
    """Equal to the last bit, tables, settings and losses."""
    for name in tables.COLUMNS:
        pd.testing.assert_frame_equal(getattr(a, name), getattr(b, name), check_exact=True)
    fields = ("clock", "model", "plan", "cluster", "meta")
    assert all(getattr(a, f) == getattr(b, f) for f in fields)
    assert list(map(repr, a.losses)) == list(map(repr, b.losses))  # repr: NaN equals NaN
    return True


def hand_made(*spans: tuple, plan: Plan | None = None, steps: list[tuple] | None = None,
              calls: list[tuple] | None = None) -> Report:  # fmt: skip
    """A report from spans (rank, step, lane, kind, start, end)."""
    full = [(i, r, s, lane, kind, 0, 0, -1, a, b, 0.0, ())
            for i, (r, s, lane, kind, a, b) in enumerate(spans)]  # fmt: skip
    return Report(
        clock="measured", model=MODEL, plan=plan or Plan(), **synthetic.tables(
            spans=full, collectives=calls or [],
            steps=[(*step, 0.0) for step in steps or [(0, 1, 0.0, 10.0)]]),
    )  # fmt: skip


# ---- parts of ranks become one report -----------------------------------------------------------
def test_parts_merge_to_the_same_report_in_any_order():
    parts, plan = synthetic.parts(4)
    one, other = (Report.from_parts(some, model=MODEL, plan=plan, meta={"run_id": "a"})
                  for some in (parts, parts[::-1]))  # fmt: skip
    assert same(one, other) and one.clock == "measured"
    losses = one.summary().filter(like="loss", axis=0)["value"]
    assert losses.tolist() == pytest.approx([one.losses[0], one.losses[-1]], abs=1e-4)


def test_clock_offsets_put_ranks_on_one_clock_that_starts_at_zero():
    plain, offsets = synthetic.report(3), [0.0, 5.0, -2.5]
    shifted = synthetic.report(3, clock_offsets=offsets)
    for report in (plain, shifted):
        assert report.steps["start"][report.steps["step"] == 0].min() == 0.0
    for name in ("spans", "collectives", "steps"):
        for column in ("start", "end"):
            ours, theirs = (getattr(report, name)[column] for report in (shifted, plain))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    stated = shifted.meta["clock_offsets"]
    assert stated == {"offset_s": offsets, "uncertainty_s": [1e-6, 2e-6, 3e-6]}
    said = "order of moments on different machines that are less than 0.006 ms apart"
    assert said in shifted.explain()["What is not known?"]
    assert "machines" not in shifted.replay(CLUSTER).explain()["What is not known?"]


@pytest.mark.parametrize("dealt", [1, 2, 4])
def test_loss_is_the_mean_over_the_global_batch_however_it_was_dealt(dealt):
    values = [1.0, 1e16, 1.0, 1.0]  # a running sum would lose the ones
    parts, plan = synthetic.parts(dealt, steps=1)
    per = 4 // dealt
    dealt_parts = [{**p, "losses": [values[r * per : (r + 1) * per]]} for r, p in enumerate(parts)]
    report = Report.from_parts(dealt_parts[::-1], model=MODEL, plan=plan, meta={})
    assert report.losses == [2.5e15 + 1]
    diverged = [{**p, "losses": [[float("inf"), float("-inf")]]} for p in parts]
    assert np.isnan(Report.from_parts(diverged, model=MODEL, plan=plan, meta={}).losses).all()


@pytest.mark.parametrize("kept", [3, 0])  # only a rank of an observed program may have none
def test_losses_of_unequal_numbers_of_steps_are_refused(kept):
    parts, plan = synthetic.parts(2)
    del parts[1]["losses"][kept:]
    refuses("losses of", Report.from_parts, parts, model=MODEL, plan=plan, meta={})


# ---- tables -------------------------------------------------------------------------------------
def test_tables_have_the_stated_columns_and_dtypes_even_without_rows(tmp_path):
    full = synthetic.report(2)
    empty = Report(clock="predicted", model=MODEL, plan=Plan())
    empty.save(tmp_path / "empty.json")
    for report in (full, empty, load(tmp_path / "empty.json")):
        for name, columns in tables.COLUMNS.items():
            table = getattr(report, name)
            assert list(table.columns) == list(columns)
            kinds = {int: "int64", float: "float64", str: "object", tuple: "object"}
            assert [str(d) for d in table.dtypes] == [kinds[k] for k in columns.values()]
    assert {*map(type, full.spans["after"]), *map(type, full.collectives["ranks"])} == {tuple}
    assert {*map(type, full.spans["kind"])} == {str}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("cost"), "lacks cost"),
        (lambda s: s.update(color=[]), "unknown color"),
        (lambda s: s["kind"].__setitem__(3, "dreaming"), "row 3, kind='dreaming'; legal: forward"),
        (lambda s: s["start"].__setitem__(2, float("nan")), "row 2, start=nan"),
        (lambda s: s["start"].__setitem__(2, "0"), "row 2, start='0' is not a finite number"),
        (lambda s: s["rank"].__setitem__(1, 0.5), "row 1, rank=0.5 is not a whole number"),
        (lambda s: s["rank"].__setitem__(1, True), "row 1, rank=True is not a whole number"),
        (lambda s: s["rank"].__setitem__(1, 9), "rank 9 in a report of 2 ranks"),
        (lambda s: s["id"].__setitem__(1, s["id"][0]), "appears more than once"),
        (lambda s: s["after"].__setitem__(0, (10**6,)), "waits for span 1000000"),
        (lambda s: s["end"].__setitem__(4, s["start"][4] - 1), "row 4 ends before it starts"),
        (lambda s: s["end"].pop(), "unequal lengths"),
    ],
)
def test_a_wrong_table_is_refused_with_its_row_and_column(change, says):
    spans = synthetic.report(2).spans
    lists = {c: spans[c].tolist() for c in spans}
    change(lists)
    refuses(says, Report, clock="measured", model=MODEL, plan=Plan(dp=2), spans=lists)


def test_a_collective_of_a_span_that_is_not_there_is_refused():
    row = (0, 0, 1, "broadcast", "dp", (0, 1), 0, "intra", "init", 8, 8, 0.0, 1.0)
    refuses("span 99", hand_made, plan=Plan(dp=2), calls=[(*row, 99)])
    hand_made(plan=Plan(dp=2), calls=[(*row, -1)])


# ---- numbers ------------------------------------------------------------------------------------
def test_step_time_is_the_median_over_steps_of_the_slowest_rank():
    steps = [(0, 0, 0.0, 99.0), (1, 0, 0.0, 98.0)]  # warm-up does not count
    for step, took in enumerate([(1.0, 3.0), (2.0, 1.0), (7.0, 6.0)], start=1):
        at = 100.0 * step
        steps += [(rank, step, at, at + seconds) for rank, seconds in enumerate(took)]
    assert hand_made(plan=Plan(dp=2), steps=steps).step_time == 3.0
    assert hand_made(plan=Plan(dp=2), steps=steps[:2]).step_time == 99.0


def test_hidden_communication_is_what_runs_beside_work_of_any_kind():
    spans = [(0, 1, "compute", "backward", 0.0, 4.0), (0, 1, "compute", "wait", 4.0, 7.0),
             (0, 1, "compute", "optimizer", 7.0, 9.0), (0, 1, "comm:dp", "comm", 1.0, 5.0),
             (0, 1, "comm:dp", "comm", 3.0, 7.5), (0, 1, "comm:dp", "comm", 8.0, 9.0)]  # fmt: skip
    calls = [(0, 0, 1, "all_reduce", "dp", (0, 1), -1, "intra", "control", 8, 8, 8.0, 9.0, 5)]
    part = metrics.shares(hand_made(*spans, plan=Plan(dp=2), calls=calls), 1)
    right = {"work": 4.0, "optimizer": 2.0, "wait": 3.0, "communication": 6.5, "hidden": 3.5}
    right |= {"for calls": 3.0, "for copies": 0.0, "host": 0.0, "copies": 0.0, "copies hidden": 0.0}
    assert part == right


def test_means_over_ranks_are_of_those_that_took_the_step():
    """Rank 1 of an observed program ends one step earlier: what rank 0 does there is no less."""
    taken = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]  # rank, step
    lanes = {("compute", "forward"): (0.0, 4.0), ("compute", "wait"): (4.0, 6.0),
             ("comm:dp", "comm"): (2.0, 6.0), ("d2h", "copy"): (3.0, 5.0),
             ("host", "optimizer"): (5.0, 8.0)}  # fmt: skip
    spans = [(*at, *what, *when) for at in taken for what, when in lanes.items()]
    steps = [(*at, 0.0, 10.0) for at in taken]
    report = hand_made(*spans, plan=Plan(dp=2), steps=steps)
    part = {"work": 4.0, "optimizer": 0.0, "wait": 2.0, "communication": 4.0, "hidden": 2.0}
    part |= {"for calls": 2.0, "for copies": 0.0, "host": 3.0, "copies": 2.0, "copies hidden": 1.0}
    for step in (1, 2):
        assert metrics.shares(report, step) == part
    said = report.summary()["value"]
    assert (said["forward and backward"], said["host's processor at work"]) == (4e3, 3e3)
    assert said["step time"] == 1e4
    once = (0, 3, "comm:dp", "comm", 0.0, 6.0), (0, 3, "compute", "wait", 0.0, 3.0)  # local SGD
    said = hand_made(*once, steps=[(0, n, 0.0, 10.0) for n in range(4)]).summary()["value"]
    assert (said["communication in flight"], said["waiting"]) == (2e3, 1e3)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
@pytest.mark.parametrize("grad_sync", ["bucketed", "overlapped"])
def test_traffic_is_exact_and_the_same_bytes_by_every_view(dp, grad_sync):
    report = synthetic.report(dp, grad_sync=grad_sync)
    views = ("rank", "op", "axis", "level", "phase", "edge", ("axis", "level", "op"))
    for by in (*views, ["edge", "op"]):
        table = report.traffic(by=by)
        assert table["bytes"].dtype == "int64"
        assert table["bytes"].sum() == 2 * (dp - 1) * PSI, by
    edges = report.traffic(by="edge")
    assert list(edges.columns) == ["sender", "receiver", "bytes"]
    ring = {(r, (r + 1) % dp) for r in range(dp)} if dp > 1 else set()
    assert set(zip(edges["sender"], edges["receiver"], strict=True)) == ring
    assert report.traffic()["rank"].tolist() == list(range(dp))
    assert set(report.traffic(by="phase")["phase"]) == ({"grad_sync"} if dp > 1 else set())


def test_the_calls_are_read_once_for_all_views_of_the_traffic(monkeypatch):
    report, read, edges = synthetic.report(4), [], amounts.edges
    monkeypatch.setattr(amounts, "edges", lambda *of, **how: read.append(of) or edges(*of, **how))
    for by in ("level", "rank", ("edge", "op"), "level"):
        assert report.traffic(by)["bytes"].sum() == 6 * PSI
    calls = report.collectives
    assert len(read) == ((calls["phase"] == "grad_sync") & (calls["step"] > 0)).sum()


def test_traffic_leaves_out_bookkeeping_and_warm_up_unless_asked():
    report = synthetic.report(2, steps=3)
    assert report.traffic("phase", bookkeeping=True)["phase"].tolist() == ["control", "grad_sync"]
    calls = report.collectives
    sizes = {name: calls[name] * (calls["step"] > 0) for name in ("payload_bytes", "wire_bytes")}
    quiet = dataclasses.replace(report, collectives=calls.assign(**sizes))
    assert quiet.traffic()["bytes"].sum() == 2 * PSI
    assert quiet.traffic(warmup=True)["bytes"].sum() == pytest.approx(2 * PSI * 2 / 3)


def test_traffic_level_is_that_of_each_edge_and_not_of_the_group():
    report = synthetic.report(4, nodes=[0, 0, 1, 1])
    assert set(report.collectives["level"]) == {"inter"}
    levels = report.traffic(by="level").set_index("level")["bytes"]
    # 0 to 1 and 2 to 3 stay inside a node; 1 to 2 and 3 to 0 cross.
    assert levels.to_dict() == {"inter": 3 * PSI, "intra": 3 * PSI}


def test_traffic_says_which_bytes_no_formula_knows():
    row = (0, 0, 1, "all_reduce", "dp", (0, 1), -1, "intra", "grad_sync", 800, 801, 0.0, 1.0, -1)
    said = "wire_bytes=801, but all_reduce of 800 bytes among 2 ranks"
    refuses(said, hand_made(plan=Plan(dp=2), calls=[row]).traffic)
    report = synthetic.report(2)
    for wrong in ({"by": "colour"}, {"by": None}, {"warmup": "x"}, {"bookkeeping": 1}):
        ((name, value),) = wrong.items()
        refuses(f"^{name}={value!r}: unknown choice", report.traffic, **wrong)
    refuses("^rank=True: ", report.peaks, rank=True)


def test_a_few_bytes_are_said_too():
    row = (0, 0, 1, "all_reduce", "dp", (0, 1), -1, "intra", "grad_sync", 40, 40, 0.0, 1.0, -1)
    sent = hand_made(plan=Plan(dp=2), calls=[row]).summary()["value"]["sent per rank and step"]
    assert sent == 4e-5 and readable(sent) == "0.000040"  # MB; one rank's of one rank with steps


def test_repr_is_one_line_that_no_clock_changes():
    shown = "Report(measured, dp=4, 4 ranks, 8 steps, 24 collectives)"
    assert repr(synthetic.report(4, steps=8)) == shown


# ---- files --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_saved_and_loaded_is_the_same_to_the_last_bit(tmp_path, name):
    report = synthetic.report(2, keep_state=True, meta={"note": "ünï\u2028", "nodes": (0, 1)})
    report = dataclasses.replace(
        report, cluster=CLUSTER, losses=[0.1, float("nan"), float("inf"), 1 / 3],
        meta={**report.meta, "lr": float("inf")},
    )  # fmt: skip
    report.save(tmp_path / name)
    back = load(tmp_path / name)
    assert same(back, report) and back.weights is None is back.gradients  # checkpoints hold these
    first = (tmp_path / name).read_bytes()
    assert (first[:2] == b"\x1f\x8b") == name.endswith("gz")
    report.save(tmp_path / name)
    assert (tmp_path / name).read_bytes() == first  # no random order
    assert not name.endswith("gz") or first[4:8] == bytes(4)  # and no date
    assert os.listdir(tmp_path) == [name]
    json.loads(gzip.decompress(first) if name.endswith("gz") else first, parse_constant=pytest.fail)


def test_what_cannot_be_saved_or_loaded_is_refused_before_anything_is_written(tmp_path):
    report = synthetic.report(1)
    clever = {"clever": lambda: 0}
    refuses(r"meta\['clever'\].*has no plain form", dataclasses.replace, report, meta=clever)
    for call, said in (
        (lambda: report.save(tmp_path / "nowhere" / "a.json"), "No such file .*nowhere/a.json"),
        (lambda: load(tmp_path / "gone.json"), r"No such file .*gone\.json"),
        (lambda: load(tmp_path), r"it has no rank-00000\.json"),
    ):
        with pytest.raises(FileNotFoundError, match=said):
            call()
    for write in (report.save, report.to_html, report.to_perfetto):
        refuses("^path=.*: it is a folder, not a file; legal: a file in", write, tmp_path)
    assert os.listdir(tmp_path) == []


PARAMETER = {"name": "w", "elements": 4, "held": 4, "bytes": 16, "trained": True, "cut": {"tp": 2}}
PROGRAM = {"modules": ["FSDPModule"], "parameters": [PARAMETER]}
FACTS = {
    "nodes": [0, 0], "cores": 2, "one_machine": True, "optimizer": "sgd", "steps": 2,
    "skipped_steps": 1, "compute": 0.5, "memory_limit": 100, "observed": [PROGRAM, PROGRAM],
    "clock_offsets": {"offset_s": [0.0, 0.5], "uncertainty_s": [0.0, 1e-3]},
    "detail": "calls", "num_params": 4, "in flight": dict.fromkeys(
        ("communication", "communication hidden", "copies", "copies hidden"), 0.5),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, Report]:
    spans = [(i, i, 0, lane, kind, 0, 0, k, 0.5 + i, 1.5 + i, 0.25, after)
             for i, (lane, kind, k, after) in enumerate(
                 [("compute", "forward", 3, ()), ("comm:dp", "comm", -1, (0,))])]  # fmt: skip
    call = (0, 1, 0, "all_reduce", "dp", (0, 1), -1, "intra", "grad_sync", 8, 8, 1.5, 2.5, 1)
    report = Report(
        clock="measured", model=MODEL, plan=Plan(dp=2), cluster=CLUSTER, losses=[5.5, 5.25],
        meta={"run_id": "a"} | FACTS, **synthetic.tables(
            spans=spans, collectives=[call], steps=[(0, 0, 0.5, 1.5, 0.0)],
            memory=[(0, 0, 0.5, "device", "parameters", 7)]),
    )  # fmt: skip
    path = tmp_path_factory.mktemp("saved") / "run.json"
    report.save(path)
    return path, report


def refused(path: Path, says: str = ": ") -> bool:
    with pytest.raises(ValueError, match=says) as caught:
        load(path)
    assert type(caught.value) is ValueError
    assert str(caught.value).startswith(f"{path}: ")
    assert "; " in str(caught.value)  # what is wrong; what would do
    return True


NO_REPORTS = [
    (b"\x00\xff\xfe", "damaged or not a report"),
    (b"\x1f\x8b broken", "damaged or not a report"),
    (b"[" * 100_000, "damaged or not a report"),
    (b"[1, 2]", "not a paralab report"),
    (b'{"traceEvents": []}', "not a paralab report"),
    (b'{"format": "paralab report", "version": 2}', "body is missing"),
    (b'{"format": "paralab report", "version": true, "body": {}}', "version is True"),
    (b'{"format": "paralab report", "version": 1, "body": {}}', "version is 1, and .*; upd"),
    (b'{"format": "paralab report", "version": 3, "body": {}}', "version is 3, and .*; upd"),
    (b'{"format": "paralab report", "version": NaN}', "version is nan"),
]


@pytest.mark.parametrize(("content", "says"), NO_REPORTS)
def test_files_that_are_no_reports_are_refused_in_words(tmp_path, content, says):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    assert VERSION == 2 and refused(path, says)


@few
@given(st.data())
def test_every_cut_and_every_wrong_byte_is_noticed_or_changes_nothing(saved, tmp_path, data):
    content = bytearray(saved[0].read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    for name, whole in (("c.json", content), ("c.json.gz", gzip.compress(content))):
        path = tmp_path / name
        path.write_bytes(whole[: at * len(whole) // len(content)])
        assert refused(path)
    content[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        reloaded = load(path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert same(reloaded, saved[1])  # a space that became a tab, say


def changed(original: dict, at: tuple, value: object, path: Path) -> Path:
    """A file of the report with another value there, or none, and a checksum that fits."""
    envelope = json.loads(json.dumps(original))
    spot = envelope["body"]
    for key in at[:-1]:
        spot = spot[key]
    spot[at[-1]] = value
    if value is ABSENT:
        del spot[at[-1]]
    envelope["sha256"] = seal(envelope["body"])
    path.write_text(json.dumps(envelope))
    return path


def test_a_file_that_unpacks_to_more_than_memory_has_room_for_is_refused(
    saved, tmp_path, monkeypatch
):
    path, data = tmp_path / "run.json", saved[0].read_bytes()
    path.write_bytes(gzip.compress(data))
    for room, fits in ((len(data), True), (len(data) - 1, False)):
        monkeypatch.setattr("paralab.report.storage.memory_bytes", lambda room=room: 4 * room)
        assert load(path) if fits else refused(path, f"unpacked it is larger than {room:,} bytes")


def test_a_damaged_body_says_where_it_is_damaged(saved, tmp_path):
    original, path = json.loads(saved[0].read_bytes()), tmp_path / "d.json"
    for at, value, says in (
        (("model",), [], "model has type list, not dict or None"),
        (("losses",), {}, "losses has type dict, not list"),
        (("losses",), "12", "losses has type str, not list"),
        (("tables", "steps"), 3, "steps has type int, not dict"),
        (("tables", "steps"), ABSENT, "steps is missing"),
        (("clock",), "sundial", "clock='sundial'"),
        (("plan", "dp"), 0, "dp=0"),
        (("meta",), {"detail": "actions"}, r"meta\['in flight'\] is None"),
        (("meta",), {"compute": None}, r"meta\['compute'\] is None"),
        (("meta", "observed"), [PROGRAM], r"meta\['observed'\] is \[.*, which no report has there"),
        (("meta", "nodes"), ["0"], r"meta\['nodes'\] is \['0'\], which no report has there"),
    ):
        assert refused(changed(original, at, value, path), says)


def places(value, at=()):
    """Every path into a JSON value, lists by their first element."""
    yield at
    items = value.items() if isinstance(value, dict) else ()
    items = list(enumerate(value))[:1] if isinstance(value, list) else items
    for key, inner in items:
        yield from places(inner, (*at, key))


STRANGE = [None, True, -7, 2**70, 0.5, "?", [], ["?"], {}, {"$float": "?"}, [[]], [None], ABSENT]


def test_no_change_of_the_body_escapes_as_anything_but_a_clear_error(saved, tmp_path):
    """Drop or replace every single thing, with a checksum that fits, as a foreign writer would."""
    original = json.loads(saved[0].read_bytes())
    must_fail = {("model",), ("clock",), ("tables",), ("tables", "steps"), ("cluster", "intra"),
                 ("losses",), ("tables", "spans", "start"),
                 ("tables", "memory", "bytes"), ("tables", "collectives", "ranks")}  # fmt: skip
    path, failed = tmp_path / "m.json", {}
    for at in list(places(original["body"]))[1:]:
        for strange in STRANGE:
            try:
                report = load(changed(original, at, strange, path))
            except ValueError as error:
                assert type(error) is ValueError, at
                assert str(error).startswith(f"{path}: the file is damaged ("), error
                failed.setdefault(at, []).append(strange)
            else:  # legal, if unexpected: then it is a report in every respect
                assert repr(report).startswith("Report(")
                if "meta" in at:
                    assert len(report.summary()) and report.explain() and shared_cores(report)
    for at in must_fail:
        assert ABSENT in failed[at], at
        assert len(failed[at]) >= 8, at


# ---- folders of parts ---------------------------------------------------------------------------
def written(folder: Path, dp: int = 3, run_id: str = "a", ranks=None, **settings) -> Report:
    parts, plan = synthetic.parts(dp, **settings)
    meta = {"run_id": run_id, "nodes": [0] * dp}
    for part in parts[::-1]:
        if ranks is None or part["rank"] in ranks:
            save_part(folder, part, model=MODEL, plan=plan, meta=meta)
    return Report.from_parts(parts, model=MODEL, plan=plan, meta=meta)


def test_a_folder_of_parts_loads_as_the_report_that_one_process_would_make(tmp_path):
    whole = written(tmp_path / "deep" / "run", clock_offsets=[0.0, 1.5, -0.25])
    assert sorted(os.listdir(tmp_path / "deep" / "run")) == [f"rank-0000{r}.json" for r in range(3)]
    assert same(load(tmp_path / "deep" / "run"), whole)


def test_a_folder_whose_parts_are_not_those_of_one_run_says_whose_they_are(tmp_path):
    written(tmp_path / "some", dp=4, ranks=[0, 2])
    assert refused(tmp_path / "some", r"no part of ranks 1, 3")
    folder, part = tmp_path / "all", tmp_path / "all" / "rank-00001.json"
    written(folder)
    copy = folder / "rank-00001 (copy).json"
    copy.write_bytes(part.read_bytes())
    refuses("rank 1 wrote more than one part", load, folder)
    copy.unlink()
    part.write_bytes(part.read_bytes()[:-40])
    refuses(r"rank-00001\.json: the file is damaged", load, folder)
    written(folder, run_id="new", ranks=[0, 1])
    refuses(r"different runs \(rank 2: run a; ranks 0, 1: run new\)", load, folder)
    written(folder, dp=2, run_id="new")  # one with fewer ranks: what is left is not its own
    refuses("belong to different runs", load, folder)
    assert refused(part, "is not a paralab report; .*parts of all ranks")
    synthetic.report(1).save(part)
    refuses("is not a paralab rank part", load, folder)


@pytest.mark.timeout(HANG_S)
def test_a_plan_of_very_many_ranks_takes_neither_memory_nor_time(saved, tmp_path):
    many = {"dp": 2**20, "pp": 2**20, "microbatches": 1}
    original = json.loads(saved[0].read_bytes())
    plan, _ = original["body"]["plan"] | many, original["body"]["meta"].pop("observed")
    assert load(changed(original, ("plan",), plan, tmp_path / "many.json")).world_size == 2**40
    written(tmp_path, dp=2)
    for part in tmp_path.glob("rank-*.json"):
        changed(json.loads(part.read_bytes()), ("plan",), plan, part)
    refuses("no part of ranks 2-", load, tmp_path)


@pytest.mark.parametrize(("name", "value"), [("losses", [1.5]), ("meta", {"run_id": []})])
def test_a_part_that_does_not_fit_the_others_names_the_folder(tmp_path, name, value):
    written(tmp_path, dp=2)
    part = tmp_path / "rank-00001.json"
    changed(json.loads(part.read_bytes()), (name,), value, part)
    with pytest.raises(ValueError, match=f"^{tmp_path}: "):
        load(tmp_path)


@pytest.mark.timeout(HANG_S)
def test_a_fifo_is_no_report(tmp_path):
    """It would be waited for without end; as a part in a folder too."""
    os.mkfifo(tmp_path / "rank-00000.json")
    for path in (tmp_path / "rank-00000.json", tmp_path):
        refuses("rank-00000.json': neither a file nor a folder", pl.load, path)


def test_a_file_system_for_reading_only_names_the_file_that_was_asked_for(tmp_path, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), ".scratch.tmp")

    monkeypatch.setattr("paralab.report.output_files.open", refused, raising=False)
    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(OSError, match="Read-only file system: .*out'$"):
        synthetic.report(2).save(tmp_path / "out")


@pytest.mark.parametrize("write", ["save", "to_html", "to_perfetto"])
def test_a_full_disk_names_the_file_and_leaves_the_one_before(tmp_path, monkeypatch, write):
    report, file = synthetic.report(2), tmp_path / "out"
    getattr(report, write)(file)
    before = file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device: .*out"):
        getattr(report, write)(file)
    assert file.read_bytes() == before and os.listdir(tmp_path) == ["out"]
