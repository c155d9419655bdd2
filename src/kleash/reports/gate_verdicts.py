"""The gate ``--at-most`` of a measurement: its verdict, and that in words for reports and the terminal."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from kleash.estimate import Estimate
from kleash.reports.formatting import format_bytes, format_count, format_value
from kleash.store import Gate
from kleash.store.measurement import Measurement, SweepGate
from kleash.store.measurement_summary import headline
from kleash.store.summary import counted
from kleash.store.sweep import Sweep, SweepCandidate
from kleash.uncertainty.gate_decision import decide_gate

ResultT = TypeVar("ResultT", Measurement, Sweep)


def gate_of_number(
    quantity: str, number: Estimate, *, at_most: float, noise_floor: float | None, clusters: int, tokens: int
) -> Gate:
    """The gate of a number.

    Args:
        quantity: a key of ``QUANTITIES``.
        number: in nats, with its interval.
        at_most: the limit in nats.
        noise_floor: in nats; None if it is not known.
        clusters: number of independent clusters behind the interval.
        tokens: number of tokens in them.
    """
    decision = decide_gate(
        number.value,
        number.ci95,
        at_most=at_most,
        noise_floor=0.0 if noise_floor is None else noise_floor,
        clusters=clusters,
        tokens=tokens,
    )
    return Gate(
        quantity=quantity,
        at_most=at_most,
        value=number.value,
        ci95=number.ci95,
        noise_floor=noise_floor,
        clusters=clusters,
        tokens=tokens,
        verdict=decision.verdict,
        more_tokens=decision.more_tokens,
    )


def gate_of_measurement(measurement: Measurement, at_most: float, statistic: str | None = None) -> Gate:
    """The gate of a measurement's KL per token, with its noise floor.

    Where one model is behind a server, the interval goes from the lower end of the lower bound to the upper end of the
    upper bound, and the estimate is NaN.

    Args:
        measurement: of the KL.
        at_most: the limit in nats.
        statistic: the KL's name in ``STATISTICS``; None for the headline.
    """
    floor, name = measurement.noise_floor, statistic or measurement.headline
    return gate_of_number(
        f"per_token.{name}",
        _kl_or_range(measurement.per_token, name),
        at_most=at_most,
        noise_floor=None if floor is None else floor.value,
        clusters=measurement.counts.clusters,
        tokens=measurement.counts.tokens,
    )


def _kl_or_range(per_token: Mapping[str, Estimate], name: str) -> Estimate:
    """The KL with its interval; where only bounds are known, NaN with the interval from one to the other."""
    if name in per_token:
        return per_token[name]
    lower, upper = (per_token[f"{name}_{end}"] for end in ("lower", "upper"))
    high = upper.ci95[1] if math.isfinite(upper.value) else math.inf
    return Estimate(value=math.nan, unit=lower.unit, standard_error=math.nan, ci95=(lower.ci95[0], high))


def with_gate(result: ResultT, at_most: float | None, statistic: str | None = None) -> ResultT:
    """The result with the verdict for a limit in nats; as it is without one.

    Args:
        result: a measurement or a sweep.
        at_most: the limit.
        statistic: the KL's name in ``STATISTICS``; None for that of the headline, or that which ranks.

    Raises:
        RunFolderError: if a measurement has no headline.
    """
    if at_most is None:
        return result
    if isinstance(result, Sweep):
        return gate_of_sweep(result, at_most, statistic)  # pyrefly: ignore[bad-return]
    headline(result)
    return replace(result, gate=gate_of_measurement(result, at_most, statistic))


def gate_of_sweep(sweep: Sweep, at_most: float, statistic: str | None = None) -> Sweep:
    """The sweep with the gate of each candidate, and the smallest candidate within the limit.

    Args:
        sweep: of the candidates.
        at_most: the limit in nats per token.
        statistic: the KL's name in ``STATISTICS``; None for that which ranks.
    """
    name = statistic or sweep.rank_by
    gates = {
        candidate.number: gate_of_number(
            f"per_token.{name}",
            candidate.numbers[name],
            at_most=at_most,
            noise_floor=None if candidate.noise_floor is None else candidate.noise_floor.value,
            clusters=sweep.clusters,
            tokens=sweep.tokens,
        )
        for candidate in sweep.ranking
    }
    by_size = sorted(sweep.ranking, key=lambda each: (_size(each), each.numbers[name].value, each.number))
    smallest = next((each for each in by_size if gates[each.number].verdict == "passed"), None)
    undecided = tuple(
        each.number
        for each in by_size
        if gates[each.number].verdict == "undecided" and (smallest is None or _size(each) < _size(smallest))
    )
    return replace(
        sweep,
        candidates=tuple(replace(each, gate=gates.get(each.number)) for each in sweep.candidates),
        gate=SweepGate(
            quantity=f"per_token.{name}",
            at_most=at_most,
            verdict="undecided" if undecided or sweep.failed else "failed" if smallest is None else "passed",
            smallest=None if smallest is None else smallest.number,
            undecided=undecided,
        ),
    )


def _size(candidate: SweepCandidate) -> float:
    """Bytes on disk; infinite if they are not known."""
    return math.inf if candidate.bytes_on_disk is None else candidate.bytes_on_disk


def describe_sweep_gate(sweep: Sweep) -> str:
    """The smallest candidate of a sweep within its limit, and those that could be a smaller one, in words."""
    gate, by_number = sweep.gate, {candidate.number: candidate for candidate in sweep.candidates}
    if gate is None:
        return ""
    condition = f"whose {gate.label} is at most {gate.limit}"
    if gate.smallest is None:
        words = (
            f"no candidate is known {condition}"
            if gate.verdict == "undecided"
            else f"there is no candidate {condition}"
        )
    else:
        best = by_number[gate.smallest]
        known = " known" if gate.verdict == "undecided" else ""
        words = f"{best.name} ({_described_size(best)}) is the smallest candidate{known} {condition}"
    undecided = [by_number[number] for number in gate.undecided]
    sentences = [
        *(
            f"{each.name} ({_described_size(each)}) is undecided: {_remedy(each.gate)}"
            for each in undecided
            if each.gate is not None
        ),
        *(f"{each.name} could not be measured" for each in sweep.failed),
    ]
    return "; ".join((f"{gate.verdict}: {words}", *sentences))


def _described_size(candidate: SweepCandidate) -> str:
    """The size on disk, in words."""
    return "of unknown size" if candidate.bytes_on_disk is None else format_bytes(candidate.bytes_on_disk)


def describe_gate(gate: Gate) -> str:
    """The verdict of a gate with the numbers that decided it, as a sentence without a full stop."""
    label, limit = gate.label, gate.limit
    if gate.verdict == "passed":
        return f"passed: {label} is at most {limit}: {_end(gate, 'upper')}"
    if gate.verdict == "failed":
        return f"failed: {label} is above {limit}: {_end(gate, 'lower')}"
    ends = f"{_end(gate, 'lower')}; {_end(gate, 'upper')}"
    few = f"; {counted(gate.clusters, 'cluster')}, and it takes 30 to pass" if gate.clusters < 30 else ""
    return f"undecided: whether {label} is at most {limit}: {ends}{few}; {_remedy(gate)}"


def _end(gate: Gate, end: Literal["lower", "upper"]) -> str:
    """An end of the interval with the noise floor, as it is compared with the limit."""
    value = gate.ci95[0] if end == "lower" else gate.ci95[1]
    if gate.noise_floor is None:
        return f"the {end} end of its interval is {_nats(value)} (noise floor unknown)"
    sign, total = (
        ("minus", value - gate.noise_floor) if end == "lower" else ("plus", value + gate.noise_floor)
    )
    return f"the {end} end of its interval {sign} the noise floor is {_nats(total)}"


def _remedy(gate: Gate) -> str:
    """What may decide an undecided gate."""
    if gate.more_tokens is not None:
        return f"about {format_count(max(1, gate.more_tokens))} more tokens, of other prompts or documents, may decide"
    if gate.noise_floor is not None and abs(gate.value - gate.at_most) <= gate.noise_floor:
        return "more tokens would not decide, since the value differs from the limit by less than the noise floor"
    return "no number of tokens is known to decide"


def _nats(value: float) -> str:
    # a limit may be an end that was printed to four digits
    return f"{format_value(value, 6)} nats"
