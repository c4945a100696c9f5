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


# The threads in which people ask what collectives move, and how large bubbles are.
ASKED = {
    "NVIDIA/nccl": (870, 768),
    "mit-han-lab/distrifuser": (10,),
    "deepspeedai/DeepSpeed": (264, 5047, 7403),
    "traceopt-ai/traceml": (145,),
    "pytorch/torchtitan": (1369,),
    "NVIDIA/Megatron-LM": (691, 828, 169, 750),
    "sail-sg/zero-bubble-pipeline-parallelism": (25, 18),
    "deepseek-ai/DeepSeek-V3": (211,),
    "deepspeedai/DeepSpeedExamples": (201,),
    "Victarry/PP-Schedule-Visualization": (1,),
}


def test_every_public_question_about_traffic_and_bubbles_has_a_row():
    asked = {f"https://github.com/{of}/issues/{n}" for of, some in ASKED.items() for n in some}
    assert {url for _, url, _, _ in ROWS} >= asked


@pytest.mark.parametrize(("question", "url", "lab", "section"), ROWS)
def test_the_section_is_there_and_its_lab_names_the_question(question, url, lab, section):
    assert f"# ## {section}\n" in SOURCES[lab]
    assert f"]({url})" in SOURCES[lab]


def test_every_lab_is_linked_and_every_link_of_a_lab_leads_somewhere():
    linked = set(re.findall(r"\]\((\d\d_\w+\.ipynb)\)", README))
    assert linked == {path.name for path in LABS.glob("[0-9]*.ipynb")}
