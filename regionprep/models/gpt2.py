"""The captioner of "VisualGPT" (arXiv 2102.10407): a transformer's encoder, and GPT-2 as decoder.

Section 4.2 and figure 3: an attention over the encoder, randomly initialised, stands in every block
of GPT-2 between its self-attention and its MLP. In the terms of `transformers`, for block l:

    H = X + attn_l(ln_1(X))             left to right
    A = connection_l(H, memory)         any of the registry; `srau` is the paper's, eq. 4-5
    X = A + mlp_l(ln_2(A))
    logits = wte^T ln_f(X)              tied to the input embeddings

    symbol          argument
    X, H            hidden
    I               memory, what GPT2.encode makes of the regions
    K, M            encoder_layers, decoder_layers
    D, S            width (the paper's "hidden size D")

The blocks are those of `transformers`, whose weights they hold under their own names. Only the
arithmetic of self-attention is ours (`attend`), since theirs knows neither our cache nor our masks.

What the paper leaves open, or what is done differently:
- The encoder normalises last, as eq. 3 has it; its inner width is unstated: 2048, as in "Attention
  Is All You Need" and in M^2. Features are projected as in the other transformers here. Section 4.2
  feeds it "the spatial location", section 7.1 feature vectors: it gets the features.
- What stands between the blocks of GPT-2 normalises first, as they do.
- Rows for <pad>, <bos> and so on, which GPT-2 lacks, are drawn at random like its own.
- GELU by tanh goes through torch's fused kernel, the same function as GPT-2's `gelu_new`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from regionprep.errors import InputError, MissingError
from regionprep.models.attention import WordCache
from regionprep.models.attention.dot import dot
from regionprep.models.attention.mechanism import KeysAndValues, allowed
from regionprep.models.captioner import Captioner, Regions, Shape
from regionprep.models.connections import Connection, Memory
from regionprep.models.encoder import Encoder, Sizes
from regionprep.models.options import Count, Rate
from regionprep.models.transformer import LayerCache, TransformerState

GELUS = ("gelu_new", "gelu_pytorch_tanh")


def attend(
    attention: Any,  # noqa: ANN401 - a GPT2Attention
    hidden: Float[Tensor, "n t m"],
    *,
    heads: int,
    words: Bool[Tensor, "n t"] | None = None,
    cache: WordCache | None = None,
) -> Float[Tensor, "n t m"]:
    """Return what words take from those before them, by the weights of a `GPT2Attention`."""

    def project() -> KeysAndValues:
        return key, value

    query, key, value = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in attention.c_attn(hidden).chunk(3, -1)
    )
    keys, values = cache.keep(project) if cache else project()
    seen = allowed(
        words,
        causal=True,
        images=len(hidden),
        queries=hidden.shape[1],
        keys=keys.shape[2],
        device=hidden.device,
    )
    rate = attention.attn_dropout.p if attention.training else 0.0
    found = dot(query, keys, values, allowed=seen, dropout=rate)
    return attention.resid_dropout(attention.c_proj(found.transpose(1, 2).flatten(2)))


class GPT2(Captioner[Memory, TransformerState]):
    """An encoder over regions and GPT-2 over words."""

    def __init__(
        self,
        shape: Shape,
        *,
        encoder_layers: Count = 3,
        decoder_layers: Count = 12,
        width: Count = 768,
        heads: Count = 12,
        feed_forward: Count = 2048,
        positions: Count = 1024,
        dropout: Rate = 0.1,
        norm: Literal["first", "last"] = "last",
        attention: str | dict[str, Any] = "dot",
        cross_attention: str | dict[str, Any] = "dot",
        connection: str | dict[str, Any] = "srau",
        pretrained: str | None = None,
    ) -> None:
        """Build the encoder and the decoder, both with random weights.

        `attention`, `feed_forward` and `norm` are the encoder's; GPT-2's MLP has four times the
        width. `pretrained` is GPT-2's name on the Hugging Face hub or a local folder, which
        `warm_start` reads. Raises MissingError without `transformers`, InputError for sizes, names
        or options that do not fit.
        """
        super().__init__(shape)
        if shape.max_length + 1 > positions:
            raise InputError(
                f"captions of {shape.max_length} words do not fit into {positions} positions",
                mend="Make the vocabulary with a smaller --max-length, or give more positions.",
            )
        self.heads, self.pretrained = heads, pretrained
        sizes = Sizes(
            width=width,
            heads=heads,
            feed_forward=feed_forward,
            dropout=dropout,
            norm_first=norm == "first",
            grid=shape.grid,
            layers=encoder_layers,
        )
        self.encoder = Encoder(sizes, feature_width=shape.feature_width, attention=attention)
        between = dataclasses.replace(sizes, norm_first=True)
        self.connections = nn.ModuleList(
            between.connection(connection, cross_attention) for _ in range(decoder_layers)
        )
        self.initialise()  # GPT-2 comes initialised its own way.
        self.decoder = _gpt2(
            vocab_size=shape.vocabulary_size,
            n_positions=positions,
            n_embd=width,
            n_layer=decoder_layers,
            n_head=heads,
            bos_token_id=shape.bos,
            eos_token_id=shape.eos,
            dropout=dropout,
        )

    def warm_start(self) -> None:
        """Take over the weights of the pretrained GPT-2, if there is to be one.

        Raises MissingError where it cannot be had, InputError where its sizes or its vocabulary
        are not this model's.
        """
        if self.pretrained is None:
            return
        _require_own_tokens(self.pad, where=self.pretrained)
        source = _load(self.pretrained)
        _require_same(self.decoder.config, source.config, where=self.pretrained)
        _require_own_tokens(self.pad, source.config.vocab_size, where=self.pretrained)
        with torch.no_grad():
            for name, weight in self.decoder.named_parameters():
                taken = source.get_parameter(name)
                weight[: len(taken)] = taken  # All but the marks' rows of the embeddings.

    def forward(self, regions: Regions, tokens: Int[Tensor, "b c t"]) -> Float[Tensor, "b c t v"]:
        """Return the logits of the token that follows each token; c captions share an image."""
        rows = tokens.flatten(0, 1)
        logits = self._decode(rows, self.encode(regions), words=rows != self.pad)
        return logits.unflatten(0, tokens.shape[:2])

    def encode(self, regions: Regions) -> Memory:
        """Return what the layers of the encoder make of the regions."""
        return self.encoder(regions)

    def start(self, memory: Memory, beams: int) -> TransformerState:
        """Return the state before the first word; its rows come with the first tokens."""
        del beams
        caches = [
            LayerCache(WordCache(self.max_length + 1), connection.caches(memory))
            for connection in cast(list[Connection], self.connections)
        ]
        return TransformerState(memory, caches)

    def step(
        self, tokens: Int[Tensor, " n"], state: TransformerState
    ) -> tuple[Float[Tensor, "n v"], TransformerState]:
        """Return the logits that follow `tokens`, and the state after them."""
        logits = self._decode(
            tokens.unsqueeze(1), state.memory, start=state.position, caches=state.caches
        )
        state.position += 1
        return logits.squeeze(1), state

    def _decode(
        self,
        tokens: Int[Tensor, "n t"],
        memory: Memory,
        *,
        start: int = 0,
        words: Bool[Tensor, "n t"] | None = None,
        caches: list[LayerCache] | None = None,
    ) -> Float[Tensor, "n t v"]:
        """Return the logits that follow tokens, of which the first stands at place `start`."""
        hidden = self._embed(tokens, start)
        kept: Sequence[LayerCache | None] = caches or [None] * len(self.connections)
        layers = zip(self.decoder.h, self.connections, kept, strict=True)
        for block, connection, cache in layers:
            hidden = hidden + attend(
                block.attn,
                block.ln_1(hidden),
                heads=self.heads,
                words=words,
                cache=cache.words if cache else None,
            )
            hidden = connection(hidden, memory, words=words, caches=cache.memory if cache else None)
            hidden = hidden + block.mlp(block.ln_2(hidden))
        return functional.linear(self.decoder.ln_f(hidden), self.decoder.wte.weight)

    def _embed(self, tokens: Int[Tensor, "n t"], start: int) -> Float[Tensor, "n t m"]:
        end = start + tokens.shape[1]
        if end > self.max_length + 1:
            raise InputError(
                f"a caption of {end - 1} words, and this model has room for {self.max_length}",
                mend="Shorten the captions, or build the model with a larger max_length.",
            )
        places = self.decoder.wpe.weight[start:end]
        return self.decoder.drop(self.decoder.wte(tokens) + places)


def _transformers() -> Any:  # noqa: ANN401 - a module that may not be there, and is slow to import
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingError(
            "the package transformers, which has GPT-2, is not installed",
            mend="Install it: pip install 'regionprep[gpt2]'",
        ) from error


def _gpt2(*, dropout: float, **sizes: int) -> Any:  # noqa: ANN401 - a GPT2Model
    """Return a GPT-2 without the output layer, its weights drawn from torch's random state."""
    library = _transformers()
    config = library.GPT2Config(
        **sizes,
        activation_function="gelu_pytorch_tanh",
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
    )
    return library.GPT2Model(config)


def _load(name: str) -> Any:  # noqa: ANN401 - a GPT2Model
    """Return a pretrained GPT-2 from the hub, its cache or a folder.

    Raises MissingError where there is none, or where its file is torn.
    """
    try:
        return _transformers().GPT2Model.from_pretrained(name)
    except (OSError, ValueError, SafetensorError) as error:
        summary = str(error).partition("\n")[0]
        raise MissingError(
            f"the pretrained weights '{name}' cannot be had: {summary}",
            mend="Give the captioner's argument `pretrained` the name of a GPT-2 on the Hugging "
            "Face hub, or a folder with its config.json and model.safetensors, which can be "
            "fetched where there is a network; null, as in the presets, draws random weights.",
        ) from error


def _require_same(own: Any, theirs: Any, *, where: str) -> None:  # noqa: ANN401 - GPT2Configs
    """Raise InputError where pretrained weights are of other sizes, or of another model."""
    sizes = {
        "width": "n_embd",
        "decoder_layers": "n_layer",
        "heads": "n_head",
        "positions": "n_positions",
    }
    differing = [
        f"{argument} {getattr(theirs, size)} there and {getattr(own, size)} here"
        for argument, size in sizes.items()
        if getattr(theirs, size) != getattr(own, size)
    ]
    if differing:
        raise InputError(
            f"the pretrained GPT-2 has other sizes: {', '.join(differing)}",
            where=where,
            mend="Give the captioner the pretrained model's, or null for `pretrained`.",
        )
    if (
        theirs.n_inner not in (None, 4 * theirs.n_embd)
        or theirs.activation_function not in GELUS
        or theirs.scale_attn_by_inverse_layer_idx
        or not theirs.scale_attn_weights
    ):
        raise InputError("a variant of GPT-2 that computes something else", where=where)


def _require_own_tokens(marks_from: int, theirs: int | None = None, *, where: str) -> None:
    """Raise InputError unless the ids are the pretrained model's tokens, `theirs`, then marks.

    What is known before its weights are had is that words have their marks first.
    """
    if marks_from and theirs in (None, marks_from):
        return
    told = f"of {marks_from} others" if marks_from else "of words"
    raise InputError(
        f"the pretrained GPT-2 has {theirs or 'its own'} tokens, and the vocabulary is {told}",
        where=where,
        mend=f"Make the vocabulary of its own tokens: prep vocab --bpe {where}",
    )
