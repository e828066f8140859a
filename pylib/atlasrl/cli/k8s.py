"""Write a run's job as an AscendJob for a Kubernetes cluster with MindCluster."""

from __future__ import annotations

from pathlib import Path

import click

from atlasrl.cli import command


@command
@click.argument("recipe_or_run")
@click.option("--image", required=True, help="Container image with CANN, torch_npu, vLLM-Ascend and the rest.")
@click.option("--nodes", "-N", type=click.IntRange(min=1), help="Number of pods. Default: the recipe's nodes.")
@click.option("--resume", is_flag=True, help="The argument is a run: write its next attempt.")
@click.option("--name", help="Name of the run. Default: the recipe's.")
@click.option("--site", "site_name", help="Site file for interface, setup lines and folders. Default: none.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key of the recipe; repeatable.")
@click.option("--runs", "folder", type=click.Path(file_okay=False), help="Folder of runs, shared by all hosts.")
@click.option("--namespace", default="default", show_default=True)
@click.option("--queue", default="default", show_default=True, help="Volcano's queue.")
@click.option(
    "--mount", "mounts", multiple=True, type=click.Path(path_type=Path), help="More host folders; repeatable."
)
@click.option("--allow-oom-risk", is_flag=True, help="Although the memory model says that it will not fit.")
@click.option("--dry-run", is_flag=True, help="Print the job and make nothing.")
def main(
    recipe_or_run,
    image,
    nodes,
    resume,
    name,
    site_name,
    changes,
    folder,
    namespace,
    queue,
    mounts,
    allow_oom_risk,
    dry_run,
):
    """Make a run of RECIPE_OR_RUN and write the AscendJob that trains it.

    \b
    bin/k8s deepseek-v3-671b-dapo --nodes 32 --image registry/verl:a2 --runs /shared/runs
    bin/k8s deepseek-v3-671b-dapo --resume --image registry/verl:a2 --runs /shared/runs
    kubectl apply -f RUN/k8s/attempt-0001.yaml
    """
    from atlasrl import k8s, k8s_runs
    from atlasrl.cli import runs_folder

    pods = k8s.Pods(image, namespace, queue, mounts=tuple(path.absolute() for path in mounts))
    if resume:
        request = k8s_runs.of_run(recipe_or_run, runs_folder(folder))
    else:
        request = k8s_runs.of_recipe(
            recipe_or_run, folder, name=name, nodes=nodes, site_name=site_name, changes=changes, oom=allow_oom_risk
        )
    if dry_run:
        click.echo(k8s_runs.preview(request, pods), nl=False)
        return
    file = k8s_runs.write(request, pods)
    click.echo(f"run {request.plan.rundir.name}: submit it with: kubectl apply -f {file}")


if __name__ == "__main__":
    main(prog_name="bin/k8s")
