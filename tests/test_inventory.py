"""Nothing is lost unsaid: what the library offered before a plan became a program, it offers still.

Each entry is a name that a user writes. Whether it does its work is what the other tests say; this
one says that it is there, and that what a plan, a run or a report takes is not renamed in passing.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil

import pytest

import paralab as pl
from paralab import cli

FIELDS = {
    pl.ModelSpec: "layers hidden heads seq_len vocab tied dropout attention",
    pl.Plan: "dp tp pp schedule microbatches microbatch_size virtual_stages zero_stage shard "
    "sequence_parallel recompute offload precision tp_mode tp_depth partition_activations "
    "grad_sync bucket_bytes prefetch passes secondary_shard tp_overlap partition_messages",
    pl.Cluster: "name nodes devices_per_node flops peak_flops half_rate_tokens memory_bandwidth "
    "op_overhead call_overhead wait_overhead wait_work memory intra inter host disk host_bandwidth "
    "collectives products cores ports algorithm operand_bandwidth elements fused "
    "launch_overhead",
}
ARGUMENTS = {
    "run": "model plan steps optimizer lr clip_norm data seed memory_limit keep_state save "
    "save_every resume resume_changes device timeout progress strict stop",
    "predict": "model plan cluster steps optimizer detail",
    "dry_run": "model plan rank cluster optimizer steps clip_norm",
    "program": "model plan rank",
    "plan_search": "model cluster",
    "trace": "fn ranks args nodes memory timeout device strict live stop",
    "launch": "fn ranks args",
}
METHODS = {
    pl.Plan: "world_size global_batch stages shard_degree tp_grid place ranks actions validate "
    "to_dict from_dict replace",
    pl.ModelSpec: "parameter_shapes num_params preset to_dict replace",
    pl.Cluster: "local preset link num_devices node_of",
    pl.Report: "spans collectives copies memory steps losses weights gradients results step_time "
    "bubble peak_memory peaks bubbles traffic copied replay timeline memory_chart traffic_chart "
    "to_html to_perfetto save summary from_parts clock",
}
NAMES = (
    "Cluster Link ModelSpec OutOfMemory Plan RankError RankTimeout Report Stopped compare dry_run "
    "explore launch load plan_search predict program reference run trace warm_up"
)
OPTIONS = "--dp --tp --pp --schedule --zero-stage --offload --precision --save --resume --predict"


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_every_setting_is_there(kind):
    fields = {field.name for field in dataclasses.fields(kind)}
    assert set(FIELDS[kind].split()) <= fields


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_is_there(name):
    parameters = inspect.signature(getattr(pl, name)).parameters
    assert set(ARGUMENTS[name].split()) <= set(parameters)


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_method_is_there(kind):
    names = set(dir(kind)) | {field.name for field in dataclasses.fields(kind)}
    assert set(METHODS[kind].split()) <= names


def test_every_public_name_is_there_after_every_module_was_imported():
    """Folders and functions could have one name: then importing a module would hide a function."""
    for found in pkgutil.walk_packages(pl.__path__, "paralab."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
    hidden = {name for name in pl.__all__ if inspect.ismodule(getattr(pl, name))}
    assert set(NAMES.split()) <= set(pl.__all__) and hidden == {"reference", "theory"}


def test_every_command_is_there(capsys):
    def help_of(*words: str) -> str:
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        return capsys.readouterr().out

    commands = help_of()
    for command in ("run", "predict", "program", "dry-run", "doctor", "show"):
        assert command in commands
    options = help_of("run")
    for option in OPTIONS.split():
        assert option in options
