"""The text of docs/leash_study.md, from the figures of benchmarks/leash_spread.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from performance_frame import markdown_table, paragraph

WHERE = {
    "exact": "exact, in the loss",
    "k1": "k1, in the reward",
    "k3": "k3's value, the right gradient, in the loss",
}
UNDECIDED = "not significant"
Figure = Mapping[str, Any]

HEAD = """How much does the KL at the end of training vary between seeds, and does that depend on how the KL is
estimated? What changes if each token is charged only for its own KL? This study answers both with small runs of
kleash's PPO ([ppo.md](ppo.md)), for one model, one reward and one training length only. All numbers are from
`benchmarks/results/leash_spread.json`."""

SETTING = """Each run trains all weights of `shipped:reference` for {steps} steps with a learning rate of
{learning_rate:g}. A step samples at most {max_new_tokens} tokens for each of the {prompts} shortest shipped prompts and
makes one update. The reward counts words for the heroine (`{reward}`). Runs differ only in the KL term, beta and seed;
runs of one seed use the same sampling noise, so their first responses are the same. The final policy answers the
{held_out} next longer prompts, {held_out_samples} times each. Reward and exact KL(policy‖reference) per response, in
nats, are means over these."""

EQUAL = """*At equal reward*: the reward and the exact KL of each step's responses are averaged over {window}
neighbouring
steps. The KL is compared at the first point where that reward is {equal_reward:g}, by linear interpolation from the
step before. Pairs of which one run never reaches it are left out."""

INTERVALS = """Intervals are at 95 %. Means: Student's t over seeds. Standard deviations: chi-squared. Differences:
paired by seed. Ratios of standard deviations: Pitman and Morgan's, for pairs. All intervals assume that the numbers
of the seeds are normally distributed, and none is corrected for multiple comparisons. “Not significant” means that the
interval contains 0, or 1 for a ratio."""


def outcome(estimators: Figure | None, frontier: Figure | None, setting: Figure) -> list[str]:
    """The main results, one line each."""
    lines = []
    for name, beside in ({} if estimators is None else estimators["against_exact"]).items():
        end, equal = beside["end"], beside["equal_reward"].get("spread", {"value": None})
        lines += [
            f"- Standard deviation of the reached KL, {name} ÷ exact: {multiple(end['spread'])}.",
            f"- The same at equal reward: {multiple(equal)}.",
            f"- At the end, {name} − exact: reward {decided(end['reward'])}; KL {decided(end['kl'])}.",
        ]
    gain = ({} if frontier is None else frontier["at_equal_kl"]).get("sequence_less_token")
    if gain is not None:
        where = f"{setting['equal_kl']:g} nats"
        lines.append(f"- Reward at {where}, scope “sequence” − scope “token”: {decided(gain)}.")
    return [*lines, ""] if lines else paragraph("Too few runs yet.")


def multiple(figure: Figure) -> str:
    """A ratio of spreads with its interval, or a note that there are too few seeds."""
    return "too few seeds yet" if figure["value"] is None else decided(figure, 1)


def chance(figures: Figure | None, setting: Figure) -> list[str]:
    """Means and spreads for each estimator, and differences from the exact KL."""
    if figures is None:
        return paragraph("Not measured yet: fewer than two seeds have all three runs.")
    lines = paragraph(
        "{seeds} seeds, beta {beta:g}, scope “sequence”, GAE λ = {decay:g}. All three have the same expected "
        "gradient, that "
        "of the KL between responses, except for the effect of whitening on their noise.",
        seeds=figures["seeds"],
        beta=setting["beta"],
        decay=setting["decay"],
    )
    lines += ["After the last step, on held-out prompts:", ""]
    heads = [
        "KL",
        "reward",
        "KL reached",
        "standard deviation of the KL",
        "share of its variance from held-out sampling",
    ]
    rows = []
    for name, estimator in figures["of"].items():
        end = estimator["end"]
        share = f"{end['from_sampling']:.0%}" if "from_sampling" in end else ""
        rows.append([WHERE[name], number(end["reward"]), number(end["kl"]), number(end["spread"]), share])
    lines += markdown_table(heads, rows)
    for name, beside in figures["against_exact"].items():
        lines += paragraph(compared(name, beside["end"]))
    lines += paragraph(EQUAL, **setting)
    rows = []
    for name, estimator in figures["of"].items():
        at = estimator["equal_reward"]
        rest = [number(at["kl"]), number(at["spread"])] if "kl" in at else ["", ""]
        rows.append([WHERE[name], f"{at['reached']} of {figures['seeds']}", *rest])
    lines += markdown_table(
        ["KL", "runs that reach the reward", "KL there", "standard deviation of the KL"], rows
    )
    for name, beside in figures["against_exact"].items():
        lines += paragraph(compared_at_equal_reward(name, beside["equal_reward"]))
    return lines


def compared(name: str, beside: Figure) -> str:
    """Differences from the exact KL after the last step, in words."""
    return (
        f"{name} − exact, paired by seed: reward {decided(beside['reward'])}; KL {decided(beside['kl'])}. "
        f"{ratio(name, beside['spread'])}"
    )


def compared_at_equal_reward(name: str, beside: Figure) -> str:
    """Differences from the exact KL at equal reward, in words."""
    if "kl" not in beside:
        return f"{name} and exact: {beside['both']} seeds reach the reward with both, too few to compare."
    return (
        f"{name} − exact at equal reward, over the {beside['both']} seeds that reach it with both: KL "
        f"{decided(beside['kl'])}. {ratio(name, beside['spread'])}"
    )


def ratio(name: str, figure: Figure) -> str:
    """The ratio of an estimator's spread to that of the exact KL, in words."""
    if figure["ci95"] is None:
        return "Too few seeds to compare standard deviations."
    return f"The KL's standard deviation with {name} is {number(figure)} times that with exact: {side(figure, 1)}."


def scopes(figures: Figure | None, setting: Figure) -> list[str]:
    """Both scopes compared at each beta, and at one KL."""
    if figures is None:
        return paragraph("Not measured yet.")
    lines = paragraph(
        "The exact KL in the loss. Scope “sequence” charges a token also for the KL of later tokens. Results "
        "after the last "
        "step, on held-out prompts; differences are sequence − token, paired by seed."
    )
    heads = [
        "beta",
        "seeds",
        "reward, sequence",
        "reward, token",
        "difference",
        "KL, sequence",
        "KL, token",
        "difference",
    ]
    by_scope_and_beta = {(point["scope"], point["beta"]): point for point in figures["points"]}
    rows = []
    for point in figures["sequence_less_token"]:
        row = [f"{point['beta']:g}", str(point["kl"]["n"])]
        for what in ("reward", "kl"):
            row += [
                number(by_scope_and_beta[scope, point["beta"]][what]) for scope in ("sequence", "token")
            ] + [number(point[what])]
        rows.append(row)
    lines += markdown_table(heads, rows)
    lines += paragraph(compare_by_beta(figures["sequence_less_token"]))
    return [*lines, *paragraph(at_equal_kl(figures["at_equal_kl"], setting))]


def compare_by_beta(differences: Sequence[Figure]) -> str:
    """The betas at which the interval of the difference in KL excludes 0."""
    with_intervals = [point for point in differences if point["kl"]["ci95"] is not None]
    if not with_intervals:
        return "One seed does not allow a comparison."
    words = [
        f"{point['beta']:g} ({side(point['kl'], 0)})"
        for point in with_intervals
        if side(point["kl"], 0) != UNDECIDED
    ]
    if not words:
        return "At the same beta, no difference in KL is significant."
    return f"At the same beta, the difference in KL is significant for beta {', '.join(words)}."


def at_equal_kl(figures: Figure, setting: Figure) -> str:
    """The difference in reward between the scopes at one KL, in words."""
    where = f"a KL of {setting['equal_kl']:g} nats per response"
    if "sequence_less_token" not in figures:
        return (
            f"Rewards at {where} are not compared yet: {figures['seeds']} seeds have all betas of both scopes, and "
            f"{figures['reached']} of them reach it with both."
        )
    gain = figures["sequence_less_token"]
    return (
        f"At {where}, interpolated for each seed between its betas (linearly in √KL), the reward is "
        f"{number(figures['sequence'])} with scope “sequence” and {number(figures['token'])} with scope “token”, over "
        f"{figures['reached']} of {figures['seeds']} seeds; the difference is {decided(gain)}."
    )


def side(figure: Figure, null: float) -> str:
    """Whether an interval lies above or below ``null``, or contains it."""
    if figure["ci95"] is None:
        return "one seed, no interval"
    low, high = figure["ci95"]
    return UNDECIDED if low <= null <= high else ("higher" if low > null else "lower")


def decided(figure: Figure, null: float = 0) -> str:
    """A number with its interval and its position relative to ``null``."""
    return f"{number(figure)}, {side(figure, null)}"


def number(figure: Figure) -> str:
    """A number with its interval."""
    if figure["value"] is None:
        return ""
    interval = figure["ci95"]
    return f"{figure['value']:.2f}" + (
        "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    )
