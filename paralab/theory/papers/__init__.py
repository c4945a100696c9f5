"""Tables of papers, as the labs show them, next to the same figures by paralab's formulas.

Every function returns a pandas DataFrame with one row per row of the table. A column "..., printed"
is the paper's figure, "..., recomputed" that of theory/ for the same settings; other columns are
inputs. Tables that only check the formulas are in the tests.

"GB" is decimal in ZeRO and binary in ZeRO-Infinity, Korthikanti+ and DeepSpeed; columns say GB or
GiB accordingly. A printed figure that does not follow from its own inputs stays as printed, and
`errata` lists it.
"""

from paralab.theory.papers.errata import errata
from paralab.theory.papers.korthikanti import korthikanti_table5
from paralab.theory.papers.ptdp import ptdp_models, ptdp_table1, ptdp_table2

__all__ = ["errata", "korthikanti_table5", "ptdp_models", "ptdp_table1", "ptdp_table2"]
