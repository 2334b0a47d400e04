"""The tables of the second regime, for readme.py. Its comparisons are all made in one place, since they
are corrected for their number together."""

import functools
import statistics
import textwrap

import evidence

LOW = "long_nine", "lower"  # experiment and variant of the nine, at the lower rate
HIGH = "long_high", "higher"
LONG_RATES = {"lower": "3e-4", "higher": "1e-3"}
FREE = {"long_nine": "long_claims", "long_high": "long_high"}  # where grpo without its KL is


MEASURES = {
    "held_out": "held-out accuracy after the run",
    "accuracy": "accuracy, mean of all rollouts",
    "drop": "largest drop",
}


def measured(measure, name, key):
    """For each seed."""
    if measure == "held_out":
        return [value or 0.0 for value in evidence.held_out_of(name, key)]
    if measure == "drop":
        return evidence.largest_drop(name, key)
    return evidence.whole(name, key, "accuracy")


@functools.cache
def long_comparisons():
    """{what: (ours, theirs, sign)}: values by seed, and the sign of the prediction (see `directed`)."""
    found = {}
    for name, variant in (LOW, HIGH):
        free = FREE[name], ("grpo", "free")
        for script in evidence.SCRIPTS:
            for measure in MEASURES:
                mine = measured(measure, name, (script, variant))
                found[name, script, measure] = mine, measured(measure, *free), 0

    def of_claims(script, variant, column, count=10_000):
        return evidence.per_seed("long_claims", (script, variant), column, count)

    def of_nine(script, column, count=10_000):
        return evidence.per_seed("long_nine", (script, "lower"), column, count)

    entropy = of_nine("dapo", "entropy", 5), of_claims("dapo", "high0.2", "entropy", 5)
    found["b", "dapo"] = *entropy, 1
    for script in ("gspo", "gmpo"):
        width = of_nine(script, "log_ratio_p99"), of_claims("grpo", "free", "log_ratio_p99")
        found["g", script] = *width, -1
    for script in ("gmpo", "rspo"):
        correlations = evidence.shift_before_fall("long_high", (script, "higher"))
        found["h", script] = correlations, [0.0] * len(correlations), -1
    falls = [evidence.largest_drop("long_high", (script, "higher")) for script in ("rspo", "gmpo")]
    found["h", "drop"] = *falls, -1
    equal = of_claims("sapo", "equal", "accuracy")
    found["i", "paper"] = of_nine("sapo", "accuracy"), equal, 1
    found["i", "reversed"] = of_claims("sapo", "reversed", "accuracy"), equal, -1
    equal = evidence.largest_drop("long_claims", ("sapo", "equal"))
    paper = evidence.largest_drop("long_nine", ("sapo", "lower"))
    found["i", "paper", "drop"] = paper, equal, -1
    other = evidence.largest_drop("long_claims", ("sapo", "reversed"))
    found["i", "reversed", "drop"] = other, equal, 1
    free = of_claims("grpo", "free", "accuracy")
    found["j", "grpo"] = of_claims("grpo", "r2", "accuracy"), free, 1
    found["j", "gspo"] = of_claims("gspo", "r2", "accuracy"), of_nine("gspo", "accuracy"), 1
    found["k", "cispo"] = of_nine("cispo", "accuracy"), of_nine("dapo", "accuracy"), 1
    return found


@functools.cache
def long_verdicts():
    """{what: (verdict, p, p after Holm's correction)} for all comparisons of the second regime."""
    found = long_comparisons()
    p_values = [evidence.p_value(ours, theirs) for ours, theirs, _ in found.values()]
    corrected = evidence.holm(p_values)
    verdicts = {}
    for what, p, p_corrected in zip(found, p_values, corrected, strict=True):
        verdicts[what] = evidence.directed(*found[what]), p, p_corrected
    return verdicts


# ------------------------------------------------------------------------------------------- tables


def long_name(key):
    script, variant = key
    return f"{script}, no KL" if variant.endswith("free") else script


def beside_free(name, variant):
    """(experiment, key) of the nine, and of grpo without its KL."""
    return [*((name, (script, variant)) for script in evidence.SCRIPTS), (FREE[name], ("grpo", "free"))]


def clipped_by_iteration(rows):
    return [(row["clip_low"] or 0) + (row["clip_high"] or 0) for row in rows]


def falls(runs):
    """How many fell by 0.2 or more, and how many of these end less than that below their highest."""
    fallen = [evidence.drops(rows) for rows in runs if max(evidence.drops(rows)) >= 0.2]
    risen = sum(drops[-1] < 0.2 for drops in fallen)
    return f"{len(fallen)} of {len(runs)}" + (f", {risen} rose again" if fallen else "")


def mean_to_single(runs):
    """Spread of the mean log-ratio of a completion, divided by that of a single token's: the median."""
    spread = [row["mean_log_ratio_std"] / row["log_ratio_std"] for rows in runs for row in rows]
    return f"{statistics.median(spread):.2f}"


def long_runs(name, variant):
    """What the runs of the second regime end with, and what they do on the way."""
    lines = []
    for source, key in beside_free(name, variant):
        runs = evidence.read_curves(source)[key].values()
        greedy = [value or 0.0 for value in evidence.held_out_of(source, key, "after_greedy_accuracy")]
        clipped = [clipped_by_iteration(rows) for rows in runs]
        early = mean_to_single(rows[:5] for rows in runs)
        late = mean_to_single(rows[-5:] for rows in runs)
        gamma = evidence.whole(source, key, "shift")
        cells = [
            evidence.mean_std(greedy),
            f"{statistics.mean(max(row['accuracy'] for row in rows) for rows in runs):.3f}",
            f"{statistics.mean(row['accuracy'] for rows in runs for row in rows[:5]):.2f}",
            f"{statistics.mean(row['accuracy'] for rows in runs for row in rows[-5:]):.2f}",
            falls(runs),
            f"{statistics.mean(evidence.per_seed(source, key, 'len', 5)):.0f}",
            f"{statistics.mean(evidence.per_seed(source, key, 'entropy', 5)):.3f}",
            f"{statistics.mean(evidence.whole(source, key, 'log_ratio_p99')):.3f}",
            f"{early}, {late}",
            f"{statistics.mean(shares[0] for shares in clipped):.3f}",
            f"{statistics.mean(share for shares in clipped for share in shares):.3f}",
            f"{statistics.mean(evidence.whole(source, key, 'flips')):.3f}",
            "" if None in gamma else f"{statistics.mean(gamma):.3f}",
        ]
        lines.append([long_name(key), *cells])
    header = [
        "script",
        "held-out, greedy",
        "highest accuracy of an iteration",
        "accuracy, first 5 iterations",
        "accuracy, last 5",
        "fell by 0.2 or more",
        "length, last 5",
        "entropy, last 5",
        r"99% of \|log r\| below, mean of all",
        "rms of a completion's mean log r / of a token's log r, first 5 and last 5",
        "clipped, first iteration",
        "clipped, mean of all",
        "experts changed, mean of all",
        "gamma before its floor, mean of all",
    ]
    return evidence.markdown(header, lines, "l" + "r" * 13)


def against_free(name, variant):
    """Each of the nine against grpo without its KL: no child of grpo has one."""
    lines = []
    for source, key in beside_free(name, variant):
        script, its_variant = key
        cells = [long_name(key)]
        for measure in MEASURES:
            cell = evidence.mean_std(measured(measure, source, key))
            if its_variant != "free":
                cell += f"<br>{long_verdicts()[name, script, measure][0]}"
            cells.append(cell)
        lines.append(cells)
    return evidence.markdown(["(compared with the last row)", *MEASURES.values()], lines)


def long_nine():
    return [*long_runs(*LOW), "", *against_free(*LOW)]


def long_high():
    return [*long_runs(*HIGH), "", *against_free(*HIGH)]


LONG_CLAIMS = {  # what is compared: (words, decimals)
    ("b", "dapo"): ("(b) dapo's entropy at the end, 0.28 : 0.2; higher?", 4),
    ("g", "gspo"): (r"(g) 99% of \|log r\| below, gspo : grpo, no KL; narrower?", 4),
    ("g", "gmpo"): (r"(g) 99% of \|log r\| below, gmpo : grpo, no KL; narrower?", 4),
    ("h", "gmpo"): ("(h) correlation of changed experts and next accuracy, gmpo; below 0?", 2),
    ("h", "rspo"): ("(h) correlation of changed experts and next accuracy, rspo; below 0?", 2),
    ("h", "drop"): ("(h) largest drop, rspo : gmpo; smaller?", 3),
    ("i", "paper"): ("(i) accuracy, tau_pos 1.0, tau_neg 1.05 : both 1.0; higher?", 3),
    ("i", "reversed"): ("(i) accuracy, tau_pos 1.05, tau_neg 1.0 : both 1.0; lower?", 3),
    ("i", "paper", "drop"): ("(i) largest drop, tau_pos 1.0, tau_neg 1.05 : both 1.0; smaller?", 3),
    ("i", "reversed", "drop"): ("(i) largest drop, tau_pos 1.05, tau_neg 1.0 : both 1.0; larger?", 3),
    ("j", "grpo"): ("(j) accuracy of grpo, no KL, with replay : without; higher?", 3),
    ("j", "gspo"): ("(j) accuracy of gspo, with replay : without; higher?", 3),
    ("k", "cispo"): ("(k) accuracy, cispo : dapo; higher?", 3),
}


def long_claims():
    lines = []
    for what, (words, digits) in LONG_CLAIMS.items():
        ours, theirs, _ = long_comparisons()[what]
        word, p, corrected = long_verdicts()[what]
        values = evidence.mean_std(ours, digits)
        if any(theirs):
            values += f" : {evidence.mean_std(theirs, digits)}"
        lines.append([words, values, word, f"{p:.2g}", f"{corrected:.2g}"])
    return evidence.markdown(["", "mean ± std", "verdict", "p", "p, corrected"], lines, "lllrr")


def in_words(what):
    """Which comparison it is: a key of `long_comparisons`."""
    if what in LONG_CLAIMS:
        words, _ = LONG_CLAIMS[what]
        return words
    name, script, measure = what
    rate = LONG_RATES["lower" if name == "long_nine" else "higher"]
    return f"{script} : grpo without a KL, lr {rate}, {MEASURES[measure]}"


def long_holm():
    """Which of the verdicts of the second regime stay when their number is corrected for."""
    found = long_verdicts()
    alone = sum(evidence.first_word(word) != "not shown" for word, _, _ in found.values())
    smallest = min(p for _, p, _ in found.values())
    stay = [in_words(what) for what, (_, _, corrected) in found.items() if corrected < 0.05]
    text = (
        f"Of the {len(found)} comparisons of this section, {alone} have a verdict other than *not"
        f" shown* by themselves; the smallest p is {smallest:.2g}. After Holm's correction over all of"
        f" them the number is {len(stay)}{': ' if stay else ''}{'; '.join(stay)}."
    )
    return textwrap.wrap(text, evidence.WIDTH)


# -------------------------------------------------------------------- the claims in the main README
#
# Each of these returns [(verdict, what was measured)], as those of readme.py do.


def long_words(*whats):
    return evidence.overall(*(long_verdicts()[what][0] for what in whats))


def long_apart(*what):
    ours, theirs, _ = long_comparisons()[what]
    return evidence.apart(ours, theirs, "higher", "lower")


def long_clip_higher():
    what = "b", "dapo"
    text = f"with 0.28 in place of 0.2, the entropy is {long_apart(*what)}"
    return [(long_words(what), text)]


def long_stale_ratio():
    whats = ("g", "gspo"), ("g", "gmpo")
    _, grpo, _ = long_comparisons()[whats[0]]
    widths = [grpo, *(long_comparisons()[what][0] for what in whats)]
    listed = " / ".join(f"{statistics.mean(width):.3g}" for width in widths)
    text = rf"99% of \|log r\| are below, in grpo (no KL) / gspo / gmpo: {listed}"
    return [(long_words(*whats), text)]


def long_router_shift():
    whats = ("h", "gmpo"), ("h", "rspo")
    found = [statistics.mean(long_comparisons()[what][0]) for what in whats]
    text = (
        "at lr 1e-3, changed experts correlate with the next change of accuracy by"
        f" {found[0]:+.2f} (gmpo), {found[1]:+.2f} (rspo)"
    )
    drop = "h", "drop"
    more = f"rspo's largest drop of the accuracy, compared with gmpo's: {long_apart(*drop)}"
    return [(long_words(*whats), text), (long_words(drop), more)]


def long_sapo_taus():
    items = []
    for name, pair in (
        ("paper", "tau_pos 1.0, tau_neg 1.05"),
        ("reversed", "tau_pos 1.05, tau_neg 1.0"),
    ):
        what = "i", name
        text = f"accuracy with {pair}, compared with equal ones: {long_apart(*what)}"
        items.append((long_words(what), text))
    return items


def long_routing_replay():
    items = []
    for script in ("grpo", "gspo"):
        what = "j", script
        text = f"with replay (r2), {script}'s accuracy is {long_apart(*what)}"
        items.append((long_words(what), text))
    return items


def long_equal_steps():
    what = "k", "cispo"
    text = f"in 15 iterations, cispo's mean accuracy is {long_apart(*what)} than dapo's"
    return [(long_words(what), text)]
