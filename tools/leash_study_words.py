"""What docs/leash_study.md says, from the figures of benchmarks/leash_spread.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from performance_frame import grid, said

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
    """The answers, a line each."""
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
    return [*lines, ""] if lines else said("Too few runs yet.")


def multiple(figure: Figure) -> str:
    """A ratio of spreads with its interval; or that there is none yet."""
    return "too few seeds yet" if figure["value"] is None else decided(figure, 1)


def chance(found: Figure | None, setting: Figure) -> list[str]:
    """Means and spreads of each estimate, and of each beside the exact KL."""
    if found is None:
        return said("Not measured yet: fewer than two seeds have all three runs.")
    lines = said(
        "{seeds} seeds, beta {beta:g}, scope “sequence”, GAE λ = {decay:g}. All three have the same expected "
        "gradient, that "
        "of the KL between responses, except for the effect of whitening on their noise.",
        seeds=found["seeds"],
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
    for name, one in found["of"].items():
        end = one["end"]
        share = f"{end['from_sampling']:.0%}" if "from_sampling" in end else ""
        rows.append([WHERE[name], number(end["reward"]), number(end["kl"]), number(end["spread"]), share])
    lines += grid(heads, rows)
    for name, beside in found["against_exact"].items():
        lines += said(compared(name, beside["end"]))
    lines += said(EQUAL, **setting)
    rows = []
    for name, one in found["of"].items():
        at = one["equal_reward"]
        rest = [number(at["kl"]), number(at["spread"])] if "kl" in at else ["", ""]
        rows.append([WHERE[name], f"{at['reached']} of {found['seeds']}", *rest])
    lines += grid(["KL", "runs that reach the reward", "KL there", "standard deviation of the KL"], rows)
    for name, beside in found["against_exact"].items():
        lines += said(compared_at_equal_reward(name, beside["equal_reward"]))
    return lines


def compared(name: str, beside: Figure) -> str:
    """What came out at the end, in a sentence or two."""
    return (
        f"{name} − exact, paired by seed: reward {decided(beside['reward'])}; KL {decided(beside['kl'])}. "
        f"{ratio(name, beside['spread'])}"
    )


def compared_at_equal_reward(name: str, beside: Figure) -> str:
    """What came out at equal reward, in a sentence or two."""
    if "kl" not in beside:
        return f"{name} and exact: {beside['both']} seeds reach the reward with both, too few to compare."
    return (
        f"{name} − exact at equal reward, over the {beside['both']} seeds that reach it with both: KL "
        f"{decided(beside['kl'])}. {ratio(name, beside['spread'])}"
    )


def ratio(name: str, figure: Figure) -> str:
    """One spread over the other, in words."""
    if figure["ci95"] is None:
        return "Too few seeds to compare standard deviations."
    return f"The KL's standard deviation with {name} is {number(figure)} times that with exact: {side(figure, 1)}."


def scopes(found: Figure | None, setting: Figure) -> list[str]:
    """The frontiers, beta by beta, and at one KL."""
    if found is None:
        return said("Not measured yet.")
    lines = said(
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
    of = {(one["scope"], one["beta"]): one for one in found["points"]}
    rows = []
    for one in found["sequence_less_token"]:
        row = [f"{one['beta']:g}", str(one["kl"]["n"])]
        for what in ("reward", "kl"):
            row += [number(of[scope, one["beta"]][what]) for scope in ("sequence", "token")] + [
                number(one[what])
            ]
        rows.append(row)
    lines += grid(heads, rows)
    lines += said(apart(found["sequence_less_token"]))
    return [*lines, *said(at_equal_kl(found["at_equal_kl"], setting))]


def apart(differences: Sequence[Figure]) -> str:
    """At which betas the KL of one scope is surely above that of the other."""
    told = [one for one in differences if one["kl"]["ci95"] is not None]
    if not told:
        return "One seed does not allow a comparison."
    words = [f"{one['beta']:g} ({side(one['kl'], 0)})" for one in told if side(one["kl"], 0) != UNDECIDED]
    if not words:
        return "At the same beta, no difference in KL is significant."
    return f"At the same beta, the difference in KL is significant for beta {', '.join(words)}."


def at_equal_kl(found: Figure, setting: Figure) -> str:
    """What a scope is worth at one KL."""
    where = f"a KL of {setting['equal_kl']:g} nats per response"
    if "sequence_less_token" not in found:
        return (
            f"Rewards at {where} are not compared yet: {found['seeds']} seeds have all betas of both scopes, and "
            f"{found['reached']} of them reach it with both."
        )
    gain = found["sequence_less_token"]
    return (
        f"At {where}, interpolated for each seed between its betas (linearly in √KL), the reward is "
        f"{number(found['sequence'])} with scope “sequence” and {number(found['token'])} with scope “token”, over "
        f"{found['reached']} of {found['seeds']} seeds; the difference is {decided(gain)}."
    )


def side(figure: Figure, null: float) -> str:
    """On which side of ``null`` an interval lies."""
    if figure["ci95"] is None:
        return "one seed, no interval"
    low, high = figure["ci95"]
    return UNDECIDED if low <= null <= high else ("higher" if low > null else "lower")


def decided(figure: Figure, null: float = 0) -> str:
    """A number with its interval, and on which side of ``null`` that lies."""
    return f"{number(figure)}, {side(figure, null)}"


def number(figure: Figure) -> str:
    """A number with its interval."""
    if figure["value"] is None:
        return ""
    interval = figure["ci95"]
    return f"{figure['value']:.2f}" + (
        "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"
    )
