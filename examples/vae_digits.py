"""A variational autoencoder of handwritten digits: how its latent code collapses, and what brings it back.

    python examples/vae_digits.py

The data are scikit-learn's 1797 digits of 8 x 8 pixels. The loss is what it costs to describe an image:

    -log p(x | z) + weight KL(q(z | x) || N(0, 1)),    z ~ q(z | x)

The KL weighs 2 here, as in a beta-VAE. A decoder that draws from z alone pays for it. One that sees the
pixels before the one it draws can do without z, and then the cheapest posterior is the prior: the KL goes to
0, no latent dimension moves with the data, and z says nothing. That is posterior collapse; a weight that
is large enough brings it about with any decoder. Free bits cure it: each dimension may say so much at no
cost. Annealing lets the KL cost nothing until z has become useful; z keeps what it learned for a while, but
an objective that prefers the collapse wins in the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from kleash.losses import active_units, cyclical_annealing, free_bits, kl_per_dimension, linear_annealing

PIXELS, HIDDEN, DIM = 64, 64, 8
STEPS, BATCH = 400, 128
WEIGHT = 2.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One way to train, and what it is called in the table."""

    name: str
    sees_pixels: bool
    """Whether the decoder sees the pixels before the one it draws: a strong decoder."""
    weight: Callable[[int], float] = lambda step: WEIGHT
    """The weight of the KL at each step."""
    floor_nats: float = 0.0
    """What each latent dimension may carry for free."""


RUNS = (
    Run(name="weak decoder", sees_pixels=False),
    Run(name="weak decoder, KL weighs 8", sees_pixels=False, weight=lambda step: 8.0),
    Run(name="strong decoder", sees_pixels=True),
    Run(name="strong decoder, free bits", sees_pixels=True, floor_nats=0.25),
    Run(
        name="strong decoder, annealed",
        sees_pixels=True,
        weight=lambda step: linear_annealing(step, steps=STEPS * 3 // 4, end=WEIGHT),
    ),
    Run(
        name="strong decoder, cyclical",
        sees_pixels=True,
        weight=lambda step: cyclical_annealing(step, steps=STEPS, cycles=2, rising=0.9, end=WEIGHT),
    ),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run, over all images."""

    name: str
    image_nats: float
    """Cost of an image given its z, per image."""
    kl_nats: float
    """KL(q(z | x) || N(0, 1)) per image, without weight or floor."""
    active: int
    """How many of the latent dimensions move with the data."""


class Autoencoder(nn.Module):
    """Encoder to a diagonal Gaussian; decoder to a Bernoulli for each pixel."""

    def __init__(self, *, sees_pixels: bool) -> None:
        """A decoder that sees no pixels has z alone."""
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2 * DIM))
        self.decoder = nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, PIXELS))
        self.before = nn.Parameter(torch.zeros(PIXELS, PIXELS)) if sees_pixels else None

    def posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of z."""
        mean, log_variance = self.encoder(images).chunk(2, -1)
        return mean, log_variance

    def image_nats(self, images: Tensor, z: Tensor) -> Tensor:
        """-log p(x | z) of each image."""
        logits = self.decoder(z)
        if self.before is not None:
            logits = logits + images @ self.before.triu(1)  # pixel j sees the pixels i < j
        return binary_cross_entropy_with_logits(logits, images, reduction="none").sum(-1)


def binary_digits() -> Tensor:
    """The images, [1797, 64], each pixel on or off."""
    digits: Any = load_digits()
    return torch.tensor(digits.data > 7, dtype=torch.float32)


def train(run: Run, images: Tensor, *, seed: int = 0) -> Outcome:
    """Train from scratch, then look at all images."""
    random = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Autoencoder(sees_pixels=run.sees_pixels)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    for step in range(STEPS):
        batch = images[torch.randint(len(images), (BATCH,), generator=random)]
        mean, log_variance = model.posterior(batch)
        z = mean + torch.exp(log_variance / 2) * torch.randn(mean.shape, generator=random)
        kl = free_bits(kl_per_dimension(mean, log_variance), run.floor_nats)
        loss = model.image_nats(batch, z).mean() + run.weight(step) * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return look_at(run, model, images, random)


@torch.no_grad()
def look_at(run: Run, model: Autoencoder, images: Tensor, random: torch.Generator) -> Outcome:
    """The two parts of the cost, and the active units."""
    mean, log_variance = model.posterior(images)
    z = mean + torch.exp(log_variance / 2) * torch.randn(mean.shape, generator=random)
    return Outcome(
        name=run.name,
        image_nats=model.image_nats(images, z).mean().item(),
        kl_nats=kl_per_dimension(mean, log_variance).sum(-1).mean().item(),
        active=int(active_units(mean).number),
    )


def main() -> list[Outcome]:
    """Train all runs and print a table."""
    images = binary_digits()
    print(f"{'':28} {'image given z':>13} {'KL':>8} {'sum':>8}   active units of {DIM}")
    outcomes = []
    for run in RUNS:
        got = train(run, images)
        outcomes.append(got)
        total = got.image_nats + got.kl_nats
        print(f"{got.name:28} {got.image_nats:13.2f} {got.kl_nats:8.3f} {total:8.2f}   {got.active}")
    return outcomes


if __name__ == "__main__":
    main()
