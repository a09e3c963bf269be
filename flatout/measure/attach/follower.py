"""Follows the training loop of this process, and measures its steps, by its calls in torch.

A step lasts from one step of the loop's main optimizer to the next, so that accumulation and
further optimizers are part of it, unless the loop states its steps. Nothing is stored in the loop's
models, which it may copy, compile or save. An error of ours is logged, and the loop continues.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from flatout.errors import ConfigError
from flatout.hardware.machine import GIB, probe
from flatout.measure.attach.causality import looks_ahead, mixes_rows
from flatout.measure.attach.facts import (
    Rates,
    called_by,
    device_of,
    mode_matters,
    model_facts,
    moved,
    optimizer_facts,
)
from flatout.measure.attach.gathering import gathered
from flatout.measure.attach.guard import guarded, replaced
from flatout.measure.attach.hooks import BASE, Hooks, observing
from flatout.measure.attach.inputs import Inputs, plain_in, rows_of
from flatout.measure.attach.learning import Known, Learning, gradients_of_all, wasted
from flatout.measure.attach.lines import (
    Line,
    LineTotals,
    failure_of,
    site_at,
    stack_of,
    user_frame,
    user_lines,
)
from flatout.measure.attach.recorder import (
    Graphs,
    keeper_of_graphs,
    own_lines,
)
from flatout.measure.attach.request import Recording
from flatout.measure.attach.screening import Screening
from flatout.measure.attach.sites import Sites
from flatout.measure.attach.stages import Stages, fewest
from flatout.measure.attach.switches import Script
from flatout.measure.attach.timing import Steps, loss_in, ranks, roots_of, tracer_of
from flatout.measure.attach.workers import Workers
from flatout.measure.course import WORK, Course
from flatout.measure.evidence import MIN_SAVES, CallSite, Evidence, Failure
from flatout.measure.host import host_facts, used_mib
from flatout.training.metrics.device import process_peak_bytes
from flatout.training.metrics.phases import PhaseTimer
from flatout.training.metrics.readback import DelayedReadback

if TYPE_CHECKING:
    from flatout.measure.attach.flatouts import FlatoutsRun

FEW_STEPS = 5
"""With fewer ordinary steps, averages mean nothing, unless the steps are long."""
MOST_KEPT = 20_000
"""Losses that are kept: the last ones."""
MEMORY_EVERY_S, PART = 0.05, 100
"""Least time between two looks at the memory, and how many times as long as a look it is."""
EARLY_STEP = 3
"""Step after which weights without an optimizer are noted."""
PADDED_STEPS = 8
"""First steps in which the inputs are looked at for padding, which waits for the device."""
SITED_STEPS = 3
"""First steps in which the places of forward and backward passes are noted."""
FIXED_DATA_S = 8.0
"""Seconds for which steps of flatout's own run with one batch are screened."""
DATA = ("data_wait", "checkpoint")
"""Phases in which a module that is called is none of the loop: a transform of an image is one."""
EVALUATION_PASSES = 3
"""Passes in a row without gradients which are an evaluation, and no part of a step."""
PLACES = {"optimizer": "optimizer", "loader": "rows", "anomaly": "anomaly", "threads": "threads"}
"""Kinds of calls in the script's files, and what their lines are evidence of."""


class Follower:
    """Follows the loop of one thread, from its first backward pass or stated step on.

    `model` is the one that is trained, if it is known. `at_exit` is called when the process ends,
    and `after_step` after each step, with whether the measurement goes on. `is_trial` means that
    flatout's own run in this process is of no use to anybody, so that its data may be replaced.
    """

    workers: Workers | None = None
    """What looks at the stacks of worker processes."""

    def __init__(
        self,
        source: Literal["script", "watched loop"],
        *,
        at_exit: Callable[[], object],
        after_step: Callable[[bool], object] = lambda goes_on: None,
        is_enough: Callable[[Stages], bool] = lambda stages: False,
        model: nn.Module | None = None,
        recorded_steps: int = 2,
        recording: Recording | None = None,
        sites: Sites | None = None,
        is_trial: bool = False,
    ) -> None:
        self.rank, self.world_size = 0, 1
        self.steps = 0
        """Steps that have ended."""
        self.stages: Stages | None = None
        """None until the loop's first call, which makes the instruments."""
        self.base: str | None = BASE
        """None: the loop states all phases of its steps."""
        self.model = model
        """The largest model that is called with gradients, and not by another model."""
        self.screening: Screening | None = None
        """What measures changes at the end of the measurement."""
        self.run: FlatoutsRun | None = None
        """The run, if this is flatout's own loop."""
        self._source, self._at_exit, self._after_step = source, at_exit, after_step
        self._is_enough, self._sites, self._is_trial = is_enough, sites, is_trial
        self._recorded_steps, self._recording = recorded_steps, recording
        self._is_off = False
        self._depth: int | None = None
        """How many stated steps are open. None: the loop does not state its steps."""
        self._failure: Failure | None = None
        self._losses: deque[tuple[int, float]] = deque(maxlen=MOST_KEPT)
        self._logged, self._logs_itself = DelayedReadback(), False
        self._keys: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._trained: dict[int, bool] = {}
        """What was called with gradients, and whether in training mode. See `_key`."""
        self._is_inside = self._is_changing_mode = self._has_loss = False
        self._passes_in_evaluation_mode = self._trains_in_evaluation_mode = False
        """Whether the model's last pass with gradients was in that mode, and whether any such pass
        went backward: then they all belong to training."""
        self._steps_in_evaluation_mode = self._rollouts = self._evaluations_with_gradients = 0
        self._parameters = 0
        self._inputs, self._owners = Inputs(), set[type[nn.Module]]()
        self._above: list[Line] = []
        """The line that takes the step, and those that call the loop."""
        self._early_gradients: Known = {}
        """What `gradients_of_all` returned in an early step."""
        self._graphs, self._lines, self._learning = Graphs(), LineTotals(), Learning()
        self._course, self._grown, self._keeper = Course(), ("", ""), ""
        self._reduced = 0
        """Passes of this step after which gradients are reduced."""
        self._used, self._next_look_s = list[float](), 0.0
        self._traced, self._tracer = 0, ""
        """Steps in which a profiler or debugger of the script was on, and what it is."""
        self._has_anomaly_detection = self._in_autocast = self._mixes_rows = False
        self._rates, self._seeds = Rates(), dict[Any, Any]()
        """The last seed of each package, and its step."""
        self._passes_in_training_mode = 0
        """Passes of the model without gradients in training mode, since the last step."""
        self._looks_ahead: bool | None = None
        """Whether the model sees the tokens that it predicts. None: this was not tried."""
        self._given = deque[tuple[nn.Module, Any, Any]](maxlen=2)
        """The model and the inputs of the last recorded steps."""
        self._installed = stack = ExitStack()
        for owner, name, before in (
            (nn.Module, "__call__", self._before_call),
            (nn.Module, "train", self._before_mode),
            (torch.autograd, "backward", partial(self._before_backward, True)),
            (torch.autograd, "grad", partial(self._before_backward, False)),
            (torch, "manual_seed", partial(self._before_seed, torch)),
            (np.random, "seed", partial(self._before_seed, np)),
            (random, "seed", partial(self._before_seed, random)),
        ):
            stack.enter_context(replaced(owner, name, partial(observing, before)))
        self._optimizers = Steps(self._on_optimizer_step)
        stack.callback(self._optimizers.remove)
        stack.callback(self._learning.close)

    def script(self, models: list[nn.Module], sites: Sites) -> Script:
        """Return what changes of the script are about."""
        return Script(models, self._optimizers.optimizer, sites, self._hooks.read)

    def end(self) -> bool:
        """Measure no longer, and return whether anything was. Hooks stay: torch may be in one."""
        was_on = self.stages is not None and not self._is_off
        self._is_off = True
        if self.stages is not None:
            guarded(self.stages.close)()
        return was_on

    def close(self) -> None:
        """End the measurement, and remove all hooks."""
        self.end()
        guarded(self._installed.close)()

    def _starts(self) -> bool:
        """Make the instruments at the first call, and return whether this thread is timed."""
        if self.stages is None and not self._is_off:
            self._is_off = True  # unless all of this works
            self.rank, self.world_size = ranks()
            if self.rank and (self._source == "watched loop" or self._recording is not None):
                return False
            self._timer, stack = PhaseTimer(), self._installed
            self._hooks = Hooks(self._timer)
            stack.enter_context(self._hooks.installed())
            stack.callback(atexit.unregister, self._at_exit)
            atexit.register(self._at_exit)
            self.stages = Stages(
                self._timer,
                device_of(self.model),
                on_step=self._count,
                recorded_steps=self._recorded_steps,
                is_enough=self._is_enough,
                recording=self._recording,
            )
            if self.workers is not None:
                workers, hooks = self.workers, self._hooks
                self.stages.workers = lambda: workers.lines(hooks.pids)
            self._is_off = False
        return not self._is_off and self._timer.thread == threading.get_ident()

    def _count(self, seconds: float) -> None:
        assert self.stages is not None
        now_s = time.perf_counter()
        if now_s >= self._next_look_s:
            self._used = used_mib(self._hooks.pids)
            took_s = time.perf_counter() - now_s
            self._next_look_s = now_s + max(MEMORY_EVERY_S, PART * took_s)
        is_special, spent = self.stages.name != "ordinary", self._timer.seconds
        phases = (spent.get(name, 0.0) for name in WORK)
        self._course.add(
            is_special, seconds, self._inputs.size, self._reduced, *self._used, *phases
        )
        self.steps += 1
        tracer = "" if is_special else tracer_of()
        self._traced, self._tracer = self._traced + bool(tracer), tracer or self._tracer
        self._read_logged()

    def _on_optimizer_step(self) -> None:
        """End a step and start the next, unless the loop states its steps."""
        if self.stages is not None and self._is_off:
            self._after_step(False)
        if self.stages is None or not self._starts():
            return
        if self.steps == 0 and self.run is None:
            self._above = [*user_lines(stack_of(sys._getframe(1)))]
            if "flatout.training.loop" in sys.modules:
                from flatout.measure.attach.flatouts import FlatoutsRun

                self.run = FlatoutsRun.above(sys._getframe(1), self.stages, self._on_phase)
                self.base = BASE if self.run is None else None
                if self.run is not None and self._is_trial and self.world_size == 1:
                    fixed = {"synthetic-data": self.run.fixed_data}
                    self.screening = Screening(lambda: fixed, limit_s=FIXED_DATA_S)
            self.stages.screening = self.screening
        if self.steps == EARLY_STEP:
            self._early_gradients = gradients_of_all()
        self._rates.note(self._optimizers.optimizer)
        self._passes_in_training_mode = 0
        self._steps_in_evaluation_mode += self._passes_in_evaluation_mode
        self._passes_in_evaluation_mode = self._has_loss = False
        if self._depth is None:
            self.leave("evaluation")
            self._after_step(self._next_step())

    def _next_step(self) -> bool:
        """End the step before, and start one. False: the measurement is over."""
        assert self.stages is not None
        self._timer.leave_if_open(BASE)
        goes_on = self.stages.start_step()
        self._inputs.size = self._reduced = 0
        if self.steps and not self.steps & (self.steps - 1):  # a power of two
            self._look_at_variables()
        if self.base is not None:
            self._timer.enter(self.base)
        return goes_on

    @guarded
    def _look_at_variables(self) -> None:
        """Note what grows and what keeps graphs. When the process ends, its variables are gone."""
        frame = sys._getframe(1)
        grown = self._graphs.grown(frame)
        self._grown = grown if grown[0] else self._grown
        self._keeper = keeper_of_graphs(frame) or self._keeper

    @guarded
    def begin_step(self) -> None:
        """Start a stated step. Steps inside a step are part of it."""
        if self._starts():
            self._depth = (self._depth or 0) + 1
            if self._depth == 1:
                self._next_step()

    @guarded
    def end_step(self, error: BaseException | None = None) -> None:
        """End the work of a stated step. The step lasts until the next one starts."""
        if not self._starts() or not self._depth:
            return
        self._depth -= 1
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            self._failure = failure_of(error, self.steps)

    def waiting(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call what waits for a batch, or for a loader that opens, and return its result."""
        timed = self._hooks.timed("data_wait", call) if guarded(self._starts)() else call
        return timed(*args)

    @guarded
    def end_epoch(self) -> None:
        """End the last stated step of an epoch: what follows is not a step."""
        if self._starts() and self._depth == 0 and self.stages is not None:
            self._timer.leave_if_open(BASE)
            self.stages.end_step()

    @guarded
    def enter(self, phase: str) -> None:
        """Start a phase."""
        if self._starts():
            self._timer.enter(phase)

    @guarded
    def leave(self, phase: str) -> None:
        """End a phase and those inside it, if it is running."""
        if self._starts():
            self._timer.leave_if_open(phase)

    @guarded
    def _on_phase(self, name: str | None) -> None:
        """Take the phases of flatout's own loop for those of the steps."""
        if name is not None:
            self.enter(name)
        elif self._starts():
            self._timer.leave()

    @guarded
    def log(self, figures: Mapping[str, Any], *, step: int) -> None:
        """Keep the loss and the gradient's norm of a step. Tensors are read one step later.

        Shapes: each tensor has one element.
        """
        if self._is_off:
            return
        self._logs_itself = True
        self._log(figures, step)

    def _log(self, figures: Mapping[str, Any], step: int) -> None:
        if "loss" not in figures:
            return
        loss = torch.as_tensor(figures["loss"]).detach().reshape(())
        if loss.is_cpu:
            self._losses.append((step, loss.item()))
        else:
            self._logged.push(step, {"loss": loss}, due=True)

    def _read_logged(self, *, flush: bool = False) -> None:
        """Keep the metrics that have arrived."""
        for step, figures in self._logged.ready(flush=flush):
            self._losses.append((step, figures["loss"]))

    def _before_call(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Callable[[], None] | None:
        """Divide forward passes from evaluation: calls that no other module makes."""
        if self._is_inside or self.run is not None or self._is_off or torch._C._is_tracing():
            return None
        if self.stages is not None and (not self._starts() or self._timer.current in DATA):
            return None
        if (owner := called_by(sys._getframe(1))) is not None:
            module, args, kwargs = *owner, {}
            if type(module) not in self._owners:  # whose calls have no hook so far
                self._owners.add(type(module))
                ours = partial(observing, self._before_call)
                self._installed.enter_context(replaced(type(module), "forward", ours))
        self._is_inside = True
        is_forward = False

        def after() -> None:
            self._is_inside = False
            if is_forward:
                self.leave("forward")

        try:
            is_training = self._is_training(module, args, kwargs)
            # inside of a transform of torch.func, inputs have no values of their own
            if (
                is_training
                and module is self.model
                and torch.is_grad_enabled()
                and torch._C._functorch.maybe_current_level() is None
            ):
                is_early = self.steps < PADDED_STEPS
                self._inputs.look(args, kwargs, reads=is_early)
                if is_early:
                    self._note_line("padding")
                if self._sites is not None and self.steps < SITED_STEPS:
                    self._sites.note_forward(sys._getframe(1))
                if recorder := self.stages and self.stages.recording:
                    self._given.append((module, args, kwargs))
                    recorder.inputs = plain_in((args, kwargs))
            if self.stages is not None:
                self._set_evaluating(not is_training)
                if is_training:
                    self.enter("forward")
                    is_forward = True
        except Exception:
            after()
            raise
        return after

    def try_model(self) -> None:
        """Try whether the model sees the tokens that it predicts, or mixes rows of the batch.

        No step may follow: calls may change what a script keeps in its model, its hooks and lists.
        """
        recorder = None if self.stages is None else self.stages.recorder
        if recorder is None or not self._given or self.world_size > 1 or self.run is not None:
            return
        with suppress(Exception):  # of the model: it may have no evaluation mode
            if recorder.predicted is not None:
                self._looks_ahead = False
                self._looks_ahead = looks_ahead(*self._given[-1], recorder.predicted)
        with suppress(Exception):
            first, last = (plain_in(each[1:]) for each in self._given)
            if not all(map(torch.equal, first, last)):  # one that is always the same has no rows
                self._mixes_rows = mixes_rows(*self._given[-1], self._hooks.batch_size)

    def _is_training(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether a call is part of training: what is never trained may be a teacher.

        A model that is only called in evaluation mode is trained in it. One that runs on fewer rows
        than in training, without gradients and in training mode, makes the data of the next steps.
        """
        key = self._key(module)
        if not torch.is_grad_enabled():
            rows, most = rows_of(args, kwargs) or 0, self._inputs.rows or 0
            makes_data = self._optimizers.has_others and module is not self.model
            is_rollout = module.training and (makes_data or 0 < rows < most)
            self._rollouts += is_rollout and key in self._trained
            self._passes_in_training_mode += (
                module.training and not is_rollout and module is self.model
            )
            if self._passes_in_training_mode == EVALUATION_PASSES:
                self._note_line("training-mode")
            return is_rollout or key not in self._trained
        if self.model is not None and self._trained.get(key) and key == self._key(self.model):
            self._passes_in_evaluation_mode = not module.training
        if self._trained.get(key) and not module.training and not self._trains_in_evaluation_mode:
            self._evaluations_with_gradients += 1
            return False
        if key not in self._trained and self.stages is None:
            size = sum(1 if nn.parameter.is_lazy(w) else w.numel() for w in module.parameters())
            if size and size >= self._parameters:  # without weights, it is a transform of the data
                self.model, self._parameters = module, size
                self._in_autocast = torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
        self._trained[key] = self._trained.get(key, False) or module.training
        return True

    def _key(self, module: nn.Module) -> int:
        """Return what a model, a wrapper of it and a compiled one have in common."""
        if module not in self._keys:
            self._keys[module] = id(next(module.parameters(), module))
        return self._keys[module]

    def _before_mode(self, module: nn.Module, mode: bool = True) -> Callable[[], None] | None:
        """Start an evaluation when the model's mode changes, before its data is read."""
        is_known = self.stages is not None and self.run is None and not self._is_changing_mode
        if not (is_known and self._starts()):
            return None
        if self._trained.get(self._key(module)):
            self._set_evaluating(not mode)
            if not mode:
                self._note_line("evaluation-mode")
        self._is_changing_mode = True  # the modules in it follow
        return partial(setattr, self, "_is_changing_mode", False)

    def _before_seed(self, package: Any, *args: Any, **kwargs: Any) -> None:
        """Note a seed that an earlier step has set as its last one. Its own may be set twice."""
        if self.stages is None or self.run is not None or not self._starts():
            return
        seed = (*args, *kwargs.values(), None)[0]
        if isinstance(seed, int) and self._timer.current != "evaluation":
            step, last = self._seeds.get(package, (0, None))
            if last == seed and step < self.steps:
                self._note_line("seeded")
            self._seeds[package] = self.steps, seed

    def _set_evaluating(self, is_evaluating: bool) -> None:
        if not is_evaluating:
            self.leave("evaluation")
        elif self._timer.current == BASE:
            self.enter("evaluation")
            self._note_line("evaluating")

    def _note_line(self, kind: str) -> None:
        line = user_frame(sys._getframe(1))
        if line is not None:
            self._lines.add(kind, line, 0.0)

    def _before_backward(
        self, adds: bool, /, *args: Any, **kwargs: Any
    ) -> Callable[[], None] | None:
        """Start the phase, if there is one. `adds`: gradients are added to those of the weights."""
        roots = roots_of(args, kwargs)
        if not roots or isinstance(roots[0], FakeTensor) or not self._starts():
            return None
        if self._timer.current == "backward":
            return None
        if self._sites is not None and self.steps < SITED_STEPS:
            self._sites.note_backward(sys._getframe(1))
        asked = None if adds else args[1] if len(args) > 1 else kwargs.get("inputs", ())
        self._learning.before_backward(None if adds else tree_leaves(asked))
        if self.world_size > 1 and roots[0].requires_grad:
            roots[0].register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
            if adds and not self._optimizers.has_others:  # whose passes may be of other models
                self._reduced += getattr(self.model, "require_backward_grad_sync", False)
        self._note_loss(roots, adds=adds)
        if self._passes_in_evaluation_mode and not self._trains_in_evaluation_mode:
            self._trains_in_evaluation_mode, self._evaluations_with_gradients = True, 0
        if self.run is not None:  # it states its phases
            return partial(self.leave, "communication")
        self.leave("evaluation")
        self.enter("backward")
        return partial(self._after_backward, adds)

    def _after_backward(self, adds: bool) -> None:
        self.leave("backward")
        if adds:
            self._learning.after_backward()

    def _on_gradient(self, _: Tensor) -> None:
        """Start waiting for other ranks when the rest of a backward pass is done.

        Callbacks run in order, and those that wait are queued after the first gradient.
        """
        wait = partial(self.enter, "communication")
        guarded(torch.autograd.Variable._execution_engine.queue_callback)(wait)

    def _note_loss(self, roots: list[Tensor], *, adds: bool) -> None:
        if recorder := self.stages and self.stages.recording:
            recorder.note_backward(roots, adds=adds)
        loss = loss_in(roots)
        if self._has_loss or loss is None:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(loss):  # it ends with its transform
            return
        self._has_loss = True
        self._has_anomaly_detection |= torch.is_anomaly_enabled()
        with suppress(AttributeError):  # a graph of a different kind
            self._graphs.mark(loss)
        if not self._logs_itself:
            self._log({"loss": loss}, self.steps + 1)

    def evidence(self) -> Evidence:
        """Return what has been measured so far.

        Raises: ConfigError when no step has been watched.
        """
        stages, machine = self.stages, probe()
        self._read_logged(flush=True)
        if stages is None:
            where = f": this is rank {self.rank}, and rank 0 is watched" if self.rank else ""
            raise ConfigError(
                f"No step has been watched{where}.",
                fix="Use `with watch.step()`, or an optimizer of torch.",
            )
        memory = {"total_gib": machine.memory_gib, "peak_gib": process_peak_bytes() / GIB}
        if stages.on_gpu:
            memory = {
                "total_gib": torch.cuda.mem_get_info(stages.device)[1] / GIB,
                "peak_gib": torch.cuda.max_memory_allocated(stages.device) / GIB,
                "reserved_gib": torch.cuda.max_memory_reserved(stages.device) / GIB,
            }
        if stages.sampler is not None:
            stages.sampler.drop_step()
        # an adversary's, or of another policy than the one before, is no measure
        is_one = self._logs_itself or not (self._optimizers.has_others or self._rollouts)
        known = Evidence(
            source=self._source,
            machine=machine,
            device=stages.device,
            world_size=self.world_size,
            **host_facts(Path()),
            **stages.gpu,
            **memory,
            losses=tuple(self._losses) * is_one or None,
            failure=self._failure,
        )
        ordinary = stages.ordinary
        if ordinary.steps < fewest(FEW_STEPS, ordinary.steps, ordinary.seconds):
            short = f"{self.steps} steps are too few to measure: the warm-up takes up to 20."
            return known.model_copy(update={"notes": (*stages.notes, short)})
        return self._with_calls(gathered(known, stages, stages.periodic_s()), stages)

    def _with_calls(self, found: Evidence, stages: Stages) -> Evidence:
        """Return what the timer measured, with what only calls in torch show."""
        recorder, sampler = stages.recorder, stages.sampler
        steps, sampled = max(self.steps, 1), max(stages.sampled_steps, 1)
        sites: dict[str, tuple[CallSite, ...]] = {}
        update: dict[str, Any] = {}
        if sampler is not None:
            own, moved_s = own_lines(sampler.lines, sampled, recorder, self._above)
            sites |= own.sites(1)
            update = moved(found, moved_s)
        sites |= self._hooks.saves.sites(sampled)
        if 0 < self._lines.total("evaluating") < MIN_SAVES and found.evaluation_s:
            note = "Too few evaluations were seen to tell what share of a longer run they take."
            update |= {"evaluation_s": None, "notes": (*found.notes, note)}
            update["step_s"] = found.step_s and found.step_s - found.evaluation_s
        if recorder is not None:
            sites |= recorder.found.sites(stages.called_steps)
            if self.world_size > 1:
                sites.pop("created", None)  # wrappers make parameters of the parts of others
            if recorder.work is not None:
                calls_s = found.work_s + (found.host_s or 0.0) + (found.other_s or 0.0)
                sites |= recorder.work.sites(stages.called_steps, calls_s)
            update["only_classes"] = recorder.sorted_classes(stages.called_steps)
            update["padded_targets"] = recorder.padded_targets()
            float64_s = sum(recorder.found.seconds["float64"].values())
            update["float64_s"] = float64_s / stages.called_steps
        lines, here = dict[str, Line | None](), f"{Path.cwd()}{os.sep}"
        if kept_graphs := self._graphs.kept():
            self._look_at_variables()
        update |= {"kept_graphs": kept_graphs, "kept_by": self._keeper or "a variable"}
        update["grown"], update["grown_by"] = self._grown
        calls = () if self._sites is None else guarded(self._sites.found)(None) or ()
        for kind, name in PLACES.items():
            made = {(one.file.removeprefix(here), one.line) for one in calls if one.kind == kind}
            if len(made) == 1:  # its arguments are where it is made
                (lines[name],) = made
        origin = self._graphs.origin
        lines |= {
            "step": next(iter(self._above), None),
            "not-finite": origin.line,
            "unclipped": self._learning.unclipped,
            "clipped": self._learning.clipped[0],
        }
        update["bad_data"] = origin.is_data and origin.line is not None
        sites |= {kind: (site,) for kind, line in lines.items() if (site := site_at(line))}
        by_line, half = self._lines.sites(steps), (steps - EARLY_STEP) / 2
        if self._lines.total("seeded") < half:
            by_line.pop("seeded", None)  # once for all that follow
        matters = self.model is not None and mode_matters(self.model)
        # a pass makes data for another model, or in each step for this one
        makes_data = self._optimizers.has_others or self._lines.total("training-mode") > half
        if makes_data or not matters:
            by_line.pop("training-mode", None)
        sites |= by_line
        optimizer = self._optimizers.optimizer
        update |= {} if self.model is None else model_facts(self.model, optimizer)
        update |= {
            "calls": tuple({one.kind for one in calls}),
            "autocast": self._in_autocast,
            "tf32": torch.get_float32_matmul_precision() != "highest",
            "anomaly_detection": self._has_anomaly_detection,
            "evaluation_mode": self._steps_in_evaluation_mode / steps * matters,
            "looks_ahead": self._looks_ahead,
            "mixes_rows": self._mixes_rows,
            "tiny_rates": self._rates.tiny / steps,
            "halved_after": self._rates.halved_after(),
            "evaluates_with_gradients": self._evaluations_with_gradients > 0,
        }
        if self._traced > steps / 2:
            update["tracer"] = self._tracer
        with suppress(Exception):  # of the script: it has no length
            update["dataset_rows"] = len(self._hooks.read[0]())
        late, worked = [plain_in(one[1:]) for one in self._given], recorder.rows if recorder else 0
        update |= self._inputs.found(late, worked) | self._hooks.found()
        update |= self._course.found()
        update["uneven"] |= bool(self._graphs.filling)
        # whatever modules there are in the process
        update |= guarded(wasted)(self._early_gradients, self.model, self._learning.first) or {}
        update |= self._learning.found(self.model)
        update |= optimizer_facts(optimizer)
        return found.model_copy(update=update | {"sites": {**found.sites, **sites}})
