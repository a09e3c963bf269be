"""Write the file that starts a run on a cluster."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from string import Template
from typing import Annotated, Literal

from flatout.assembly import preflight
from flatout.cli.commands import Command, Overrides, RecipeName
from flatout.config.schema import RunConfig, load_config
from flatout.config.signature import Argument, Option, checked
from flatout.distributed.launch import replicas
from flatout.errors import ConfigError, OutputInUse
from flatout.storage.files import write_whole
from flatout.storage.json_io import Result

SLURM = """\
#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=$gpus
#SBATCH --time=$time
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append

# Two minutes before the time is up, the run saves, and the job continues it later.
head=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
rm -f $run/exit_code
asked=
srun $torchrun \\
    --rdzv-backend c10d --rdzv-id "$$SLURM_JOB_ID" --rdzv-endpoint "$$head:29500" \\
    $train &
train=$$!
trap 'asked=1; kill -USR1 "$$train"' USR1
code=0
while kill -0 "$$train" 2>/dev/null; do
    wait "$$train"
    code=$$?
done
code=$$(cat $run/exit_code 2>/dev/null || echo "$$code")
case "$$asked$$code" in
    175 | 1138) scontrol requeue "$$SLURM_JOB_ID" ;;
esac
exit "$$code"
"""
TORCHRUN = """\
#!/bin/sh
# Start it on each of $nodes machines, with the address of the first: sh $file HOST
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
$torchrun \\
    --rdzv-backend c10d --rdzv-id $name --rdzv-endpoint "$${1:-127.0.0.1}:29500" \\
    $train
"""
KUBERNETES = """\
# A pod per machine; $image needs flatout, and the claim `$name` holds data and runs.
apiVersion: v1
kind: Service
metadata:
  name: $name
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: $name
---
apiVersion: batch/v1
kind: Job
metadata:
  name: $name
spec:
  completions: $nodes
  parallelism: $nodes
  completionMode: Indexed
  backoffLimit: 20
  template:
    spec:
      subdomain: $name
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: 120
      containers:
        - name: flatout
          image: $image
          workingDir: /work
          command: ["sh", "-c"]
          args:
            - >-
              exec $torchrun
              --rdzv-backend c10d --rdzv-id $name --rdzv-endpoint $name-0.$name:29500
              $train
          env:
            - name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
              value: "1"
          resources:
            limits:
              nvidia.com/gpu: $gpus
          volumeMounts:
            - name: work
              mountPath: /work
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: work
          persistentVolumeClaim:
            claimName: $name
        - name: shm
          emptyDir:
            medium: Memory
"""
SKYPILOT = """\
name: $name
num_nodes: $nodes
resources:
  accelerators: $gpu:$gpus
workdir: .
setup: pip install flatout
run: |
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  head=$$(echo "$$SKYPILOT_NODE_IPS" | head -n 1)
  exec $torchrun \\
      --rdzv-backend c10d --rdzv-id $name --rdzv-endpoint "$$head:29500" \\
      $train
"""
FILES = {
    "slurm": ("$name.sbatch", SLURM, "sbatch $file"),
    "torchrun": ("$name.sh", TORCHRUN, "sh $file HOST"),
    "kubernetes": ("$name.job.yaml", KUBERNETES, "kubectl apply -f $file"),
    "skypilot": ("$name.sky.yaml", SKYPILOT, "sky launch -c $name $file"),
}
"""Name, content and use of each file."""


class LaunchFile(Result):
    """The file that was written."""

    path: str
    start: str
    """The command that starts the run."""

    def summary(self) -> str:
        """Return the file, and how to use it."""
        return f"Wrote {self.path}. Start with: {self.start}"


@checked
def launch(
    kind: Annotated[
        Literal["slurm", "torchrun", "kubernetes", "skypilot"],
        Argument("slurm, torchrun, kubernetes or skypilot."),
    ],
    recipe: RecipeName,
    overrides: Overrides = None,
    nodes: Annotated[int, Option("Machines.", min=1)] = 1,
    gpus: Annotated[int, Option("GPUs of each machine.", min=1)] = 8,
    min_nodes: Annotated[
        int | None, Option("Fewest machines to continue with (default: all).", min=1)
    ] = None,
    gpu: Annotated[str, Option("With SkyPilot: the kind of GPU.")] = "H100",
    time: Annotated[
        str, Option("With Slurm: the time limit of a job. Runs continue in the next one.")
    ] = "04:00:00",
    image: Annotated[str, Option("With Kubernetes: an image with flatout.")] = "flatout:latest",
    run_dir: Annotated[
        str | None, Option("Directory of the run (default: runs/NAME).", "--run-dir")
    ] = None,
    out: Annotated[Path | str | None, Option("File to write.")] = None,
) -> LaunchFile:
    """Write the file that starts a run on a cluster, and continues it after a stop.

    The recipe is checked for every number of processes, one per GPU. An existing file is not
    replaced.

    Raises: ConfigError; OutputInUse.
    """
    config = load_config(recipe, overrides or ())
    preflight.check_names(config)
    _check(config, nodes, gpus, min_nodes, {"--gpu": gpu, "--time": time, "--image": image})
    name = re.sub(r"[^a-z0-9]+", "-", Path(str(recipe)).stem.lower()).strip("-")
    if not name:
        raise ConfigError(
            f"{recipe} has no name for a job.", fix="Give the file a name with letters."
        )
    run = shlex.quote(run_dir or f"runs/{name}")
    words = [str(recipe), *([overrides] if isinstance(overrides, str) else overrides or ())]
    file, content, start = FILES[kind]
    path = Path(out or Template(file).substitute(name=name))
    allowed = nodes if min_nodes is None else f"{min_nodes}:{nodes}"
    values = {
        "name": name,
        "nodes": nodes,
        "gpus": gpus,
        "gpu": gpu,
        "time": time,
        "image": image,
        "run": run,
        "file": shlex.quote(str(path)),
        "torchrun": f"torchrun --nnodes {allowed} --nproc-per-node {gpus} --max-restarts 3 "
        "--signals-to-handle SIGTERM,SIGINT,SIGUSR1",
        "train": f"-m flatout train {shlex.join(words)} --run-dir {run}",
    }
    if path.exists():
        raise OutputInUse(f"{path} exists.", fix="Remove it, or choose a different --out.")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, Template(content).substitute(values))
    return LaunchFile(path=str(path), start=Template(start).substitute(values))


def _check(
    config: RunConfig, nodes: int, gpus: int, min_nodes: int | None, options: dict[str, str]
) -> None:
    """Check that the recipe trains on every number of machines, and what goes into the file.

    Raises: ConfigError.
    """
    replicas(config.parallel, nodes * gpus)
    sizes = preflight.sizes_of(preflight.resolve_batch(config, nodes * gpus))
    if min_nodes and min_nodes > nodes:
        raise ConfigError(
            f"--min-nodes {min_nodes} is more than --nodes {nodes}.",
            fix=f"Set --min-nodes to at most {nodes}.",
        )
    for count in range(min_nodes or nodes, nodes):
        if count * gpus not in sizes:
            raise ConfigError(
                f"A step cannot be divided among {count * gpus} processes, if {count} of {nodes} "
                "machines are left.",
                fix="Set batch.tokens_per_step to a multiple of data.seq_len and of every number "
                "of processes, or remove --min-nodes.",
            )
    if config.train.devices is not None:
        raise ConfigError(
            f"train.devices={config.train.devices} starts processes by itself, but --nodes and "
            "--gpus set how many the file starts.",
            fix="Remove train.devices.",
        )
    for option, value in options.items():
        if not re.fullmatch(r"[\w.:/@+-]+", value):
            raise ConfigError(
                f"{option} {value!r} contains characters that are not allowed in the file.",
                fix="Use letters, digits and any of . : / @ + - _.",
            )


COMMAND = Command(
    launch, example="flatout launch slurm my.yaml --nodes 2 --gpus 8", writes_files=True
)
