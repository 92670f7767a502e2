"""Every sentence that the doctor can print has a row, and so a test that follows its advice."""

from advice import findings
from advice.rows import rows


def test_every_finding_of_the_doctor_has_rows() -> None:
    """Each sentence has a row, and so has each advice. The rows' tests find them in what the doctor prints."""
    known = [r for r in rows() if r.tool == "doctor"]
    missing = []
    for one in findings.sentences():
        missing += [f"{one.where}: {one.check}: {t}" for t in one.said if not one.says(t, [r.said for r in known])]
        missing += [f"{one.where}: → {t}" for t in one.advice if not findings.fits_any(t, [r.do for r in known])]
    assert not missing, "give each a row in tests/advice/test_doctor_….py"
    assert len(findings.sentences()) > 50, "the calls of Finding were found"
