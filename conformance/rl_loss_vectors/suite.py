"""The cases as parameters of somebody's pytest suite."""

from pathlib import Path
from typing import NamedTuple

from rl_loss_vectors import doctor
from rl_loss_vectors.vectors import Subject, same


class Check(NamedTuple):
    """A case and the function that is to pass it: `check()` in the body of a test."""

    subject: Subject
    case: dict

    def __repr__(self):
        return self.case["id"]

    def check(self):
        """An AssertionError with the diagnosis of all cases, if the function does not agree."""
        answer = self.subject.answer(self.case)
        value, gradient = self.subject.expected(self.case)
        if same(answer, value, gradient, self.case["tolerance"]):
            return
        if self.subject.diagnosis is None:
            self.subject.diagnosis = doctor.diagnosis(self.subject, doctor.examine(self.subject))
        healthy = ["all cases agree within the tolerance of float32: pass dtype='float32'"]
        lines = [doctor.difference(self.case, answer, value, gradient)]
        lines += self.subject.diagnosis or healthy
        raise AssertionError("\n".join(lines))


def cases(section, call, xfails=None, **how):
    """The cases of a section for `pytest.mark.parametrize`, each with its id; `how`: as in Subject.

    Cases that do not apply are skipped. xfails: a file with the ids of known differences, one on each
    line, and a reason after #. They are strict: a listed case that passes is a failure. Ids of other
    sections are ignored.
    """
    import pytest

    subject = Subject(call, section, **how)
    known = {}
    lines = Path(xfails).read_text().splitlines() if xfails else []
    for line in lines:
        id, _, words = line.partition("#")
        if id.strip():
            known[id.strip()] = words.strip()
    parameters = []
    for case in subject.about["cases"]:
        why_not = subject.why_not(case)
        marks = []
        if why_not:
            marks = [pytest.mark.skip(reason=why_not)]
        elif case["id"] in known:
            reason = known.pop(case["id"])
            marks = [pytest.mark.xfail(strict=True, reason=reason, raises=AssertionError)]
        parameters.append(pytest.param(Check(subject, case), id=case["id"], marks=marks))
    unused = [id for id in known if id.rsplit("-", 1)[0] == section]
    if unused:
        raise ValueError(f"{xfails}: no such case, or it does not apply: {', '.join(unused)}")
    return parameters
