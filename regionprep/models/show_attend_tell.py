"""Show, Attend and Tell: LSTM with soft or hard attention over a feature map (arXiv 1502.03044).

Section 3, with the numbers of the thesis that reprints it:

    e_ti = f_att(a_i, h_(t-1))       α_t = softmax(e_t)       ẑ_t = φ({a_i}, {α_i})          (3.1)
    i_t, f_t, o_t = σ(W E y_(t-1) + U h_(t-1) + Z ẑ_t + b)
    c_t = f_t c_(t-1) + i_t tanh(W_c E y_(t-1) + U_c h_(t-1) + Z_c ẑ_t + b_c)
    h_t = o_t tanh(c_t)
    c_0 = f_init,c(mean of a_i)      h_0 = f_init,h(mean of a_i)
    p(y_t | a, y_1 .. y_(t-1)) ∝ exp(L_o tanh(E y_(t-1) + L_h h_t + L_z ẑ_t))                (3.2)

  hard: s_t ~ Multinoulli({α_i})                                                             (3.3)
    ẑ_t = Σ_i s_ti a_i                                                                       (3.4)
    ∂L_s/∂W ≈ 1/N Σ_n [∂log p(y | s, a)/∂W
              + λ_r (log p(y | s, a) - b) ∂log p(s | a)/∂W + λ_e ∂H[s]/∂W]                   (3.7)
    b_k = 0.9 b_(k-1) + 0.1 log p(y | s_k, a)

  soft: ẑ_t = β_t Σ_i α_ti a_i       β_t = σ(f_β(h_(t-1)))                                   (3.8)
    L_d = -log p(y | a) + λ Σ_i (1 - Σ_t α_ti)²                                              (3.9)

    symbol             argument
    a_i, L, D          regions.features, cells of grid, feature_width
    E; m, n            words; word_width, width
    f_att              attention, with attention_width units
    β                  selector
    λ                  penalty
    λ_r, λ_e           reward_weight, entropy_weight
    s set to α         expected_rate: the share of images in training
    W and b; U, Z      ShowAttendTell.from_words; .from_state
    L_h, L_z; L_o      .deep; .output

Departures:
- The first input is the start token, which has an embedding as words have.
- Tanh before L_o, which eq. 3.2 leaves out and the released code has.
- Criteria are means over words, so all of 3.7 and 3.9 is: both are summed over the captions of a
  batch and divided by its words, which keeps the ratio of their terms. The release divides each
  term by something else. Padded steps count nowhere.
- In 3.7 log p is summed over the words of a caption, and b is what it was before the batch: with
  the batch in it the gradient would be biased. It starts at 0.
- The REINFORCE term adds its gradient to the loss and nothing to its value, which has no meaning.
- s is set to α image by image; the release does so batch by batch.
- Each of f_init has one hidden layer of ReLU and ends with tanh; the paper says MLP.
- A hard model decodes with expected attention, as the release does, or with `decoding="sampled"`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from regionprep.models.captioner import Criterion, Regions, Shape
from regionprep.models.options import Count, Rate, require_grid
from regionprep.models.recurrent import (
    AdditiveAttention,
    Annotations,
    RecurrentCaptioner,
    RecurrentState,
    lstm,
    pool,
)

Weight = Annotated[float, Field(ge=0)]
Select = Callable[[Tensor], Tensor]
"""From α_t (n, r) to the weights that locations get: what makes φ soft or hard."""


def expected(weights: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
    """Return α: the context becomes the expected one."""
    return weights  # Eq. 3.8


def sampled(weights: Float[Tensor, "n r"]) -> Float[Tensor, "n r"]:
    """Return s as one-hot rows; nothing of an image without regions."""
    nowhere = ~weights.any(-1, keepdim=True)
    chosen = torch.multinomial(weights.detach().float() + nowhere, 1)  # Eq. 3.3
    one_hot = torch.zeros_like(weights).scatter_(1, chosen, 1.0)
    return one_hot.masked_fill(nowhere, 0)


def half_and_half(images: int, captions: int, rate: float, device: torch.device) -> Select:
    """Return a choice that samples, but for a share of the images that keep α."""
    keep = (torch.rand(images, device=device) < rate).repeat_interleave(captions).unsqueeze(1)
    return lambda weights: torch.where(keep, weights, sampled(weights))


@dataclass(frozen=True, eq=False)
class Glimpses:
    """Where captions looked at each step: α, log α, and the weights that locations got."""

    weights: Float[Tensor, "n t r"]
    log_weights: Float[Tensor, "n t r"]
    selected: Float[Tensor, "n t r"]


def doubly_stochastic(
    weights: Float[Tensor, "n t r"], real: Bool[Tensor, "n t"], mask: Bool[Tensor, "n r"]
) -> Float[Tensor, " n"]:
    """Return Σ_i (1 - Σ_t α_ti)² of each caption, over its real steps and regions."""
    received = (weights * real.unsqueeze(-1)).sum(1)
    return ((1 - received).square() * mask).sum(-1)  # Eq. 3.9


def learning_rule(
    log_p: Float[Tensor, " n"],
    glimpses: Glimpses,
    real: Bool[Tensor, "n t"],
    *,
    baseline: Float[Tensor, ""] | float,
    reward_weight: float,
    entropy_weight: float,
) -> Float[Tensor, " n"]:
    """Return what the learning rule adds to `log_p`, log p(y | s, a) of each caption.

    Where s was set to α the gradient of the first term is Σ_i α_i ∂log α_i = 0, as it should be.
    """
    places = (glimpses.selected.detach() * glimpses.log_weights).sum(-1)
    log_p_places = (places * real).sum(-1)  # log p(s | a)
    entropy = -((glimpses.weights * glimpses.log_weights).sum(-1) * real).sum(-1)  # H[s]
    reward = (log_p - baseline).detach()
    gradient = reward * (log_p_places - log_p_places.detach())
    return reward_weight * gradient + entropy_weight * entropy  # Eq. 3.7


class ShowAttendTell(RecurrentCaptioner[Annotations]):
    """An LSTM that looks at one place of a feature map, or at all of them a little, every word."""

    def __init__(
        self,
        shape: Shape,
        *,
        word_width: Count = 512,
        width: Count = 1800,
        attention_width: Count = 512,
        attention: Literal["soft", "hard"] = "soft",
        selector: bool = True,
        penalty: Weight = 1.0,
        reward_weight: Weight = 0.1,
        entropy_weight: Weight = 0.002,
        expected_rate: Rate = 0.5,
        decoding: Literal["expected", "sampled"] = "expected",
        dropout: Rate = 0.5,
    ) -> None:
        """Build the LSTM and its attention.

        `penalty` is for soft attention, the two weights, `expected_rate` and `decoding` are for
        hard attention. Raises InputError for sets of regions: attention is over a feature map.
        """
        require_grid(shape.grid, owner="captioner 'show_attend_tell'")
        super().__init__(
            shape,
            word_width=word_width,
            dropout=dropout,
        )
        self.hard, self.penalty = attention == "hard", penalty
        self.reward_weight, self.entropy_weight = reward_weight, entropy_weight
        self.expected_rate = expected_rate
        self.select = sampled if self.hard and decoding == "sampled" else expected
        self.attention = AdditiveAttention(
            feature_width=shape.feature_width, hidden_width=width, width=attention_width
        )
        self.selector = nn.Linear(width, 1) if selector else None
        self.initial_hidden = _initial(shape.feature_width, width)
        self.initial_cell = _initial(shape.feature_width, width)
        self.from_words = nn.Linear(word_width, 4 * width)
        self.from_state = nn.Linear(width + shape.feature_width, 4 * width, bias=False)
        self.deep = nn.Linear(width + shape.feature_width, word_width)
        self.output = nn.Linear(word_width, shape.vocabulary_size)
        if self.hard:
            self.baseline: Tensor
            self.register_buffer("baseline", torch.zeros(()))
        self.initialise()

    def loss(
        self,
        regions: Regions,
        tokens: Int[Tensor, "b c t"],
        targets: Int[Tensor, "b c t"],
        criterion: Criterion,
    ) -> Float[Tensor, ""]:
        """Return L_d, or what has the gradient of the hard learning rule; both a word's mean."""
        images, captions = tokens.shape[:2]
        select: Select = expected
        if self.hard:
            select = half_and_half(images, captions, self.expected_rate, tokens.device)
        words = self.embed(tokens.flatten(0, 1))
        start = self.start(self.encode(regions), captions)
        read, glimpses, _ = self.look(words, start, select)
        logits = self.predict(words, read)
        rows = targets.flatten(0, 1)
        real = rows != self.pad
        if self.hard:
            added = -self._rule(logits, glimpses, rows)
        else:
            mask = regions.mask.repeat_interleave(captions, 0)
            written = real.any(-1)  # Missing captions have no words that could look anywhere.
            added = self.penalty * doubly_stochastic(glimpses.weights, real, mask) * written
        own = criterion(logits.unflatten(0, (images, captions)), targets)
        return own + added.sum() / real.sum().clamp_min(1)

    def _rule(
        self, logits: Float[Tensor, "n t v"], glimpses: Glimpses, targets: Int[Tensor, "n t"]
    ) -> Float[Tensor, " n"]:
        """Return what the learning rule adds, and move the baseline."""
        real = targets != self.pad
        log_p = -functional.cross_entropy(
            logits.flatten(0, 1).float(),
            targets.flatten(),
            ignore_index=self.pad,
            reduction="none",
        )
        log_p = log_p.unflatten(0, targets.shape).sum(-1)
        added = learning_rule(
            log_p,
            glimpses,
            real,
            baseline=self.baseline,
            reward_weight=self.reward_weight,
            entropy_weight=self.entropy_weight,
        )
        if self.training:
            mean = log_p.detach().sum() / real.any(-1).sum().clamp_min(1)
            self.baseline.lerp_(mean.to(self.baseline.dtype), 0.1)
        return added

    def encode(self, regions: Regions) -> Annotations:
        """Return the annotation vectors, projected for attention, and their mean."""
        return Annotations.of(regions, self.attention)

    def start(self, memory: Annotations, beams: int) -> RecurrentState[Annotations]:
        """Return h_0 and c_0, `beams` rows an image."""
        rows = (self.initial_hidden(memory.mean), self.initial_cell(memory.mean))
        return RecurrentState(memory, tuple(row.repeat_interleave(beams, 0) for row in rows))

    def step(
        self, tokens: Int[Tensor, " n"], state: RecurrentState[Annotations]
    ) -> tuple[Float[Tensor, "n v"], RecurrentState[Annotations]]:
        """Return the logits that follow `tokens`; `decoding` says where these look."""
        words = self.embed(tokens.unsqueeze(1))
        read, _, state = self.look(words, state, self.select)
        return self.predict(words, read).squeeze(1), state

    def unroll(
        self, words: Float[Tensor, "n t m"], state: RecurrentState[Annotations]
    ) -> tuple[Float[Tensor, "n t i"], RecurrentState[Annotations]]:
        """Return h_t and ẑ_t of each step under expected attention, and the state after them."""
        read, _, state = self.look(words, state, expected)
        return read, state

    def look(
        self, words: Float[Tensor, "n t m"], state: RecurrentState[Annotations], select: Select
    ) -> tuple[Float[Tensor, "n t i"], Glimpses, RecurrentState[Annotations]]:
        """Return h_t and ẑ_t of each step side by side, where they looked, and the last state."""
        memory, (hidden, cell) = state.memory, state.rows
        read, looks = [], []
        for gates in self.from_words(words).unbind(1):
            weights, log_weights = self.attention(memory.keys, hidden, memory.mask)
            chosen = select(weights)
            context = pool(chosen, memory.features)  # Eq. 3.1, 3.4, 3.8
            if self.selector is not None:
                context = self.selector(hidden).sigmoid() * context  # β
            gates = gates + self.from_state(torch.cat([hidden, context], -1))
            hidden, cell = lstm(gates, cell)
            read.append(torch.cat([hidden, context], -1))
            looks.append((weights, log_weights, chosen))
        glimpses = Glimpses(*(torch.stack(steps, 1) for steps in zip(*looks, strict=True)))
        return torch.stack(read, 1), glimpses, state.after(hidden, cell)

    def predict(
        self, words: Float[Tensor, "n t m"], read: Float[Tensor, "n t i"]
    ) -> Float[Tensor, "n t v"]:
        """Return the logits of the deep output layer."""
        return self.output((words + self.deep(self.dropout(read))).tanh())  # Eq. 3.2


def _initial(feature_width: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(feature_width, feature_width),
        nn.ReLU(),
        nn.Linear(feature_width, width),
        nn.Tanh(),
    )
