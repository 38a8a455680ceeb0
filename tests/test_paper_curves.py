"""The paper's curves, from files written here."""

import pytest

from dapo_jax import paper_curves
from dapo_jax.types import UserError


def write_paper(folder, *, end=160, leave_out=()):
    """Files with the names and columns of the real ones, and numbers of no one's."""
    folder.mkdir()
    for source in paper_curves.SOURCES:
        names = {"1": ["DAPO pass@32", "DAPO avg@32"], "2a": ["w/ A", "w/o A"]}
        lines = [f"series,step,{source.column}"]
        for s, name in enumerate(names.get(source.figure, ["DAPO"])):
            # Out of order, so that a curve is a line only if it is sorted.
            lines += [f"{name},{step},{(s + 1) * step / end}" for step in (end, 0.0, end / 2)]
        if source.file not in leave_out:
            (folder / source.file).write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    "text, message",
    [
        ("series,step\nDAPO,1\n", r"entropy.csv, line 1: no column 'entropy'.*series, step"),
        ("", "line 1: no column 'series'.*there are: none"),
        ("series,step,entropy\nDAPO,1,2\nDAPO,2,much\n", "line 3: entropy is 'much'"),
        ("series,step,entropy\nDAPO,,2\n", "line 2: step is ''"),
        ("series,step,entropy\nDAPO,1,nan\n", "line 2: entropy is 'nan'"),
        ("series,step,entropy\nDAPO,1\n", "line 2: not as many cells as the 3 columns"),
        ("series,step,entropy\nDAPO,1,0,5\n", "line 2: not as many cells"),
        ("series,step,entropy\n", "has no rows"),
        ("series,step,entropy\nD\xc4PO,1,2\n", "not a CSV file in UTF-8"),
    ],
)
def test_a_malformed_file_is_named_with_its_line(tmp_path, text, message):
    paper = write_paper(tmp_path / "paper")
    (paper / "fig7c_entropy.csv").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        paper_curves.load_paper(paper)


def test_a_figure_1_without_the_papers_run(tmp_path):
    paper = write_paper(tmp_path / "paper")
    (paper / "fig1_aime24_pct.csv").write_text("series,step,aime24_pct\nother,1,2\n")
    with pytest.raises(UserError, match="no rows of the series 'DAPO avg@32'"):
        paper_curves.load_paper(paper)
