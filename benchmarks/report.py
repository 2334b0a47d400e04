r"""Writes the generated parts of README.md and of benchmarks/README.md.

    python benchmarks/report.py           # write
    python benchmarks/report.py --check   # exit code 1 if a part is stale, or in neither file

A part stands between <!-- generated: NAME --> and <!-- end: NAME -->, in whichever file has these two
comments. What it says comes from the scripts' headers, from their diffs, and from what the other
programs here have written to results/.
"""

import ast
import difflib
import functools
import itertools
import json
import re
import statistics
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import claims
import gpu
import stats
from experiments import STABILITY
from stats import MORE, SCRIPTS, held_out_of, markdown, read_curves, read_runs, whole

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
TEXTS = tomllib.loads((ROOT / "benchmarks" / "report.toml").read_text())
END = 14_000  # completions that every run of the nine has generated
COMMANDS = {  # {file in results/: what makes it}; all others: sweep.py
    "gpu": "gpu.py measure benchmarks/results/gpu.json",
    "mismatch": "mismatch.py precisions",
    "rejected": "mismatch.py rejected",
    "sampler": "speed.py sampler",
    "trl_speed": "speed.py trl",
    "trl_losses": "losses_trl.py",
    "verl_losses": "losses_verl.py",
}


def made(make):
    """The lines of a part. If it reads results that are not there yet: how to get them."""
    try:
        return make()
    except stats.NotRunYet as error:
        name = str(error)
    except FileNotFoundError as error:
        path = Path(error.filename)
        if path.parent != stats.RESULTS:
            raise
        name = path.stem
    command = COMMANDS.get(name, f"sweep.py {name}")
    return [f"There are no runs yet: `python benchmarks/{command}`."]


# -------------------------------------------------------------------------------------- the scripts


def path_of(name):
    """more.rloo -> .../more/rloo.py"""
    return ROOT / f"{name.replace('.', '/')}.py"


def read(name):
    """(header docstring, lines after it) of a script."""
    text = path_of(name).read_text()
    tree = ast.parse(text)
    return ast.get_docstring(tree), text.splitlines()[tree.body[0].end_lineno :]


def changed_lines(parent, child):
    """Lines added and lines removed, the header docstring aside."""
    _, old = read(parent)
    _, new = read(child)
    diff = list(difflib.unified_diff(old, new, lineterm=""))
    return sum(line.startswith(("+", "-")) for line in diff[2:])  # after the two names


def differences(header):
    """What stands before the colon in each item of the header's numbered list."""
    numbered = header.split("Differs only in:")[1].split("\n\n")[0]
    leads = []
    for item in re.split(r"\n\s*\d\. ", numbered)[1:]:
        lead = " ".join(item.split(":")[0].split())
        is_acronym = lead[:2].isupper()
        leads.append(lead if is_acronym else lead[0].lower() + lead[1:])
    return ", ".join(leads)


def parent_of(name):
    """The script that the header names, None for the root."""
    header, _ = read(name)
    found = re.search(r"Parent: (\w+)\.py", header)
    if not found:
        return None
    return found[1] if found[1] in SCRIPTS else f"more.{found[1]}"


def script_table(names, folder=""):
    """A table of scripts; `folder`: how to get to the repository's root from the page."""
    rows = []
    for name in names:
        header, _ = read(name)
        title = header.split(":")[0]
        arxiv = re.search(r"arXiv\s+(\d+\.\d+)", header).group(1)
        path = path_of(name).relative_to(ROOT)
        row = [f"[`{path}`]({folder}{path})", f"[{title}](https://arxiv.org/abs/{arxiv})"]
        parent = parent_of(name)
        if parent:
            row += [differences(header), f"{changed_lines(parent, name)}, {parent.split('.')[-1]}"]
        else:
            row += ["a critic, GAE, KL in the reward", ""]
        rows.append(row)
    header = ["script", "paper", "what differs from its parent", "changed lines, parent"]
    return markdown(header, rows)


def objectives(names):
    """A table of what is maximised."""
    rows = [[name.split(".")[-1], f"$`{TEXTS['objectives'][name]}`$"] for name in names]
    return markdown(["script", "objective, maximised"], rows)


def more():
    return [*script_table(MORE, folder="../"), "", *objectives(MORE), "", *TEXTS["legend"].splitlines()]


def policy_loss(name):
    """The lines of a script's `policy_loss` from its docstring to its statistics."""
    text = path_of(name).read_text()
    (function,) = [node for node in ast.parse(text).body if getattr(node, "name", "") == "policy_loss"]
    docstring = function.body[0]
    lines = text.splitlines()[docstring.end_lineno : function.end_lineno]
    return lines[: lines.index("    stats = {")]


def lesson():
    """The diff of grpo's and sapo's policy_loss."""
    both = [policy_loss("grpo"), policy_loss("sapo")]
    diff = difflib.unified_diff(*both, "grpo.py", "sapo.py", lineterm="", n=0)
    # Line numbers would count from the beginning of the function, not of the file.
    lines = ["@@ policy_loss @@" if line.startswith("@@") else line for line in diff]
    return ["```diff", *lines, "```"]


# ---------------------------------------------------------------------------------- runs of sweep.py


def mean_std(values):
    """Empty if there are no runs."""
    return stats.mean_std(values) if len(values) > 1 else ""


def mean(values, form):
    """Empty if there are no such values; not below 0, as an estimate of a KL of 0 may be."""
    return format(max(0.0, statistics.mean(values)), form) if values and None not in values else ""


def accuracy_and_kl(name, key):
    return [mean_std(held_out_of(name, key)), mean(whole(name, key, "sampler_kl"), ".2g")]


def areas(name, key):
    """{seed: mean height of the curve of the rollouts}"""
    runs = read_curves(name)[key]
    return {seed: stats.area(stats.rollout_points(rows), END) for seed, rows in runs.items()}


def paired(ours, theirs):
    """95 % interval of the difference, over the seeds that both have."""
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2 or ours == theirs:
        return ""
    return stats.interval([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])


def curves():
    """What the runs of the default job reach, how soon, and how far they are from grpo's."""
    names = [("nine", script, "default") for script in SCRIPTS]
    names.insert(2, ("nine", "grpo", "free"))
    names += [("more", script, "default") for script in MORE]
    grpo = areas("nine", ("grpo", "default"))
    free = areas("nine", ("grpo", "free"))
    lines = []
    for name, script, variant in names:
        key = (script, variant)
        own = areas(name, key)
        cells = [
            mean_std(held_out_of(name, key, "after_greedy_accuracy")),
            mean_std(held_out_of(name, key)),
            mean_std(list(own.values())),
            paired(own, grpo),
            paired(own, free),
        ]
        label = f"`{path_of(script).relative_to(ROOT)}`"
        lines.append([f"{label}, no KL" if variant == "free" else label, *cells])
    header = ["script", "greedy", "temperature 1", "area", "area, minus grpo's", "minus grpo's, no KL"]
    return markdown(header, lines, "lrrrrr")


def stability():
    """Accuracy after the runs at each setting, and how many had an iteration 0.2 or more below an
    earlier one."""
    lines = []
    for script in SCRIPTS:
        cells = []
        for setting in STABILITY:
            key = (script, setting)
            falls = [max(stats.drops(rows)) >= 0.2 for rows in read_curves("stability")[key].values()]
            fell = f"; {sum(falls)} of {len(falls)} fell" if any(falls) else ""
            cells.append(mean_std(held_out_of("stability", key)) + fell)
        lines.append([script, *cells])
    words = [setting.replace("lr", "lr ").replace("-steps", ", steps ") for setting in STABILITY]
    return markdown(["script", *words], lines, "lrrr")


def staleness():
    """grpo on rollouts of weights that are renewed every iteration, or every 8."""
    rows = [("1", "none", "nine", "default")]
    rows += [("8", rule, "stale_rollouts", rule) for rule in ("none", "token_tis", "geo_mask")]
    lines = []
    for refresh, rule, name, variant in rows:
        lines.append([refresh, rule, *accuracy_and_kl(name, ("grpo", variant))])
    header = ["`--rollout_refresh_every`", "`--rollout_correction`", "held-out accuracy", "KL"]
    return markdown(header, lines, "rlrr")


def correction():
    """grpo at 1e-3 with a sampler in int4, by what is done about it."""
    name = "rollout_correction"
    lines = []
    for variant in ("same", "int4", "int4-token_tis", "int4-sequence_tis", "int4-geo_mask"):
        key = ("grpo", variant)
        weights = mean(whole(name, key, "weight_zero"), ".3f")
        effective = mean(whole(name, key, "weight_effective"), ".2f")
        lines.append([variant.replace("-", ", "), *accuracy_and_kl(name, key), weights, effective])
    header = ["sampler", "held-out accuracy", "KL", "tokens of weight 0", "effective sample size"]
    return markdown(header, lines, "lrrrr")


def smollm2():
    """Greedy held-out accuracy during the runs of SmolLM2, one seed."""
    iterations = (5, 10, 15, 20)
    lines = []
    for (script, variant), seeds in read_curves("smollm2").items():
        (run,) = read_runs("smollm2")[script, variant]
        (rows,) = seeds.values()
        held_out = {row["iteration"]: row["held_out"] for row in rows}
        accuracies = [run["before_greedy_accuracy"], *(held_out[i] for i in iterations)]
        cells = [f"{accuracy:.3f}" for accuracy in accuracies]
        lines.append([script, *cells, f"{run['generated']:,.0f}", f"{run['seconds'] / 60:.0f}"])
    figure = "![Accuracy of eight algorithms on SmolLM2-135M](figures/smollm2.png)"
    header = ["after iteration", 0, *iterations, "completions", "minutes"]
    return [figure, "", *markdown(header, lines, "lrrrrrrr")]


def percent(value):
    return f"{float(f'{100 * value:.2g}'):g} %"  # not 1e+02


def rejected():
    """Whom the masks leave out: share of the worked answers, had they ended after so many tokens."""
    shares = defaultdict(list)  # by seed
    for row in stats.table("rejected"):
        shares[row["rule"], row["tokens"]].append(row["rejected"] / row["completions"])
    lengths = sorted({tokens for _, tokens in shares})
    lines = []
    for rule in ("sequence_mis", "geo_mask"):
        lines.append([f"`{rule}` leaves out", *(mean_std(shares[rule, n]) for n in lengths)])
    return markdown(["after", *(f"{n:.0f} tokens" for n in lengths)], lines, "lrrrr")


def mismatch():
    lines = []
    for row in stats.table("mismatch"):
        ends = [f"{row[f'sampler_sequence_ratio_{end}']:.2g}" for end in ("min", "max")]
        experts = row["sampler_expert_diff_frac"]
        cells = [
            f"{row['model']}, {row['precision']}",
            f"{max(row['sampler_kl'], 0):.2g}",
            f"{row['sampler_logratio_max']:.2g}",
            " to ".join(ends),
            "" if experts is None else percent(experts),
        ]
        cells += [percent(row[f"{rule}_zero"]) for rule in ("geo_mask", "sequence_mis", "icepop")]
        lines.append(cells)
    header = ["", "KL per token", r"largest \|log rho\|", "product of rho over a completion"]
    header += ["other experts", "geo_mask leaves out", "sequence_mis", "icepop"]
    return [*markdown(header, lines, "lrrrrrrr"), "", *made(rejected)]


# ------------------------------------------------------ speed, the losses of TRL and verl, memory


def by_case(name):
    """{(case, threads): [row of results/<name>.csv, by pair]}."""
    groups = defaultdict(list)
    for row in stats.table(name):
        groups[f"`{row['case']}`", f"{row['threads']:.0f}"].append(row)
    return groups


def of_both(rows, columns, summarize, form):
    """[what is measured on our side over all pairs, the same on theirs]."""
    return [format(summarize([row[column] for row in rows]), form) for column in columns]


def ratio(rows, columns):
    """Ours to theirs: lowest, middle and highest of the pairs."""
    ours, theirs = columns
    values = [row[ours] / row[theirs] for row in rows]
    chosen = min(values), statistics.median(values), max(values)
    return " / ".join(f"{value:.2f}" for value in chosen)


def sampler():
    lines = []
    rates = ["sampler_tokens_per_second", "generate_tokens_per_second"]
    for case, rows in by_case("sampler").items():
        medians = of_both(rows, rates, statistics.median, ",.0f")
        lines.append([*case, len(rows), *medians, ratio(rows, rates)])
    header = ["case", "threads", "pairs", "sampler, tokens/s", "`generate()`, tokens/s"]
    return markdown([*header, "ratio (min / median / max)"], lines, "lrrrrr")


def speed():
    lines = []
    seconds = ["ours_seconds", "trl_seconds"]
    for case, rows in by_case("trl_speed").items():
        for row, side in itertools.product(rows, ("ours", "trl")):
            row[f"{side}_rest"] = row[f"{side}_seconds"] - row[f"{side}_sampling"]
        cells = [
            *of_both(rows, seconds, statistics.median, ".2f"),
            ratio(rows, seconds),
            ratio(rows, ["ours_sampling", "trl_sampling"]),
            ratio(rows, ["ours_rest", "trl_rest"]),
            " : ".join(of_both(rows, ["ours_peak_mib", "trl_peak_mib"], max, ",.0f")),
            " : ".join(of_both(rows, ["ours_tokens", "trl_tokens"], statistics.mean, ",.0f")),
        ]
        lines.append([*case, len(rows), *cells])
    header = ["case", "threads", "pairs", "`grpo.py`, s", "TRL, s", "ratio (min / median / max)"]
    header += ["of the sampling", "of the rest", "peak MiB, ours : TRL", "tokens, ours : TRL"]
    return markdown(header, lines, "lrrrrrrrrr")


def brief(value):
    """1.4e-06, 0.12, 3; what is no more than rounding in float64 is 0."""
    return "0" if value < 1e-15 else f"{value:.2g}"


def engines():
    columns = [("trl_losses", "loss", "plugged"), ("trl_losses", "loss", "trl")]
    columns += [("verl_losses", "kind", "plugged"), ("verl_losses", "kind", "verl")]
    lines = []
    for script in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"):
        cells = []
        for table, column, kind in columns:
            rows = [row for row in stats.table(table) if (row["script"], row[column]) == (script, kind)]
            errors = [max(row[f"{of}_error"] for row in rows) for of in ("value", "gradient")]
            cells.append(" / ".join(brief(error) for error in errors))
        lines.append([f"`{script}`", *cells])
    header = ["script", "ours in TRL", "TRL's own", "ours in verl", "verl's own"]
    return markdown(header, lines, "lrrrr")


def how_far_off(departure):
    """What a departure of benchmarks/report.toml does, in words."""
    case = departure["case"]
    trl = stats.table("trl_losses")
    if case == "advantages":
        errors = [row["advantage_error"] for row in trl if row["loss"] == "trl"]
        return f"A off by {brief(max(errors))}"
    rows = [row for row in stats.table("verl_losses") if row["case"] == case]
    if case == "equal rewards":
        return f"A = {brief(rows[0]['value_error'])} for rewards of 0.1"
    if case == "mean of a micro-batch":
        ratios = sorted({(row["micro_batches"], row["gradient_ratio"]) for row in rows})
        pairs = [f"x {ratio:.0f} with {count:.0f}" for count, ratio in ratios]
        return f"{', '.join(pairs)} micro-batches"
    if departure["engine"] != "verl":
        rows = [row for row in trl if row["loss"] == case]
    scripts = departure["scripts"].split(", ")
    errors = [row["gradient_error"] for row in rows if row["script"] in scripts]
    ends = dict.fromkeys([brief(min(errors)), brief(max(errors))])
    return " to ".join(ends)


def engine_departures():
    lines = []
    for departure in TEXTS["departures"]:
        cells = [departure[column] for column in ("engine", "scripts", "what", "paper")]
        lines.append([*cells, how_far_off(departure), departure["remedy"]])
    header = ["in", "script", "what it does", "the paper", "gradient off by", "to have the paper's"]
    return markdown(header, lines)


def memory():
    header = ["model", "way", "stays", "a rollout", "an update", "at most", "GB card"]
    return markdown(header, gpu.memory_rows(), "llrrrrr")


def measured_on_a_gpu():
    """What benchmarks/gpu_kit.py has found: a table for each check."""
    results = json.loads((stats.RESULTS / "gpu.json").read_text())
    versions = f"torch {results['torch']}, transformers {results['transformers']}"
    lines = [f"Measured on one {results['device']}, {versions}, commit {results['commit']}."]
    for name, result in results["checks"].items():
        ended = f": {result['ended']}" if result["ended"] else ""
        lines += ["", f"`{name}`, {result['seconds']:.0f} s{ended}"]
        rows = result["rows"]
        header = list(dict.fromkeys(itertools.chain(*rows.values())))
        cells = []
        for row, columns in rows.items():
            cells.append([row, *[columns.get(column, "") for column in header]])
        if rows:
            lines += ["", *markdown(["", *header], cells, "l" + "r" * len(header))]
    return lines


# -------------------------------------------------------------------------------------------- pages

MAKERS = [lesson, more, curves, stability, staleness, correction, mismatch, sampler, speed]
MAKERS += [engines, engine_departures, memory, measured_on_a_gpu, smollm2]
PARTS = {make.__name__.replace("_", " "): make for make in MAKERS}
PARTS |= {"claims": claims.table, "claims in short": claims.short}
PARTS["nine"] = functools.partial(script_table, SCRIPTS)
PARTS["formulas"] = functools.partial(objectives, SCRIPTS)
BEGIN = "<!-- generated: "
PART = re.compile(BEGIN + r"([a-z0-9 ]+) -->.*?<!-- end: \1 -->", re.DOTALL)


def filled(text):
    """(the text with its parts as they are made now, the names of these parts)."""

    def replaced(match):
        name = match[1]
        if name not in PARTS:
            return match[0]
        return "\n".join([f"{BEGIN}{name} -->", *made(PARTS[name]), f"<!-- end: {name} -->"])

    return PART.sub(replaced, text), PART.findall(text)


def main():
    check = "--check" in sys.argv
    complaints = []
    there = []
    for path in FILES:
        old = path.read_text()
        new, names = filled(old)
        there += names
        if old.count(BEGIN) != len(names):
            complaints.append(f"{path}: a part has no end")
        if check and new != old:
            complaints.append(f"{path}: stale, run python benchmarks/report.py")
        if not check:
            path.write_text(new)
    complaints += [f"part '{name}' is in neither file" for name in PARTS if name not in there]
    complaints += [f"there is no part '{name}'" for name in there if name not in PARTS]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
