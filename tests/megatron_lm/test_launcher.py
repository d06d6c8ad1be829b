"""How many GPUs each launcher's options ask for."""

from __future__ import annotations

import pytest

from overlapkit.megatron_lm.launcher import cluster_of
from overlapkit.megatron_lm.script import read_script

FLAGS = "x.py --train-iters 1 --num-layers 2"


@pytest.mark.parametrize(
    ("text", "gpus", "per_node"),
    [
        ("torchrun --nproc-per-node 8", 8, 8),
        ("torchrun --nproc_per_node=4 --nnodes=2", 8, 4),
        ("srun -N 2 torchrun --nproc_per_node=8", 16, 8),
        ("python -m torch.distributed.launch --nproc_per_node=8", 8, 8),
        ("deepspeed --num_gpus 8 --num_nodes 2", 16, 8),
        ("accelerate launch --num_processes=8", 8, None),
        ("accelerate launch --num_processes=16 --num_machines=2", 16, 8),
        ("srun -N 2 -n 16 python", 16, 8),
        ("srun -N2 -n16 python", 16, 8),
        ("srun --nodes=2 --ntasks-per-node=4 python", 8, 4),
        ("srun -n 16 python", 16, None),
        ("srun --nodes=2 --gres=gpu:8 python", 16, 8),
        ("srun --nodes=2 --gres=gpu:h100:8,nvme:1 --ntasks-per-node=1 python", 16, 8),
        ("srun --nodes=2 --gres=nvme:1 --ntasks-per-node=8 python", 16, 8),
        ("srun --nodes=2 --gpus-per-node h100:8 python", 16, 8),
        ("srun --nodes=2 -G 16 python", 16, 8),
        ("mpirun -np 16 -N 8 python", 16, 8),
        ("mpirun -np 16 --map-by ppr:8:node python", 16, 8),
        ("mpirun -np 16 --map-by socket python", 16, None),
        ("mpiexec -n 16 -ppn 8 python", 16, 8),
        ("srun -N 2 numactl -N 0 python -m torch.distributed.run --nproc_per_node 8", 16, 8),
        ("#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\nsrun python", 16, 8),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\nsrun python", 16, 8),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:8\nsrun torchrun --nproc_per_node 4", 8, 4),
        ("#SBATCH -N 2\nsrun -N 4 --ntasks-per-node 8 python", 32, 8),
        ("torchrun", None, None),
        ("docker run --gpus 4 image torchrun --nproc_per_node 8", 8, 8),
    ],
)
def test_gpus(text: str, gpus: int | None, per_node: int | None):
    (launch,) = read_script(f"{text} {FLAGS}", "job.sh")
    cluster, lines, notes = cluster_of(launch)
    assert (cluster.get("num_gpus"), cluster.get("gpus_per_node")) == (gpus, per_node)
    assert lines.keys() == {f"cluster.{name}" for name in cluster}
    assert notes == ()


@pytest.mark.parametrize(
    ("text", "per_node", "note"),
    [
        ("torchrun --nproc_per_node 8 --nnodes $N", 8, "line 1: $N: $N is not set in this script"),
        ("torchrun --nproc_per_node gpu", None, "line 1: gpu: no number"),
        ("srun -n $SLURM_NTASKS python", None, "line 1: $SLURM_NTASKS: $SLURM_NTASKS is only known at run time"),
        ("srun -N 2-4 --ntasks-per-node 8 python", 8, "line 1: 2-4: no number"),
    ],
)
def test_what_an_option_leaves_open_is_a_note(text: str, per_node: int | None, note: str):
    (launch,) = read_script(f"{text} {FLAGS}", "job.sh")
    cluster, _, notes = cluster_of(launch)
    assert (cluster.get("num_gpus"), cluster.get("gpus_per_node")) == (None, per_node)
    assert notes == (f"{note}, so the GPUs are what cluster.num_gpus says",)
