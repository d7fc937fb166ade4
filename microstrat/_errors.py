"""Errors and warnings, each built by a function that names the user's thing, the rule, and the way out.

They are of Python's own types: AutoGraph re-raises only those as they are, and turns any other into its StagingError.
Imports no TensorFlow.
"""

from __future__ import annotations

from typing import Any

SYMBOLIC_ESCAPES = (
    "A per-replica value was used outside the merge function that received it. Inside merge_call, reduce it with "
    "strategy.extended.reduce_to, or return it: each replica then gets its own value back."
)


def bad_number(argument: str, value: Any) -> ValueError:
    return ValueError(
        f"{argument} must be a positive int, not {value!r}. It is a number of parts: a batch of 64 with {argument}=4 "
        "runs as 4 parts of 16."
    )


def bad_base(base: Any) -> TypeError:
    return TypeError(
        "base must be a tf.distribute.MirroredStrategy or MultiWorkerMirroredStrategy: its devices are then real replicas, "
        f"with virtual ones on each. Got {base!r}. Without base=, everything runs on one device."
    )


def base_and_device(base: Any, device: str) -> ValueError:
    return ValueError(
        f"device={device!r} and base={base!r} exclude each other: with base=, replicas run on the base's devices. Leave "
        "device= out, or give the base the devices you want."
    )


def no_such_device(device: str, devices: list[str]) -> ValueError:
    return ValueError(f"There is no device {device!r} here. TensorFlow sees: {', '.join(devices)}.")


def reduce_plain_value(value: Any) -> ValueError:
    return ValueError(
        f"reduce('SUM', ...) of {value!r}, which is one value and not one per replica. If it is reduced already, use it "
        "as it is; if each replica has that value, multiply it by strategy.num_replicas_in_sync."
    )


def shared_tensor_counts_once(tensor: Any, number: int) -> str:
    return (
        f"all_reduce('SUM', ...) of {tensor!r}, which was made outside the replica function: all {number} replicas have the "
        "very same tensor, and it counts once, as in MirroredStrategy. To count it for every replica, give all_reduce "
        "tf.identity(tensor)."
    )


def no_logical_devices(method: str) -> AttributeError:
    return AttributeError(
        f"MicroBatchStrategy has no {method}: it is for models that span several cores of a TPU. Here each replica is one "
        "device, and the replicas share it: leave the call out."
    )


def varying_branch(variable: str, function: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"In replica function {function!r}, a branch (tf.cond, or an AutoGraph if{where}) writes variable {variable!r}, "
        "which has one value for all replicas, and the condition, or what it writes, may differ between them. Make the "
        "condition the same for all replicas, and all-reduce what is written (gradients, above all)."
    )


def bad_semantics(value: Any) -> ValueError:
    return ValueError(f"semantics must be 'replicas' or 'whole_batch', not {value!r}.")


def bad_loss_reduction(value: Any) -> ValueError:
    return ValueError(
        f"loss_reduction must be 'mean' (losses are means over rows) or 'sum' (losses are sums over rows), not {value!r}."
    )


def only_for_whole_batch(argument: str) -> ValueError:
    return ValueError(
        f"{argument} is for semantics='whole_batch'. With semantics='replicas', the number of micro-batches is the "
        "number of replicas, and the code scales its own loss, as with tf.distribute.MirroredStrategy."
    )


def bad_option(argument: str, value: Any, choices: tuple[str, ...]) -> ValueError:
    return ValueError(f"{argument} must be {' or '.join(repr(choice) for choice in choices)}, not {value!r}.")


def only_for_replicas(argument: str) -> ValueError:
    return ValueError(
        f"{argument} says what replicas keep apart, and there is one replica here. With micro_batches=, moving "
        "statistics are those of the whole batch, and dropout masks differ between micro-batches, as between rows of "
        "one batch."
    )


def workers_share_unequally(replicas: int, workers: int) -> ValueError:
    below = replicas // workers * workers
    shares = [str(number) for number in (below, below + workers) if number]
    return ValueError(
        f"replicas={replicas} cannot be shared equally by the {workers} workers in TF_CONFIG, each of which takes part. "
        f"Say replicas={' or '.join(shares)}, or mode='virtual' for one device of this worker alone."
    )


def devices_missing(replicas: int, there: str, workers: int, instead: str) -> ValueError:
    needed = f"{replicas // workers} devices on each of {workers} workers" if workers > 1 else f"{replicas} devices"
    return ValueError(
        f"replicas={replicas} with mode='real' needs {needed}; TensorFlow sees {there} here. With mode='auto' that would be "
        f"{instead}."
    )


def other_strategy_scope(mine: Any, current: Any, what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was called under the scope of another strategy, {current!r}. Leave that scope, or use one strategy "
        f"throughout; this one is {mine!r}."
    )


def inside_replica_function(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was called inside a replica function. Call it outside strategy.run, or from a merge function given to "
        "tf.distribute.get_replica_context().merge_call."
    )


def variable_of_other_strategy(name: str, owner: Any, mine: Any, what: str) -> RuntimeError:
    made = "outside any strategy's scope" if owner is None else f"in the scope of {owner!r}"
    return RuntimeError(
        f"{what} got variable {name!r}, which was made {made}. Make the model and its optimizer inside "
        f"`with strategy.scope():` of the strategy that runs them ({mine!r})."
    )


def varying_write(variable: str, function: str | None, operation: str, where: str) -> RuntimeError:
    place = f"In replica function {function!r}, the" if function else "The"
    return RuntimeError(
        f"{place} replicas would write different values to variable {variable!r} ({operation}{where}), which has one "
        "value for all of them. Reduce the value first (tf.distribute.get_replica_context().all_reduce), or give the "
        "variable an aggregation (tf.Variable(..., aggregation=tf.VariableAggregation.MEAN)), or "
        "synchronization=ON_READ to keep one value per replica."
    )


def written_by_handle(variable: str, function: str, operation: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"In replica function {function!r}, {operation}{where} may write variable {variable!r}, which has a value per "
        "replica, by its handle, as functions do that were restored from a SavedModel. They can only read it; write it by "
        "its own methods (variable.assign)."
    )


def no_cross_replica_value(variable: str) -> ValueError:
    return ValueError(
        f"Variable {variable!r} has synchronization=ON_READ and aggregation=NONE: it has one value per replica and no "
        "way to make one of them, so it can only be read inside a replica function. Give it an aggregation."
    )


def sum_changed_outside(variable: str, method: str) -> ValueError:
    return ValueError(
        f"Variable {variable!r} (ON_READ, aggregation SUM) does not support `{method}` in cross-replica context: the sum "
        "could be spread over the replicas in many ways. Use `assign`, or do it in a replica function."
    )


def synchronization_none(variable: Any) -> ValueError:
    return ValueError(
        "`NONE` variable synchronization mode is not supported with tf.distribute strategy. Please change the "
        f"`synchronization` for variable: {variable}"
    )


def invalid_variable_mode(argument: str, value: Any, variable: Any) -> ValueError:
    return ValueError(f"Invalid variable {argument} mode: {value} for variable: {variable}")


def local_results_of_unknown_rank(tensor: str) -> NotImplementedError:
    return NotImplementedError(
        f"The local results of a tensor of unknown rank ({tensor}) are not supported in a merge function."
    )


def scatter_on_local(variable: str, method: str) -> NotImplementedError:
    return NotImplementedError(
        f"{method} on variable {variable!r}, which has a value per replica, is not supported: assign the whole value."
    )


_COLLECTIVE_KINDS = {
    "sum": "an all-reduce",
    "max": "a running maximum",
    "min": "a running minimum",
    "concat": "a gather",
    "first": "an update from the first replica",
}


def collective_in_loop(kind: str, function: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} has {_COLLECTIVE_KINDS[kind]} inside a tf.while_loop, and it cannot be taken "
        f"out: {reason}. Replicas meet at a collective, which ends a loop over them. Compute its input before the loop, "
        "move the collective (often optimizer.apply_gradients) out of it, or use a Python loop."
    )


def gradient_through_loop(function: str) -> RuntimeError:
    return RuntimeError(
        f"In replica function {function!r}, a GradientTape records a tf.while_loop (or an AutoGraph loop over tensors) that "
        "holds a collective, or writes a variable that all share. Gradients through such a loop are not supported: use a "
        "Python loop, or take the collective out of it."
    )


def loop_variable(function: str, dtype: str, shape: Any) -> RuntimeError:
    return RuntimeError(
        f"In replica function {function!r}, a tf.while_loop that holds a collective, or writes a variable that all share, "
        f"uses a {dtype} of shape {shape} that differs between replicas. All replicas' values are kept together there, so a "
        "tensor must have a known shape (all but the first dimension), and a tf.TensorArray must be written what is the "
        "same in all: reduce the value first, or use a Python loop."
    )


def collective_under_varying_condition(function: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"In replica function {function!r}, a collective (an all-reduce, often optimizer.apply_gradients), or a write of a "
        f"variable that all share, stands under a condition that may differ between replicas{where}. Replicas meet there, "
        "so all must get there or none. Make the condition the same for all replicas (all_reduce it first), or move the "
        "collective out of the branch."
    )


def collective_in_function(kind: str, function: str, nested: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} calls {kind} inside the nested tf.function {nested!r} in eager mode, where each "
        "replica runs that function to its end by itself. Decorate the function given to strategy.run, or the one that "
        "calls strategy.run, with @tf.function."
    )


def became_local_too_late(variable: str, function: str) -> RuntimeError:
    return RuntimeError(
        f"While replica function {function!r} was traced, its replicas turned out to assign different values to variable "
        f"{variable!r}, so it got a value per replica; but earlier in the same tf.function it was assigned, or read in "
        "the same loop, as one value for all. Nothing has run yet: call the tf.function again, and it is traced with a "
        "value per replica from the start."
    )


def initial_value_in_trace(function: str, reason: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} creates a variable whose initial value cannot be computed outside it: {reason}. "
        "A variable is made once for all replicas, before they run: give it a Python or numpy value, or a callable."
    )


def different_number_of_collectives(finished: list[int], waiting: list[int]) -> RuntimeError:
    return RuntimeError(
        f"Replicas {finished} returned while replicas {waiting} wait at a collective (all_reduce, merge_call, an update "
        "of a variable with aggregation). Every replica must reach the same collectives in the same order: do not put "
        "one behind a condition that depends on the replica or on its data."
    )


def different_collectives(kinds: list[str]) -> RuntimeError:
    return RuntimeError(
        f"Replicas met at different collectives: {', '.join(kinds)} (replica 0 first). Every replica must reach the same "
        "collectives in the same order."
    )


def different_structures(lengths: set[int]) -> RuntimeError:
    return RuntimeError(f"Replicas returned sequences of different lengths: {sorted(lengths)}.")


def cannot_add_uneven(rows: Any, num_replicas: int) -> ValueError:
    return ValueError(
        f"reduce('SUM', ..., axis=None) of a batch of {rows} rows over {num_replicas} replicas: their shares differ in "
        "length and cannot be added elementwise. Use axis=0 to add all rows, or batch with drop_remainder=True."
    )


def cannot_add_composite(value: Any) -> TypeError:
    return TypeError(f"reduce('SUM', ...) is not defined for {type(value).__name__} batches.")


def _parts(number: int, num_replicas: int) -> str:
    return f"{number} replicas" if num_replicas > 1 else f"{number} micro-batches"


def not_batched(path: str, spec: Any, number: int, num_replicas: int) -> ValueError:
    return ValueError(
        f"The dataset's component {path} is {spec}, which has no batch dimension to split over "
        f"{_parts(number, num_replicas)}. Call dataset.batch(batch_size) first, with all the rows of one optimizer step."
    )


def not_a_dataset(caller: str, value: Any) -> TypeError:
    return TypeError(
        f"The function given to {caller} returned {type(value).__name__}, not a tf.data.Dataset. It must return the dataset "
        "of the replicas' batches, each of input_context.get_per_replica_batch_size(global_batch_size) rows."
    )


def no_common_rows(counts: dict[str, int], number: int, num_replicas: int) -> ValueError:
    return ValueError(
        f"The dataset's components have different numbers of rows in one batch ({counts}); a batch is split over "
        f"{_parts(number, num_replicas)} by rows, so all components need the same number. Capture constants in the "
        "function, or repeat them for every row."
    )


def cannot_place_per_replica() -> NotImplementedError:
    return NotImplementedError(
        "InputReplicationMode.PER_REPLICA is only supported in distribute_datasets_from_function."
    )


def next_in_replica_context() -> ValueError:
    return ValueError(
        "next(iterator) was called inside a replica function. A distributed iterator yields a global batch: take it "
        "outside, and pass it in: strategy.run(replica_fn, args=(next(iterator),))."
    )


def reduce_mirrored_sum(name: str) -> ValueError:
    return ValueError(
        f"reduce('SUM', ...) of variable {name!r}, which has one value for all replicas, would be that value times the "
        "number of replicas. Use 'MEAN', or read the variable."
    )


def integer_mean(name: str, dtype: Any) -> ValueError:
    return ValueError(
        f"Variable {name!r} has dtype {dtype} and aggregation MEAN: a mean of integers loses precision, so it cannot be "
        "assigned in a replica function. Use a float dtype, another aggregation, or assign it in cross-replica context."
    )


def gather_slices() -> NotImplementedError:
    return NotImplementedError("all_gather and gather do not support IndexedSlices: convert to a dense tensor first.")


def different_number_of_variables(replica: int, name: Any) -> RuntimeError:
    return RuntimeError(
        f"Replica {replica} creates variable {name!r}, which replica 0 did not create. A variable made in a replica "
        "function is one variable for all replicas, so each replica must make the same ones in the same order."
    )


# --- Whole-batch semantics ----------------------------------------------------------------------------------------------
def weight_not_scalar(shape: Any) -> ValueError:
    return ValueError(
        f"microstrat.set_weight takes one number for the micro-batch (its tokens, say), not a tensor of shape {shape}. "
        "Sum it first: microstrat.set_weight(tf.reduce_sum(mask))."
    )


def weight_too_late(function: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} calls microstrat.set_weight after a gradient, a mean or a masked loss has been "
        "weighted by rows. Call it first, before the loss."
    )


def weight_for_replicas() -> RuntimeError:
    return RuntimeError(
        "microstrat.set_weight was called in a replica function of several replicas without micro-batches. It weighs "
        "micro-batches of one replica (microstrat.scope(micro_batches=n)). Between replicas the code itself scales its "
        "loss: divide the sum by the weight of all, tf.distribute.get_replica_context().all_reduce('SUM', weight)."
    )


def loss_not_as_declared(function: str, kind: str, declared: str) -> str:
    other = "sum" if declared == "mean" else "mean"
    return (
        f"The loss that replica function {function!r} takes the gradient of is a {kind} over the rows of the "
        f"micro-batch, but losses are declared to be {declared}s (loss_reduction={declared!r}): the whole batch's "
        f"gradient comes out {'too small' if declared == 'mean' else 'too large'} by the number of micro-batches. Use "
        f"loss_reduction={other!r}, or make the loss a {declared}."
    )


def loss_divided_by_a_sum(function: str) -> str:
    return (
        f"The loss that replica function {function!r} takes the gradient of is divided by a sum over the micro-batch's "
        "rows that is not their number (of tokens, or weights). Micro-batches are weighted by rows, which is not the "
        "same: call microstrat.set_weight(that sum) before the gradient."
    )


def gradient_of_inner_mean(function: str) -> str:
    return (
        f"Replica function {function!r} takes the gradient of a single number by tensors of the micro-batch. The number "
        "is taken to be a mean over rows, as loss_reduction='mean' declares, so the gradient is that of the whole "
        "batch's mean. If it is a sum (of a critic's outputs, in a gradient penalty), take the gradient of the tensor "
        "before the sum: it is the same, and needs no such guess."
    )


def cannot_combine(variable: str, dtype: str, function: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} assigns a value that depends on the micro-batch to variable {variable!r} "
        f"({dtype}), in a way that cannot be put together to what the whole batch would assign. Sums (v.assign(v + x)), "
        "running maxima and minima, and averages can. Assign one of those, or what does not depend on the micro-batch."
    )


def rows_assigned(variable: str, shape: Any, function: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} assigns a value for each row (shape {shape}) to variable {variable!r}. A "
        "micro-batch has some of the batch's rows only, so state that is kept by row (a stateful RNN's) cannot be cut "
        "into micro-batches."
    )


def mean_assigned(variable: str, function: str) -> str:
    return (
        f"Replica function {function!r} assigns variable {variable!r} a value that depends on the micro-batch. The whole "
        "batch's is taken to be the mean over micro-batches, weighted by rows: right for means and moving averages. If "
        "it is a sum (a running total), make the variable with aggregation=tf.VariableAggregation.SUM; MEAN silences "
        "this."
    )


def sum_assigned(variable: str, function: str) -> str:
    return (
        f"Replica function {function!r} assigns integer variable {variable!r} a value that depends on the micro-batch. "
        "The whole batch's is taken to be the sum over micro-batches: right for counts. Make the variable with "
        "aggregation=tf.VariableAggregation.SUM if so; this silences the warning."
    )


def reduce_of_rows(function: str, shape: Any) -> ValueError:
    return ValueError(
        f"Replica function {function!r} all-reduces a tensor whose size depends on the micro-batch (shape {shape}). "
        "With one replica there is nothing to add it to, and rows of different micro-batches must not be added. Reduce "
        "it over its rows first (tf.reduce_sum(x, axis=0)), or gather them (all_gather)."
    )


def gather_not_rows(function: str, axis: int) -> ValueError:
    return ValueError(
        f"Replica function {function!r} gathers along axis {axis}. With one replica a gather gives back the whole "
        "batch, and micro-batches are parts of it along axis 0 only."
    )


def which_is_the_batch(shapes: list[Any], number: int) -> ValueError:
    return ValueError(
        f"strategy.run got tensors with different numbers of rows ({', '.join(str(shape) for shape in shapes)}), so it "
        f"cannot tell which of them are the batch to cut into {number} micro-batches. Take the batch from "
        "strategy.experimental_distribute_dataset(dataset): then that is cut, and all else is given whole."
    )


def not_a_batch(value: Any) -> ValueError:
    return ValueError(
        f"strategy.run got {value!r}, one value for each micro-batch, outside any tf.function, where batches are not "
        "cut. Reduce it first, or call strategy.run in a tf.function."
    )


def eager_batch_whole(function: str) -> str:
    return (
        f"strategy.run({function}) was called outside any tf.function, so the batch is not cut: it runs as one, and "
        "needs the memory of the full batch. Good for debugging; decorate the function that calls strategy.run with "
        "@tf.function (or don't compile with run_eagerly=True) to save memory."
    )


def optimizer_outside_run() -> str:
    return (
        "An optimizer stepped outside strategy.run, so its batch was not cut: it ran as one, and needed the memory of the "
        "full batch. Give the training step to tf.distribute.get_strategy().run(train_step, args=(x, y)), inside a "
        "tf.function; or use model.fit."
    )


def varying_write_outside(function: str, operation: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"Replica function {function!r} writes a value that depends on the micro-batch to a variable that was not made "
        f"in the strategy's scope ({operation}{where}). Make it there (metrics and optimizers too, which Keras makes in "
        "compile()): then the micro-batches' values are put together."
    )


def values_of_other_strategy(function: str, number: int, replicas: int) -> ValueError:
    return ValueError(
        f"strategy.run of {function!r} got a per-replica value with {number} entries, but the strategy has {replicas} "
        "replicas here: it comes from another strategy. Distribute the dataset, or make the value, with this one."
    )


def stateful_rnn(layer: str) -> RuntimeError:
    return RuntimeError(
        f"Layer {layer!r} is a stateful RNN: it keeps a state for each row of the batch. A micro-batch has some of the "
        "rows only, so such a layer cannot be cut into micro-batches. Use stateful=False, or replicas= with batches of "
        "fixed size."
    )


def varying_write_of_micro_batches(variable: str, function: str, operation: str, where: str) -> RuntimeError:
    return RuntimeError(
        f"In replica function {function!r}, variable {variable!r} is written in a way that depends on the micro-batch "
        f"and cannot be put together to one write for the whole batch ({operation}{where}): under a condition that "
        "differs between micro-batches, inside a loop, or by scattering. Use assign, assign_add or assign_sub outside "
        "of branches."
    )


# --- Warnings of replicas semantics -------------------------------------------------------------------------------------
def uneven_batch(rows: int, num_replicas: int) -> str:
    share = max(-(-rows // num_replicas), 1)
    full, rest = divmod(rows, share)
    parts = f"{full} with {share} rows" + (f", one with {rest}" if rest else "")
    empty = num_replicas - full - bool(rest)
    parts += f", {empty} with none, which do not run" if empty else ""
    return (
        f"A batch of {rows} rows does not divide evenly over {num_replicas} replicas: {parts}. As under "
        "tf.distribute.MirroredStrategy, a mean over replicas counts every replica alike, so the rows of a short one "
        "weigh more (up to as many times as it has fewer rows), in the gradients of `fit` too. For the numbers of the "
        "full batch use microstrat.scope(micro_batches=n), or leave such batches out with drop_remainder=True."
    )


def unscaled_loss(loss: str, function: str, num_replicas: int) -> str:
    return (
        f"Keras loss {loss!r} was called in replica function {function!r} and is one mean for the replica's rows, which "
        f"is not divided by the number of replicas. Gradients are summed over {num_replicas} replicas, so they come out "
        f"{num_replicas} times too large. Give the loss a value for each row, or divide it by "
        "strategy.num_replicas_in_sync; or, if the code was written for one device, use "
        "microstrat.scope(micro_batches=n)."
    )


def gradient_of_micro_batches(function: str) -> str:
    return (
        "The gradient of a result of strategy.run was asked for, by a tape around it. Replica function "
        f"{function!r} runs in micro-batches, which are put together at the tape: use the tape inside the replica function."
    )


def gradient_of_effects(function: str, operation: str, where: str) -> str:
    return (
        "The gradient of a result of strategy.run was asked for, by a tape around it, which runs replica function "
        f"{function!r} again; but that has effects ({operation}{where}), which must happen once. Use the tape inside the "
        "replica function, or leave the effects out of it (training=False, for layers that draw random numbers or keep "
        "statistics)."
    )


def compiled_around_devices(function: str, around: str, number: int) -> RuntimeError:
    return RuntimeError(
        f"strategy.run of {function!r} stands in {around!r}, which has jit_compile=True, but it runs on {number} devices, "
        f"and XLA compiles a program for one. Leave jit_compile=True away from {around!r} (in Keras, from compile()); "
        f"{function!r} itself may have it: each device then runs a program of its own."
    )
