"""The cases as parameters of somebody's pytest suite."""

import functools
from typing import NamedTuple

from rl_loss_vectors import doctor
from rl_loss_vectors.vectors import Subject


@functools.cache
def diagnosis_of(subject):
    return doctor.diagnosis(subject, doctor.examine(subject))


class Check(NamedTuple):
    """A case and the function that is to pass it: `check()` in the body of a test."""

    subject: Subject
    case: dict

    def check(self):
        """An AssertionError with the diagnosis of all cases, if the function does not agree."""
        answer = self.subject.answer(self.case)
        if not doctor.is_right(self.subject, self.case, answer):
            raise AssertionError("\n".join(diagnosis_of(self.subject)))


def cases(section, call, xfails=(), **how):
    """The cases of a section for `pytest.mark.parametrize`, each with its id; `how`: as in Subject.

    Cases that do not apply are skipped. xfails: ids of known differences. They are strict: when one
    starts to pass, its test fails.
    """
    import pytest

    subject = Subject(call, section, **how)
    parameters = []
    for case in subject.about["cases"]:
        why_not = subject.why_not(case)
        marks = []
        if why_not:
            marks = [pytest.mark.skip(reason=why_not)]
        elif case["id"] in xfails:
            marks = [pytest.mark.xfail(strict=True, raises=AssertionError)]
        parameters.append(pytest.param(Check(subject, case), id=case["id"], marks=marks))
    return parameters
