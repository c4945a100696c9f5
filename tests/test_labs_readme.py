"""labs/README.md sends a reader with a question to a lab and a section: both are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LABS = ROOT / "labs"
SCRIPTS = ROOT / "tests" / "labs" / "src"
README = (LABS / "README.md").read_text(encoding="utf-8")
SOURCES = {path.name[:2]: path.read_text(encoding="utf-8") for path in SCRIPTS.glob("*.py")}
ROW = re.compile(r"^\| (.+) \| \[.+\]\((https://\S+)\) \| (\d\d) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(README)


def test_every_public_question_about_traffic_and_bubbles_has_a_row():
    # the threads in which people ask what collectives move, and how large bubbles are
    asked = {
        "NVIDIA/nccl/issues/870",
        "NVIDIA/nccl/issues/768",
        "mit-han-lab/distrifuser/issues/10",
        "deepspeedai/DeepSpeed/issues/264",
        "deepspeedai/DeepSpeed/issues/5047",
        "deepspeedai/DeepSpeed/issues/7403",
        "traceopt-ai/traceml/issues/145",
        "pytorch/torchtitan/issues/1369",
        "NVIDIA/Megatron-LM/issues/691",
        "NVIDIA/Megatron-LM/issues/828",
        "NVIDIA/Megatron-LM/issues/169",
        "NVIDIA/Megatron-LM/issues/750",
        "sail-sg/zero-bubble-pipeline-parallelism/issues/25",
        "sail-sg/zero-bubble-pipeline-parallelism/issues/18",
        "deepseek-ai/DeepSeek-V3/issues/211",
        "deepspeedai/DeepSpeedExamples/issues/201",
        "Victarry/PP-Schedule-Visualization/issues/1",
    }
    assert {url.removeprefix("https://github.com/") for _, url, _, _ in ROWS} >= asked


@pytest.mark.parametrize(("question", "url", "lab", "section"), ROWS)
def test_the_section_is_there_and_its_lab_names_the_question(question, url, lab, section):
    assert f"# ## {section}\n" in SOURCES[lab]
    assert f"]({url})" in SOURCES[lab]


def test_every_lab_is_linked_and_every_link_of_a_lab_leads_somewhere():
    linked = set(re.findall(r"\]\((\d\d_\w+\.ipynb)\)", README))
    assert linked == {path.name for path in LABS.glob("[0-9]*.ipynb")}
    answered = {
        name for name, text in SOURCES.items() if re.search("### (BEGIN SOLUTION|ANSWER: )", text)
    }
    assert {p.name[:2] for p in (LABS / "solutions").glob("*.ipynb")} == answered


def test_what_a_notebook_shows_when_it_is_opened_again_is_explained():
    """The words are ipywidgets', Python's and JupyterLab's: who meets them looks for them."""
    text = " ".join(README.split())
    assert "“Error displaying widget: model not found”: run their cells again" in text
    assert "`NameError`" in text and "*Run → Run All Above Selected Cell*" in text
