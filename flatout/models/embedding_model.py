"""Base class of models with a token embedding, a final norm and an output weight.

Letters: B rows, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from flatout.models.language_model import LanguageModel, ParameterKind, kind_by_name
from flatout.models.layers import Embedding, Linear


class EmbeddingModel(LanguageModel):
    """A model with a token embedding, a final norm, and a tied or separate output weight.

    A subclass creates them in its constructor, in the order in which their weights are drawn.
    """

    token_embedding: Embedding
    final_norm: nn.Module
    unembedding: Linear | None
    """The separate output weight; None when the embedding is the output weight too."""
    logit_scale: float = 1.0
    """Factor of the logits."""

    def head(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalised hidden states and the output weight.

        Shapes:  hidden_BTD (B, T, D).
        Returns: (hidden_BTD, weight_VD).
        """
        output = self.token_embedding if self.unembedding is None else self.unembedding
        hidden_BTD = self.final_norm(hidden_BTD)
        if self.logit_scale != 1:
            hidden_BTD = hidden_BTD * self.logit_scale
        return hidden_BTD, output.weight

    def parameter_kinds(self) -> dict[str, ParameterKind]:
        """Return the kind of every parameter by its name; a tied head is an embedding."""
        return {name: kind_by_name(name, parameter) for name, parameter in self.named_parameters()}

    def stacked_rows(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts of the parts of each matrix that stacks several, by name."""
        return {
            name: rows
            for name, _ in self.named_parameters()
            for ending, rows in self.stacked_by_ending().items()
            if name.endswith(ending)
        }

    @abstractmethod
    def stacked_by_ending(self) -> dict[str, tuple[int, ...]]:
        """Return the row counts for `stacked_rows`, by the ending of the parameter name."""

    def matmul_flops(self) -> int:
        """Return the training FLOPs per token of the products with hidden matrices and the head.

        Each weight of a matrix product costs 2 FLOPs forward and 4 backward: 6 N in all, also for a
        tied head. A frozen weight needs no gradient and costs 4. The embedding look-up is not a
        product.
        """
        kinds = self.parameter_kinds()
        hidden = [p for name, p in self.named_parameters() if kinds[name] == "hidden"]
        products = [*hidden, self.token_embedding.weight]
        return sum((6 if p.requires_grad else 4) * p.numel() for p in products)

    def new_unembedding(self, *, tied: bool) -> Linear | None:
        """Return a separate output weight, or None when it is tied to the embedding."""
        vocab_size, width = self.token_embedding.weight.shape
        return None if tied else Linear(width, vocab_size, bias=False, ops=self.ops)
