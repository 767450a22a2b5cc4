"""ZoDIAC: Zoneup Dropout Injection Attention Calculation (arXiv 2206.14263), section III.

    G(x)     = GELU(x)                                                                    (1)
    RA_map   = Softmax(G(G(Q_1) G(K^T) / sqrt(d_k)))                                      (2)
    RA       = D_δZ(RA_map G(V))                                                          (3)
    IV_map   = G(G(Q_2) G(V^T) / sqrt(d_v))                                               (4)
    IV_pool  = IV_map ⊙ mask                                                              (5)
    RAP      = Σ IV_map / N          without a mask                                       (6)
    RAP      = Σ IV_pool / Σ mask    with one                                             (7)
    IV       = ζ ⊕ φ(RAP)                                                                 (8)
    ZoDIAC   = RA ⊙ IV                                                                    (9)
    x_(g)    = W_x(G(x))             for x = Q_1, Q_2, K, V                              (10)
    Z_i      = ZoDIAC(Q_1(g), Q_2(g), K_(g), V_(g))                                      (11)
    ZMHA     = W_o [Z_1, ..., Z_h]                                                       (12)

    symbol          argument
    Q_1, Q_2, K, V  query, second, key, value
    mask            allowed, real
    δ_Z             dropout (its own, not the model's)
    ζ, φ            zoneup, gate
    RAP's Σ         pool: what is summed over
    W_x, W_o        ZodiacAttention.query, .second, .key, .value, .output

Departures:
- `pool="causal"`, the default in decoders: row t is scaled by the mean over rows up to t. Eq. 7
  over the whole target (`head`) lets a word see later ones through the mean, and makes training and
  word-by-word decoding two functions. The last row of `causal` is `head`.
- `pool="sample"` also takes the mean over heads, `"batch"` over all rows; `"released"` is what the
  authors' code computes, one number for the batch that is divided by the mask before it is
  broadcast, thus scaled by heads and rows. With the last two a row depends on its batch.
- Rows of padding do not count in the mean (but in `released`), or it would depend on the batch.
- The mask of eq. 2 comes after the outer GELU, for GELU of a large negative number is 0.
- `gate="identity"` (φ(x) = x) and `"off"` (IV = 1): two readings of Table II's missing gate.
- With a cache, means go over the rows that have been seen; former rows stay as they were scaled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional

from regionprep.errors import InputError, unknown
from regionprep.models.attention.mechanism import (
    Cache,
    KeysAndValues,
    Layout,
    Mechanism,
    allowed,
    share,
)
from regionprep.models.options import Rate

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": torch.positive,
    "off": torch.ones_like,
}
POOLS = ("causal", "head", "sample", "batch", "released")


def refined_attention(
    query: Float[Tensor, "b h q d"],
    key: Float[Tensor, "b h k d"],
    value: Float[Tensor, "b h k d"],
    *,
    seen: Bool[Tensor, "#b 1 #q k"] | None = None,
    activate: Callable[[Tensor], Tensor] = functional.gelu,
) -> Float[Tensor, "b h q d"]:
    """Return RA before its dropout, of G(Q_1), G(K) and G(V); 0 for a query that sees nothing."""
    scores = activate(query / math.sqrt(query.shape[-1]) @ key.mT)  # Eq. 2, inside the softmax
    if seen is None:
        return scores.softmax(-1) @ value  # Eq. 2, 3
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    heads = scores.softmax(-1) @ value  # Eq. 2, 3
    return heads.masked_fill(~seen.any(-1, keepdim=True), 0)


def intensity_sums(
    second: Float[Tensor, "b h q d"],
    value: Float[Tensor, "b h k d"],
    *,
    seen: Bool[Tensor, "#b 1 #q k"] | None = None,
    activate: Callable[[Tensor], Tensor] = functional.gelu,
) -> Float[Tensor, "b h q"]:
    """Return the sum of each row of IV_pool, of G(Q_2) and G(V)."""
    intensities = activate(second / math.sqrt(second.shape[-1]) @ value.mT)  # Eq. 4
    if seen is not None:
        intensities = intensities * seen  # Eq. 5
    return intensities.sum(-1)


def pooled(
    sums: Float[Tensor, "n h q"], counts: Float[Tensor, "#n 1 #q"], pool: str
) -> Float[Tensor, "#n #h #q"]:
    """Return RAP (eq. 6, 7) over what `pool` says, from the sums and entries of each row.

    Where there is no entry it is 0: a row that looks at nothing is 0 whatever its intensity.
    """
    heads = sums.shape[1]
    if pool == "causal":
        return sums.cumsum(-1) / counts.cumsum(-1).clamp_min(1)
    if pool == "head":
        return sums.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp_min(1)
    if pool == "sample":
        whole = sums.sum((1, 2), keepdim=True)
        return whole / (heads * counts.sum((1, 2), keepdim=True)).clamp_min(1)
    return (sums.sum() / (heads * counts.sum()).clamp_min(1)).reshape(1, 1, 1)


def entries(
    seen: Bool[Tensor, "#b 1 #q k"] | None, sums: Float[Tensor, "b h q"], keys: int
) -> Float[Tensor, "b 1 q"]:
    """Return how many entries of IV_map went into each row of `sums`."""
    whole = sums.new_full((1, 1, 1), keys)
    counts = whole if seen is None else seen.sum(-1).to(sums.dtype)
    return counts.expand(len(sums), 1, sums.shape[-1])


class ZodiacAttention(Mechanism):
    """ZoDIAC multi-head attention: refined attention, scaled by a learned intensity."""

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        gate: str = "sigmoid",
        zoneup: float = 1.0,
        gelu: bool = True,
        dropout: Rate = 0.2,
        pool: str = "head",
    ) -> None:
        super().__init__(width=width, heads=heads)
        for kind, name, known in (("gate", gate, GATES), ("pool", pool, POOLS)):
            if name not in known:
                raise InputError(unknown(f"{kind} of attention 'zodiac'", name, known))
        self.gate, self.zoneup, self.pool = gate, zoneup, pool
        self.activate = functional.gelu if gelu else torch.positive
        self.query = nn.Linear(width, width)
        if gate != "off":
            self.second = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(width, width)

    @classmethod
    def defaults(cls, *, dropout: float, decoder: bool) -> dict[str, Any]:
        """Return the pool of either side; the model's dropout is not this mechanism's."""
        del dropout
        return {"pool": "causal" if decoder else "head"}

    def forward(
        self,
        query: Float[Tensor, "n q m"],
        key: Float[Tensor, "b k m"],
        value: Float[Tensor, "b k m"],
        *,
        mask: Bool[Tensor, "b k"] | Bool[Tensor, "n q k"] | None = None,
        query_mask: Bool[Tensor, "n q"] | None = None,
        causal: bool = False,
        layout: Layout | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "n q m"]:
        """Return what each query takes from the values; see Mechanism."""
        refined = self.activate(query)

        def project() -> KeysAndValues:
            # The same tensor often comes as all three, and GELU is no small part of the cost.
            refined_key = refined if key is query else self.activate(key)
            refined_value = refined_key if value is key else self.activate(value)
            return self._head(self.key, refined_key), self._head(self.value, refined_value)

        together = share(refined, len(key))
        keys, values = cache.keep(project) if cache else project()
        seen = allowed(
            mask,
            causal=causal,
            images=len(key),
            queries=query.shape[1],
            keys=keys.shape[2],
            device=query.device,
        )
        heads = refined_attention(
            self._head(self.query, together), keys, values, seen=seen, activate=self.activate
        )
        attention = self.dropout(by_row(heads, len(query)))  # Eq. 3
        if self.gate != "off":
            sums = intensity_sums(
                self._head(self.second, together), values, seen=seen, activate=self.activate
            )
            counts = entries(seen, sums, keys.shape[2])
            if self.pool == "released":
                counts = counts * _released_share(
                    seen, sums, len(query), causal=causal, cache=cache
                )
            sums, counts = by_row(sums, len(query)), by_row(counts, len(query))
            attention = attention * self._intensity(sums, counts, query_mask, cache)  # Eq. 9
        return self.output(attention.transpose(1, 2).flatten(2))  # Eq. 12

    def _head(
        self, project: nn.Module, refined: Float[Tensor, "b k m"]
    ) -> Float[Tensor, "b h k d"]:
        """Return G(x_(g)): both GELU stages, around the projection."""
        return self.activate(self.split(project(refined)))  # Eq. 10, and G of eq. 2-4

    def _intensity(
        self,
        sums: Float[Tensor, "n h q"],
        counts: Float[Tensor, "n 1 q"],
        real: Bool[Tensor, "n q"] | None,
        cache: Cache | None,
    ) -> Float[Tensor, "#n #h #q 1"]:
        """Return IV; rows that are not `real` do not count, and those of the steps before do."""
        queries = sums.shape[-1]
        if real is not None and self.pool != "released":
            sums, counts = sums * real[:, None], counts * real[:, None]
        if cache is not None:
            if cache.running:
                sums = torch.cat([cache.running[0], sums], -1)
                counts = torch.cat([cache.running[1], counts], -1)
            cache.running = sums.sum(-1, keepdim=True), counts.sum(-1, keepdim=True)
        mean = pooled(sums, counts, self.pool)[..., -queries:]
        return (self.zoneup + GATES[self.gate](mean)).unsqueeze(-1)  # Eq. 8


def by_row(tensor: Float[Tensor, "b h cq *d"], rows: int) -> Float[Tensor, "n h q *d"]:
    """Return one row for each sequence of queries that `share` put together."""
    return tensor.unflatten(2, (rows // len(tensor), -1)).transpose(1, 2).flatten(0, 1)


def _released_share(
    seen: Bool[Tensor, "#b 1 #q k"] | None,
    sums: Float[Tensor, "b h q"],
    rows: int,
    *,
    causal: bool,
    cache: Cache | None,
) -> float:
    """Return which share of the entries the release divides by.

    It sums its mask before that is broadcast over heads, over queries (a memory's mask) and over
    rows (a causal mask without padding); without a mask it takes the mean.
    """
    images, heads, queries = sums.shape
    if seen is None and not causal:
        return 1.0
    images_of_mask, _, queries_of_mask, _ = (1, 1, 1, 1) if seen is None else seen.shape
    if causal or queries_of_mask > 1:
        return images_of_mask / images / heads
    if cache is not None and cache.running:
        return 0.0  # One row of the mask serves all steps: it was counted at the first.
    return rows / images / (heads * max(queries, 1))
