"""A model that flatout trained, as a model of transformers. It needs flatout installed.

    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

Generation computes the whole text for each token. `flatout generate` keeps the state of the model.
"""

from __future__ import annotations

from torch.nn import functional
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from flatout.config.registry import MODELS
from flatout.models.transformer import Rotary
from flatout.ops import Ops, attention, scan


class FlatoutConfig(PretrainedConfig):
    """The configuration: `model` has flatout's own keys, which its documentation explains."""

    model_type = "flatout"

    def __init__(self, model: dict | None = None, **others) -> None:
        self.model = model or {}
        super().__init__(**others)


class FlatoutForCausalLM(PreTrainedModel, GenerationMixin):
    """A model of flatout. Its weights keep their names."""

    config_class = FlatoutConfig
    _no_split_modules = ("Block",)

    def __init__(self, config: FlatoutConfig) -> None:
        super().__init__(config)
        keys = dict(config.model)
        model_class = MODELS.get(keys.pop("kind"))
        ops = Ops.plain(attention=attention.fused, scan=scan.chunked)
        model = model_class(model_class.check(keys, seq_len=1), ops)
        for name, module in model.named_children():
            setattr(self, name, module)
        self.__dict__["flatout_model"] = model  # not a submodule: its parts are
        self.post_init()

    def _init_weights(self, module):
        """Compute what no file of weights contains."""
        if isinstance(module, Rotary):
            module.cos, module.sin = module._tables(module.cos.device)

    def get_input_embeddings(self):
        """Return the token embedding."""
        return self.token_embedding

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **ignored):
        """Return the whole text: no state is kept between tokens."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(self, input_ids, attention_mask=None, labels=None, **ignored):
        """Return the logits at every position, and with labels the mean loss of the next tokens.

        Padding is not supported: every row has as many tokens.
        """
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("This model takes no padding: pass rows of equal length.")
        logits_BTV = self.flatout_model.logits(input_ids)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits_BTV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits_BTV)
