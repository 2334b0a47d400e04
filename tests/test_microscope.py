"""study/microscope.py shows what the scripts do."""

import re
import sys

import numpy
import pytest

import microscope


@pytest.mark.extras
def test_the_command_prints_question_answer_and_picture(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(microscope, "FIGURES", tmp_path)
    monkeypatch.setattr(microscope, "PANELS", {"group": microscope.group})  # one is enough
    monkeypatch.setattr(sys, "argv", ["microscope.py"])
    microscope.main()
    printed = capsys.readouterr().out
    assert printed.startswith("Which prompts get the gradient?\nWith the mean alone")
    assert str(tmp_path / "microscope_group.png") in printed
    assert (tmp_path / "microscope_group.png").stat().st_size > 10_000


def seen(name):
    return " ".join(microscope.WORDS[name]["seen"].split())


def at(line, x):
    """The y of a line at x, interpolated between its points."""
    points = sorted((float(a), float(b)) for a, b in zip(*line, strict=True))
    return numpy.interp(x, *zip(*points, strict=True))


def test_the_words_have_the_numbers_of_clip_and_group():
    (clipped,) = microscope.clip()
    token, mean, paper, _ = clipped.values()
    for line, length, words in [
        (token, 16, "grpo clips {:.2%} of the tokens"),
        (mean, 16, "ours clips {:.0%} of the tokens in answers of 16 tokens"),
        (mean, 1024, "and {:.0%} in answers of 1,024"),
        (paper, 1024, "the paper's range clips {:.0%}."),
    ]:
        assert words.format(at(line, length)) in seen("clip")
    weights, silent = microscope.group()
    ratios = [at(weights[label], 0.1) / at(weights[label], 0.5) for label in weights]
    std, mean, mixed = (f"{ratio:.0%}" for ratio in ratios)
    assert re.search(f"has {mean} of .* to {std}, and .* to {mixed}", seen("group"))
    eight, sixteen = (f"{at(silent[f'groups of {size}'], 0.1):.0%}" for size in (8, 16))
    assert f"{eight} of the groups of 8 and {sixteen} of the groups of 16" in seen("group")


@pytest.mark.slow
def test_the_words_have_the_numbers_of_what_is_trained():
    (lines,) = microscope.rare()
    after_five = [f"{at(line, 5):.2f}" for line in lines.values()]
    words = "{} with the clip at 1.2, {} at 1.28, {} at 1.4, {} with gmpo"
    assert words.format(*after_five) in seen("rare")
    assert min(at(lines["sapo"], 5), at(lines["cispo"], 5)) > 0.99
    _, _, at_equal_success = microscope.entropy()
    clips = list(at_equal_success.values())[:3]
    entropies = [f"{at(line, 0.05):.2f}" for line in clips]
    words = "{} nats with the clip at 1.2, {} at 1.28 and {} at 1.4"
    assert words.format(*entropies) in seen("entropy")
