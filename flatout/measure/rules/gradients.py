"""Rules about gradients: what does not learn, learns something else, or is computed in vain."""

from __future__ import annotations

import math

from flatout.measure.rules import row

TIGHT = 1e-3
"""Share of the gradients' norm that clipping leaves only by mistake."""
SOON = 50
"""Steps in which a learning rate halves only by mistake."""
TINY_UPDATE = 1e-6
"""Share of their values by which a step changes the weights only by mistake."""
LEAST_UNREACHED = 0.1
"""Share of the weights without a gradient that is no part which the model merely does not use."""

GRADIENTS = [
    row(
        "broadcast-loss",
        "The loss broadcasts a column against a row, which compares all pairs of rows.",
        "spoils",
        "Tensors of the shapes (n, 1) and (n,) are broadcast to (n, n): every prediction is "
        "compared with every target.",
        "Give both one shape: predictions.squeeze(1).",
        site="broadcast",
    ),
    row(
        "cleared-gradients",
        "The optimizer finds no gradients: cleared before its step, or of other weights.",
        lambda e: (e.without_gradients or 0.0) > 0.9 and "spoils",
        "{e.watched_optimizer} finds no gradients in {e.without_gradients:.0%} of the steps, "
        "although each goes backward: it updates nothing.",
        "Call zero_grad() before backward() or after step(), never between them, and give the "
        "optimizer the weights of the model that is trained, not of a copy or before detach().",
        site="step",
    ),
    row(
        "created-weights",
        "Weights are created in each step, so that they never learn.",
        "spoils",
        "Each step creates weights at {site}: they are random every time, and no optimizer knows "
        "them.",
        "Create the module once, in __init__, before the optimizer gets model.parameters().",
        site="created",
    ),
    row(
        "discarded-gradients",
        "Gradients are computed, and cleared before an optimizer uses them.",
        0.1,
        "{share:.0%} of each step computes gradients, in the backward pass at {site}, that are "
        "cleared before an optimizer uses them.",
        "Call zero_grad() only after the step() that uses the gradients. If that loss should not "
        "train these weights, name what it is about: loss.backward(inputs=[...]).",
        site="discarded",
        unless="cleared-gradients lost-gradients repeated-backward unlearned-weights "
        "unregistered-weights wasted-gradients",
    ),
    row(
        "dropped-graphs",
        "Much of the forward pass builds graphs that no backward pass goes through.",
        lambda e: e.share(e.seconds_at("dropped"), 0.15),
        "{share:.0%} of each step computes results with graphs that no backward pass goes through, "
        "most of it at {site}.",
        "Remove what is not used, or compute it under torch.no_grad(), when it is looked at.",
        site="dropped",
        unless="work-without-effect",
    ),
    row(
        "equal-units",
        "All units of a layer have the same weights, and learn the same.",
        lambda e: e.equal_units and "spoils",
        "All units of {e.equal_units} still have the same weights: they compute and learn the same "
        "as a single one.",
        "Initialise it with random numbers, such as those of nn.init.xavier_uniform_().",
        site="optimizer",
        unless="unmoved-weights tiny-updates",
    ),
    row(
        "evaluation-mode",
        "The model stays in evaluation mode while it is trained.",
        lambda e: (e.evaluation_mode or 0.0) >= 0.05 and e.site("evaluation-mode") and "spoils",
        "In {e.evaluation_mode:.0%} of the steps the model is in evaluation mode while it is "
        "trained: dropout is off, and batch norm keeps its statistics.",
        "Call model.train() where the evaluation that starts there ends.",
        site="evaluation-mode",
    ),
    row(
        "lost-gradients",
        "Gradients of some backward passes of a step are cleared, and others are used.",
        "spoils",
        "Gradients of the backward pass at {site} are cleared before the optimizer uses them, "
        "except for those of the last passes: it learns nothing from the other micro-batches.",
        "Call zero_grad() once per optimizer.step(), after it, and not for each micro-batch.",
        site="lost",
        unless="cleared-gradients",
    ),
    row(
        "interleaved-targets",
        "Outputs and targets are flattened in different orders.",
        lambda e: e.site("interleaved") and "spoils",
        "At {site}, outputs of (rows, tokens) and targets of (tokens, rows) are flattened, or the "
        "reverse: outputs are compared with the targets of others.",
        "Exchange two dimensions of one of them before: outputs.transpose(0, 1).reshape(-1, "
        "classes).",
        site="interleaved",
    ),
    row(
        "mixed-rows",
        "Outputs for a row of the batch depend on other rows.",
        lambda e: e.mixes_rows and "spoils",
        "With another first row, the model's outputs for the other rows of the batch change, in "
        "evaluation mode as well. Only a model that compares its rows, or is given a graph or one "
        "sequence without a batch dimension, does so by design.",
        "Look for a softmax, a mean or a norm along dimension 0, a recurrent layer or attention "
        "without batch_first=True, and for view() or reshape() where dimensions should be "
        "exchanged: transpose() or permute().",
        site="padding",
    ),
    row(
        "new-optimizers",
        "An optimizer is made anew in each step, so that it has no state.",
        lambda e: (e.new_optimizers or 0.0) > 0.5 and "spoils",
        "Each step makes a new optimizer of the same weights: its moments start at zero every "
        "time.",
        "Make the optimizer once, before the loop.",
        site="optimizer step",
    ),
    row(
        "probabilities-as-logits",
        "A loss that takes logits is given probabilities, so that gradients are small.",
        "spoils",
        "The loss at {site} is given probabilities, the result of a softmax or sigmoid, and takes "
        "logits, or F.nll_loss their logarithms.",
        "Give it the logits: F.cross_entropy has the softmax in it, "
        "F.binary_cross_entropy_with_logits the sigmoid. F.nll_loss takes log_softmax.",
        site="normalised",
    ),
    row(
        "repeated-backward",
        "Backward passes of one step go through the same graph again.",
        0.1,
        "{share:.0%} of each step goes backward again through the graph that the pass at {site} "
        "keeps.",
        "Call detach() on what should not be differentiated again: a state that is carried over, "
        "or what another model made. Or add the losses up, and go backward once.",
        site="again",
    ),
    row(
        "repeated-steps",
        "An optimizer takes several steps with the same gradients.",
        # without any backward pass, they are made in another way
        lambda e: 0.3 <= (e.bare_steps or 0.0) <= 0.8 and "spoils",
        "{e.bare_steps:.0%} of the optimizer's steps repeat the step before, with the same "
        "gradients.",
        "Call optimizer.step() once after each backward pass.",
        site="step",
    ),
    row(
        "same-batch",
        "Each step gets the same rows, although there are others.",
        lambda e: e.same_rows and (e.dataset_rows or 0) > 2 * e.same_rows and "spoils",
        "The batches of the DataLoader have the same values: the model sees {e.same_rows} of the "
        "{e.dataset_rows:,} rows of the dataset.",
        "Make the iterator of the DataLoader once, before the loop, and use shuffle=True.",
        site="padding",
    ),
    row(
        "seen-targets",
        "A model that predicts the next token sees it.",
        lambda e: e.looks_ahead and "spoils",
        "With a different last token, the model's outputs for the tokens before it change: it sees "
        "what it learns to predict. Only an autoencoder does so by design.",
        "Mask what comes later: scaled_dot_product_attention(..., is_causal=True), or a mask of "
        "torch.tril. Pad convolutions over time on the left only.",
        site="padding",
    ),
    row(
        "tight-clipping",
        "Gradients are clipped to a tiny part of their norm.",
        lambda e: e.clipped_to < TIGHT and "spoils",
        "Gradients are clipped to less than {e.clipped_to:.1g} of their norm in each step at "
        "{site}.",
        "Use a max_norm near the norm that most steps have, which clip_grad_norm_ returns.",
        site="clipped",
    ),
    row(
        "tiny-updates",
        "Each step changes the weights by next to nothing.",
        lambda e: 0 < (e.updates or 0.0) < TINY_UPDATE and "spoils",
        "Each step of {e.watched_optimizer} changes the weights by at most {e.updates:.1g} of "
        "their values: thousands of steps learn nothing.",
        "Raise the learning rate, {e.highest_lr}: updates of a thousandth are usual.",
        site="optimizer step",
        unless="unmoved-weights cleared-gradients tight-clipping",
    ),
    row(
        "training-mode",
        "The model is evaluated in training mode.",
        lambda e: e.site("training-mode") and "spoils",
        "The evaluation at {site} runs the model in training mode: dropout is on, and batch norm "
        "learns from the data of the evaluation.",
        "Call model.eval() before it, and model.train() after it.",
        site="training-mode",
    ),
    row(
        "uncleared-gradients",
        "Gradients are never cleared, so that every update repeats all earlier ones.",
        lambda e: (e.uncleared or 0.0) > 0.9 and "spoils",
        "No step clears the gradients: each update of {e.watched_optimizer} adds those of all "
        "steps before it.",
        "Call optimizer.zero_grad() after each optimizer.step().",
        site="step",
    ),
    row(
        "unclipped-gradients",
        "Gradients are clipped when there are none, or after the step that uses them.",
        # where the loss is lost, this is the reason
        lambda e: (
            e.site("unclipped")
            and ("spoils" if all(math.isfinite(loss) for _, loss in e.losses or ()) else "fails")
        ),
        "The gradients that {site} clips are all zero, not there, or those of the step before: no "
        "step uses clipped ones.",
        "Call clip_grad_norm_() between backward() and step().",
        site="unclipped",
        unless="cleared-gradients",
    ),
    row(
        "undone-updates",
        "Something takes back the updates of the optimizer.",
        lambda e: e.undone > 0.8 and "spoils",
        "{e.undone:.0%} of each update of {e.watched_optimizer} is taken back before the next one.",
        "Look for what else writes the weights: a moving average in place of its copy, a "
        "load_state_dict() or an initialisation in the loop.",
        site="written optimizer",
    ),
    row(
        "unlearned-weights",
        "Weights of the model never learn: no optimizer has them.",
        lambda e: e.unlearned and "spoils",
        "No optimizer updates {e.unlearned}, which have gradients: they never learn.",
        "Give the optimizer all weights: model.parameters().",
        site="optimizer",
        unless="unregistered-weights",
    ),
    row(
        "unmoved-weights",
        "Weights have gradients and are updated, and their values do not change.",
        lambda e: (e.unmoved or 0.0) > (0.9 if e.weights_dtype == "float32" else 0.5) and "spoils",
        "{e.unmoved:.0%} of the weights with gradients have the same values after several steps "
        "of {e.watched_optimizer}.",
        lambda e, _: (
            e.highest_lr == 0
            and "The learning rate is 0: start the schedule above it, and call scheduler.step() "
            "after every optimizer.step() if its unit is steps."
        ),
        lambda e, _: (
            e.weights_dtype != "float32"
            and "Updates are smaller than what {e.weights_dtype} can tell apart. Keep weights in "
            "float32, and compute in torch.autocast."
        ),
        "Print the learning rate and the gradients' norm: updates are smaller than the weights' "
        "precision.",
        site="step",
        shows="weights_dtype highest_lr",
        unless="cleared-gradients",
    ),
    row(
        "unreached-weights",
        "Weights that an optimizer has never get a gradient.",
        # without any, they are cleared, or of another model
        lambda e: LEAST_UNREACHED <= (e.unreached or 0.0) < 1 and "spoils",
        "{e.unreached:.0%} of the weights of {e.watched_optimizer} have no gradient in any step"
        "{e.unreached_words}: the loss does not reach them.",
        "Look for detach(), .data, item(), no_grad() or a new tensor between them and the loss. "
        "Set requires_grad_(False) for what should not learn.",
        site="optimizer",
    ),
    row(
        "unregistered-weights",
        "Layers are in a plain list or dict, where parameters() does not see them.",
        lambda e: e.unregistered and "spoils",
        "Weights in {e.unregistered[0]}, a plain container of the model, are not among its "
        "parameters(): no optimizer updates them.",
        "Keep them in nn.ModuleList, nn.ModuleDict or nn.ParameterList.",
        site="optimizer",
    ),
    row(
        "vanished-rate",
        "The schedule ends long before the run.",
        lambda e: (e.tiny_rates > 0.25 or (e.halved_after or math.inf) < SOON) and "spoils",
        "The learning rate falls to nothing long before the run ends{e.rate_words}.",
        "Call scheduler.step() in the unit in which the schedule was given its length: once per "
        "epoch, or after each step.",
        site="step",
        shows="tiny_rates halved_after",
    ),
    row(
        "wasted-gradients",
        "Part of the backward pass is for weights that no optimizer updates.",
        lambda e: e.share(2 / 3 * (e.wasted_gradients or 0.0) * e.work_s, 0.1),
        "{e.wasted_gradients:.0%} of the gradients belong to weights that no optimizer updates.",
        "Give them to the optimizer if they should learn. Otherwise set requires_grad_(False) for "
        "them, and call a model before which nothing learns in torch.no_grad().",
        site="backward",
        unless="unlearned-weights unregistered-weights",
    ),
]
"""Sorted by name."""
