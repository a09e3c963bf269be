"""The sections of a run's config: frozen pydantic models whose field docstrings are the help."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flatout.errors import ConfigError
from flatout.storage.json_io import JsonObject, is_finite

Rule: TypeAlias = tuple[Callable[[Any], Any], str, str]
"""A contradiction: a function that finds it in a section, what happened, and the fix.

In both texts, {0} is the section and {1} what was found.
"""


def _split(names: Any) -> Any:
    """Return names as a list: text has commas between them, and none stands for an empty list."""
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",")]
    if isinstance(names, list | tuple):
        return [name for name in names if name not in ("", "none")]
    return () if names is None else names


Count: TypeAlias = Annotated[int, Field(ge=1, le=10**30)]
Epochs: TypeAlias = Annotated[float, Field(gt=0, le=1e9)]
Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]
Names: TypeAlias = Annotated[
    tuple[str, ...],
    BeforeValidator(_split),
    AfterValidator(lambda names: tuple(dict.fromkeys(names))),
]
"""Names, each once."""


class _Switch:
    """True or false where neither is valid: not a number, text or list, but shown as it was."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Section(BaseModel):
    """Base class of all config sections: frozen, no unknown keys, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()
    """Contradictions between the keys of the section."""

    @model_validator(mode="after")
    def _obeys_rules(self) -> Self:
        for found_in, what, fix in self.rules:
            if found := found_in(self):
                raise ConfigError(what.format(self, found), fix=fix.format(self, found))
        return self

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[info.field_name or ""]
        is_other = isinstance(value, bool) and "bool" not in str(field.annotation)
        return _Switch(str(value)) if is_other else value


class ModelConfig(Section):
    """Which model to train. The model checks its own keys when the run is built."""

    model_config = ConfigDict(extra="allow")

    kind: str = "transformer"
    """A file in flatout/models, or package.module:MyModel."""
    vocab_size: Count | None = None
    """Rows of the embedding. None means the vocabulary size of the dataset."""

    def own(self) -> JsonObject:
        """Return the keys of the chosen model."""
        return dict(self.model_extra or {})


class DataConfig(Section):
    """The dataset to train on, and how it is cut into sequences."""

    path: str | None = None
    """Directory that `flatout prepare` wrote. Set path or mix."""
    mix: dict[str, float] | None = None
    """Several datasets prepared with one tokenizer, and the weight of each: {data/book: 3,
    data/code: 1} reads three sequences of the first for each sequence of the second. At any step of
    the run the proportion is exact to less than one sequence. Weights are rounded to multiples of
    1/65,536, which is the smallest share. Each dataset has its own epochs and its own score, and
    the validation loss is the mean of the scores with these weights."""
    tokenizer: str | None = None
    """Tokenizer to prepare the text with, as `--tokenizer` of `flatout prepare` takes it. `prepare
    --recipe` reads it. Training uses that of the dataset."""
    seq_len: Count = 256
    """Tokens per training sequence (T)."""
    prefetch: int = Field(4, ge=1, le=1000)
    """Optimizer steps that the data loader reads ahead."""
    document_mask: bool = False
    """Restrict attention to the document that a token belongs to."""

    @field_validator("mix", mode="before")
    @classmethod
    def _check_mix(cls, mix: Any) -> Any:
        fix = "Write data.mix='{data/book: 3, data/code: 1}', with a space after each colon."
        if mix is None:
            return None
        if not isinstance(mix, Mapping) or not mix:
            raise ConfigError(f"data.mix={mix!r} is not a mapping of datasets to weights.", fix=fix)
        for path, weight in mix.items():
            if not is_finite(weight) or weight <= 0:
                raise ConfigError(
                    f"data.mix gives {path!r} the weight {weight!r}, which is not a number above "
                    "0.",
                    fix=fix,
                )
        return {str(path): weight for path, weight in mix.items()}


class BatchConfig(Section):
    """How many tokens each optimizer step sees. Set two of the three keys. The third follows."""

    tokens_per_step: Count | None = None
    """Tokens per optimizer step, summed over ranks and micro-batches."""
    rows_per_device: Count | Literal["auto"] = "auto"
    """Sequences per micro-batch on each device. auto takes what a device uses well and a GPU has
    memory for, by estimate, and half of it when a step runs out of memory."""
    accumulate: Count | None = None
    """Micro-batches per optimizer step."""
    by_tokens: bool = False
    """With the speedup length-buckets: mix documents of all lengths in a step, and give a
    micro-batch as many of them as fit in rows_per_device x data.seq_len tokens, padded to about
    the longest of them. The other keys then count documents of at most data.seq_len tokens."""

    @property
    def chooses_rows(self) -> bool:
        """Whether flatout chooses the rows of a micro-batch."""
        return self.rows_per_device == "auto" and self.accumulate is None


class OptimConfig(Section):
    """The optimizer."""

    rules = (
        (
            lambda optim: not all(0 <= beta < 1 for beta in optim.betas) and [*optim.betas],
            "optim.betas={1} must be in [0, 1).",
            "Set optim.betas=[0.9,0.95].",
        ),
    )

    kind: str = "adamw"
    """A file in flatout/optim, or package.module:my_optimizer."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates for the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the denominator."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, not applied to norms, biases and embeddings."""
    clip: NonNegativeFloat = 1.0
    """Maximum gradient norm. 0 turns clipping off."""
    momentum: Share = 0.95
    """Muon's momentum."""


class ScheduleConfig(Section):
    """The learning rate as a function of the optimizer step."""

    rules = (
        (
            lambda schedule: isinstance(schedule.warmup, float) and schedule.warmup >= 1,
            "schedule.warmup={0.warmup} is neither a number of steps nor a fraction of the run.",
            "Write schedule.warmup={0.warmup:.0f} for steps, or a fraction below 1.",
        ),
    )

    kind: str = "cosine"
    """cosine, linear, wsd (warm-up, stable, decay) or constant."""
    warmup: int | float = Field(0.02, ge=0)
    """Steps of linear warm-up (an int), or a fraction of the run (below 1)."""
    decay: float = Field(0.2, gt=0, le=1)
    """Fraction of the steps after the warm-up over which wsd lowers the rate to min_lr."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the last step."""


class TrainConfig(Section):
    """How long to train, on which device, and in which precision."""

    rules = (
        (
            lambda train: train.watchdog_stop and not train.watchdog_minutes,
            "train.watchdog_stop has no effect: train.watchdog_minutes=0 turns the watchdog off.",
            "Set train.watchdog_minutes=5, or remove train.watchdog_stop.",
        ),
        (
            lambda train: train.patience and train.eval_every == 0 and not train.eval_every_epochs,
            "train.patience={0.patience} counts evaluations during the run, but "
            "train.eval_every=0 means that there are none.",
            "Set train.eval_every or train.eval_every_epochs, or remove train.patience.",
        ),
    )

    steps: Count | None = None
    """Optimizer steps. Set one of steps, tokens and epochs. Without any, the run is one epoch."""
    tokens: Count | None = None
    """Training tokens, rounded up to whole steps."""
    epochs: Epochs | None = None
    """Passes over the training tokens of all datasets, rounded up to whole steps."""
    seed: int = Field(0, ge=0, lt=2**62)
    """Seed of the initial weights, the order of the data and dropout."""
    deterministic: bool = False
    """Use only deterministic operations, and fail on others. Slower on a GPU, and the only way to
    make two runs there, or a run and its resumed copy, bit-identical."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N, or mps, the GPU of a Mac, which is untested."""
    devices: Count | Literal["all"] | None = None
    """Devices of this machine to train on: `flatout train` starts a process for each. A number, or
    all GPUs. On a CPU, a number of processes. None means one, or as many as torchrun starts."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """Precision of the matmuls. Weights and optimizer state stay fp32."""
    eval_every: NonNegativeInt | None = None
    """Steps between evaluations. 0 evaluates once, at the end. None evaluates after every epoch, or
    20 times in a run that is shorter than two or is stated in steps or tokens."""
    eval_every_epochs: Epochs | None = None
    """Epochs between evaluations, in place of eval_every, rounded up to whole steps."""
    eval_tokens: Count | Literal["all"] | None = None
    """Validation tokens per evaluation during the run. The final one always uses all. None means
    all if the interval is stated, or else at most what takes 5% of the run."""
    patience: NonNegativeInt = 0
    """Stop after this many evaluations in a row without a better validation loss. 0 turns this off.
    The learning rate is scheduled for the whole run, so it is still high at an early stop."""
    init_from: str | None = None
    """Where the initial weights come from: a run directory (its best checkpoint), a checkpoint, or
    another tool's model (hf:ORG/NAME, its directory, or a file). Data, schedule, optimizer state
    and step start from the beginning, except for AdamW's moments that another tool saved beside its
    model."""
    sample_every: NonNegativeInt = 0
    """Steps between text samples. 0 samples once, at the end. Weights that are sharded, or in host
    memory, give none."""
    sample_prompt: str = ""
    """Prompt of the samples. Empty starts a new document, or continues the validation text if the
    training text is a single one."""
    max_bad_steps: Count = 10
    """Bad steps in a row that stop the run. A step is bad when its loss or its gradient norm is not
    finite. Its update is skipped, and the run continues with the next step."""
    watchdog_minutes: NonNegativeFloat = 5.0
    """Minutes without a micro-batch or a batch of an evaluation after which the run reports that,
    and writes the stacks of its threads. Compiling, saving and sampling may take four times as
    long. 0 turns this off."""
    watchdog_stop: bool = False
    """End such a run with exit code 75, so that a scheduler starts it again from its last
    checkpoint."""


class LoraConfig(Section):
    """Low-rank adapters: the weights of train.init_from are frozen, and small matrices beside its
    linear layers are trained.
    """

    rules = (
        (
            lambda lora: not lora.targets,
            "lora.targets=[] names no layer.",
            "Set lora.targets=all-linear, or [q,v].",
        ),
        (
            lambda lora: (
                lora.rank is None
                and [
                    name
                    for name, one in type(lora).model_fields.items()
                    if one.default != getattr(lora, name)
                ]
            ),
            "lora.{1[0]} has no effect without lora.rank.",
            "Set lora.rank=8, or remove lora.{1[0]}.",
        ),
    )

    rank: Count | None = None
    """Rank of the adapters, such as 8. None trains all weights. Needs train.init_from."""
    alpha: PositiveFloat | None = None
    """The output of an adapter is multiplied by alpha / rank. None means a factor of 1."""
    dropout: Share = 0.0
    """Share of components dropped from the input of the adapters."""
    targets: Names = ("all-linear",)
    """Layers with adapters: some of q, k, v, o (attention), gate, up, down (MLP), or another linear
    layer of the blocks by its name. All-linear means every one."""

    @property
    def scale(self) -> float:
        """Factor of the adapters' output."""
        return (self.alpha or self.rank or 1) / (self.rank or 1)


UPLOAD_OFF = "none"
"""The value of `checkpoint.upload` that turns off the uploads of a stored run."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and how many are kept."""

    rules = (
        (
            lambda checkpoint: checkpoint.compress and checkpoint.upload is None,
            "checkpoint.compress={0.compress} has no effect without checkpoint.upload.",
            "Set checkpoint.upload=s3://BUCKET/FOLDER, or remove checkpoint.compress.",
        ),
    )

    every_steps: Count | None = None
    """Steps between saves. Set at most one of the three. Without any, every ten minutes."""
    every_minutes: PositiveFloat | None = None
    """Minutes between saves."""
    every_epochs: Epochs | None = None
    """Epochs between saves."""
    keep: Count | Literal["all"] = 2
    """Number of newest checkpoints to keep, or all. The best one is kept in addition. Incomplete
    ones do not count, so the last complete one is never deleted."""
    keep_every: Count | None = None
    """Steps between checkpoints that stay for good: the run also saves at each multiple."""
    best: bool = True
    """Save at each evaluation with a lower loss than all before it. With false, only the intervals
    above and the end of the run save, and the best step may have no checkpoint."""
    upload: str | None = None
    """URL to which checkpoints are copied while training continues, such as s3://BUCKET/runs. A run
    whose directory is gone continues from there. none turns off the uploads of a stored run."""
    compress: Literal["zstd"] | None = None
    """How uploaded checkpoints are compressed."""


class LogConfig(Section):
    """How often metrics are written, and where they go besides metrics.jsonl."""

    rules = (
        (
            lambda log: [name for name in log.observers if ":" not in name],
            "log.observers names {1[0]!r}, which is not an object in a Python module.",
            "Write log.observers=package.module:MyObserver. For tensorboard, wandb and mlflow "
            "set log.to.",
        ),
    )

    every: Count = 10
    """Steps between records in metrics.jsonl."""
    to: Names = ("tensorboard",)
    """Loggers that receive the metrics too: tensorboard, wandb, mlflow, or
    package.module:MyLogger, or none for metrics.jsonl alone. A run continues when one of them
    fails."""
    project: str | None = None
    """Project of W&B, experiment of MLflow. None means the one that WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME states, or else flatout."""
    run_name: str | None = None
    """Name of the run there. None means the name of the run directory."""
    tags: Names = ()
    """Tags of the run there."""
    wandb_mode: Literal["online", "offline"] | None = None
    """offline keeps W&B's files in the run directory, for `wandb sync`. None means what WANDB_MODE
    states, or else online."""
    observers: Names = ()
    """Your own observers, each as package.module:MyObserver. A class is called without
    arguments. They are called as those passed to `flatout.train` are."""


class ParallelConfig(Section):
    """How processes share the work. The product of the sizes is the number of processes."""

    replicate: Count | Literal["auto"] = "auto"
    """Replicas of the model (DDP). auto is the number of processes divided by the other sizes."""
    shard: Count = 1
    """Processes that weights, gradients and optimizer state are sharded over (fully_shard)."""
    reshard: bool = True
    """Free the gathered weights of a block after its forward pass, and gather them again in
    backward. False keeps them until then (ZeRO-2), which is faster and takes the memory of all of
    them.
    """
    offload: Literal["none", "cpu"] = "none"
    """Where weights, gradients and optimizer state are kept: `cpu` keeps them in host memory, where
    the optimizer steps, and copies blocks to the GPU as they are used. One process may do so too.
    """
    tensor: Count = 1
    """Processes that share every layer, by heads and columns, best within one machine. They have
    the same rows, and `replicate` and `shard` count them as one.
    """
    context: Count = 1
    """Processes among them that share the tokens of each row, for sequences that are too long for
    one. A divisor of `shard`, or of `replicate` without sharding.
    """
    pipeline: Count = 1
    """Processes that have different blocks of the model, and compute micro-batches one after the
    other. They have the same rows, and `replicate`, `shard` and `tensor` count within each part.
    """
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """Order of the micro-batches: 1f1b (a forward and a backward pass in turns), or interleaved (so
    too, with two shorter parts of the model per process, which wait half as long and communicate
    twice as much).
    """

    @property
    def per_row(self) -> int:
        """Processes that have the same rows."""
        return self.context * self.tensor * self.pipeline

    @property
    def unit(self) -> int:
        """Processes that have one copy of the model together."""
        return self.shard * self.tensor * self.pipeline

    @property
    def num_stages(self) -> int:
        """Stages that the blocks of the model are divided into."""
        return self.pipeline * (2 if self.pipeline_schedule == "interleaved" else 1)

    @property
    def is_sharded(self) -> bool:
        """Whether fully_shard holds the weights, in this process alone or over several."""
        return self.unit > 1 or self.offload == "cpu"
