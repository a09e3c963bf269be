"""Attaches to a training script inside its own process, through torch's global hooks.

A step lasts from one step of the script's main optimizer to the next, so that accumulation and
further optimizers are part of it. Everything that a step does is measured by `flatout.watch`'s own
timer. What is found goes to a file, after which the script ends, or runs on unmeasured.

Nothing is stored in the script's models, which it may copy, compile or save.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.config.registry import is_user_code
from flatout.measure.scripts.apply import Models, apply, replace
from flatout.measure.scripts.recorder import Graphs, own_lines, padding_of
from flatout.measure.scripts.request import SEEN, Answer, Request
from flatout.measure.scripts.sites import Sites
from flatout.measure.scripts.trial import (
    Guard,
    StepTimer,
    end_script,
    facts_of,
    loss_in,
    roots_of,
    takes_steps,
)
from flatout.measure.steps.evidence import MIN_SAVES, CallSite, Evidence
from flatout.measure.steps.guard import guarded
from flatout.measure.steps.lines import (
    Line,
    LineTotals,
    failure_of,
    site_at,
    stack_of,
    user_frame,
    user_lines,
)
from flatout.measure.steps.windows import Windows, fewest
from flatout.measure.watch.hooks import observing
from flatout.measure.watch.loop import LoopTimer, Settings
from flatout.storage.files import write_text
from flatout.training.metrics.detectors import is_steady_growth

if TYPE_CHECKING:
    from flatout.measure.scripts.flatouts import FlatoutsRun

MIN_MEASURED = 5
"""Fewest ordinary steps of a measurement."""
OTHERS_STEPS = 25
"""Steps of other optimizers after which the main one is taken to have ended its work."""
PARENT_POLL_S = 1.0
SAY_EVERY_S = 0.5
"""Time between two reports of the number of steps."""
MEMORY_EVERY_S = 0.05
"""Time between two looks at the memory."""
MIN_GROWTH_BYTES, MIN_GROWTH = 24 * 2**20, 0.1
"""Growth below which it is noise: in bytes, and as a share of what is in use."""
EARLY_STEP, SOME = 3, 64
"""Step after which weights without an optimizer are noted, and values of each that are compared."""
MIN_LOOKS = 12
"""Fewest looks at the memory by which its growth is judged."""
PADDED_STEPS = 8
"""First steps in which the inputs are looked at for padding, which waits for the device."""
PLACES = {"optimizer": "optimizer", "loader": "rows", "anomaly": "anomaly", "threads": "threads"}
"""Kinds of calls in the script's files, and what their lines are evidence of."""


class Attachment:
    """Follows the script of this process by the calls that it makes in torch."""

    def __init__(self, request: Request, guard: Guard | None) -> None:
        self._request, self._process = request, os.getpid()
        self._guard = guard
        self._sites = Sites()
        self._sites.install()
        self._run: FlatoutsRun | None = None
        """None for the loop of somebody else."""
        self._loop: LoopTimer | None = None
        """None until the first backward pass: it knows the ranks, the thread and the model."""
        self._model: nn.Module | None = None
        """The largest model that is called with gradients, and not by another model."""
        self._optimizer: Any = None
        """The one whose steps end the script's."""
        self._steps_of_others = 0
        self._keys: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._trained: dict[int, bool] = {}
        """What was called with gradients, and whether in training mode. See `_key`."""
        self._is_inside = self._is_changing_mode = self._is_done = self._has_loss = False
        self._passes_in_evaluation_mode = self._trains_in_evaluation_mode = False
        """Whether the model's last pass with gradients was in that mode, and whether any such pass
        went backward: then they all belong to training."""
        self._steps_in_evaluation_mode = self._rollouts = self._evaluations_with_gradients = 0
        self._parameters = self._backwards = 0
        self._rows: int | None = None
        self._above: list[Line] = []
        """The line that takes the step, and those that call the loop."""
        self._padding: list[float] = []
        self._early_gradients: dict[int, tuple[int, float | None]] = {}
        """What `_gradients` returned in an early step."""
        self._graphs, self._lines = Graphs(), LineTotals()
        self._memory: deque[tuple[int, int]] = deque(maxlen=4000)
        """Steps, and the memory in use after them, in bytes."""
        self._looked_s = self._said_s = 0.0
        self._has_anomaly_detection = self._has_others = False
        replace(nn.Module, "__call__", partial(observing, self._before_call))
        replace(nn.Module, "train", partial(observing, self._before_mode))
        for name in ("backward", "grad"):
            replace(torch.autograd, name, partial(observing, self._before_backward))
        replace(os, "_exit", partial(observing, lambda *_: self.answer()))
        atexit.register(guarded(self.answer))
        register_optimizer_step_post_hook(guarded(self._on_optimizer_step))
        self._models = Models()  # outside of the hooks above, so that it can remove its own

    def answer(self) -> None:
        """Write what was measured, once. Only the process that takes the steps writes."""
        loop, error = self._loop, getattr(sys, "last_value", None)  # set when an error ends it
        if self._is_done or os.getpid() != self._process or (loop is None and error is None):
            return
        if loop is not None and loop.rank:
            return
        self._is_done = True
        steps, found = loop.steps if loop is not None else 0, dict[str, Any]()
        if loop is not None and loop.windows is not None and self._request.recording is not None:
            found["recorded"] = guarded(loop.windows.recorded)()
            loop.windows.close()
        elif loop is not None and loop.windows is not None and steps:
            found["once"] = (guarded(self._run.once)() if self._run is not None else None) or {}
            try:
                found["evidence"] = self._evidence(loop, loop.windows)
                loop.windows.close()
            except Exception as unexpected:
                found["problem"] = f"{type(unexpected).__name__}: {unexpected}"
            found["sites"] = sites = guarded(self._sites.found)(self._model) or ()
            found["facts"] = guarded(facts_of)(self._models, tuple({one.kind for one in sites}))
        elif error is None:
            return
        writes = list(self._guard.others) if self._guard else []
        failure = None if error is None else failure_of(error, steps)
        answer = Answer(steps=steps, failure=failure, writes=writes, **found)
        with suppress(OSError):  # the command has ended, and has removed its directory
            write_text(Path(self._request.answer), answer.model_dump_json())

    def _say(self, seen: str) -> None:
        with suppress(OSError):  # the command has ended
            Path(self._request.answer + SEEN).write_text(seen, encoding="utf-8")

    def _on_optimizer_step(self, optimizer: Any, *_: Any) -> None:
        """End a step and start the next, or end the measurement."""
        loop = self._loop
        if loop is None or loop.rank or not takes_steps(optimizer):
            return
        if self._is_done:
            self._end()
            return
        if self._optimizer is None:
            self._optimizer = optimizer
            self._above = [*user_lines(stack_of(sys._getframe(1)))]
        elif _weights(optimizer) is not _weights(self._optimizer):
            self._steps_of_others += 1
            self._has_others = True
            if self._steps_of_others < OTHERS_STEPS:
                return
        self._optimizer = optimizer
        if loop.steps == EARLY_STEP:
            self._early_gradients = _gradients()
        self._steps_in_evaluation_mode += self._passes_in_evaluation_mode
        self._passes_in_evaluation_mode = False
        if (now_s := time.perf_counter()) - self._said_s > SAY_EVERY_S:
            self._said_s = now_s
            self._say(f"step {loop.steps + 1}")
        self._steps_of_others, self._has_loss = 0, False
        if loop.steps == 0 and "flatout.training.loop" in sys.modules:
            from flatout.measure.scripts.flatouts import FlatoutsRun

            self._run = FlatoutsRun.above(sys._getframe(1), loop)
        loop.leave("evaluation")
        loop.end_step()
        self._look_at_memory(loop)
        if loop.steps == self._request.steps or loop.begin_step() is False:
            self.answer()
            self._end()

    def _end(self) -> None:
        if not self._request.to_the_end:
            end_script(is_one_of_several=self._loop is not None and self._loop.world_size > 1)

    def _is_enough(self, windows: Windows) -> bool:
        """Return whether the ordinary steps are enough for averages."""
        done, seconds = windows.ordinary, self._request.seconds
        least = fewest(MIN_MEASURED, done.steps, done.seconds)
        return self._request.steps is None and done.steps >= least and done.seconds >= seconds

    def _start(self) -> None:
        """Make the instruments, at the first backward pass."""
        settings = Settings(
            model=self._model,
            is_script=True,
            is_enough=self._is_enough,
            recording=self._request.recording,
        )
        self._loop = LoopTimer(settings, at_exit=self.answer)
        self._loop.time_loaders()

    def _before_call(
        self, module: nn.Module, /, *args: Any, **kwargs: Any
    ) -> Callable[[], None] | None:
        """Divide forward passes from evaluation: calls that no other module makes."""
        loop = self._loop
        if self._is_inside or self._is_done or self._run is not None:
            return None
        if loop is not None and not loop.is_timed_thread:
            return None
        self._is_inside = True
        is_forward = False

        def after() -> None:
            self._is_inside = False
            if is_forward and loop is not None:
                loop.leave("forward")

        try:
            is_training = self._is_training(module, args, kwargs)
            if is_training and module is self._model and torch.is_grad_enabled():
                self._look_at_inputs(args, kwargs)
            if loop is not None:
                self._set_evaluating(loop, not is_training)
                if is_training:
                    loop.enter("forward")
                    is_forward = True
        except Exception:
            after()
            raise
        return after

    def _look_at_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the rows of a forward pass, and in the first steps its padding."""
        if torch._C._functorch.maybe_current_level() is None:
            self._rows = _rows_of(args, kwargs)
        if self._loop is None or self._loop.steps < PADDED_STEPS:
            self._padding += padding_of((args, kwargs))
            self._note_line("padding")

    def _is_training(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Return whether a call is part of training: what is never trained may be a teacher.

        A model that is only called in evaluation mode is trained in it. One that runs on fewer rows
        than in training, without gradients and in training mode, makes the data of the next steps.
        """
        key = self._key(module)
        if not torch.is_grad_enabled():
            is_rollout = module.training and 0 < (_rows_of(args, kwargs) or 0) < (self._rows or 0)
            self._rollouts += is_rollout and key in self._trained
            return is_rollout or key not in self._trained
        if self._model is not None and self._trained.get(key) and key == self._key(self._model):
            self._passes_in_evaluation_mode = not module.training
        if self._trained.get(key) and not module.training and not self._trains_in_evaluation_mode:
            self._evaluations_with_gradients += 1
            return False
        if key not in self._trained and self._loop is None:
            size = sum(weights.numel() for weights in module.parameters())
            if self._model is None or size >= self._parameters:
                self._model, self._parameters = module, size
        self._trained[key] = self._trained.get(key, False) or module.training
        return True

    def _key(self, module: nn.Module) -> int:
        """Return what a model, a wrapper of it and a compiled one have in common."""
        if module not in self._keys:
            self._keys[module] = id(next(module.parameters(), module))
        return self._keys[module]

    def _before_mode(self, module: nn.Module, mode: bool = True) -> Callable[[], None] | None:
        """Start an evaluation when the model's mode changes, before its data is read."""
        loop = self._loop
        if self._is_changing_mode or self._is_done or self._run is not None:
            return None
        if loop is None or not loop.is_timed_thread:
            return None
        if self._trained.get(self._key(module)):
            self._set_evaluating(loop, not mode)
            if not mode:
                self._note_line("evaluation-mode")
        self._is_changing_mode = True  # the modules in it follow
        return partial(setattr, self, "_is_changing_mode", False)

    def _set_evaluating(self, loop: LoopTimer, is_evaluating: bool) -> None:
        if not is_evaluating:
            loop.leave("evaluation")
        elif loop.is_in("other"):
            loop.enter("evaluation")
            self._note_line("evaluation")

    def _note_line(self, kind: str) -> None:
        line = user_frame(sys._getframe(1))
        if line is not None:
            self._lines.add(kind, line, 0.0)

    def _before_backward(self, *args: Any, **kwargs: Any) -> Callable[[], None] | None:
        roots = roots_of(args, kwargs)
        if self._is_done or not roots or isinstance(roots[0], FakeTensor):
            return None
        if self._loop is None:
            self._start()
        loop = self._loop
        if loop is None or not loop.is_timed_thread or loop.is_in("backward"):
            return None
        self._note_loss(loop, roots)
        if self._passes_in_evaluation_mode and not self._trains_in_evaluation_mode:
            self._trains_in_evaluation_mode, self._evaluations_with_gradients = True, 0
        if self._run is not None:  # it states its phases
            return None
        loop.leave("evaluation")
        loop.enter("backward")
        return partial(loop.leave, "backward")

    def _note_loss(self, loop: LoopTimer, roots: list[Tensor]) -> None:
        self._backwards += 1
        if loop.windows is not None and loop.windows.recording is not None:
            loop.windows.recording.note_backward(roots)
        loss = loss_in(roots)
        if self._has_loss or loss is None:
            return
        if torch._C._functorch.is_functorch_wrapped_tensor(loss):  # it ends with its transform
            return
        self._has_loss = True
        self._has_anomaly_detection |= torch.is_anomaly_enabled()
        with suppress(AttributeError):  # a graph of a different kind
            self._graphs.mark(loss)
        loop.log({"loss": loss}, step=loop.steps + 1)

    def _look_at_memory(self, loop: LoopTimer) -> None:
        now_s = time.perf_counter()
        windows = loop.windows
        if now_s - self._looked_s < MEMORY_EVERY_S or windows is None or windows.name != "ordinary":
            return
        self._looked_s = now_s
        used = (
            torch.cuda.memory_allocated() if windows.on_gpu else psutil.Process().memory_info().rss
        )
        self._memory.append((loop.steps, used))

    def _evidence(self, loop: LoopTimer, windows: Windows) -> Evidence:
        """Return what the timer measured, with what only calls in torch show."""
        if windows.traced is not None and windows.sampler is not None:
            windows.traced.correct(windows.sampler.lines)
        found = loop.evidence()
        recorder, sampler = windows.recorder, windows.sampler
        sites: dict[str, tuple[CallSite, ...]] = {}
        notes = [*found.notes]
        update: dict[str, Any] = {}
        steps = max(windows.sampled_steps, 1)
        if sampler is not None and found.step_s:
            own, moved_s = own_lines(sampler.lines, steps, recorder, self._above)
            sites |= own.sites(steps=1, counted=False)
            update = moved(found, moved_s)
        few_s = found.evaluation_s or 0.0
        if 0 < self._lines.total("evaluation") < MIN_SAVES and few_s:
            update["evaluation_s"] = None
            note = "Too few evaluations were seen to tell what share of a longer run they take."
            notes.append(note)
        else:
            few_s = 0.0
        if recorder is not None:
            sites |= recorder.found.sites(windows.called_steps)
        kept_graphs = self._graphs.kept()
        keeper = self._graphs.keeper(sys._getframe(1)) if kept_graphs else None
        lines, here = dict[str, Line](), f"{Path.cwd()}{os.sep}"
        if keeper is not None:
            update["kept_by"], lines["kept"] = keeper
        calls = guarded(self._sites.found)(None) or ()
        for kind, name in PLACES.items():
            made = {(one.file.removeprefix(here), one.line) for one in calls if one.kind == kind}
            if len(made) == 1:  # its arguments are where it is made
                (lines[name],) = made
        sites |= {kind: (site,) for kind, line in lines.items() if (site := site_at(line))}
        sites |= self._lines.sites(max(loop.steps, 1), timed=False)
        is_evaluating = self._steps_in_evaluation_mode / max(loop.steps, 1)
        return found.model_copy(
            update={
                **update,
                "micro_batches": self._backwards / max(loop.steps, 1),
                "rows": self._rows,
                "workers": loop.workers,
                "anomaly_detection": self._has_anomaly_detection,
                "float64_s": recorder
                and sum(recorder.found.seconds["float64"].values()) / windows.called_steps,
                "kept_graphs": kept_graphs,
                "growth_bytes": _growth([*self._memory]),
                "padding": statistics.fmean(self._padding) if self._padding else None,
                "dataset": loop.dataset,
                "evaluation_mode": is_evaluating
                * (self._model is not None and mode_matters(self._model)),
                "evaluates_with_gradients": self._evaluations_with_gradients > 0,
                **_wasted(self._early_gradients, self._model),
                **_optimizer_facts(self._optimizer),
                "step_s": found.step_s and found.step_s - few_s,
                "notes": tuple(notes),
                # an adversary's, or of another policy than the one before, is no measure
                "losses": None if self._has_others or self._rollouts else found.losses,
                "sites": {**found.sites, **sites},
            }
        )


def moved(found: Evidence, seconds: float) -> dict[str, float | None]:
    """Return the phases of a CPU after moving seconds from other work to computation.

    Negative ones are lines in the forward pass that do not train: Python's part of it comes first.
    """
    other_s, compute_s, host_s = found.other_s, found.compute_s, found.host_s or 0.0
    if found.on_gpu or other_s is None or compute_s is None:
        return {}
    seconds = min(max(seconds, -compute_s - host_s), other_s)
    python_s = max(min(-seconds, host_s), 0.0)
    return {
        "other_s": other_s - seconds,
        "host_s": None if found.host_s is None else host_s - python_s,
        "compute_s": compute_s + seconds + python_s,
    }


def _optimizer_facts(optimizer: Any) -> dict[str, Any]:
    """Return class, implementation and number of tensors of an optimizer."""
    if optimizer is None:
        return {}
    groups, way = optimizer.param_groups, None
    module = sys.modules.get(type(optimizer).__module__)
    if is_user_code(getattr(module, "__file__", None) or "<"):
        way = "own"
    elif "foreach" in groups[0]:
        is_on_gpu = any(weights.is_cuda for group in groups for weights in group["params"])
        uses_foreach = groups[0].get("foreach")
        way = "foreach" if (is_on_gpu if uses_foreach is None else uses_foreach) else "for-loop"
        way = "fused" if groups[0].get("fused") else way
    tensors = sum(len(group["params"]) for group in groups)
    return {"optimizer": type(optimizer).__name__, "optimizer_way": way, "tensors": tensors}


def _gradients() -> dict[int, tuple[int, float | None]]:
    """Return the numbers of all weights with gradients, and some values' sum, by identity.

    The sum is None for those that an optimizer has. {} where no optimizer has any of them: it has
    copies.
    """
    claimed: set[int] = set()
    known: list[nn.Parameter] = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            claimed |= {id(weights) for group in one.param_groups for weights in group["params"]}
        elif issubclass(type(one), nn.Parameter) and one.requires_grad and one.grad is not None:
            known.append(one)
    if not any(id(one) in claimed for one in known):
        return {}
    return {
        id(one): (
            one.numel(),
            None if id(one) in claimed else float(one.detach().flatten()[:SOME].double().sum()),
        )
        for one in known
    }


def _wasted(before: dict[int, tuple[int, float | None]], model: nn.Module | None) -> dict[str, Any]:
    """Return the share of the gradients that belong to weights which nothing updates.

    Those have no optimizer, and the values that they had before, however others are updated. Those
    of the model are named.
    """
    now = _gradients()
    if not now or not before or model is None:
        return {}
    same = {key for key, each in now.items() if each[1] is not None and before.get(key) == each}
    share = sum(now[key][0] for key in same) / sum(each[0] for each in now.values())
    names = tuple(name for name, each in model.named_parameters() if id(each) in same)
    return {"wasted_gradients": share, "never_updated": names}


def _rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Return the largest first dimension of the tensors in a call."""
    tensors = (one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
    return max((one.shape[0] for one in tensors if one.dim()), default=None)


def mode_matters(model: nn.Module) -> bool:
    """Return whether some module computes something else in evaluation mode."""
    return any(
        "training" in type(module).forward.__code__.co_names
        and all(getattr(module, name, True) != 0 for name in ("p", "dropout"))
        for module in model.modules()
        if hasattr(type(module).forward, "__code__")
    )


def _weights(optimizer: Any) -> Any:
    """Return the first tensor that an optimizer updates. Its first groups may be empty."""
    return next((each for group in optimizer.param_groups for each in group["params"]), None)


def _growth(memory: list[tuple[int, int]]) -> float | None:
    """Return the bytes that each step adds. 0 unless they grow steadily, None if unknown."""
    if len(memory) < MIN_LOOKS:
        return None
    (step, first), (last_step, last) = memory[0], memory[-1]
    least = max(MIN_GROWTH_BYTES, MIN_GROWTH * first)
    some = [used for _, used in memory[:: len(memory) // 100 + 1]]
    if last - first < least or not is_steady_growth(some):
        return 0.0
    return (last - first) / max(last_step - step, 1)


def attach(path: str) -> None:
    """Change and follow this process as the request in a file asks."""
    request = Request.model_validate_json(Path(path).read_text(encoding="utf-8"))
    with suppress(OSError):  # the command has ended
        Path(request.answer + SEEN).write_text("torch", encoding="utf-8")
    if request.parent is not None:
        threading.Thread(target=_end_with, args=(request.parent,), daemon=True).start()
    guard = Guard(request) if request.guarded else None
    if request.interrupt_after is not None:
        _interrupt_after(request.interrupt_after)
        return
    if request.timing is None and request.measures:
        Attachment(request, guard)
        return
    failed = apply(request.changes, Models())
    if request.timing is not None:
        StepTimer(request, failed, guard)
    else:
        atexit.register(_tell, Path(request.answer), failed)


def _end_with(parent: int) -> None:
    """End this process, and everything in its session, when a process has ended."""
    while psutil.pid_exists(parent):
        time.sleep(PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def _interrupt_after(steps: int) -> None:
    """Ask this process to stop when its first optimizer has taken some steps.

    A process in the background may ignore SIGINT, so it is SIGTERM.
    """
    first, seen = list[Any](), 0

    def on_step(optimizer: Any, *_: Any) -> None:
        nonlocal seen
        if not takes_steps(optimizer):
            return
        first[:] = first or [optimizer]
        seen += optimizer is first[0]
        if seen == steps and optimizer is first[0]:
            os.kill(os.getpid(), signal.SIGTERM)

    register_optimizer_step_post_hook(on_step)


def _tell(path: Path, failed: dict[str, str]) -> None:
    """Report at the end which changes could not be applied."""
    with suppress(OSError):
        write_text(path, Answer(failed=failed).model_dump_json())
