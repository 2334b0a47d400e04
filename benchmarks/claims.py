"""The papers' claims, as comparisons of runs: this list makes both tables, and Holm's correction.

A claim has one primary comparison in each regime where it is asked. It stands here, with its gate,
before its runs are made. The other comparisons are secondary: they have an interval, and no verdict.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import stats
from experiments import EXPERIMENTS

DEFAULT, LONG, HARD = "default job", "long answers", "hard base"


class NotRunYet(Exception):
    """Some of an experiment's runs are missing."""


class Gate(NamedTuple):
    """What has to be so for a comparison to say anything about its claim."""

    words: str
    value: Callable  # () -> a number
    least: float
    style: str = ".2%"

    def failure(self):
        """'' if it is passed, else why not."""
        value = self.value()
        return "" if value >= self.least else f"{self.words}: {value:{self.style}}"


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
    """[rows of a run, by seed] when all seeds have been run."""
    try:
        of_seeds = stats.read_curves(name).get((script, variant), {})
    except FileNotFoundError as error:
        raise NotRunYet from error
    if len(of_seeds) < EXPERIMENTS[name].seeds:
        raise NotRunYet
    return [of_seeds[seed] for seed in sorted(of_seeds)]


def mean_of(name, script, variant, column, last=10_000):
    """Mean of a column over the last iterations, all of them if no number is given; by seed."""
    return [stats.tail(rows, column, last) for rows in curves(name, script, variant)]


def final(name, script, variant):
    """Held-out accuracy at temperature 1 of the trained weights, by seed; 0 where the run broke off."""
    curves(name, script, variant)
    return stats.held_out_of(name, (script, variant))


def area(name, script, variant, end):
    """Of the rollouts' accuracy over the first `end` completions, by seed."""
    return [stats.area(stats.rollout_points(rows), end) for rows in curves(name, script, variant)]


def early(name, script, variant, column, iterations):
    """Mean of a column over the first iterations, by seed."""
    return [stats.tail(rows[:iterations], column, iterations) for rows in curves(name, script, variant)]


def clipped(name, script, variant):
    """Share of tokens that the clip leaves without a gradient, of all iterations; by seed."""
    low = mean_of(name, script, variant, "clip_low")
    return [a + b for a, b in zip(low, mean_of(name, script, variant, "clip_high"), strict=True)]


HEIGHTS = (0.22, 0.26, 0.30)  # accuracies of the rollouts at which runs on the hard base are compared


def at_equal_accuracy(name, script, variant, column):
    """Mean of a column's values where the accuracy first reaches each of HEIGHTS, by seed; None for a
    run that does not reach them all."""
    means = []
    for rows in curves(name, script, variant):
        values = [stats.at_accuracy(rows, column, height) for height in HEIGHTS]
        means.append(None if None in values else statistics.mean(values))
    return means


def against(measure, name, ours, theirs, *more):
    """The same measure of two (script, variant) of an experiment."""
    return lambda: (measure(name, *ours, *more), measure(name, *theirs, *more))


def reached(name, *keys):
    """A gate: all runs that are compared reach the highest of HEIGHTS."""

    def value():
        means = [mean for key in keys for mean in at_equal_accuracy(name, *key, "entropy")]
        return sum(mean is not None for mean in means) / len(means)

    return Gate(f"runs that reach an accuracy of {HEIGHTS[-1]}", value, 1.0, ".0%")


def is_negative(name, script, variant):
    """Correlation of changed experts with the change of accuracy after the next updates, and 0."""

    def values():
        found = [stats.shift_before_fall(rows) for rows in curves(name, script, variant)]
        return found, [0.0] * len(found)

    return values


def by_quartile(rule):
    """Share of completions that a rule rejects: the longest quarter, and the shortest; by seed."""

    def values():
        try:
            rows = [row for row in stats.table("rejected") if row["rule"] == rule]
        except FileNotFoundError as error:
            raise NotRunYet from error
        shares = {(row["quartile"], row["seed"]): row["rejected"] / row["completions"] for row in rows}
        seeds = sorted({row["seed"] for row in rows})
        return [shares[4, seed] for seed in seeds], [shares[1, seed] for seed in seeds]

    return values


def outside(name, script, variant):
    """A gate's share: tokens beyond PPO's range, on the side where its clip binds."""
    return lambda: statistics.mean(mean_of(name, script, variant, "outside"))


# ------------------------------------------------------------------------------------------ the list

CLAIMS = {  # id: (what is claimed, who claims it)
    "a": (
        "with one step, grpo without KL, gspo, gmpo, rspo and sapo are one algorithm",
        "the formulas",
    ),
    "b": ("a wider range above 1 keeps the entropy higher", "DAPO, 3.1"),
    "c": ("dividing by the length makes wrong answers long", "Dr. GRPO, 3.1"),
    "d": ("refilling the batch with mixed groups learns faster", "DAPO, 3.2"),
    "e1": ("punishing overlong answers makes fewer of them", "DAPO, 3.4"),
    "e2": ("leaving overlong answers out makes the accuracy higher", "DAPO, 3.4"),
    "f": ("the tokens that PPO's clip drops matter", "MiniMax-M1, 3.1"),
    "g": ("GMPO's log-ratios stay closer to 0 than GRPO's", "GMPO, abstract"),
    "h": ("damping the shift of routers makes training more stable", "RSPO, abstract"),
    "i": ("tau_neg above tau_pos is more stable than the reverse", "SAPO, on its temperatures"),
    "j": ("on an MoE, GRPO needs routing replay", "GSPO, 5.3"),
    "k": ("CISPO learns faster than DAPO in as many steps", "MiniMax-M1, 3.1"),
    "l": ("correcting for stale rollouts makes training end higher", "ours"),
    "m": ("GSPO clips a hundred times as many tokens as GRPO", "GSPO, 5.2"),
    "n": ("masks by products reject long answers", "ours, after DeepSeek-V3.2"),
}

FREE, DAPO_LOW, DAPO_HIGH = ("grpo", "free"), ("dapo", "high0.2"), ("dapo", "high0.28")
ALL, KEPT, CONTROL = ("cispo", "all"), ("cispo", "kept"), ("cispo", "control")
GSPO, GMPO = ("gspo", "default"), ("gmpo", "default")
RSPO_LONG, GMPO_LONG = ("rspo", "lr7e-4"), ("gmpo", "lr7e-4")
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
        gate=Gate(
            "clipped above 1.2",
            lambda: statistics.mean(mean_of("hard_clip", *DAPO_LOW, "clip_high")),
            0.0015,
        ),
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
        "f",
        DEFAULT,
        "share of the gradient's norm, 16 steps: dropped tokens : as many equally improbable ones",
        1,
        two_columns("gradient_share", ("cispo", "steps16"), "outside_gradient", "matched_gradient"),
    ),
    Comparison(
        "f",
        DEFAULT,
        "the same with 4 steps",
        1,
        two_columns("gradient_share", ("cispo", "steps4"), "outside_gradient", "matched_gradient"),
        **SECOND,
    ),
    Comparison(
        "f",
        HARD,
        "area over 25,000 completions, cispo: all tokens : those that PPO keeps",
        1,
        against(area, "hard_tokens", ALL, KEPT, 25_000),
        gate=Gate("tokens beyond PPO's range", outside("hard_tokens", *ALL), 0.001),
    ),
    Comparison(
        "f",
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
        gate=reached("hard_ratios", GMPO, FREE),
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
        DEFAULT,
        "gmpo's correlation of changed experts with the change of accuracy one update later : 0",
        -1,
        is_negative("router_shift", "gmpo", "lr1e-3"),
        **SECOND,
    ),
    Comparison(
        "h",
        LONG,
        "held-out accuracy after the run, lr 7e-4: rspo : gmpo",
        1,
        against(final, "long_shift", RSPO_LONG, GMPO_LONG),
    ),
    Comparison(
        "h",
        LONG,
        "gmpo's correlation of changed experts with the change of accuracy one update later : 0",
        -1,
        is_negative("long_shift", *GMPO_LONG),
        **SECOND,
    ),
    Comparison(
        "i",
        DEFAULT,
        "accuracy of all rollouts, lr 1e-3: the paper's 1.0 and 1.05 : reversed",
        1,
        against(mean_of, "temperatures", ("sapo", "paper"), ("sapo", "reversed"), "accuracy"),
    ),
    Comparison(
        "i",
        DEFAULT,
        "the same, the paper's : equal ones",
        1,
        against(mean_of, "temperatures", ("sapo", "paper"), ("sapo", "equal"), "accuracy"),
        **SECOND,
    ),
    Comparison(
        "j",
        LONG,
        "held-out accuracy after the run, lr 1e-3, grpo without KL: r2 : no replay",
        1,
        against(final, "replay", ("grpo", "r2"), ("grpo", "none")),
    ),
    Comparison(
        "j",
        LONG,
        "the same, gspo",
        1,
        against(final, "replay", ("gspo", "r2"), ("gspo", "none")),
        **SECOND,
    ),
    Comparison(
        "j",
        LONG,
        "the same, grpo without KL at 6e-4",
        1,
        against(final, "replay_lower", ("grpo", "r2"), ("grpo", "none")),
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
        "held-out accuracy after the run, weights 8 iterations old, grpo: token_tis : none",
        1,
        against(final, "stale_rollouts", ("grpo", "refresh8-token_tis"), ("grpo", "refresh8-none")),
    ),
    Comparison(
        "l",
        DEFAULT,
        "the same, geo_mask : none",
        1,
        against(final, "stale_rollouts", ("grpo", "refresh8-geo_mask"), ("grpo", "refresh8-none")),
        **SECOND,
    ),
    Comparison(
        "l",
        DEFAULT,
        "the same, gspo: token_tis : none",
        1,
        against(final, "stale_rollouts", ("gspo", "refresh8-token_tis"), ("gspo", "refresh8-none")),
        **SECOND,
    ),
    Comparison(
        "m",
        DEFAULT,
        "share of clipped tokens, gspo : a hundred times that of grpo without KL",
        1,
        lambda: (
            clipped("nine", "gspo", "default"),
            [100 * share for share in clipped("nine", "grpo", "free")],
        ),
    ),
    Comparison(
        "n",
        LONG,
        "share rejected by sequence_mis, longest : shortest quarter (int4 sampler)",
        1,
        by_quartile("sequence_mis"),
    ),
    Comparison(
        "n",
        LONG,
        "the same, geo_mask",
        1,
        by_quartile("geo_mask"),
        **SECOND,
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
    except NotRunYet:
        return "not run yet", None, None


def verdict(ours, theirs, sign, corrected):
    """In a word: what a primary comparison says of its claim."""
    if corrected >= 0.05:
        return "no difference seen"
    mean, _ = stats.difference(ours, theirs)
    return "holds" if mean * sign > 0 else "contradicted"


def brief(values):
    return f"{statistics.mean(values):.3g}"


def findings():
    """A `Found` for each comparison, in order."""
    results = [measured(comparison) for comparison in COMPARISONS]
    tested = []
    for i, (word, ours, theirs) in enumerate(results):
        if COMPARISONS[i].is_primary and not word:
            tested.append((i, stats.p_value(ours, theirs)))
    adjusted = stats.holm([p for _, p in tested])
    corrected_of = {i: (p, corrected) for (i, p), corrected in zip(tested, adjusted, strict=True)}
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


def identity():
    """(a) is no test: the largest difference of a mean reward from grpo's, over all iterations."""
    largest = {}
    for script in ("gspo", "gmpo", "rspo", "sapo", "dr_grpo", "cispo"):
        gaps = []
        pairs = zip(curves("one_step", script, "one"), curves("one_step", "grpo", "one"), strict=True)
        for mine, base in pairs:
            gaps += [abs(a["reward"] - b["reward"]) for a, b in zip(mine, base, strict=True)]
        largest[script] = max(gaps)
    return largest


# ------------------------------------------------------------------------------------------ the tables


def table():
    """All comparisons, the primary ones with their verdicts, for benchmarks/README.md."""
    lines = []
    try:
        gaps = ", ".join(f"{script} {gap:.3f}" for script, gap in identity().items())
        lines.append(["(a)", DEFAULT, f"largest distance from grpo's mean reward: {gaps}", *[""] * 3])
        lines[-1].append("an identity")
    except NotRunYet:
        lines.append(
            ["(a)", DEFAULT, "largest distance from grpo's mean reward", *[""] * 3, "not run yet"]
        )
    for each in findings():
        comparison = each.comparison
        words = comparison.words.replace("|", r"\|")
        arrow = "larger?" if comparison.sign > 0 else "smaller?"
        name = f"**({comparison.claim})**" if comparison.is_primary else f"({comparison.claim})"
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
    """A row for each claim, with the verdicts of its primary comparisons, for README.md."""
    cells = {(claim, regime): "" for claim in CLAIMS for regime in (DEFAULT, LONG, HARD)}
    cells["a", DEFAULT] = "(an identity)"
    for each in findings():
        comparison = each.comparison
        if comparison.is_primary:
            word = each.verdict.split(" (")[0]
            if word == "no difference seen":
                word += f" ({each.interval})"
            cells[comparison.claim, comparison.regime] = word
    lines = []
    for claim, (words, who) in CLAIMS.items():
        row = [cells[claim, regime] for regime in (DEFAULT, LONG, HARD)]
        lines.append([f"({claim}) {words} ({who})", *row])
    return stats.markdown(["claim", DEFAULT, LONG, HARD], lines)
