"""A sweep with attributions, made without any model; one candidate has a hostile name."""

from kleash.records import Number
from kleash.store.sweep import Attribution, GroupChange, Sweep, SweepCandidate, SweepPair

HOSTILE_NAME = "<script>window.broken = 1</script>/" + "a-very-long-folder-without-spaces" * 3 + ".gguf"
KLS = (0.00008, 0.0055, 0.0227)
LAYERS = 40


def nats(value: float, error: float) -> Number:
    ends = (value - 2 * error, value + 2 * error)
    return Number(value=value, unit="nats", standard_error=error, ci95=ends)


def group(name: str, value: float) -> GroupChange:
    change = nats(value, abs(value) / 10)
    return GroupChange(
        name=name,
        parameters=10_000_000,
        is_identical=value == 0,
        change=change,
        simultaneous_ci95=(1.5 * change.ci95[0] - 0.5 * value, 1.5 * change.ci95[1] - 0.5 * value),
    )


def attribution(grouping: str) -> Attribution:
    """Changes that do not add up, and a control that is exactly 0."""
    layers = [group(f"layer {index}", -2e-6 * (index % 7 + 1)) for index in range(LAYERS)]
    modules = [group(f"self_attn.a_rather_long_module_name_{name}", -1e-5) for name in "qkvo"]
    return Attribution(
        candidate=2,
        grouping=grouping,
        sequences=40,
        tokens=20_000,
        clusters=40,
        mean=nats(KLS[1], 1e-4),
        groups=(*(layers if grouping == "layers" else modules), group("embeddings and head", 0.0)),
        sum_of_changes=nats(-0.006, 1e-4),
        change_of_all=nats(-0.0055, 1e-4),
        interaction=nats(-0.0005, 1e-5),
        control=nats(0.0, 0.0),
        critical_value=2.9,
    )


def synthetic_sweep() -> Sweep:
    """Three candidates that were measured, one that was not, and one that could not be attributed."""
    names = ("q8.gguf", HOSTILE_NAME, "q4.gguf")
    measured = []
    for number, (name, kl) in enumerate(zip(names, KLS, strict=True), 1):
        numbers = {name: nats(kl, kl / 40) for name in ("kl_policy_reference", "kl_reference_policy")}
        numbers["kl_policy_reference_99.9"] = nats(30 * kl, kl)
        sizes = {"bytes_on_disk": (9 - number) * 10**9, "bits_per_weight": 10.0 - 2 * number}
        place = {"number": number, "name": name, "folder": f"candidates/{number:02d}-q"}
        letters = "abc"[number - 1]
        measured.append(
            SweepCandidate(**place, **sizes, numbers=numbers, letters=letters, is_on_pareto_front=True)
        )
    pairs = []
    for first, second in ((1, 2), (1, 3), (2, 3)):
        difference = nats(KLS[first - 1] - KLS[second - 1], 1e-4)
        ends = {"simultaneous_ci95": (-0.03, -1e-4), "is_tie": False}
        pairs.append(SweepPair(first=first, second=second, difference=difference, **ends))
    failed = SweepCandidate(number=4, name="other/", folder="candidates/04-other", failure="<b>no</b>")
    failure = Attribution(candidate=3, grouping="layers", failure="<b>another architecture</b>")
    return Sweep(
        kleash="0",
        reference=HOSTILE_NAME,
        rank_by="kl_policy_reference",
        job={},
        candidates=(*measured, failed),
        pairs=tuple(pairs),
        clusters=40,
        tokens=20_000,
        critical_value=2.4,
        warnings=("only 20 clusters",),
        attributions=(attribution("layers"), attribution("modules"), failure),
    )
