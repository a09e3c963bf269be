"""A made-up trace file of two steps on a GPU, in the profiler's format. Times are in us."""

US = 1e-6


def ranged(cat, name, start, length, **args):
    place = {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": args} | place


def operation(name, start, length, number):
    return ranged("cpu_op", name, start, length, **{"External id": number})


def kernel(name, start, length, number, correlation, cat="kernel", **more):
    args = {"External id": number, "correlation": correlation, "stream": 7, **more}
    return ranged(cat, name, start, length, **args)


def launch(start, correlation):
    return ranged("cuda_runtime", "cudaLaunchKernel", start, 2, correlation=correlation)


def step_at(start, number):
    """A step of 100 us: its kernels run 20 us late, and it waits for data for 10 us."""
    ids = number * 10
    return [
        ranged("user_annotation", f"flatout.step {number}", start, 0),
        ranged("user_annotation", "flatout.data", start, 10),
        ranged("user_annotation", "flatout.compute", start + 10, 81),
        ranged("user_annotation", "flatout.forward", start + 11, 20),
        ranged("user_annotation", "flatout.backward", start + 32, 38),
        ranged("user_annotation", "flatout.optimizer", start + 70, 20),
        ranged("user_annotation", "flatout.logging", start + 90, 10),
        operation("aten::linear", start + 12, 10, ids),
        operation("aten::mm", start + 14, 6, ids + 1),
        launch(start + 15, ids + 1),
        kernel("nvjet_tst_128x256", start + 30, 20, ids + 1, ids + 1),
        kernel("splitKreduce_kernel", start + 50, 4, ids + 1, ids + 1),
        operation("aten::gelu", start + 25, 4, ids + 2),
        launch(start + 26, ids + 2),
        kernel("vectorized_elementwise_kernel<4, GeluCUDAKernel>", start + 54, 6, ids + 2, ids + 2),
        operation("aten::mul_", start + 72, 6, ids + 3),
        launch(start + 74, ids + 3),
        kernel("vectorized_elementwise_kernel<4, MulFunctor>", start + 85, 5, ids + 3, ids + 3),
        kernel("Memcpy HtoD (Pinned -> Device)", start + 62, 2, 0, 0, "gpu_memcpy", bytes=512),
    ]


def document(steps=2):
    events = [one for number in range(1, steps + 1) for one in step_at(1e9 + 200 * number, number)]
    return {"traceEvents": [*events, {"ph": "M", "name": "process_name"}]}
