"""ZeRO's figure 1, tables 1 and 2, as printed."""

import pytest

from paralab.theory import zero

# Rajbhandari+ 2020, arXiv:1910.02054, Figure 1: 7.5 B parameters, N = 64, K = 12; GB.
FIGURE_1 = {0: "120", 1: "31.4", 2: "16.6", 3: "1.9"}

# Table 1: GB per device; a row is N, then Pos, Pos+g, Pos+g+p for 7.5 B, 128 B and 1 T parameters.
TABLE_1 = """
1     120   120   120    2048 2048 2048   16000 16000 16000
4     52.5  41.3  30     896  704  512    7000  5500  4000
16    35.6  21.6  7.5    608  368  128    4750  2875  1000
64    31.4  16.6  1.88   536  284  32     4187  2218  250
256   30.4  15.4  0.47   518  263  8      4046  2054  62.5
1024  30.1  15.1  0.12   513  257  2      4011  2013  15.6
"""

# Table 2, theory: MP degree, then billions for baseline, Pos, Pos+g, Pos+g+p; 64-way data
# parallel on 32 GB. Every row is its MP times the first, as printed; 0.5 T, 1 T, 2 T are rounded.
TABLE_2 = """
1   2   7.6    14.4   128
2   4   15.2   28.8   256
4   8   30.4   57.6   500
8   16  60.8   115.2  1000
16  32  121.6  230.4  2000
"""
ROUNDED = {500: 512, 1000: 1024, 2000: 2048}


@pytest.mark.parametrize("stage, printed", FIGURE_1.items())
def test_figure_1(stage, printed):
    found = zero.bytes_per_device(7.5e9, 64, stage) / 1e9
    assert f"{found:.1f}".removesuffix(".0") == printed


@pytest.mark.parametrize("row", TABLE_1.split("\n")[1:-1])
def test_table_1_with_its_rounding(row):
    n, *printed = row.split()
    found = [
        zero.as_printed(zero.bytes_per_device(psi, int(n), stage))
        for psi in (7.5e9, 128e9, 1e12)
        for stage in (1, 2, 3)
    ]
    assert found == printed


@pytest.mark.parametrize("row", TABLE_2.split("\n")[1:-1])
def test_table_2_multiplies_its_first_row(row):
    mp, *printed = (float(number) for number in row.split())
    for stage, billions in enumerate(printed):
        largest = 32e9 / zero.bytes_per_device(1e9, 64, stage)
        assert mp * round(largest, 1) == pytest.approx(ROUNDED.get(billions, billions), rel=1e-12)
        assert mp * largest == pytest.approx(ROUNDED.get(billions, billions), rel=0.006)


def test_the_first_stage_to_fit_32_gb_is_the_bold_one():
    # Table 1, bold: N = 4, 16, 64 fit 7.5 B parameters into 32 GB from Pos+g+p, Pos+g, Pos on
    first = {
        n: next(s for s in (1, 2, 3) if zero.bytes_per_device(7.5e9, n, s) <= 32e9)
        for n in (4, 16, 64)
    }
    assert first == {4: 3, 16: 2, 64: 1}


def test_every_recipe_is_shared_out_whole():
    for recipe, width in {"fp32": 16, "zero-fp16": 16, "megatron-bf16": 18,
                          "megatron-fp16": 20}.items():  # fmt: skip
        assert zero.bytes_per_device(1000, 1, 3, recipe) == width * 1000
        assert zero.bytes_per_device(1000, 8, 3, recipe) == width * 1000 / 8
        assert zero.bytes_per_device(1000, 8, 0, recipe) == width * 1000
    assert zero.stage_bytes(80, 8, 2, "megatron-fp16") == {
        "parameters": 160, "gradients": 20, "master gradients": 40, "master": 40, "moments": 80
    }  # fmt: skip


def test_volumes_are_those_of_section_7():
    assert [zero.volume(stage) for stage in range(4)] == [2, 2, 2, 3]
    assert [zero.volume(stage, 5) for stage in range(4)] == [2, 2, 6, 15]
    assert zero.elements_sent(1000, 4, 3, 2) == 6 * 1000 * 3 / 4
    assert zero.elements_sent(1000, 1, 3) == 0
