"""The papers' own tables that labs print, each next to what paralab's formulas make of it.

Every function returns a pandas DataFrame with one row per row of the table. A column "..., printed"
is what the paper says, "..., recomputed" what theory/ says for the same settings; other columns are
inputs. The tables that check the formulas alone are in the tests.

``rows=`` puts a reader's own rows in place of the paper's, one or several, each a mapping of the
fields of the table's kind of row (or such a row). What a reader has no printed figure for is left
out, and empty in the table:

    papers.ptdp_table1(rows={"model": model, "plan": pl.Plan(dp=8, tp=8), "tflops": 140})

    ptdp.Row                model, plan, tflops; params, percent, pflops, peak
    ptdp.Days               model, plan, tflops; scheme, params, days, tokens
    korthikanti.Measured    model, devices, batch, present; name, full, gain, mfu, hfu, peak

    ptdp         Narayanan+ 2021, arXiv:2104.04473, Megatron's PTD-P
    korthikanti  Korthikanti+ 2022, arXiv:2205.05198, activations and recomputation
    errata       where papers contradict themselves, and what this package does about it

"GB" is decimal in ZeRO and binary in ZeRO-Infinity, Korthikanti+ and DeepSpeed; columns say GB or
GiB as it is meant. Where a printed row does not follow from its own inputs it stays as printed, and
`errata` says so.
"""

from paralab.theory.papers.errata import errata
from paralab.theory.papers.korthikanti import korthikanti_table5
from paralab.theory.papers.ptdp import ptdp_models, ptdp_table1, ptdp_table2

__all__ = ["errata", "korthikanti_table5", "ptdp_models", "ptdp_table1", "ptdp_table2"]
