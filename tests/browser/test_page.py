"""A report's page in a browser: on paper, where there is less room than in a window."""

from __future__ import annotations

import synthetic

PAPER = 718  # pixels: A4 without the margins that Chrome leaves
DRAWN = "() => [...document.querySelectorAll('.figure')].map((one) => one._fullLayout.width)"
ENDS = """(kind) => [...document.querySelectorAll(kind)].map(
    (one) => one.getBoundingClientRect().right)"""


def test_printed_figures_and_their_titles_fit_on_the_paper(browser, tmp_path):
    path = tmp_path / "report.html"
    synthetic.with_memory(synthetic.report(4)).to_html(path)
    page, complaints = browser.new_page(), []
    for kind in ("console", "pageerror"):
        page.on(kind, lambda said: complaints.append(str(said)))
    page.set_viewport_size({"width": 1900, "height": 900})
    page.goto(path.as_uri())
    before = page.evaluate(DRAWN)
    page.evaluate(f"() => addEventListener('beforeprint', () => (window.seen = ({DRAWN})()))")
    page.pdf(format="A4")
    on_paper, after = page.evaluate("() => window.seen"), page.evaluate(DRAWN)
    assert before == after and min(before) > 1000
    assert on_paper == [800] * 4  # what their titles are broken for

    # That width, as the page's style has it on paper; a window that is resized draws them anew.
    page.set_viewport_size({"width": PAPER, "height": 900})
    page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    ends = {kind: page.evaluate(ENDS, kind) for kind in (".main-svg", ".gtitle", "section")}
    page.close()
    assert not complaints
    assert len(ends[".gtitle"]) == 4 and max(ends["section"]) <= PAPER
    assert max(ends[".main-svg"] + ends[".gtitle"]) <= min(ends["section"])
