"""ZeRO's figure 1, tables 1 and 2, as printed."""

from itertools import product

import pytest

from paralab.theory import zero

# Rajbhandari+ 2020, arXiv:1910.02054. Figure 1 is the row of 64 devices with 7.5 B parameters.
# Table 1: GB per device; a row is N, then Pos, Pos+g, Pos+g+p for 7.5 B, 128 B and 1 T parameters.
TABLE_1 = """
1     120   120   120    2048 2048 2048   16000 16000 16000
4     52.5  41.3  30     896  704  512    7000  5500  4000
16    35.6  21.6  7.5    608  368  128    4750  2875  1000
64    31.4  16.6  1.88   536  284  32     4187  2218  250
256   30.4  15.4  0.47   518  263  8      4046  2054  62.5
1024  30.1  15.1  0.12   513  257  2      4011  2013  15.6
"""


@pytest.mark.parametrize("row", TABLE_1.split("\n")[1:-1])
def test_table_1_with_its_rounding(row):
    n, *printed = row.split()
    sizes = product((7.5e9, 128e9, 1e12), (1, 2, 3))
    found = [zero.bytes_per_device(psi, int(n), stage) for psi, stage in sizes]
    assert list(map(zero.as_printed, found)) == printed


def test_table_2_theory_of_mp_1():
    # Billions of parameters with 64-way data parallelism on 32 GB; its other rows multiply this one
    found = [32e9 / zero.bytes_per_device(1e9, 64, stage) for stage in range(4)]
    assert [round(billions, 1) for billions in found] == [2.0, 7.6, 14.4, 128.0]


def test_every_recipe_is_shared_out_whole():
    for recipe, width in {"fp32": 16, "zero-fp16": 16, "megatron-bf16": 18,
                          "megatron-fp16": 20}.items():  # fmt: skip
        assert zero.bytes_per_device(1000, 8, 0, recipe) == width * 1000
        assert zero.bytes_per_device(1000, 8, 3, recipe) == width * 1000 / 8
    assert zero.stage_bytes(80, 8, 2, "megatron-fp16") == {
        "parameters": 160, "gradients": 20, "master gradients": 40, "master": 40, "moments": 80
    }  # fmt: skip


def test_volumes_are_those_of_section_7():
    assert [zero.volume(stage) for stage in range(4)] == [2, 2, 2, 3]
    assert [zero.volume(stage, 5) for stage in range(4)] == [2, 2, 6, 15]
    assert zero.elements_sent(1000, 4, 3, 2) == 6 * 1000 * 3 / 4
    assert zero.elements_sent(1000, 1, 3) == 0
