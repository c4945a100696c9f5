"""Lab 08's exercises: right answers pass, wrong ones are refused by the limits they break."""

import importlib

import paralab as pl
from judged import Table, altered

SUMMA = pl.exercises.summa
torus = importlib.import_module("paralab.exercises.cannon")

changed = altered("summa")
TERM = "self.sent(self.row, x, step) @ self.sent(self.column, w, step)"
SUMS = "dist.reduce(part, group_dst=step, "
ACROSS_X = (f"{SUMS}group=self.row)", f"{SUMS}group=self.column)")
ROOT = changed(("group_src=step", "src=step"))
HALF = changed(("y = x.new_zeros", "if not dist.get_rank(self.column):  # the others wait\n"
                "            return x @ w\n        y = x.new_zeros"))  # fmt: skip
# As many elements, and a whole row and a whole column on every rank.
GATHERED = """        q = dist.get_world_size(self.row)
        xs, ws = x.new_empty(q, *x.shape), w.new_empty(q, *w.shape)
        dist.all_gather_into_tensor(xs.view(-1), x.view(-1), group=self.row)
        dist.all_gather_into_tensor(ws.view(-1), w.view(-1), group=self.column)
        return (xs @ ws).sum(0)
"""
WRONG = [  # answer, limits it breaks, words of the verdict
    (changed(("        y = x.new_zeros", f"{GATHERED}        y = x.new_zeros")), {"memory forward"},
     ("bytes in addition to its own blocks, required: at most 20,584; a whole row or column has "
      "30,720 bytes")),
    (changed((TERM, "x @ w / 2")), {"Y", "elements forward"},
     "all ranks send 0 elements, required: 17,664"),
    *((changed((TERM, term)), {"Y"}, ("rank (0, 0): block of Y", f"; {words}"))
      for term, words in (
          (TERM.replace("self.sent(self.row, x, step)", "x"),
           "the term X_01 W_10 is missing, the term X_00 W_10 is in it"),
          (TERM.replace("w, step", "w, dist.get_world_size(self.row) - 1 - step"),
           "the terms X_00 W_00 and X_01 W_10 are missing, the terms X_00 W_10 and X_01 W_00 "))),
    (ROOT, {"Y"}, "Global rank 0 is not part of group <torch.distributed.distributed_c10d.Proc"
     "essGroup object>, line 39 of cell "),
    (changed((TERM, f"{TERM} + 0 * ({TERM})")),
     {"elements forward"}, "35,328 elements, required: 17,664 (yours is 2 times that)"),
    (changed(("else torch.empty_like(block)", "else block")),
     {"Y", "gradients"}, "; forward overwrites its x or w, which later steps need: in step l only"),
    (changed((SUMS, "dist.all_reduce(part, ")), {"elements backward"},
     "52,992 elements, required: 35,328 (yours is 1.5 times"),
    (changed(ACROSS_X), {"gradients"}, "; terms were summed along the column, required: the row"),
    (changed(ACROSS_X[::-1]), {"gradients"}, "; terms were summed along the row, required: the co"),
    (changed(("if dist.get_rank(self.row) == step:", "if True:")), {"gradients"},
     "; it is its own term of step 1; it has to keep the sum of step 0, its place in the row"),
    (changed(("return dx, dw", "return dx, dw.t().contiguous()")),
     {"gradients"}, "of dW has shape (6, 48), required: (48, 6)"),
    (changed(("return dx, dw", "return dx")), {"Y"},
     "required: dX and dW, two blocks; the answer returns a Tensor"),
    (HALF, {"Y"}, "every member has to make the same calls in the same order"),
]  # fmt: skip

TABLE = Table(SUMMA, WRONG, alone=[ROOT, HALF])
test_a_wrong_summa_is_refused, test_a_right_summa_passes, test_its_stub = TABLE.tests()


# ---- groups of rows and columns, and Cannon's algorithm ------------------------------------------
groups = altered("grid_groups")
cannon = altered("cannon")
ROWS, COLUMNS = (
    f"{name} = [dist.new_group([a * q + b for {a} in range(q)]) for {b} in range(q)]"
    for name, a, b in (("rows", "b", "a"), ("columns", "a", "b"))
)
LINES = "return rows[i], columns[j]"
# Some of its ranks fail, and the others wait for them.
FIRST_ONES = groups((LINES, "return rows[0], columns[0]"))
LINE = [  # answer, limits it breaks, words of the verdict
    (groups((LINES, "return columns[j], rows[i]")), {"row", "column"},
     "[0, 2], required: [0, 1]; these are the ranks of its column"),
    (groups(("rows[i]", "dist.new_group(list(range(q * q)))")), {"row"},
     "the row has the ranks [0, 1, 2, 3], required: [0, 1]"),
    (groups(("dist.new_group(", "list(")), {"row"},
     "the row is [0, 1], required: a group that dist.new_group(ranks) has"),
    (groups((LINES, "return (rows[i],)")), {"row"},
     "a row and a column, two groups; the answer returns a tuple of length 1"),
    (FIRST_ONES, {"row"}, " raised ValueError: the row is a group of which this rank is "
     "no member, required: a group"),
    (groups((COLUMNS, COLUMNS.replace("b in range(q)", "b in range(q if i else j + 1)"))), {"row"},
     "q=2: rank 1 makes the group [1, 3] where rank 0 makes no other group"),
]  # fmt: skip
FIRST, NEXT = "moved(x, w, i, j)", "moved(x, w, 1, 1)"
ALL_AT_ONCE = """    xs, ws = {}, {}
    for k in range(q):
        xs[(j + k) % q], ws[(i + k) % q] = moved(x, w, k, k)
    return sum(xs[k] @ ws[k] for k in range(q))
"""
TURN = [
    # Those judged by memory go first. Each answer's messages have threads of their own, and
    # Python's set of a process's threads is counted as memory once it has 4 KiB.
    (cannon((f"    x, w = {FIRST}", ALL_AT_ONCE)), {"memory"},
     "holds 29,376 bytes in addition to x and w, required: at"),
    (cannon(("return y", "pass")), {"Y"}, "required: a tensor, yours is None"),
    (cannon((FIRST, "moved(x, w, -i, -j)")), {"Y"}, "; X was moved to the right and W down be"),
    (cannon((NEXT, "moved(x, w, 1, -1)")), {"Y"},
     ("q=4: rank (0, 0): block of Y, element (0, 0): ",
      "; between the products X goes left and W down, or X right and W ")),
    (cannon(("(0, left", "(1, left"), ("(1, up", "(0, up")), {"Y"},
     "; X went along the columns and W along the rows"),
    (cannon(("range(q - 1)", "range(q - 2)")), {"Y"}, "; the last of the q products is missing"),
    (cannon((f"x, w = {FIRST}", "for step in range(q - 1):\n"
             "        x, w = moved(x, w, step < i, step < j)")), {"blocks sent"},
     "q=4: rank (3, 3) sends 52,992 bytes, required: at most 35,328, 4 blocks of X and of W"),
    (cannon((f"x, w = {FIRST}", f"dist.broadcast(x.clone(), 0)\n    x, w = {FIRST}")), {"calls"},
     "q=2: it calls broadcast, required: messages between two ranks"),
    (cannon((f"x, w = {FIRST}", f"own = x, w\n    x, w = {FIRST}"), ("for _", "for k"),
            (NEXT, "moved(*own, i + k + 1, j + k + 1)")), {"calls"},
     "q=4: rank (0, 0) sends to rank (0, 2) after the first move, required: to a neighbour"),
    (cannon(("return y", "moved(*moved(x, w, 1, 0), 1, 0)\n    return y")), {"blocks sent"},
     "q=2: rank (1, 1) sends 33,024 bytes, required: at most 17,664, 2 blocks"),
    (cannon((f"x, w = {FIRST}", f"x[:], w = {FIRST}")), {"Y"},
     "q=2: it changes x, which its caller still needs: work on a copy"),
]  # fmt: skip
GROUPED = groups(
    (f"{ROWS}\n    {COLUMNS}", f"{COLUMNS}\n    {ROWS}"), (LINES, "return [rows[i], columns[j]]")
)
MOVED = [cannon((NEXT, "moved(x, w, -1, -1)"))]
ALL_LINES = Table(pl.exercises.grid_groups, LINE, [GROUPED], alone=[FIRST_ONES])
TORUS = Table(pl.exercises.cannon, TURN, MOVED)
test_wrong_groups_are_refused, test_right_groups_pass, test_the_stub_of_groups = ALL_LINES.tests()
test_a_wrong_cannon_is_refused, test_a_right_cannon_passes, test_the_stub = TORUS.tests()


def test_a_wrong_sum_over_a_group_is_said_with_the_right_one():
    said = torus._wrong_line(0, "a sum over each", {"sums": [3.0, 2.0]}, 2)
    assert said == "rank 0: the sums in its row and its column are [3.0, 2.0], required: [1.0, 2.0]"
