"""Real text, and the same batches whatever the plan."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paralab as pl
from paralab.data import Corpus
from processes import printed
from refusals import refuses


def test_the_default_text_is_there_without_a_download_and_without_torch_being_loaded():
    corpus = Corpus()
    assert corpus.num_bytes > 500_000
    assert b"class Linear(Module):" in corpus.read(0, corpus.num_bytes)
    found = "import sys, paralab.data as d; print(d.Corpus().identity, 'torch' in sys.modules)"
    assert printed(found) == f"{corpus.identity} False\n"


def test_where_torch_is_not_installed_the_default_text_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    refuses("^data=None.*torch is not installed.*legal: a text file", Corpus)


@given(st.lists(st.binary(max_size=9), min_size=1, max_size=6), st.data())
def test_reading_is_slicing_the_files_joined(tmp_path_factory, pieces, data):
    folder = tmp_path_factory.mktemp("files")
    pieces = [p.replace(b"\0", b".") for p in pieces] + [b"end"]
    for i, piece in enumerate(pieces):
        (folder / f"{i:02d}.txt").write_bytes(piece)
    whole, corpus = b"".join(pieces), Corpus(folder)
    assert corpus.num_bytes == len(whole)
    start = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(1, len(whole) - start))
    assert corpus.read(start, count) == whole[start : start + count]


def test_samples_depend_on_seed_and_number_alone(text):
    def batch(index=0, size=8, step=3, seed=5):
        how = {"step": step, "index": index, "size": size, "seed": seed}
        return corpus.microbatch(**how, global_batch=8, length=20)

    corpus = Corpus(text)
    assert batch() == batch(0, 4) + batch(1, 4)
    assert batch() != batch(step=4) and batch() != batch(seed=6)
    # a fixed value: another processor, another Python must draw the same
    assert corpus.sample(0, length=20, seed=0) == b"as leaves a the it ho"


def test_samples_reach_all_of_a_short_text(tmp_path):
    (tmp_path / "t.txt").write_bytes(bytes(range(65, 75)))
    corpus = Corpus(tmp_path / "t.txt")
    assert {corpus.sample(i, length=6, seed=0)[0] for i in range(60)} == {65, 66, 67, 68}
    assert len(corpus.sample(0, length=9, seed=0)) == 10  # exactly one place


def test_folders_are_read_in_the_order_of_names_without_hidden_and_binary_files(tmp_path):
    held = {"b.txt": b"second", "a/x.md": b"first ", ".hidden": b"no", ".git/c.txt": b"no",
            "c.bin": b"\0\1\2"}  # fmt: skip
    for name, data in held.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    corpus = Corpus(tmp_path)
    assert corpus.read(0, corpus.num_bytes) in (b"first second", b"secondfirst ")
    assert corpus.num_bytes == 12


NO_TEXT = (b"", b"\0", b"\0\1\2" * 99, "words".encode("utf-16"), b"\xfe\xff" * 50)


@pytest.mark.parametrize("held", NO_TEXT)
def test_what_is_no_text_is_refused_with_the_reason(tmp_path, held):
    path = tmp_path / "t"
    for data in (path, tmp_path, 7):  # which is missing, empty, or no path
        refuses("data=.*legal", Corpus, data)
    path.write_bytes(held)
    refuses("data=.*legal", Corpus, tmp_path)
    refuses("data=.*" + "not text: it contains zero bytes, or is UTF-16" * bool(held), Corpus, path)


def test_a_text_shorter_than_a_sample_is_refused_before_a_process_starts(tmp_path, model):
    (tmp_path / "short.txt").write_text("too short")
    words = "9 bytes are fewer than one sample needs; legal: .* 25 bytes"
    refuses(words, pl.run, model, data=tmp_path / "short.txt")


def test_a_file_that_shrinks_is_an_error_not_an_endless_read(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("x" * 100)
    corpus = Corpus(path)
    os.truncate(path, 10)
    refuses("became shorter", corpus.read, 50, 5)
