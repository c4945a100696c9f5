"""Figures of tensor parallelism: blocks as they are sharded, steps as a product goes, curves."""

import pickle
from fractions import Fraction

import pytest

import paralab as pl
from paralab import view
from paralab.parallel import layouts
from paralab.theory import tensor
from paralab.view import matrix_blocks, matrix_steps, theme
from refusals import refuses
from test_tensor_theory import ALL, GRIDS

GPT3 = pl.ModelSpec.preset("gpt3-175b")
MODEL = pl.ModelSpec(layers=1, hidden=64, heads=8, seq_len=32)
PARAMETER = {"qkv": "attention.qkv", "proj": "attention.proj", "up": "mlp.up", "down": "mlp.down"}
every_mode = pytest.mark.parametrize("mode", ALL)


def plan_of(mode):
    return pl.Plan(microbatch_size=4, **ALL[mode])


def drawn(chart, matrix, rank):
    """The rank's one block of the matrix: (row start, row stop, column start, column stop)."""
    rows = chart.table.query("matrix == @matrix and rank == @rank")
    assert len(rows) == 1
    return tuple(rows.iloc[0, 2:])


def parts(box, whole):
    return tuple(end / n for at, n in zip(box, whole, strict=True) for end in (at.start, at.stop))


# ---- blocks -------------------------------------------------------------------------------------
@pytest.mark.parametrize("role", PARAMETER)
@every_mode
def test_a_drawn_block_of_w_is_what_the_rank_holds(mode, role):
    plan = plan_of(mode)
    chart = view.blocks(plan, role=role)
    for rank in range(plan.tp):
        held = layouts.holding(MODEL, plan, f"blocks.0.{PARAMETER[role]}.weight", rank)
        out, inner = held.box[-2:]  # as torch stores it
        assert drawn(chart, "W", rank) == parts((inner, out), held.whole[-2:][::-1])


@every_mode
def test_drawn_blocks_of_x_and_y_are_the_ranks_activations(mode):
    plan = plan_of(mode)
    inward, outward = view.blocks(plan, role="up"), view.blocks(plan, role="down")
    cut = 1 if ALL[mode].get("sequence_parallel") else 0  # which dimension tokens are cut in
    for rank in range(plan.tp):
        stream = layouts.activation_box(MODEL, plan, "residual", rank)
        stream = parts((stream[cut], stream[2]), ((4, 32)[cut], 64))
        between = layouts.activation_box(MODEL, plan, "scores", rank)
        between = parts(between[:2], (4, 8))
        assert drawn(inward, "X", rank) == drawn(outward, "Y", rank) == stream
        assert drawn(inward, "Y", rank) == drawn(outward, "X", rank) == between


@pytest.mark.parametrize(("plan", "role", "said"), [
    ({"tp": 4}, "up", "1D on 4 ranks: every rank holds all of X and 1/4 of W and Y"),
    ({"tp": 4, "sequence_parallel": True}, "up",
     "1D, sequence parallel, on 4 ranks: every rank holds 1/4 of X, W and Y"),
    (GRIDS["2.5d, 8"], "up", "2.5D on 8 ranks: every rank holds 1/4 of W and 1/8 of X and Y"),
    (GRIDS["3d, 8"], "proj", "3D on 8 ranks: every rank holds 1/8 of X, W and Y"),
])  # fmt: skip
def test_the_title_says_how_much_a_rank_holds(plan, role, said):
    chart = view.blocks(pl.Plan(**plan), role=role)
    assert chart.finding == said
    several = chart.table.drop(columns="rank").duplicated().any()
    assert ("grey:" in chart.layout.title.text) == several


@pytest.mark.parametrize("look", theme.LOOKS)
def test_a_rank_has_one_colour_in_every_figure_by_day_and_by_night(look):
    with theme.drawn(look):
        for mode in ALL:
            chart = view.blocks(plan_of(mode))
            for word in chart.layout.annotations:
                if (word.text or "").isdigit():
                    *_, top = [s.fillcolor for s in chart.layout.shapes
                               if s.x0 < word.x < s.x1 and s.y0 < word.y < s.y1]  # fmt: skip
                    assert top == matrix_blocks.RANK_COLOUR[int(word.text)], mode
    assert len(set(matrix_blocks.RANK_COLOUR)) == 8


def test_what_cannot_be_drawn_is_refused():
    for call in (view.blocks, view.multiplication):
        refuses("tp=1: one rank holds all.*legal: 2 to 8", call, pl.Plan())
        refuses("tp=9: too many ranks.*legal: 2 to 8", call, pl.Plan(tp=9, tp_mode="2d"))
    refuses("role='norm'.*legal: .*down", view.blocks, pl.Plan(tp=4), role="norm")
    refuses("step=2.*0 to 1", view.multiplication, plan_of("2d, 4"), step=2)
    refuses(r"tp_mode='1d'.*view\.blocks", view.multiplication, pl.Plan(tp=4))
    refuses("tp=1.*legal: .*at least 2", view.crossover, GPT3, 1)


# ---- one product, step by step ------------------------------------------------------------------
def terms_of(step, plan):
    """{rank: the labels of the blocks that it multiplies in this step of SUMMA}."""
    sent = [c for c in step.cells if c.strong]

    def one(matrix, rank, *axes):
        at = layouts.coordinates(plan, rank)
        [label] = [c.label for c in sent if c.matrix == matrix and any(
            all(layouts.coordinates(plan, r).get(a) == at.get(a) for a in axes)
            for r in c.ranks)]  # fmt: skip
        return label

    return {r: one("X", r, "i", "z") + one("W", r, "j") for r in range(plan.tp)}


@pytest.mark.parametrize("plan", [pl.Plan(tp=4, tp_mode="2d"), pl.Plan(tp=8, tp_mode="2.5d")],
                         ids=str)  # fmt: skip
def test_every_step_of_summa_adds_the_product_of_what_is_sent(plan):
    q, _ = plan.tp_grid
    steps = matrix_steps.summa(plan)
    assert len(steps) == q
    for number, step in enumerate(steps):
        said = view.multiplication(plan, step=number).layout.title.text
        assert ("grey:" in said) == any(len(c.ranks) > 1 for c in step.cells)
        added = terms_of(step, plan)
        for cell in (c for c in step.cells if c.matrix == "Y"):
            shown = cell.label.replace("<b>", "").replace("</b>", "").split("<br>+ ")
            assert len(shown) == number + 1 and shown[-1] == added[cell.ranks[0]]
        sent = [c for c in step.cells if c.matrix != "Y" and c.strong]
        assert len(sent) == plan.tp // q + q  # a column of X, a row of W
    final = {c.ranks[0]: c.label for c in steps[-1].cells if c.matrix == "Y"}
    assert all(label.count("X") == q for label in final.values())


def test_the_cubes_gathered_blocks_multiply_to_the_block_that_is_summed():
    plan, q = pl.Plan(tp=8, tp_mode="3d"), 2
    product, last = matrix_steps.cube(plan)[3:]

    def of(step, matrix, rank):
        [cell] = [c for c in step.cells if c.matrix == matrix and rank in c.ranks]
        return cell

    for rank in range(plan.tp):
        x, w, y = (of(product, name, rank) for name in "XWY")
        assert x.columns == w.rows and (y.rows, y.columns) == (x.rows, w.columns)
        assert len(x.ranks) == len(w.ranks) == len(y.ranks) == q
        mine = of(last, "Y", rank)
        assert mine.columns == y.columns and y.rows[0] <= mine.rows[0] < mine.rows[1] <= y.rows[1]
        inner = {of(product, "X", r).columns for r in y.ranks}
        assert sum((b - a for a, b in inner), Fraction(0)) == 1  # all of K, each part once


@pytest.mark.parametrize("mode", GRIDS)
def test_a_frame_shows_what_the_same_step_shows_alone(mode):
    plan = plan_of(mode)
    moving = view.multiplication(plan)
    slider = moving.layout.sliders[0]
    assert [s.args[0][0] for s in slider.steps] == [f.name for f in moving.frames]
    for number, frame in enumerate(moving.frames):
        still = view.multiplication(plan, step=number)
        assert not still.frames and not still.layout.sliders
        assert frame.layout.shapes == still.layout.shapes
        assert frame.layout.annotations == still.layout.annotations
        assert frame.layout.title.text == still.layout.title.text
        assert still.finding.startswith(f"Step {number + 1} of {len(moving.frames)}: ")
        rows = moving.table.query("step == @number").reset_index(drop=True)
        assert rows.equals(still.table)
    assert moving.finding == view.multiplication(plan, step=0).finding  # what GitHub shows
    assert pickle.loads(pickle.dumps(moving)).frames == moving.frames


# ---- the crossover ------------------------------------------------------------------------------
@pytest.mark.parametrize(("batch", "numbers"), [
    (1, {"1d": 99, "2d": 438, "2.5d": 810, "3d": 137}),
    (64, {"1d": 6342, "2d": 3039, "2.5d": 1925, "3d": 1623}),
])  # fmt: skip
def test_the_curves_are_the_formulas_at_gpt3_sizes(batch, numbers):
    found = view.crossover(GPT3, 64).table.query("tokens == 2048 * @batch").set_index("mode")
    for mode, millions in numbers.items():
        plan = pl.Plan(tp=64, tp_mode=mode, microbatch_size=batch)
        sent = sum(sum(tensor.linear_elements(GPT3, plan, role)) for role in ("up", "down"))
        sent += sum(tensor.depth_elements(GPT3, plan, role) for role in ("up", "down"))
        assert found["elements"][mode] == pytest.approx(float(sent))
        assert round(sent / 10**6) == millions


def test_the_title_names_the_crossovers_and_the_picture_marks_them():
    chart = view.crossover(GPT3, 64, name="GPT-3")
    assert chart.finding == ("GPT-3, MLP on 64 ranks: 1D sends least below 3,070 tokens, 3D up to "
                             "236,000 tokens, 2.5D above")  # fmt: skip
    exact = [12288 / 4, 235_930]  # tokens, where two straight lines meet
    assert [s.x0 for s in chart.layout.shapes] == pytest.approx(exact, rel=2e-3)
    assert list(chart.data[-1].x) == [s.x0 for s in chart.layout.shapes]  # rings
    assert chart.table["tokens"].max() == pytest.approx(2**20)
    for tp, modes in ((4, ["1d", "2d"]), (8, ["1d", "2.5d", "3d"])):  # one grid of 2.5D is 2D
        assert view.crossover(GPT3, tp).table["mode"].unique().tolist() == modes
    assert view.crossover(GPT3, 6).finding.startswith("h=12,288, MLP on 6 ranks: 1D: ")
