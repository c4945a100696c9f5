"""Every illegal description is refused with field, value and what would be legal."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import paralab as pl
from paralab.experiment import run_under_torchrun
from paralab.spec import MODEL_PRESETS, cluster
from paralab.spec.cluster import CLUSTER_PRESETS
from paralab.theory.tensor import linear_elements
from paralab.theory.traffic import wire_bytes

DGX = pl.Cluster.preset("dgx-a100")
GOOD_MODEL = {"layers": 2, "hidden": 64, "heads": 4, "seq_len": 32}
MODEL = pl.ModelSpec(**GOOD_MODEL)
NOT_COUNTS = st.one_of(
    st.integers(max_value=0), st.floats(), st.booleans(), st.text(max_size=5), st.none(),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip
MODEL_COUNTS = ["layers", "hidden", "heads", "seq_len", "vocab"]
PLAN_COUNTS = ["dp", "tp", "pp", "microbatches", "microbatch_size", "virtual_stages"]


def refuses(build, field: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r}:") and "; legal: " in message, message


@pytest.mark.parametrize("make, counts", [
    (lambda **given: pl.ModelSpec(**{**GOOD_MODEL, **given}), MODEL_COUNTS),
    (pl.Plan, PLAN_COUNTS),
], ids=["model", "plan"])  # fmt: skip
@given(data=st.data(), value=NOT_COUNTS)
def test_counts_must_be_whole_and_positive(make, counts, data, value):
    field = data.draw(st.sampled_from(counts))
    refuses(lambda: make(**{field: value}), field, value)


def values(*texts: str) -> pytest.MarkDecorator:
    """A test for each "field=value", the value as Python writes it."""
    found = [(name, eval(value)) for name, _, value in (text.partition("=") for text in texts)]
    return pytest.mark.parametrize("field, value", found)


@values("attention='flash'", "tied=1", "tied='yes'", "dropout=1.0", "dropout=-0.1", "dropout=1",
        "dropout=-1", "dropout=float('nan')", "dropout='0.1'", "heads=3", "grad_sync='ddp'",
        "precision='int8'", "recompute=True", "tp_mode='4d'", "prefetch=-1", "zero_stage=4",
        "zero_stage=True", "schedule='dualpipe'", "sequence_parallel=1", "grad_dtype='bf16'",
        "tf32=1", "shard=0", "shard=1.5", "shard='2'")  # fmt: skip
def test_other_fields_of_a_model_and_a_plan_are_checked(field, value):
    of_model = field in pl.ModelSpec.__dataclass_fields__
    make = (lambda **given: pl.ModelSpec(**{**GOOD_MODEL, **given})) if of_model else pl.Plan
    refuses(lambda: make(**{field: value}), field, value)


def test_gathering_again_at_every_action_of_a_pipeline_warns_once():
    plan = pl.Plan(dp=2, pp=2, microbatches=3, zero_stage=3)
    with pytest.warns(UserWarning, match=r"gathered again for every action, 2\*3 times") as said:
        warnings.simplefilter("default")
        plan.validate(MODEL)
        pl.program(MODEL, plan)  # validates it from another place
    assert len(said) == 1


def test_shard_groups_are_neighbours_and_replicas_hold_the_same_share():
    plan = pl.Plan(pp=2, dp=4, shard=2, zero_stage=1)
    assert [plan.ranks("shard", r) for r in (0, 1, 2, 7)] == [(0, 1), (0, 1), (2, 3), (6, 7)]
    assert [plan.ranks("replica", r) for r in (0, 1, 2, 7)] == [(0, 2), (1, 3), (0, 2), (5, 7)]
    whole = plan.replace(shard=None)
    assert whole.shard_degree == 4 and plan.shard_degree == 2
    assert whole.ranks("shard", 5) == whole.ranks("dp", 5) == (4, 5, 6, 7)
    assert whole.ranks("replica", 5) == (5,)
    second = pl.Plan(dp=8, shard=4, tp=2, zero_stage=3, secondary_shard=2)
    assert second.ranks("secondary", 7) == (5, 7) and second.ranks("shard", 7) == (1, 3, 5, 7)


@values("steps=0", "steps=2.0", "optimizer='lion'", "lr=0.0", "lr='fast'", "lr=float('inf')",
        "clip_norm=-1.0", "seed=-1", "seed=2**31", "keep_state='yes'",
        "memory_limit=0", "memory_limit=1.5", "memory_limit=True", "memory_limit='much'",
        "memory_limit='0MB'", "memory_limit='-64MB'", "memory_limit='1.5'", "memory_limit='nanMB'",
        "memory_limit='64 elephants'", "data='/no/such/text'", "device='tpu'", "device=[2]",
        "timeout=0", "timeout='long'", "strict=2", "stop=True", "progress=None")  # fmt: skip
def test_run_refuses_wrong_arguments_before_a_process_starts(monkeypatch, tmp_path, field, value):
    """And before it creates a folder for its checkpoints."""
    monkeypatch.setattr("paralab.ranks.watch.Run.start", None)
    save = tmp_path / "new"
    refuses(lambda: pl.run(MODEL, save=save, **{field: value}), field, value)
    assert not save.exists()


def test_clusters_survive_json_are_equal_by_value_and_say_what_is_wrong():
    cluster = pl.Cluster.preset("dgx-h100", nodes=4).replace(elements={"exp": 1e-9})
    again = pl.Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster and again.num_devices == 32 and again.node_of(9) == 1
    others = [cluster.replace(flops=1), cluster.replace(elements={"exp": 2e-9})]
    assert hash(cluster) == hash(again) and len({cluster, again, *others}) == 3
    refuses(lambda: cluster.replace(flops=0), "flops", 0)
    refuses(lambda: cluster.replace(intra="fast"), "intra", "fast")
    refuses(lambda: cluster.replace(collectives=None), "collectives", None)
    refuses(lambda: cluster.replace(products={"fp31": (1, 1, 1)}), "products", "fp31")
    refuses(lambda: pl.Link(alpha=-1, bandwidth=1), "alpha", -1)


def test_num_params_is_the_printed_formula():
    for tied in (True, False):
        spec = pl.ModelSpec(**GOOD_MODEL, tied=tied)
        h, blocks = spec.hidden, spec.layers * (12 * spec.hidden**2 + 13 * spec.hidden)
        outside = (spec.vocab * (1 + (not tied)) + spec.seq_len + 2) * h
        assert spec.num_params == blocks + outside
        assert spec.num_params == sum(math.prod(s) for s in spec.parameter_shapes().values())


@pytest.mark.parametrize("block", [None, lambda spec: nn.Linear(spec.hidden, spec.hidden)])
def test_parameters_are_counted_without_a_list_of_all_layers(monkeypatch, block):
    """A slider's move counts them several times, of models with up to 65,536 layers."""
    monkeypatch.delattr(pl.ModelSpec, "parameter_shapes")
    assert pl.ModelSpec(**GOOD_MODEL, block=block).replace(layers=2**16).num_params > 2**16


@pytest.mark.parametrize("kind, presets", [
    (pl.ModelSpec, MODEL_PRESETS), (pl.Cluster, CLUSTER_PRESETS),
], ids=["models", "clusters"])  # fmt: skip
def test_help_names_every_preset_and_another_is_refused(kind, presets):
    assert [name for name in presets if f'"{name}"' not in kind.preset.__doc__] == []
    for name in ("gpt-9", ["gpt2"], None):
        refuses(lambda name=name: kind.preset(name), "preset", name)


@values("timeout='long'", "timeout=0", "device='tpu'")
def test_torchruns_ranks_refuse_what_a_launch_refuses(tmp_path, field, value):
    how = {"folder": str(tmp_path / "parts"), "save": tmp_path / "new", field: value}
    refuses(lambda: run_under_torchrun(MODEL, pl.Plan(), **how), field, value)
    assert not list(tmp_path.iterdir())


# ---- values that Python itself cannot take -------------------------------------------------------
class Mute:
    def __repr__(self) -> str:
        raise KeyError("no words")


HUGE = 10**5000  # Python refuses to write it down


@pytest.mark.parametrize("make", [
    lambda: pl.Plan(dp=HUGE), lambda: pl.Plan(schedule=HUGE), lambda: pl.Plan(passes=(HUGE,)),
    lambda: pl.Plan(offload={HUGE: 1}), lambda: pl.Plan(dp=Mute()), lambda: pl.Plan().place(HUGE),
    lambda: pl.Link(alpha=HUGE, bandwidth=1.0), lambda: pl.launch(print, args=HUGE),
    lambda: pl.run(MODEL, memory_limit="1" * 5000),
    lambda: pl.run(MODEL, data="x" * 5000),
])  # fmt: skip
def test_a_refusal_is_short_and_has_words_for_any_value(make):
    with pytest.raises(ValueError, match="; legal: ") as caught:
        make()
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("words, make", [
    ("nosuch=1: Plan has no such field", lambda: pl.Plan().replace(nosuch=1)),
    ("shards=2: Plan has no such field", lambda: pl.Plan.from_dict({"shards": 2})),
    ("Plan=3: not a table", lambda: pl.Plan.from_dict(3)),
    ("ModelSpec=.*hidden is missing", lambda: pl.ModelSpec.from_dict({"layers": 2})),
    ("name=None: not a text", lambda: DGX.replace(name=None)),
    ("intra={}: not a link", lambda: DGX.replace(intra={})),
    ("intra={'a': 1}: not a li", lambda: DGX.replace(intra={"a": 1})),
    ("alpha=1000.*: not one finite number", lambda: pl.Link(alpha=10**400, bandwidth=1.0)),
    ("dropout=2.0: .*legal: from 0 to below 1$", lambda: pl.ModelSpec(**GOOD_MODEL, dropout=2.0)),
    ("model=", lambda: pl.run("gpt2")),
    ("plan=", lambda: pl.run(MODEL, 4)),
    ("vocab=100:", lambda: pl.run(pl.ModelSpec(**GOOD_MODEL, vocab=100))),  # too few for bytes
    ("dp=65: the plan needs 65 ranks.*legal: .*pl.dry_run", lambda: pl.run(MODEL, pl.Plan(dp=65))),
    # More steps than a report can hold.
    ("steps=.* rows per step, .* too large; legal: up to ",
     lambda: pl.predict(MODEL, pl.Plan(), DGX, steps=10**6)),
    ("axis=3: unknown choice", lambda: pl.Plan().ranks(3, 0)),
    ("axis='tp:row'", lambda: pl.Plan(dp=2).ranks("tp:row", 0)),
    ("rank=None: not a whole number", lambda: pl.Plan().place(None)),
    ("rank=-1: out of range; legal: .* from 0 to 1$", lambda: pl.Plan(dp=2).place(-1)),
    ("rank=2: out of range; legal: .* from 0 to 1$", lambda: pl.Plan(dp=2).ranks("dp", 2)),
    ("rank=1: out of range; legal: 0$", lambda: pl.Plan().place(1)),
    ("path=None: not a path", lambda: pl.load(None)),
    ("path='.x00': it cannot be opened: (stat: )?embedded null", lambda: pl.load("\0")),
    ("role='foo': unknown", lambda: linear_elements(MODEL, pl.Plan(), "foo")),
    ("precision='FP16': unknown choice", lambda: DGX.rate("FP16")),
    ("op='allreduce': unknown", lambda: DGX.call("allreduce", 8.0, DGX.reach([0, 1]))),
    ("op='allreduce': unknown choice", lambda: wire_bytes("allreduce", 8, 2)),
    ("payload=-8: out of range", lambda: wire_bytes("all_reduce", -8, 2)),
    ("n=0: out of range", lambda: wire_bytes("all_reduce", 8, 0)),
    ("index=9: out of range", lambda: wire_bytes("all_reduce", 8, 4, 9)),
    ("root=4: out of range", lambda: wire_bytes("broadcast", 8, 4, 0, 4)),
    # A long value is cut and counted, and an object reads the same in every run.
    ("dp='x{149} [.]{3} 702 characters left out [.]{3} x{149}'", lambda: pl.Plan(dp="x" * 1000)),
    (r"passes=\(3, <function .*<lambda>>\): 3 cannot be", lambda: pl.Plan(passes=(3, lambda p: p))),
    # All that is legal is named, and nothing that was just refused.
    (r".*legal: .*f\(pp, microbatches\) \| f\(pp, microbatches, virtual_stages\)$",
     lambda: pl.Plan(schedule="x")),
    ("schedule=<class 'dict'>: cannot be called", lambda: pl.Plan(schedule=dict)),
    ("bucket_bytes=1180591620717411303424: .* from 1 to 2", lambda: pl.Plan(bucket_bytes=2**70)),
    (f".*legal: a whole number from 1 to {2**62}$", lambda: wire_bytes("send", 8, 2**70)),
    (r".*legal: .*'calls' \| 'actions' \| None$",
     lambda: pl.predict(MODEL, cluster=DGX, detail="x")),
])  # fmt: skip
def test_what_python_would_stumble_over_is_refused_in_words(words, make):
    legal = "" if "legal: " in words else ".*; legal: "
    with pytest.raises(ValueError, match=f"^{words}{legal}"):
        make()


def test_a_model_shows_its_own_block():
    """Otherwise it would print as the standard model, which has other parameters."""
    own = MODEL.replace(block=values)
    assert repr(MODEL) != repr(own) and "block=<function values" in repr(own)


@pytest.mark.parametrize("name", ["data", "save", "resume"])
@pytest.mark.parametrize("path", ["", "\0", "x" * 5000, "~nobody-of-that-name/x", b"x", "fifo"])
def test_what_is_no_path_is_refused_before_a_process_starts(tmp_path, monkeypatch, name, path):
    monkeypatch.setattr("paralab.ranks.watch.Run.start", None)
    if path == "fifo":
        path = str(tmp_path / path)
        os.mkfifo(path)
    with pytest.raises(ValueError, match=f"^{name}=.*; legal: "):
        pl.run(MODEL, **{name: path})


# ---- sizes ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("whole, field", [
    (whole, field.name) for whole in (MODEL, pl.Plan(), DGX)
    for field in dataclasses.fields(whole)
    if field.type in ("int", "int | None")
    and field.name not in ("bucket_bytes", "memory")  # where any size is fine
])  # fmt: skip
def test_every_count_of_a_description_has_an_upper_bound(whole, field):
    with pytest.raises(ValueError, match=f"^{field}={2**62}: out of range; legal: .* to "):
        whole.replace(**{field: 2**62})


def test_the_largest_sizes_that_are_legal_are_counted_in_63_bits():
    model = pl.ModelSpec(layers=2**4, hidden=2**20, heads=2**10, seq_len=2**10, vocab=2**24)
    report = pl.dry_run(model, pl.Plan(microbatch_size=2**20))
    assert 2**57 < report.peak_memory < 2**63


@pytest.mark.parametrize("own", ["", "hub.slice/jupyter-ada.service"])
def test_a_container_s_cores_are_its_share_of_the_machine_s(own, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(cluster, "CGROUP", tmp_path)
    monkeypatch.setattr(cluster, "OWN_GROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"2:cpu,cpuacct:/{own}\n0::/{own}\n")
    two, one = tmp_path / own, tmp_path / "cpu" / own
    for group in (two, one):
        group.mkdir(exist_ok=True, parents=True)
    assert cluster.available_cores() == 8
    for said, cores in [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]:
        (two / "cpu.max").write_text(said)
        assert cluster.available_cores() == cores
    (two / "cpu.max").unlink()
    (one / "cpu.cfs_period_us").write_text("100000\n")
    for said, cores in [("-1\n", 8), ("250000\n", 2), ("50000\n", 1)]:
        (one / "cpu.cfs_quota_us").write_text(said)
        assert cluster.available_cores() == cores
    (tmp_path / "own").write_bytes(b"2:cpu:/\xff\n")  # no name that can be read
    assert cluster.available_cores() == (8 if own else 1)
