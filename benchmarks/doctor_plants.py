"""Rollouts with a planted cause, for benchmarks/doctor_trials.py; no threshold of the doctor was set with them.

The noise floor of a trial is the root mean square (rms) over all tokens of its healthy differences, or 1e-3 nats if
that is larger: nobody runs at a temperature of 1.00001. An effect is the rms of the differences that the fault makes,
and is drawn log-uniformly from 3 to 30 floors. Faults that have a strength get the one that makes this effect; for
the others the noise is fitted to the effect, as far as a dtype explains it. A fault whose errors look like rounding
makes errors of at least 1.5 times what ``rounding`` explains (4 machine epsilons and 1e-5 nats);
smaller ones are healthy by definition. Faults that replace values (shift, column, mask, insertion) have effects of
nats, above 30 floors. Where no column changes (sampler), the floor is 1.96 standard errors of the sum of log p over
the drawn tokens.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from doctor_drawing import (
    CONTEXT,
    Array,
    Engine,
    Response,
    Scores,
    draw,
    head_update,
    pair_with_head,
    pool,
    prompt_ids,
    shipped_pair,
    weights_of,
)
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LEVELS = {"float32": (1e-6, 6e-6), "float16": (3e-4, 2.5e-3), "bfloat16": (3e-3, 2e-2)}
"""Standard deviations of the errors of logits in a healthy run, in nats."""
LEAST_FLOOR = 1e-3
CALIBRATION_TOKENS = 2048
LEAST_EVIDENCE = 3.0
"""Nats by which the draws must tell two temperatures apart, for the name that depends on it alone to be asked."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rollouts:
    """What the doctor is given, and what is known of it."""

    responses: Sequence[Response]
    trainer: Array
    engine: Array
    reference: Array | None = None
    is_counted: Array | None = None
    effect: float
    """rms of the differences that the fault makes, in nats."""
    noise: float
    """rms of the healthy differences, in nats."""
    ratio: float
    """Effect over floor."""
    rounding: str
    noise_kind: str
    variant: str
    accepted: tuple[str, ...]
    """Causes that are right with the models."""
    accepted_without: tuple[str, ...]
    pair: tuple[str, str] = ("shipped:policy", "shipped:reference")


@dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """The random choices of a trial."""

    plant: str
    seed: int

    @cached_property
    def random(self) -> np.random.Generator:
        return np.random.default_rng([27, zlib.crc32(self.plant.encode()), self.seed])

    def pick(self, *options: Any) -> Any:
        """One of the options; seeds take them in turn."""
        return options[self.seed % len(options)]

    @cached_property
    def size(self) -> tuple[int, int]:
        """Responses, and tokens of the longest."""
        return self.log_uniform(16, 512, integer=True), self.log_uniform(32, 512, integer=True)

    def log_uniform(self, low: float, high: float, *, integer: bool = False) -> Any:
        value = math.exp(self.random.uniform(math.log(low), math.log(high)))
        return round(value) if integer else value

    @cached_property
    def setting(self) -> tuple[str, str, float, float, float]:
        """Rounding, kind of noise, its level, target of effect over floor, share of the noise in the trainer."""
        self.size  # noqa: B018 - the sizes are drawn first
        rounding = str(self.random.choice(["float32", "float16", "bfloat16"], p=[0.25, 0.25, 0.5]))
        kinds = ["gaussian", "heavy", "response"]
        kinds += [] if rounding == "float32" else ["logits"]
        kinds += ["network"] if rounding == "bfloat16" else []
        kind = str(self.random.choice(kinds))
        level = {"network": 0.01, "logits": EPSILON[rounding] * 1.5}.get(kind) or self.log_uniform(
            *LEVELS[rounding]
        )
        return rounding, kind, level, self.log_uniform(3, 30), float(self.random.choice([0.0, 0.5, 1.0]))

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each response: of one length in a quarter of the trials."""
        count, longest = self.size
        shares = self.random.uniform(0.35, 1, count) if self.random.random() < 0.75 else np.ones(count)
        shares[0] = 1
        return [max(8, round(longest * share)) for share in shares]

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """A prompt for each response; in half of the trials several responses share one."""
        count = len(self.lengths)
        group = self.random.choice([1, 4, 8]) if self.random.random() < 0.5 else 1
        chosen = self.random.integers(0, len(prompt_ids()), -(-count // group))
        return [prompt_ids()[chosen[row // group]] for row in range(count)]

    def capped(self, prompts: Sequence[tuple[int, ...]]) -> list[int]:
        """The lengths, cut where prompt and response would exceed the context."""
        return [
            min(length, CONTEXT - len(prompt)) for length, prompt in zip(self.lengths, prompts, strict=True)
        ]

    def plain(self, name: str = "policy") -> list[Response]:
        """Responses of a shipped model at temperature 1."""
        responses = pool(name)
        rows = self.random.choice(len(responses), min(len(self.lengths), len(responses)), replace=False)
        return [
            Response(responses[row].prompt, responses[row].tokens[:length])
            for row, length in zip(rows, self.lengths, strict=False)
        ]

    def plain_scores(self) -> Scores:
        """The policy's scores of its own responses at temperature 1."""
        return Scores.of(self.network, self.plain())

    def drawn(
        self, engine: Engine, prompts: Sequence[tuple[int, ...]] | None = None
    ) -> tuple[list[Response], Array]:
        """Responses of an engine, with its log-probabilities."""
        prompts = self.prompts if prompts is None else prompts
        responses, columns = draw(engine, prompts, self.capped(prompts), self.seed)
        return responses, np.concatenate(columns)

    @cached_property
    def network(self) -> Any:
        """The policy's network in float32."""
        return shipped_pair().policy.network

    @cached_property
    def calibration(self) -> Scores:
        """Scores of the policy on some responses of the trial's length, by which strengths are set."""
        longest = max(self.lengths)
        count = max(4, CALIBRATION_TOKENS // longest)
        rows = np.random.default_rng([28, self.seed]).choice(len(pool()), count, replace=False)
        return Scores.of(
            self.network, [Response(pool()[row].prompt, pool()[row].tokens[:longest]) for row in rows]
        )

    def target(self, *, like_rounding: bool = False) -> float:
        """The effect to make, in nats."""
        unit = rms(self.calibration.unit)
        aim = self.setting[3] * max(LEAST_FLOOR, self.setting[2] * unit)
        return max(aim, 1.5 * explained(self.setting[0]) * unit) if like_rounding else aim

    def strength(
        self, effect: Callable[[float], float], low: float, high: float, target: float, *, steps: int = 8
    ) -> float:
        """The strength between two bounds whose effect is nearest to the target; the effect grows from low to high."""
        first, last = math.log(low), math.log(high)
        for _ in range(steps):
            middle = (first + last) / 2
            if effect(math.exp(middle)) < target:
                first = middle
            else:
                last = middle
        return math.exp((first + last) / 2)

    def finish(
        self,
        scores: Scores,
        *,
        variant: str,
        accepted: Sequence[str],
        trainer: Array | None = None,
        engine: Array | None = None,
        without: Sequence[str] | None = None,
        after_noise: Callable[[Array, Array], tuple[Array, Array]] | None = None,
        like_rounding: bool = False,
        **more: Any,
    ) -> Rollouts:
        """Rollouts with healthy noise added to two exact columns, which are those of the scores if not given."""
        trainer = scores.logp if trainer is None else trainer
        engine = scores.logp if engine is None else engine
        changed = (trainer, engine) if after_noise is None else after_noise(trainer, engine)
        effect = more.pop("effect", rms(changed[0] - changed[1]))
        rounding, kind, level, ratio, share = self.setting
        unit = scores.unit
        while like_rounding and effect < 1.5 * explained(rounding) * rms(unit) and rounding != "float32":
            rounding = "float16" if rounding == "bfloat16" else "float32"
            kind, level = "gaussian", LEVELS[rounding][1]
        if kind in ("network", "logits"):
            noise = self.natural_noise(kind, rounding, scores)
        else:
            fitting, (low, high) = effect / ratio / rms(unit), LEVELS[rounding]
            if low <= fitting <= 2 * high:  # beyond it the fault has no strength, and the noise is as drawn
                level = min(fitting, high)
            noise = level * self.shaped(kind, scores) * unit
        other = noise
        if share > 0:  # random signs make the noise of the two sides independent
            other = math.sqrt(1 - share) * noise * self.random.choice([-1.0, 1.0], len(noise))
        noisy = (np.minimum(trainer - math.sqrt(share) * noise, 0), np.minimum(engine + other, 0))
        columns = noisy if after_noise is None else after_noise(*noisy)
        if "reference" not in more and self.random.random() < 0.5:
            more["reference"] = Scores.of(shipped_pair().reference.network, scores.responses).logp
        if more.get("reference") is not None:
            shake = level * unit * self.random.standard_normal(len(noise))
            more["reference"] = np.minimum(more["reference"] + shake, 0)
        return Rollouts(
            responses=scores.responses,
            trainer=columns[0],
            engine=columns[1],
            effect=effect,
            noise=rms(noise),
            ratio=more.pop("ratio", effect / max(LEAST_FLOOR, rms(noise))),
            rounding=rounding,
            noise_kind=kind,
            variant=variant,
            accepted=tuple(accepted),
            accepted_without=tuple(accepted if without is None else without),
            **more,
        )

    def shaped(self, kind: str, scores: Scores) -> Array:
        """Noise of unit rms: gaussian, Student's t of 4 to 8 degrees of freedom, or of a scale for each response."""
        count = len(scores.ids)
        if kind == "heavy":
            degrees = self.random.uniform(4, 8)
            return self.random.standard_t(degrees, count) / math.sqrt(degrees / (degrees - 2))
        noise = self.random.standard_normal(count)
        if kind == "response":
            scale = np.exp(0.5 * self.random.standard_normal(len(scores.lengths)))
            noise = noise * np.repeat(scale / rms(scale), scores.lengths)
        return noise

    def natural_noise(self, kind: str, rounding: str, scores: Scores) -> Array:
        """Errors of logits rounded to a dtype, or of the network in bfloat16."""
        if kind == "logits":
            dtype = getattr(torch, rounding)
            return scores.token(lambda logits: logits.to(dtype).float().log_softmax(-1)) - scores.logp
        role = "policy" if scores.network is self.network else "reference"
        other = Scores.of(getattr(shipped_pair("bfloat16"), role).network, scores.responses)
        return other.logp - scores.logp

    def with_engine(self, engine: Engine, **settings: Any) -> Rollouts:
        """Rollouts that an engine draws and returns its log-probabilities of; the trainer's are the policy's."""
        responses, column = self.drawn(engine)
        return self.finish(Scores.of(self.network, responses), engine=column, **settings)

    def with_weights(self, change: Callable[[str, Tensor], Tensor], **settings: Any) -> Rollouts:
        """Rollouts of an engine that has other weights."""
        with weights_of(self.network, change):
            responses, column = self.drawn(Engine(network=self.network))
        scores = Scores.of(self.network, responses)
        return self.finish(scores, engine=column, like_rounding=True, **settings)

    def with_column(self, scores: Scores, change: Callable[[Array], Array], **settings: Any) -> Rollouts:
        """Rollouts of which one column is changed: the engine's, or in a third of the trials the trainer's."""
        is_trainer = self.random.random() < 1 / 3

        def changed(trainer: Array, engine: Array) -> tuple[Array, Array]:
            return (change(trainer), engine) if is_trainer else (trainer, change(engine))

        return self.finish(scores, after_noise=changed, **settings)


def rms(values: Array) -> float:
    """The root mean square."""
    return float(np.sqrt(np.mean(np.square(values)))) if len(values) else 0.0


def explained(rounding: str) -> float:
    """Errors of logits that a dtype explains, in nats."""
    return 4 * EPSILON[rounding] + 1e-5


def by_response(scores: Scores, change: Callable[[Array, int], Array]) -> Callable[[Array], Array]:
    """A change of each response's part of a column."""
    ends = np.cumsum(scores.lengths)[:-1]
    return lambda column: np.concatenate(
        [change(part, row) for row, part in enumerate(np.split(column, ends))]
    )


def at_temperature(case: Case) -> float:
    """A temperature whose effect is the target's."""
    scores, sign = case.calibration, case.random.choice([-1, 1])

    def effect(strength: float) -> float:
        return rms(scores.at(math.exp(sign * strength)) - scores.logp)

    return math.exp(sign * case.strength(effect, 1e-3, 0.8, case.target()))


def divided(temperature: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    return lambda ids, logits, start: logits / temperature


def temperature(case: Case) -> Rollouts:
    """One side divides the logits: the engine, which draws so, or the trainer, which should not."""
    value, variant = at_temperature(case), case.pick("engine divides", "engine divides", "trainer divides")
    both = ("temperature", "processed")
    if variant == "trainer divides":
        scores = case.plain_scores()
        columns: dict[str, Any] = {"trainer": scores.at(value)}
    else:
        responses, engine = case.drawn(Engine(network=case.network, process=divided(value)))
        scores = Scores.of(case.network, responses)
        columns = {"engine": engine}
    return case.finish(
        scores,
        **columns,
        variant=f"{variant} by {value:.3f}",
        accepted=both[:1] if evidence_of_draws(scores, value) >= LEAST_EVIDENCE else both,
        without=both,
    )


def evidence_of_draws(scores: Scores, value: float) -> float:
    """Nats by which the drawn tokens tell a temperature from 1."""
    return abs(float(np.sum(scores.at(value) - scores.logp)))


def processed(case: Case) -> Rollouts:
    """The engine draws at a temperature and returns log-probabilities of before, or logits; the trainer divides."""
    variant = case.pick("log-probabilities", "log-probabilities", "log-probabilities", "logits")
    value = at_temperature(case) if variant != "logits" else float(case.random.uniform(0.6, 0.9))
    responses, at_value = case.drawn(Engine(network=case.network, process=divided(value)))
    scores = Scores.of(case.network, responses)
    names = ("temperature", "processed")
    if variant == "logits":
        raw = scores.token(lambda logits: logits)
        return case.finish(
            scores,
            trainer=at_value,
            after_noise=lambda trainer, engine: (trainer, engine - scores.logp + raw),
            variant=f"logits, drawn at {value:.3f}",
            accepted=("processed", "column"),
            without=(*names, "column"),
        )
    return case.finish(
        scores,
        trainer=at_value,
        variant=f"{variant}, drawn at {value:.3f}",
        accepted=names[1:] if evidence_of_draws(scores, value) >= LEAST_EVIDENCE else names,
        without=names,
    )


def cut_by(name: str, strength: float) -> Callable[[Tensor], Tensor]:
    """A truncation of logits by transformers, which is the stronger the larger the strength from 0 to 1."""
    if name == "top_k":
        warper: Any = TopKLogitsWarper(max(1, round(2560 ** (1 - strength))))
    elif name == "top_p":
        warper = TopPLogitsWarper(1 - strength)
    else:
        warper = MinPLogitsWarper(strength)
    return lambda logits: warper(torch.empty(0), logits)  # pyrefly: ignore[bad-argument-type]


def kept_mass(scores: Scores, cut: Callable[[Tensor], Tensor]) -> Array:
    """Log of the mass that a truncation keeps at each position."""
    return scores.rowwise(lambda logits, rows: cut(logits).logsumexp(-1) - logits.logsumexp(-1))


def truncation(case: Case) -> Rollouts:
    """The engine cuts and renormalises; the trainer does not."""
    name = case.pick("top_p", "top_k", "min_p", "top_p")
    low, high = {"top_p": (1e-3, 0.7), "top_k": (0.05, 0.8), "min_p": (1e-4, 0.5)}[name]
    strength = case.strength(
        lambda strength: rms(kept_mass(case.calibration, cut_by(name, strength))), low, high, case.target()
    )
    cut = cut_by(name, strength)
    engine = Engine(network=case.network, process=lambda ids, logits, start: cut(logits))
    return case.with_engine(engine, variant=f"{name} {strength:.3g}", accepted=("truncation",))


def shift(case: Case) -> Rollouts:
    """A column is one to three tokens late or early; its first or last values come round, or are 0."""
    scores, offset = case.plain_scores(), case.pick(1, -1, 1, -1, 2, -2, 3, -1, 1, -3)
    is_zero = case.random.random() < 0.4

    def moved(part: Array, row: int) -> Array:
        rolled = np.roll(part, offset)
        if is_zero:
            rolled[: max(offset, 0)] = rolled[len(rolled) + min(offset, 0) :] = 0.0
        return rolled

    variant = f"by {offset}{' with zeros' if is_zero else ''}"
    return case.with_column(scores, by_response(scores, moved), variant=variant, accepted=("shift",))


def column(case: Case) -> Rollouts:
    """A column has another base, the other sign, probabilities, or the values of other responses."""
    scores = case.plain_scores()
    changes: dict[str, Callable[[Array], Array]] = {
        "base 10": lambda values: values / math.log(10),
        "base 2": lambda values: values / math.log(2),
        "negative": np.negative,
        "probabilities": np.exp,
        "other responses": lambda values: np.roll(values, max(scores.lengths)),
    }
    variant = case.pick(*changes)
    return case.with_column(scores, changes[variant], variant=variant, accepted=("column",))


def column_other(case: Case) -> Rollouts:
    """A column holds something else than the log-probability of the token."""
    scores = case.plain_scores()
    variant = case.pick("likeliest", "masked logits", "ranks", "zeros in a stretch", "another token")
    accepted: tuple[str, ...] = ("column",)
    if variant == "likeliest":
        values = scores.rowwise(lambda logits, rows: logits.log_softmax(-1).amax(-1))
    elif variant == "masked logits":
        values, accepted = np.maximum(scores.token(lambda logits: logits), 0.0), ("column", "processed")
    elif variant == "ranks":
        first = int(case.random.integers(0, 2))
        values = first + scores.rowwise(
            lambda logits, rows: (logits > logits.gather(-1, scores.ids[rows].unsqueeze(-1))).sum(-1)
        )
    elif variant == "another token":
        other = int(case.random.integers(1, 2560))
        values = scores.rowwise(lambda logits, rows: logp_of(logits, (scores.ids[rows] + other) % 2560))
    else:
        share, accepted = case.random.uniform(0.2, 1), ("column", "mask")

        def with_zeros(part: Array, row: int) -> Array:
            changed, count = part.copy(), max(6, round(len(part) * case.random.uniform(0.1, 0.4)))
            start = int(case.random.integers(0, max(1, len(part) - count)))
            changed[start : start + count] = 0.0
            return changed if case.random.random() < share else part

        values = by_response(scores, with_zeros)(scores.logp)
    has_noise = variant not in ("ranks", "zeros in a stretch")

    def changed(noisy: Array) -> Array:
        other = values + (noisy - scores.logp if has_noise else 0.0)
        return np.where(values - scores.logp == 0, noisy, other)

    return case.with_column(scores, changed, variant=variant, accepted=accepted)


def mask(case: Case) -> Rollouts:
    """The results of tools count in a share of the responses; the engine has 0 or another constant there."""
    plain, share = case.plain(), case.random.uniform(0.2, 1)
    constant = case.pick(0.0, 0.0, 0.0, -1.0)
    extended, is_inserted = [], []
    for row, response in enumerate(plain):
        count = int(case.random.integers(6, max(7, len(response.tokens) // 3)))
        inserted = (
            plain[(row + 1) % len(plain)].tokens[:count] if case.random.random() < share or row == 0 else ()
        )
        place = int(case.random.integers(1, len(response.tokens)))
        tokens = (*response.tokens[:place], *inserted, *response.tokens[place:])[
            : CONTEXT - len(response.prompt)
        ]
        extended.append(Response(response.prompt, tokens))
        is_inserted.append([place <= index < place + len(inserted) for index in range(len(tokens))])
    scores, is_tool = Scores.of(case.network, extended), np.concatenate(is_inserted)
    return case.finish(
        scores,
        after_noise=lambda trainer, engine: (trainer, np.where(is_tool, constant, engine)),
        variant=f"tool results, {constant:g}",
        accepted=("mask",),
    )


def padding(case: Case) -> Rollouts:
    """Responses are padded on the right, without a mask; both columns are 0 there, or a constant each."""
    plain = case.plain()
    width = max(len(response.tokens) for response in plain)
    if min(len(response.tokens) for response in plain) == width:  # of one length: cut them
        plain = [
            Response(response.prompt, response.tokens[: max(8, round(width * case.random.uniform(0.4, 1)))])
            for response in plain
        ]
    widths = [min(width, CONTEXT - len(response.prompt)) - len(response.tokens) for response in plain]
    pad = case.pick(1, 0)
    responses = [
        Response(response.prompt, (*response.tokens, *(pad,) * count))
        for response, count in zip(plain, widths, strict=True)
    ]
    scores = Scores.of(case.network, responses)
    is_pad = np.concatenate(
        [np.arange(length) >= length - count for length, count in zip(scores.lengths, widths, strict=True)]
    )
    constants = case.pick((0.0, 0.0), (0.0, 0.0), (-1.0, -1.0), (0.0, -1.0))
    return case.finish(
        scores,
        after_noise=lambda trainer, engine: (
            np.where(is_pad, constants[0], trainer),
            np.where(is_pad, constants[1], engine),
        ),
        effect=rms(np.where(is_pad, scores.logp, 0.0)),
        variant=f"padding, trainer {constants[0]:g}, engine {constants[1]:g}",
        accepted=("mask",),
    )


def context(case: Case) -> Rollouts:
    """The engine reads another prompt, and draws after it: special tokens, a template, or a cut prompt."""
    tokenizer = shipped_pair().tokenizer

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    system = encode("A letter from Mrs. Weston to her friend at Highbury. ")
    changes: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {
        "two BOS": lambda ids: (0, *ids),
        "no BOS": lambda ids: ids[1:],
        "line break": lambda ids: (*ids, *encode("\n")),
        "system prompt": lambda ids: (0, *system, *ids[1:]),
        "last token missing": lambda ids: ids[:-1],
        "end of sentence": lambda ids: (*ids, 1),
        "left part missing": lambda ids: ids[len(ids) // 2 :],
        "template after it": lambda ids: (*ids, *encode(' "My dear, said she')),
    }
    variant = case.pick(*changes)
    changed = [changes[variant](prompt) for prompt in case.prompts]
    room = [
        min(length, CONTEXT - max(len(a), len(b)))
        for length, a, b in zip(case.lengths, changed, case.prompts, strict=True)
    ]
    drawn, columns = draw(Engine(network=case.network), changed, room, case.seed)
    responses = [
        Response(prompt, response.tokens) for prompt, response in zip(case.prompts, drawn, strict=True)
    ]
    scores, column = Scores.of(case.network, responses), np.concatenate(columns)
    return case.finish(scores, engine=column, variant=variant, accepted=("context",), like_rounding=True)


def reference_weights() -> dict[str, Tensor]:
    return {name: weight.detach() for name, weight in shipped_pair().reference.network.named_parameters()}


def low_rank_update(seed: int) -> Callable[[str, Tensor], Tensor]:
    """An adapter of rank 4 on all matrices but the embeddings, each as large as its matrix."""

    def update(name: str, weight: Tensor) -> Tensor:
        if weight.dim() != 2 or "embed" in name or "lm_head" in name:
            return torch.zeros_like(weight)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        product = torch.randn(weight.shape[0], 4, generator=generator) @ torch.randn(
            4, weight.shape[1], generator=generator
        )
        return product * (weight.norm() / product.norm())

    return update


def effect_of_weights(
    case: Case, change: Callable[[float], Callable[[str, Tensor], Tensor]]
) -> Callable[[float], float]:
    """How far a change of the weights of a strength moves the log-probabilities."""

    def effect(strength: float) -> float:
        with weights_of(case.network, change(strength)):
            return rms(Scores.of(case.network, case.calibration.responses).logp - case.calibration.logp)

    return effect


def weights(case: Case) -> Rollouts:
    """The engine draws with stale weights, those of a step further on, or another adapter."""
    stale, update = reference_weights(), low_rank_update(case.seed)
    changes: dict[str, Callable[[float], Callable[[str, Tensor], Tensor]]] = {
        "stale": lambda part: lambda name, weight: weight.lerp(stale[name], part),
        "adapter": lambda scale: lambda name, weight: weight + scale * update(name, weight),
        "newer": lambda part: lambda name, weight: weight.lerp(stale[name], -part),
    }
    variant = case.pick("stale", "adapter", "stale", "newer")
    high = 1.0 if variant != "adapter" else 0.5
    strength = case.strength(
        effect_of_weights(case, changes[variant]), 1e-3, high, case.target(like_rounding=True), steps=6
    )
    return case.with_weights(
        changes[variant](strength),
        variant=f"{variant} {strength:.3g}",
        accepted=("weights",),
        without=("weights", "modules", "dropout"),
    )


MODULES: Mapping[str, Callable[[str], bool]] = {
    "attention": lambda name: "self_attn" in name,
    "mlp": lambda name: "mlp" in name,
    "first layers": lambda name: "layers.0." in name or "layers.1." in name,
    "last layers": lambda name: "layers.2." in name or "layers.3." in name,
    "query and value": lambda name: "q_proj" in name or "v_proj" in name,
    "down": lambda name: "down_proj" in name,
    "output": lambda name: "o_proj" in name,
    "one query": lambda name: "layers.0.self_attn.q_proj" in name,
    "one output": lambda name: "layers.3.self_attn.o_proj" in name,
    "one gate": lambda name: "layers.2.mlp.gate_proj" in name,
}


def modules(case: Case) -> Rollouts:
    """The engine has the policy without its head's update, or some modules of the reference."""
    settings: dict[str, Any] = {"accepted": ("modules",), "without": ("weights", "modules", "dropout")}
    kinds = list(MODULES)
    variant = "head" if case.seed % 5 in (0, 2) else kinds[3 * case.seed % len(kinds)]
    if variant != "head":
        stale = reference_weights()
        return case.with_weights(
            lambda name, weight: stale[name] if MODULES[variant](name) else weight,
            variant=variant,
            **settings,
        )
    calibration, update = case.calibration, head_update(case.seed)

    def scored(scores: Scores, scale: float) -> Array:
        """Log-probabilities with the head that the trainer has."""
        return scores.rowwise(
            lambda logits, rows: logp_of(logits + scale * scores.hidden[rows] @ update.T, scores.ids[rows])
        )

    scale = case.strength(
        lambda scale: rms(scored(calibration, scale) - calibration.logp),
        1e-4,
        1,
        case.target(like_rounding=True),
    )
    responses, engine = case.drawn(Engine(network=case.network))
    scores = Scores.of(case.network, responses)
    return case.finish(
        scores,
        trainer=scored(scores, scale),
        engine=engine,
        variant=f"head {scale:.3g}",
        pair=pair_with_head(case.seed, scale),
        reference=None,
        like_rounding=True,
        **settings,
    )


def reference(case: Case) -> Rollouts:
    """The reference's column is the policy's (adapters on), of other weights, or at another temperature."""
    scores = case.plain_scores()
    network = shipped_pair().reference.network
    right = Scores.of(network, scores.responses)
    variant = case.pick("policy", "adapter", "part of the policy", "temperature")
    target = case.target(like_rounding=True)
    if variant == "policy":
        wrong = scores.logp
    elif variant == "temperature":
        few = Scores(network, right.responses, right.hidden)
        scale = case.strength(lambda x: rms(few.at(math.exp(-x)) - few.logp), 1e-3, 0.7, target, steps=5)
        wrong = few.at(math.exp(-scale))
    else:
        policy = {name: weight.detach().clone() for name, weight in case.network.named_parameters()}
        update = low_rank_update(case.seed)

        def change(strength: float) -> Callable[[str, Tensor], Tensor]:
            if variant == "adapter":
                return lambda name, weight: weight + strength * update(name, weight)
            return lambda name, weight: weight.lerp(policy[name], strength)

        few_responses = case.calibration.responses
        before = Scores.of(network, few_responses).logp

        def effect(strength: float) -> float:
            with weights_of(network, change(strength)):
                return rms(Scores.of(network, few_responses).logp - before)

        strength = case.strength(effect, 1e-3, 0.5 if variant == "adapter" else 1, target, steps=6)
        with weights_of(network, change(strength)):
            wrong = Scores.of(network, scores.responses).logp
    made = case.finish(
        scores,
        effect=rms(wrong - right.logp),
        variant=variant,
        reference=wrong,
        accepted=("reference",),
    )
    is_copy = variant == "policy" and case.random.random() < 0.5
    return replace(made, reference=made.trainer.copy()) if is_copy else made


def to_mantissa(values: Tensor, bits: int) -> Tensor:
    """Numbers rounded to so many bits after the leading one, as bfloat16 (7), TF32 (10) or an 8-bit float (3)."""
    mantissa, exponent = torch.frexp(values)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


def quantised(bits: int) -> Callable[[str, Tensor], Tensor]:
    """Matrices rounded to integers of so many bits with a scale for each group of 64 numbers, but for embeddings."""

    def change(name: str, weight: Tensor) -> Tensor:
        if weight.dim() != 2 or "embed" in name:
            return weight
        groups = weight.reshape(-1, 64)
        scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        return ((groups / scale).round() * scale).reshape(weight.shape)

    return change


def precision(case: Case) -> Rollouts:
    """The engine rounds logits, log-probabilities or its weights more coarsely than ``rounding`` says."""
    variant = case.pick("logits", "weights", "logits", "column")
    calibration, target = case.calibration, case.target(like_rounding=True)
    if variant == "column":
        scores = case.plain_scores()

        def rounded(column: Array) -> Array:
            return torch.from_numpy(column).bfloat16().double().numpy()

        settings = {"variant": "column in bfloat16", "accepted": ("precision",)}
        return case.with_column(scores, rounded, like_rounding=True, **settings)
    if variant == "logits":
        effects = {
            bits: rms(
                calibration.token(lambda x, bits=bits: to_mantissa(x, bits).log_softmax(-1))
                - calibration.logp
            )
            for bits in (3, 7, 10)  # an 8-bit float, bfloat16, float16
        }
    else:
        effect = effect_of_weights(case, lambda bits: quantised(round(bits)))
        effects = {bits: effect(bits) for bits in (3, 4, 5, 6, 8)}
    enough = {bits: effect for bits, effect in effects.items() if effect > 0.9 * target} or effects
    bits = min(enough, key=lambda bits: abs(math.log(enough[bits] / target)))
    both = ("precision", "weights")
    settings = {"variant": f"{variant} to {bits} bits", "without": both}
    if variant == "weights":
        return case.with_weights(quantised(bits), accepted=both, **settings)
    engine = Engine(network=case.network, process=lambda ids, logits, start: to_mantissa(logits, bits))
    return case.with_engine(engine, accepted=both[:1], like_rounding=True, **settings)


def routing(case: Case) -> Rollouts:
    """The hidden states of 5 to 50 % of the tokens are moved by various amounts, as by another expert."""
    return with_moved_tokens(case, "routing", case.log_uniform(0.05, 0.5))


def tensor_parallel(case: Case) -> Rollouts:
    """For 0.2 to 1 % of the tokens, part of half of the last layer's sum is missing."""
    return with_moved_tokens(case, "tensor_parallel", case.log_uniform(0.002, 0.01))


def with_moved_tokens(case: Case, cause: str, share: float) -> Rollouts:
    """The engine draws with other hidden states at some tokens."""
    count, longest = len(case.lengths), max(case.lengths)
    least = 4 / sum(case.lengths)
    is_moved = case.random.random((count, longest)) < max(share, least)
    if cause == "tensor_parallel":
        is_moved[:4, :4] = np.eye(4, dtype=bool)
    amounts = torch.from_numpy(np.exp(0.6 * case.random.standard_normal((count, longest)))).float()

    def moved(hidden: Tensor, amount: Tensor, scale: float) -> Tensor:
        if cause == "tensor_parallel":
            changed = hidden.clone()
            changed[:, : hidden.shape[1] // 2] *= 1 - min(scale, 1.0)
            return changed
        size = hidden.norm(dim=-1, keepdim=True) / hidden.shape[1] ** 0.5
        return hidden + scale * amount.unsqueeze(-1) * size * torch.randn(hidden.shape, generator=generator)

    calibration = case.calibration
    some = torch.from_numpy(
        np.random.default_rng(case.seed).choice(amounts.numpy().ravel(), len(calibration.ids))
    )
    actual_share = float(np.mean(is_moved))
    generator = torch.Generator()

    def effect(scale: float) -> float:
        generator.manual_seed(case.seed)
        other = replace(calibration, hidden=moved(calibration.hidden, some, scale))
        return rms(other.logp - calibration.logp) * math.sqrt(actual_share)

    scale = case.strength(effect, 1e-3, 1.0, case.target(like_rounding=True))
    generator.manual_seed(case.seed)

    def change_hidden(hidden: Tensor, rows: Array, step: int) -> Tensor:
        is_here = torch.from_numpy(is_moved[rows, step]).unsqueeze(-1)
        return torch.where(is_here, moved(hidden, amounts[rows, step], scale), hidden)

    return case.with_engine(
        Engine(network=case.network, change_hidden=change_hidden),
        variant=f"{100 * share:.2f} % of the tokens, {scale:.3g}",
        accepted=(cause,),
        like_rounding=True,
    )


def biased_tokens(case: Case, strength: float) -> dict[tuple[int, ...], float]:
    """A logit bias on 5 to 50 tokens that the policy often draws."""
    random = np.random.default_rng([29, case.seed])
    often = np.bincount([token for response in pool()[:64] for token in response.tokens], minlength=2560)
    chosen = random.choice(np.argsort(-often)[:200], int(random.integers(5, 51)), replace=False)
    sign = random.choice([-1, 1])
    return {(int(token),): float(sign * strength) for token in chosen}


def penalise(case: Case, name: str, strength: float) -> Callable[[Tensor, Tensor, int], Tensor]:
    """A change of logits after the tokens so far, of a strength above 0."""
    if name == "repetition":
        repetition: Any = RepetitionPenaltyLogitsProcessor(1 + strength)
        return lambda ids, logits, start: repetition(ids, logits)
    if name == "bias":
        biased: Any = biased_tokens(case, strength)
        bias: Any = SequenceBiasLogitsProcessor(biased)
        return lambda ids, logits, start: bias(ids, logits)

    def counted(ids: Tensor, logits: Tensor, start: int) -> Tensor:
        drawn = ids[:, start:]
        counts = torch.zeros_like(logits).scatter_add_(1, drawn, torch.ones(drawn.shape))
        return logits - strength * (counts if name == "frequency" else (counts > 0).float())

    return counted


def penalised_logits(scores: Scores, process: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
    """All logits of few responses after a process that reads the tokens before each position."""
    rows: list[Tensor] = []
    head, start = scores.network.lm_head.weight.float(), 0
    for response in scores.responses:
        ids = torch.tensor((*response.prompt, *response.tokens))
        for step in range(len(response.tokens)):
            logits = scores.hidden[start + step : start + step + 1] @ head.T
            rows.append(
                process(ids[: len(response.prompt) + step].unsqueeze(0), logits, len(response.prompt))
            )
        start += len(response.tokens)
    return torch.cat(rows)


@torch.inference_mode()
def penalty(case: Case) -> Rollouts:
    """The engine draws under a penalty and returns log-probabilities after it; the trainer's are plain."""
    name = case.pick("repetition", "presence", "frequency", "bias")
    few = sub_sample(case.calibration, 768)

    def effect(strength: float) -> float:
        logits = penalised_logits(few, penalise(case, name, strength))
        return rms(logp_of(logits, few.ids).double().numpy() - few.logp)

    low, high = {"repetition": (2e-3, 0.8), "frequency": (2e-3, 1.0)}.get(name, (3e-3, 4.0))
    strength = case.strength(effect, low, high, case.target(), steps=6)
    engine = Engine(network=case.network, process=penalise(case, name, strength))
    return case.with_engine(engine, variant=f"{name} {strength:.3g}", accepted=("penalty",))


def logp_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The log-probabilities of tokens, one a row."""
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def sub_sample(scores: Scores, tokens: int) -> Scores:
    """The first responses of scores with about so many tokens."""
    count = max(1, int(np.searchsorted(np.cumsum(scores.lengths), tokens)))
    chosen = scores.responses[:count]
    return Scores(scores.network, chosen, scores.hidden[: sum(len(response.tokens) for response in chosen)])


@torch.inference_mode()
def sampler(case: Case) -> Rollouts:
    """Both columns are plain; the tokens were drawn at a temperature, under a penalty, or from the likeliest."""
    name = case.pick("temperature", "repetition", "top_k", "temperature", "presence", "top_p")
    few = sub_sample(case.calibration, 768)
    plain = penalised_logits(few, lambda ids, logits, start: logits)
    logp = plain.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    deviation = math.sqrt(float(((logp.exp() * logp.square()).sum(-1) - entropy.square()).mean()))

    def process(strength: float) -> Callable[[Tensor, Tensor, int], Tensor]:
        if name == "temperature":
            return divided(math.exp(-sign * strength))
        if name in ("top_k", "top_p"):
            cut = cut_by(name, strength)
            return lambda ids, logits, start: cut(logits)
        return penalise(case, name, strength)

    def effect(strength: float) -> float:
        drawn = penalised_logits(few, process(strength)).softmax(-1)
        excess = float(((drawn * logp).sum(-1) + entropy).mean())
        return math.sqrt(sum(case.lengths)) * abs(excess) / deviation / 1.96

    sign = case.random.choice([1, 1, -1])
    low, high = {
        "temperature": (0.01, 0.6),
        "repetition": (0.005, 0.8),
        "top_k": (0.05, 0.8),
        "top_p": (0.005, 0.7),
        "presence": (0.02, 4.0),
    }[name]
    strength = case.strength(effect, low, high, case.setting[3], steps=6)
    if effect(strength) < 3:  # few tokens do not show it
        name, sign = "temperature", 1
        strength = case.strength(effect, 0.01, 1.2, case.setting[3], steps=6)
    responses, _ = case.drawn(Engine(network=case.network, process=process(strength)))
    return case.finish(
        Scores.of(case.network, responses),
        effect=0.0,
        ratio=effect(strength),
        variant=f"{name} {strength:.3g}",
        accepted=("sampler",),
    )


@torch.inference_mode()
def dropout(case: Case) -> Rollouts:
    """The trainer scores in train mode: dropout after the layers' parts, at the embeddings, or in an adapter."""
    scores = case.plain_scores()
    variant = case.pick("residual", "adapter", "attention", "residual", "embeddings")
    network, stale = case.network, reference_weights()
    generator = torch.Generator()

    def dropped(values: Tensor, share: float) -> Tensor:
        return values * (torch.rand(values.shape, generator=generator) >= share) / (1 - share)

    def hook_of(name: str, module: Any, share: float) -> Callable[..., Tensor] | None:
        """What is done to a module's output; None where nothing is dropped."""
        places = {"residual": ("self_attn.o_proj", "mlp.down_proj"), "attention": ("self_attn.o_proj",)}
        if name.endswith(places.get(variant, ("embed_tokens",) if variant == "embeddings" else ())):
            return lambda module, inputs, out: dropped(out, share)
        if variant != "adapter" or not isinstance(module, torch.nn.Linear) or name == "lm_head":
            return None
        update = module.weight.detach() - stale[f"{name}.weight"]
        return lambda module, inputs, out: out + (dropped(inputs[0], share) - inputs[0]) @ update.T

    def scored(responses: Sequence[Response], share: float) -> Array:
        generator.manual_seed(case.seed)
        hooks = [(module, hook_of(name, module, share)) for name, module in network.named_modules()]
        handles = [module.register_forward_hook(hook) for module, hook in hooks if hook is not None]
        try:
            return Scores.of(network, responses).logp
        finally:
            for handle in handles:
                handle.remove()

    few = sub_sample(case.calibration, 1024)
    share = case.strength(
        lambda share: rms(scored(few.responses, share) - few.logp),
        0.01 if variant != "adapter" else 0.02,
        0.2,
        case.target(like_rounding=True),
        steps=6,
    )
    return case.finish(
        scores,
        trainer=scored(scores.responses, share),
        variant=f"{variant} {share:.3g}",
        accepted=("dropout",),
        without=("dropout", "weights", "modules", "precision"),
        like_rounding=True,
    )


def break_at(case: Case) -> Rollouts:
    """The engine's errors begin or end at a token: noise, a sliding window, or another scale of positions."""
    variant = case.pick("noise begins", "window", "noise begins", "rope", "noise ends")
    settings: dict[str, Any] = {"accepted": ("break",), "like_rounding": True}
    longest = max(case.lengths)
    if variant in ("window", "rope"):
        prompts = case.prompts
        start = int(np.mean([len(prompt) for prompt in prompts]) + longest * case.random.uniform(0.1, 0.5))

        def stretched(scale: float) -> Callable[[Tensor], Tensor]:
            return lambda position: torch.where(
                position < start, position.float(), start + (position - start).float() * scale
            )

        if variant == "window":
            engine = Engine(network=case.network, window=start)
        else:
            few = sub_sample(case.calibration, 1024)

            def effect(strength: float) -> float:
                other = Scores.of(case.network, few.responses, position=stretched(1 + strength))
                return rms(other.logp - few.logp)

            strength = case.strength(effect, 0.02, 3.0, case.target(like_rounding=True), steps=5)
            engine = Engine(network=case.network, position=stretched(1 + strength))
        return case.with_engine(engine, variant=f"{variant} at {start} of the sequence", **settings)
    scores = case.plain_scores()
    of_sequence = case.random.random() < 0.5
    starts = [len(response.prompt) if of_sequence else 0 for response in scores.responses]
    place = (float(np.mean(starts)) if of_sequence else 0) + longest * case.random.uniform(0.15, 0.6)
    position = np.concatenate(
        [start + np.arange(length) for start, length in zip(starts, scores.lengths, strict=True)]
    )
    is_after = (position >= round(place)) == (variant == "noise begins")
    extra = is_after * scores.unit * case.random.standard_normal(len(position))
    extra *= case.target(like_rounding=True) / max(rms(extra), 1e-9)
    return case.finish(
        scores,
        engine=np.minimum(scores.logp + extra, 0),
        variant=f"{variant} at {round(place)} of the {'sequence' if of_sequence else 'response'}",
        **settings,
    )


def insertion(case: Case) -> Rollouts:
    """A value is inserted or missing inside some or all responses; all later ones are moved."""
    scores = case.plain_scores()
    count = len(scores.lengths)
    number = count if case.random.random() < 0.25 else max(2, round(count * case.log_uniform(0.01, 1)))
    chosen = set(case.random.choice(count, number, replace=False).tolist())
    variant, extra = case.pick("inserted", "missing"), case.random.choice(["zero", "copy"])
    places = case.random.uniform(0.1, 0.7, count)

    def moved(part: Array, row: int) -> Array:
        if row not in chosen:
            return part
        place = max(1, int(len(part) * places[row]))
        if variant == "inserted":
            value = 0.0 if extra == "zero" else part[place - 1]
            return np.concatenate([part[:place], [value], part[place:-1]])
        return np.concatenate([part[:place], part[place + 1 :], [0.0 if extra == "zero" else part[-1]]])

    change, words = by_response(scores, moved), f"{variant} in {number} of {count}"
    return case.with_column(scores, change, variant=words, accepted=("insertion",))


def clean(case: Case) -> Rollouts:
    """No fault: rounding alone, in several settings that must not be taken for one."""
    variant = case.pick(
        *("plain", "plain", "plain", "bfloat16 columns", "first step", "temperature on both sides"),
        *("equal columns", "masked tokens", "plain", "own network"),
    )
    names: tuple[str, ...] = ()
    if variant == "first step":
        scores = Scores.of(shipped_pair().reference.network, case.plain("reference"))
        made = case.finish(scores, variant=variant, accepted=names, reference=scores.logp)
        return replace(made, reference=made.trainer.copy(), pair=("shipped:reference", "shipped:reference"))
    if variant == "temperature on both sides":
        value = case.pick(0.7, 0.8, 0.6, 1.2) if case.seed % 20 < 10 else 0.9
        responses, engine = case.drawn(Engine(network=case.network, process=divided(value)))
        scores = Scores.of(case.network, responses)
        columns: dict[str, Any] = {"trainer": scores.at(value), "engine": engine}
        return case.finish(scores, **columns, variant=f"{variant}, {value}", accepted=names)
    scores = case.plain_scores()
    made = case.finish(scores, variant=variant, accepted=names)
    if variant == "bfloat16 columns":
        rounded = [torch.from_numpy(c).bfloat16().double().numpy() for c in (made.trainer, made.engine)]
        return replace(made, trainer=rounded[0], engine=rounded[1])
    if variant == "equal columns":
        return replace(made, engine=made.trainer.copy())
    if variant == "own network":
        other = Scores.of(shipped_pair("bfloat16").policy.network, scores.responses).logp
        return replace(
            made, trainer=scores.logp, engine=other, rounding="bfloat16", noise=rms(other - scores.logp)
        )
    if variant == "masked tokens":
        is_counted = np.concatenate(
            [np.arange(length) < max(8, length * case.random.uniform(0.5, 1)) for length in scores.lengths]
        )
        return replace(made, engine=np.where(is_counted, made.engine, 0.0), is_counted=is_counted)
    return made


PLANTS: Mapping[str, Callable[[Case], Rollouts]] = {
    "temperature": temperature,
    "processed": processed,
    "truncation": truncation,
    "shift": shift,
    "column": column,
    "mask": mask,
    "context": context,
    "weights": weights,
    "reference": reference,
    "precision": precision,
    "routing": routing,
    "tensor_parallel": tensor_parallel,
    "penalty": penalty,
    "sampler": sampler,
    "dropout": dropout,
    "break": break_at,
    "insertion": insertion,
    "modules": modules,
    "column_other": column_other,
    "padding": padding,
}
"""Name -> what draws its rollouts."""
UNSEEN_WITHOUT_MODELS: Mapping[str, str] = {
    "sampler": "both columns agree; what the tokens should have been drawn from is in the models",
    "reference": "a column of other log-probabilities is as likely, and one that equals the trainer's is right before "
    "the first update",
    "dropout": "errors at every token, as of other weights; one pass does not show that the next one differs",
    "modules": "errors at every token, as of other weights; which ones is in the models",
}
"""Plants that the columns alone do not show, or show as another cause, and why; decided before any result."""
