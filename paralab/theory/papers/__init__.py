"""The papers' own tables, typed as printed, each beside what paralab's formulas make of it.

Every function returns a pandas DataFrame with one row per row of the table. A column "..., printed"
is what the paper says, "..., recomputed" what theory/ says for the same settings; other columns are
inputs. tests/test_papers_*.py hold the two together, at a tolerance that each states.

    ptdp         Narayanan+ 2021, arXiv:2104.04473, Megatron's PTD-P
    korthikanti  Korthikanti+ 2022, arXiv:2205.05198, activations and recomputation
    zero         Rajbhandari+ 2019, arXiv:1910.02054, ZeRO
    pipelines    Qi+ 2023, arXiv:2401.10241, zero bubble; Huang+ 2018, arXiv:1811.06965, GPipe
    offload      Ren+ 2021, arXiv:2101.06840, ZeRO-Offload; Rajbhandari+ 2021, arXiv:2104.07857,
                 ZeRO-Infinity
    hardware     the devices they ran on
    layers       Colossal-AI's documentation; Fedus+ 2021, arXiv:2101.03961, Switch Transformers
    errata       where papers contradict themselves, and what this package does about it

"GB" is decimal in ZeRO and binary in ZeRO-Infinity, Korthikanti+ and DeepSpeed; columns say GB or
GiB as it is meant. Where a printed row does not follow from its own inputs it stays as printed, and
`errata` says so.
"""

from paralab.theory.papers.errata import errata
from paralab.theory.papers.hardware import devices
from paralab.theory.papers.korthikanti import (
    korthikanti_figure1,
    korthikanti_figure7,
    korthikanti_table2,
    korthikanti_table4,
    korthikanti_table5,
)
from paralab.theory.papers.layers import colossal_costs, switch_table1
from paralab.theory.papers.offload import (
    zero_infinity_figure2a,
    zero_infinity_figure6a,
    zero_infinity_table1,
    zero_infinity_table2,
    zero_offload_figure7,
    zero_offload_table1,
)
from paralab.theory.papers.pipelines import gpipe_table2, schedule_costs, zero_bubble_table5
from paralab.theory.papers.ptdp import (
    ptdp_configs,
    ptdp_facts,
    ptdp_models,
    ptdp_table1,
    ptdp_table2,
)
from paralab.theory.papers.zero import (
    zero_figure1,
    zero_headlines,
    zero_table1,
    zero_table2,
    zero_volumes,
)

__all__ = [
    "colossal_costs", "devices", "errata", "gpipe_table2", "korthikanti_figure1",
    "korthikanti_figure7",
    "korthikanti_table2", "korthikanti_table4", "korthikanti_table5", "ptdp_configs", "ptdp_facts",
    "ptdp_models", "ptdp_table1", "ptdp_table2", "schedule_costs", "switch_table1",
    "zero_bubble_table5", "zero_figure1", "zero_headlines", "zero_infinity_figure2a",
    "zero_infinity_figure6a", "zero_infinity_table1", "zero_infinity_table2",
    "zero_offload_figure7", "zero_offload_table1", "zero_table1", "zero_table2", "zero_volumes",
]  # fmt: skip
