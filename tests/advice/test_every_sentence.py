"""The page holds what the tests follow, and the tests follow what the tools can say."""

from pathlib import Path

from advice.rows import page, rows

PAGE = Path(__file__).parents[2] / "docs/when-it-rings.md"


def test_the_page_is_the_table() -> None:
    assert page() == PAGE.read_text(), "PYTHONPATH=tests python -m advice.rows > docs/when-it-rings.md"


def test_no_sentence_is_there_twice() -> None:
    sentences = [(r.tool, r.said) for r in rows()]
    assert len(sentences) == len(set(sentences))
