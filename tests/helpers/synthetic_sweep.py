"""A sweep with attributions, made without any model; one candidate has a hostile name."""

from dataclasses import replace

from synthetic_run import synthetic_sweep as sweep_of

from kleash.records import Number
from kleash.store.sweep import Attribution, GroupChange, Sweep

HOSTILE_NAME = "<script>window.broken = 1</script>/" + "a-very-long-folder-without-spaces" * 3 + ".gguf"


def nats(value: float, error: float) -> Number:
    ends = (value - 2 * error, value + 2 * error)
    return Number(value=value, unit="nats", standard_error=error, ci95=ends)


def group(name: str, value: float) -> GroupChange:
    change = nats(value, abs(value) / 10)
    ends = (1.5 * change.ci95[0] - 0.5 * value, 1.5 * change.ci95[1] - 0.5 * value)
    identity = {"name": name, "parameters": 10_000_000, "is_identical": value == 0}
    return GroupChange(**identity, change=change, simultaneous_ci95=ends)


def attribution(grouping: str) -> Attribution:
    """Changes that do not add up, and a control that is exactly 0."""
    layers = [group(f"layer {index}", -2e-6 * (index % 7 + 1)) for index in range(40)]
    modules = [group(f"self_attn.a_rather_long_module_name_{name}", -1e-5) for name in "qkvo"]
    return Attribution(
        candidate=2,
        grouping=grouping,
        sequences=40,
        tokens=20_000,
        clusters=40,
        mean=nats(0.0055, 1e-4),
        groups=(*(layers if grouping == "layers" else modules), group("embeddings and head", 0.0)),
        sum_of_changes=nats(-0.006, 1e-4),
        change_of_all=nats(-0.0055, 1e-4),
        interaction=nats(-0.0005, 1e-5),
        control=nats(0.0, 0.0),
        critical_value=2.9,
    )


def synthetic_sweep() -> Sweep:
    """Three candidates that were measured, one that was not, and one that could not be attributed."""
    failure = Attribution(candidate=3, grouping="layers", failure="<b>another architecture</b>")
    return replace(
        sweep_of(("q8.gguf", HOSTILE_NAME, "q4.gguf"), ("other/",)),
        reference=HOSTILE_NAME,
        warnings=("only 20 clusters",),
        attributions=(attribution("layers"), attribution("modules"), failure),
    )
