"""Reports: the worst layers lead, and the page is whole, self-contained and readable without seeing it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from report_samples import LAYERS, WORST, make_report

from kimi_gguf.verify.html import page
from kimi_gguf.verify.plots import Axis, index_axis, linear_axis, log_axis
from kimi_gguf.verify.report import percent, report_text, worst_first
from kimi_gguf.verify.result import Estimate, EvalReport

VOID = frozenset({"meta", "br", "link", "img", "input", "hr"})


class Page(HTMLParser):
    """Elements, texts and faults of a document."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.faults: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        self.faults += [f"{name} is not closed" for name in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def of(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        """Attributes of the elements called ``tag`` that have the attributes ``wanted``."""
        return [a for name, a in self.elements if name == tag and wanted.items() <= a.items()]


@pytest.fixture(scope="module")
def report() -> EvalReport:
    return make_report()


def test_the_worst_layers_come_first(report: EvalReport) -> None:
    assert worst_first(report)[0].layer == WORST
    lines = report_text(report).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("worst layers"))
    assert [int(line.split()[0]) for line in lines[start + 2 : start + 2 + LAYERS]] == [2, 3, 1, 0]


def test_the_text_names_models_engine_and_what_is_missing(report: EvalReport) -> None:
    text = report_text(report)
    for part in (
        "model.gguf (Q4_K_M) against checkpoint",
        "stream engine; 200 tokens of text.txt in 10 chunks of 20",
        "same set of experts",
        "perplexity ratio",
        "from the spread of 10 chunks",
        "not measured: indexer overlap: the model has no indexer",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "-"),
        (Estimate(1.0, 0.0, "chunks", 9), "100 %"),
        (Estimate(0.98765, 0.0004, "chunks", 9), "98.765 % ± 0.040"),
        (Estimate(0.5, 0.02, "chunks", 9), "50.0 % ± 2.0"),
        (Estimate(0.5, None, "tokens", 1), "50 %"),
    ],
)
def test_a_share_has_as_many_decimals_as_its_error_allows(found: Estimate | None, text: str) -> None:
    assert percent(found) == text


def test_the_page_is_well_formed_and_loads_nothing(report: EvalReport) -> None:
    text = page(report)
    found = Page(text)
    assert found.faults == []
    assert not {"script", "link", "img", "iframe", "object"} & {name for name, _ in found.elements}
    assert not any(key in ("src", "href", "onload") for _, attributes in found.elements for key in attributes)
    assert not re.search(r"https?:|url\(|@import", text)
    (policy,) = found.of("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_the_page_has_every_plot_with_words_for_those_who_do_not_see_it(report: EvalReport) -> None:
    found = Page(page(report))
    assert [a["id"] for a in found.of("figure")] == ["routing", "kl", "load", "hidden", "divergence"]
    ids = {attributes["id"] for _, attributes in found.elements if "id" in attributes}
    for svg in found.of("svg"):
        assert svg["role"] == "img" and set((svg["aria-labelledby"] or "").split()) <= ids
    assert all(text.strip() for text in found.texts["desc"]) and len(found.texts["desc"]) == 5
    assert any("Least in layer 2" in text for text in found.texts["figcaption"])
    assert found.of("html")[0]["lang"] == "en" and len(found.of("h1")) == 1
    assert len(found.texts["caption"]) == 2
    assert {a["scope"] for a in found.of("th")} == {"row", "col"}
    rows = [text for text in found.texts["th"] if text.isdigit()]
    assert rows == [str(n) for n in range(LAYERS)]


def test_the_page_has_colours_for_light_and_dark(report: EvalReport) -> None:
    text = page(report)
    assert "color-scheme: light dark" in text and "prefers-color-scheme:dark" in text.replace(" ", "")
    drawn = set(re.findall(r'class="([a-z0-9 ]+)"', text))
    assert not [fill for fill in re.findall(r'(?:fill|stroke)="([^"]+)"', text) if fill != "none"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert all(f".{word}" in style for classes in drawn for word in classes.split() if word != "whisker")


def test_marks_lie_inside_their_plots(report: EvalReport) -> None:
    for name, attributes in Page(page(report)).elements:
        if name == "circle":
            assert 68 <= float(attributes["cx"] or -1) <= 706 and 14 <= float(attributes["cy"] or -1) <= 254
        if name == "rect":
            assert float(attributes["x"] or -1) >= 68 and float(attributes["height"] or -1) > 0


def test_equal_models_make_a_page_too() -> None:
    report = make_report(noise=0.0)
    found = Page(page(report))
    assert found.faults == []
    assert [a["id"] for a in found.of("figure")] == ["routing", "kl", "load", "hidden"]
    assert any("equal, bit for bit" in text for text in found.texts["figcaption"])
    assert "100 %" in "".join(found.texts["dd"])


def test_names_from_files_cannot_change_the_page() -> None:
    label = '<script>alert("x")</script>&amp;'
    report = make_report(label, flags=("<b>flag</b>",))
    found = Page(page(report))
    assert found.faults == [] and not found.of("script")
    assert any(label in text for text in found.texts["h1"])
    assert any("<b>flag</b>" in text for text in found.texts["p"]) and found.of("p", role="alert")


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (linear_axis("x", 0, 1, percent=True), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]),
        (linear_axis("x", 0.9985, 1, percent=True), ["99.85 %", "99.90 %", "99.95 %", "100.00 %"]),
        (linear_axis("x", 0, 23), ["0", "5", "10", "15", "20"]),
        (log_axis("x", 2e-3, 0.5), ["10⁻³", "10⁻²", "10⁻¹", "10⁰"]),
        (index_axis("x", 5), ["0", "1", "2", "3", "4"]),
        (index_axis("x", 93), ["0", "10", "20", "30", "40", "50", "60", "70", "80", "90"]),
    ],
)
def test_ticks_are_round(axis: Axis, texts: list[str]) -> None:
    assert [text for _, text in axis.ticks] == texts
