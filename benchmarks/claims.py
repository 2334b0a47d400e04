"""The papers' claims, as comparisons of runs: this list makes both tables, and Holm's correction.

A claim has one primary comparison in each regime where it is asked. It stands here, with its gate,
before its runs are made. The other comparisons are secondary: they have an interval, and no verdict.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import stats

DEFAULT, LONG, HARD = "default job", "long answers", "hard base"


class NotReached(Exception):
    """Not all runs get as far as where they are compared."""


class Gate(NamedTuple):
    """What has to be so for a comparison to say anything about its claim."""

    words: str
    value: Callable  # () -> a share
    least: float

    def failure(self):
        """'' if it is passed, else why not."""
        value = self.value()
        return "" if value >= self.least else f"{self.words}: {value:.2%}"


class Comparison(NamedTuple):
    claim: str
    regime: str
    words: str  # of what, and ours : theirs
    sign: int  # 1 if the claim says that ours is larger, -1 if smaller
    values: Callable  # () -> (ours, theirs), by seed
    is_primary: bool = True
    gate: Gate | None = None


# ----------------------------------------------------------------------------------- what is measured


def curves(name, script, variant):
    """[rows of a run, by seed]."""
    of_seeds = stats.read_curves(name)[script, variant]
    return [of_seeds[seed] for seed in sorted(of_seeds)]


def mean_of(name, script, variant, column, last=10_000):
    """Mean of a column over the last iterations, all of them if no number is given; by seed."""
    return [stats.tail(rows, column, last) for rows in curves(name, script, variant)]


def final(name, script, variant):
    """Held-out accuracy at temperature 1 of the trained weights, by seed; 0 where the run broke off."""
    return stats.held_out_of(name, (script, variant))


def area(name, script, variant, end):
    """Of the rollouts' accuracy over the first `end` completions, by seed."""
    return [stats.area(stats.rollout_points(rows), end) for rows in curves(name, script, variant)]


def early(name, script, variant, column, iterations):
    """Mean of a column over the first iterations, by seed."""
    return [stats.tail(rows[:iterations], column, iterations) for rows in curves(name, script, variant)]


def first_fall(name, script, variant):
    """Iteration at which the accuracy is first 0.2 or more below an earlier one, by seed; one more than
    there are if it never is."""
    iterations = []
    for rows in curves(name, script, variant):
        fallen = [i for i, drop in enumerate(stats.drops(rows), 1) if drop >= 0.2]
        iterations.append(fallen[0] if fallen else len(rows) + 1)
    return iterations


def clipped(name, script, variant):
    """Share of tokens that the clip leaves without a gradient, of all iterations; by seed."""
    low = mean_of(name, script, variant, "clip_low")
    return [a + b for a, b in zip(low, mean_of(name, script, variant, "clip_high"), strict=True)]


HEIGHTS = (0.24, 0.27, 0.30)  # accuracies of the rollouts at which runs on the hard base are compared


def at_equal_accuracy(name, script, variant, column):
    """Mean of a column's values where the accuracy first reaches each of HEIGHTS, by seed."""
    means = []
    for rows in curves(name, script, variant):
        values = [stats.at_accuracy(rows, column, height) for height in HEIGHTS]
        if None in values:
            raise NotReached
        means.append(statistics.mean(values))
    return means


def against(measure, name, ours, theirs, *more):
    """The same measure of two (script, variant) of an experiment."""
    return lambda: (measure(name, *ours, *more), measure(name, *theirs, *more))


def by_length():
    """Share of the worked answers that sequence_mis rejects after 118 tokens, and after 16; by seed."""
    try:
        rows = [row for row in stats.table("rejected") if row["rule"] == "sequence_mis"]
    except FileNotFoundError as error:
        raise stats.NotRunYet("rejected") from error
    shares = {(row["tokens"], row["seed"]): row["rejected"] / row["completions"] for row in rows}
    seeds = sorted({row["seed"] for row in rows})
    return [shares[118, seed] for seed in seeds], [shares[16, seed] for seed in seeds]


def share(name, script, variant, column):
    """A gate's: the mean of a column over all iterations and seeds."""
    return lambda: statistics.mean(mean_of(name, script, variant, column))


# ------------------------------------------------------------------------------------------ the list

CLAIMS = {  # id: (who claims it, and where; what)
    "a": (
        "ours, from the formulas",
        "with one step, grpo (no KL), gspo, gmpo, rspo and sapo are one algorithm",
    ),
    "b": ("DAPO, 3.1", "a wider range above 1 keeps the entropy higher"),
    "c": ("Dr. GRPO, abstract", "dividing by the length makes wrong answers long"),
    "d": ("DAPO, 3.2", "refilling with mixed groups learns faster, per generated completion"),
    "e1": ("DAPO, 3.4", "punishing overlong answers makes fewer of them"),
    "e2": ("DAPO, 3.4", "leaving overlong answers out makes the accuracy higher"),
    "f1": ("MiniMax-M1, 3.1", "the tokens that PPO's clip drops carry more gradient"),
    "f2": ("MiniMax-M1, 3.1", "keeping these tokens learns faster"),
    "g": ("GMPO, abstract", "its log-ratios stay closer to 0 than GRPO's"),
    "h": ("RSPO, abstract", "damping the shift of routers makes training more stable"),
    "i": ("SAPO, on its temperatures", "tau_neg above tau_pos is more stable than the reverse"),
    "j": ("GSPO, 5.3", "on an MoE, GRPO needs routing replay"),
    "k": ("MiniMax-M1, 3.1", "CISPO learns faster than DAPO in as many steps"),
    "l": ("ours", "correcting for stale rollouts makes training end higher"),
    "m": ("GSPO, 5.2", "its clip drops more than a hundred times as many tokens as GRPO's"),
    "n": (
        "ours, after DeepSeek-V3.2",
        "masking by the product of a completion's ratios rejects long ones",
    ),
}

FREE, DAPO_LOW, DAPO_HIGH = ("grpo", "free"), ("dapo", "high0.2"), ("dapo", "high0.28")
ALL, KEPT, CONTROL = ("cispo", "all"), ("cispo", "kept"), ("cispo", "control")
GMPO, RSPO = ("gmpo", "default"), ("rspo", "default")
SECOND = {"is_primary": False}


def two_columns(name, key, ours, theirs):
    return lambda: (mean_of(name, *key, ours), mean_of(name, *key, theirs))


COMPARISONS = [
    Comparison(
        "b",
        HARD,
        "dapo's entropy at equal accuracy, range to 0.28 : 0.2",
        1,
        against(at_equal_accuracy, "hard_clip", DAPO_HIGH, DAPO_LOW, "entropy"),
        gate=Gate("clipped above 1.2", share("hard_clip", *DAPO_LOW, "clip_high"), 0.0015),
    ),
    Comparison(
        "c",
        DEFAULT,
        "tokens of wrong answers at the end, grpo without KL : dr_grpo",
        1,
        against(mean_of, "wrong_length", ("grpo", "kl0"), ("dr_grpo", "default"), "len_wrong", 10),
    ),
    Comparison(
        "d",
        DEFAULT,
        "area over 13,000 generated completions, refilled : dropped",
        1,
        against(area, "dynamic_sampling", ("dapo", "refill"), ("dapo", "drop"), 13_000),
    ),
    Comparison(
        "d",
        DEFAULT,
        "accuracy of the first 36 updates, refilled : dropped",
        1,
        against(early, "dynamic_sampling", ("dapo", "refill"), ("dapo", "drop"), "accuracy", 36),
        **SECOND,
    ),
    Comparison(
        "e1",
        DEFAULT,
        "share cut off at the end, soft : none",
        -1,
        against(mean_of, "overlong", ("dapo", "soft"), ("dapo", "none"), "truncated", 10),
    ),
    Comparison(
        "e2",
        DEFAULT,
        "accuracy at the end, filter : none",
        1,
        against(mean_of, "overlong", ("dapo", "filter"), ("dapo", "none"), "accuracy", 10),
    ),
    Comparison(
        "e2",
        DEFAULT,
        "share cut off at the end, filter : none",
        -1,
        against(mean_of, "overlong", ("dapo", "filter"), ("dapo", "none"), "truncated", 10),
        **SECOND,
    ),
    Comparison(
        "f1",
        DEFAULT,
        "norm of the gradient from dropped tokens, 16 steps : from as many equally improbable ones",
        1,
        two_columns("gradient_share", ("cispo", "steps16"), "outside_gradient", "matched_gradient"),
    ),
    Comparison(
        "f1",
        DEFAULT,
        "the same with 4 steps",
        1,
        two_columns("gradient_share", ("cispo", "steps4"), "outside_gradient", "matched_gradient"),
        **SECOND,
    ),
    Comparison(
        "f2",
        HARD,
        "area over 25,000 completions, cispo: all tokens : those that PPO keeps",
        1,
        against(area, "hard_tokens", ALL, KEPT, 25_000),
        gate=Gate("tokens beyond PPO's range", share("hard_tokens", *ALL, "outside"), 0.001),
    ),
    Comparison(
        "f2",
        HARD,
        "the same, without as many equally improbable ones : those that PPO keeps",
        1,
        against(area, "hard_tokens", CONTROL, KEPT, 25_000),
        **SECOND,
    ),
    Comparison(
        "g",
        DEFAULT,
        "99 % of |log r| are below, 16 steps: gmpo : grpo without KL",
        -1,
        against(mean_of, "stale_ratio", ("gmpo", "stale"), ("grpo", "stale"), "log_ratio_p99"),
    ),
    Comparison(
        "g",
        DEFAULT,
        "the same, gspo : grpo without KL",
        -1,
        against(mean_of, "stale_ratio", ("gspo", "stale"), ("grpo", "stale"), "log_ratio_p99"),
        **SECOND,
    ),
    Comparison(
        "g",
        HARD,
        "99 % of |log r| are below, at equal accuracy: gmpo : grpo without KL",
        -1,
        against(at_equal_accuracy, "hard_ratios", GMPO, FREE, "log_ratio_p99"),
    ),
    Comparison(
        "g",
        HARD,
        "the same, mean of all iterations",
        -1,
        against(mean_of, "hard_ratios", GMPO, FREE, "log_ratio_p99"),
        **SECOND,
    ),
    Comparison(
        "h",
        DEFAULT,
        "accuracy at the end, 64 steps: rspo : gmpo",
        1,
        against(mean_of, "router_shift", ("rspo", "lr1e-3"), ("gmpo", "lr1e-3"), "accuracy", 10),
    ),
    Comparison(
        "h",
        LONG,
        "held-out accuracy after the run, lr 7e-4: rspo : gmpo",
        1,
        against(final, "long_shift", RSPO, GMPO),
    ),
    Comparison(
        "i",
        DEFAULT,
        "accuracy of all rollouts, lr 1e-3: the paper's 1.0 and 1.05 : reversed",
        1,
        against(mean_of, "temperatures", ("sapo", "paper"), ("sapo", "reversed"), "accuracy"),
    ),
    Comparison(
        "j",
        LONG,
        "held-out accuracy after the run, lr 1e-3, grpo without KL: r2 : no replay",
        1,
        against(final, "replay", ("grpo", "r2"), ("grpo", "none")),
        gate=Gate(
            "accuracy that is left with replay",
            lambda: statistics.mean(final("replay", "grpo", "r2")),
            0.05,
        ),
    ),
    Comparison(
        "j",
        LONG,
        "iteration of the first fall by 0.2, the same runs",
        1,
        against(first_fall, "replay", ("grpo", "r2"), ("grpo", "none")),
        **SECOND,
    ),
    Comparison(
        "j",
        LONG,
        "held-out accuracy after the run, lr 6e-4, grpo without KL: r2 : no replay",
        1,
        against(final, "replay_lower", ("grpo", "r2"), ("grpo", "none")),
        **SECOND,
    ),
    Comparison(
        "j",
        LONG,
        "held-out accuracy after the run, lr 1e-3, gspo: r2 : no replay",
        1,
        against(final, "replay", ("gspo", "r2"), ("gspo", "none")),
        **SECOND,
    ),
    Comparison(
        "k",
        DEFAULT,
        "accuracy of the first 36 iterations, cispo : dapo",
        1,
        against(early, "nine", ("cispo", "default"), ("dapo", "default"), "accuracy", 36),
    ),
    Comparison(
        "l",
        DEFAULT,
        "held-out accuracy after the run, weights renewed every 8 iterations, grpo: token_tis : none",
        1,
        against(final, "stale_rollouts", ("grpo", "token_tis"), ("grpo", "none")),
    ),
    Comparison(
        "m",
        LONG,
        "share of clipped tokens, gspo with the printed range : a hundred times grpo's without KL",
        1,
        lambda: (
            clipped("replay", "gspo", "none"),
            [100 * share for share in clipped("replay", "grpo", "none")],
        ),
    ),
    Comparison(
        "n",
        LONG,
        "share of worked answers rejected by sequence_mis, after 118 tokens : after 16",
        1,
        by_length,
    ),
]

# ---------------------------------------------------------------------------------------- the verdicts


class Found(NamedTuple):
    comparison: Comparison
    verdict: str  # of a primary, else ""
    ours: str = ""
    theirs: str = ""
    interval: str = ""
    p: float | None = None
    corrected: float | None = None


def measured(comparison):
    """(verdict or "", ours, theirs): without values where there is nothing to compare."""
    try:
        failure = comparison.gate.failure() if comparison.gate else ""
        if failure:
            return f"not tested here ({failure})", None, None
        return "", *comparison.values()
    except stats.NotRunYet:
        return "not run yet", None, None
    except NotReached:
        return f"not tested here (not all runs reach an accuracy of {HEIGHTS[-1]})", None, None


def verdict(ours, theirs, sign, corrected):
    """In a word: what a primary comparison says of its claim."""
    if corrected >= 0.05:
        return "no difference seen"
    mean, _ = stats.difference(ours, theirs)
    return "holds" if mean * sign > 0 else "contradicted"


def brief(values):
    return f"{statistics.mean(values):.3g}"


def findings():
    """A `Found` for each comparison, in order. Corrected for the number of all primary comparisons: one
    that was not run or not tested has p = 1, so that no verdict changes when others are run."""
    results = [measured(comparison) for comparison in COMPARISONS]
    primaries = [i for i, comparison in enumerate(COMPARISONS) if comparison.is_primary]
    p_values = []
    for i in primaries:
        word, ours, theirs = results[i]
        p_values.append(1.0 if word else stats.p_value(ours, theirs))
    adjusted = stats.holm(p_values)
    corrected_of = {i: both for i, *both in zip(primaries, p_values, adjusted, strict=True)}
    found = []
    for i, (word, ours, theirs) in enumerate(results):
        comparison = COMPARISONS[i]
        if word:
            found.append(Found(comparison, word))
            continue
        values = brief(ours), brief(theirs), stats.interval(ours, theirs)
        if i in corrected_of:
            p, corrected = corrected_of[i]
            word = verdict(ours, theirs, comparison.sign, corrected)
            found.append(Found(comparison, word, *values, p, corrected))
        else:
            found.append(Found(comparison, "", *values))
    return found


ONE = ("gspo", "gmpo", "rspo", "sapo")  # with one step per rollout these are grpo without its KL
OTHERS = ("dr_grpo", "cispo")  # these have other normalisers


def identity():
    """(a) is no test. (in a word, {script: the largest difference of an iteration's mean reward from
    grpo's}); ONE must agree with it exactly until, after ten iterations, rounding may tell."""
    largest = {}
    agrees = True
    for script in (*ONE, *OTHERS):
        gaps = []
        pairs = zip(curves("one_step", script, "one"), curves("one_step", "grpo", "one"), strict=True)
        for mine, base in pairs:
            of_run = [abs(a["reward"] - b["reward"]) for a, b in zip(mine, base, strict=True)]
            gaps += of_run
            agrees = agrees and (script in OTHERS or max(of_run[:10]) == 0)
        largest[script] = max(gaps)
    return "an identity, seen" if agrees else "an identity, not seen", largest


# ------------------------------------------------------------------------------------------ the tables


def table():
    """All comparisons, the primary ones with their verdicts, for benchmarks/README.md."""
    words = "largest distance of a mean reward from grpo's, one step"
    try:
        verdict_of_a, largest = identity()
        words += ": " + ", ".join(f"{script} {gap:.3f}" for script, gap in largest.items())
    except stats.NotRunYet:
        verdict_of_a = "not run yet"
    lines = [[f"(a) {CLAIMS['a'][0]}", DEFAULT, words, "", "", "", verdict_of_a]]
    for each in findings():
        comparison = each.comparison
        words = comparison.words.replace("|", r"\|")
        arrow = "larger?" if comparison.sign > 0 else "smaller?"
        name = f"({comparison.claim})"
        if comparison.is_primary:
            name = f"**{name}** {CLAIMS[comparison.claim][0]}"
        p = "" if each.p is None else f"{each.p:.2g} / {each.corrected:.2g}"
        values = f"{each.ours} : {each.theirs}" if each.ours else ""
        lines.append(
            [name, comparison.regime, f"{words}; {arrow}", values, each.interval, p, each.verdict]
        )
    header = [
        "claim",
        "regime",
        "ours : theirs",
        "means",
        "difference, 95 %",
        "p / corrected",
        "verdict",
    ]
    return stats.markdown(header, lines, "lllll")


def short():
    """A row for each claim of a paper, with the verdicts of its primary comparisons, for README.md."""
    cells = {(claim, regime): "" for claim in CLAIMS for regime in (DEFAULT, LONG, HARD)}
    for each in findings():
        comparison = each.comparison
        if comparison.is_primary:
            word = each.verdict.split(" (")[0]
            if each.interval:
                word += f" ({each.interval})"
            cells[comparison.claim, comparison.regime] = word
    lines = []
    for claim, (who, words) in CLAIMS.items():
        if not who.startswith("ours"):
            row = [cells[claim, regime] for regime in (DEFAULT, LONG, HARD)]
            lines.append([f"({claim}) {who.split(', ')[0]}: {words}", *row])
    return stats.markdown(["claim", DEFAULT, LONG, HARD], lines)
