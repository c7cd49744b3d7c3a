"""The commands `graphft slurm` and `graphft kubernetes`: their options."""

from __future__ import annotations

from typing import Any


def add_parsers(commands: Any) -> None:
    slurm = commands.add_parser("slurm", help="print the batch script that runs a saved job on Slurm: sbatch takes it")
    add = slurm.add_argument
    add("job", help="the folder of a saved job (graphft launch --save-only), or the URL of its storage; or a script")
    add("--nodes", default="1", metavar="N[-M]", help="how many nodes; of a range, as many as there are (default: 1)")
    add("--trainers-per-node", type=int, default=1, metavar="N", help="(default: 1)")
    add("--pservers", type=int, metavar="N", help="(default: what the job says)")
    add("--cpus-per-trainer", type=int, default=1, metavar="N", help="(default: 1)")
    add("--gpus-per-trainer", type=int, default=0, metavar="N", help="(default: 0)")
    add("--time", default="", metavar="LIMIT", help="as sbatch takes it; when it is over, the job is queued again")
    add("--partition", default="", metavar="NAME")
    add("--etcd", default="", metavar="HOST:PORT[,...]", help="(default: the script starts one on its first node)")
    add("--args", default="", metavar="TEXT", help="a script's arguments, as a shell reads them: --args='--lr 0.1'")
    slurm.set_defaults(command="graphft.runtime.engines.slurm_command:print_script")

    kubernetes = commands.add_parser("kubernetes", help="print the manifests that run a saved job on Kubernetes")
    add = kubernetes.add_argument
    add("job", help="the URL of the job's storage, or its folder (graphft launch --save-only)")
    add("--image", required=True, help="with graphft and what the job's data need")
    add("--name", default="", help="of the objects (default: the job's)")
    add("--trainers", type=int, metavar="N", help="pods (default: what the job says)")
    add("--etcd", default="", metavar="ENDPOINTS", help="host:port[,host:port...] of an etcd that runs already")
    add("--etcd-members", type=int, choices=(1, 3), default=3, help="of an etcd that is deployed (default: 3)")
    add("--tls-secret", default="", metavar="NAME", help="Secret with ca.crt, tls.crt and tls.key for etcd")
    add("--cpu", default="1", help="of a trainer and a pserver (default: 1)")
    add("--memory", default="4Gi", help="of the same, at most (default: 4Gi)")
    add(
        "--gpus",
        type=int,
        metavar="N",
        help='of a trainer (default: 1 with device "cuda", else 0); a pserver: so by itself',
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="for every role; may be repeated")
    add("--env-from-secret", action="append", default=[], metavar="NAME", help="its keys are variables; repeatable")
    add("--volume", default="", metavar="CLAIM:/PATH", help="a claim that all pods mount, for a job without a storage")
    kubernetes.set_defaults(command="graphft.runtime.engines.kubernetes_command:print_manifests")
